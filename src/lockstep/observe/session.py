"""The record of a script: who takes part, its files, and what is known of it as a whole."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.comm.clocks import Offset, measure_offsets
from lockstep.comm.collectives import Group, all_gather_object, backend_name, default_group, is_initialized
from lockstep.errors import ConfigurationError
from lockstep.telemetry.provenance import Provenance, gather
from lockstep.telemetry.record.writer import LineWriter
from lockstep.train.run_file import RunFile, clocks_line, describe_rank, how_called, meet, open_rank_file, start_line


@dataclass(frozen=True)
class Place:
    """This rank among those that train together.

    Attributes:
        rank, num_ranks: Of the job.
        group: Through which they agree on the record; ``None`` if they do without.
        name: Of the session, where they do without.
        clocks: Of the ranks, where they do without.
    """

    rank: int
    num_ranks: int
    group: Group | None = None
    name: str | None = None
    clocks: tuple[Offset, ...] = ()

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of each rank, or only this one's. Collective if there is a group: every rank."""
        if self.group is None:
            return [value]
        return all_gather_object(value, group=self.group, device=self.device)

    def offsets(self) -> list[Offset]:
        """Return how far the ranks' clocks are apart. Collective if there is a group: every rank."""
        return list(self.clocks) if self.group is None else measure_offsets(self.group, self.device)

    @property
    def device(self) -> torch.device:
        """Where small messages lie that the group sends."""
        is_nccl = self.group is not None and backend_name(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def find_place() -> Place:
    """Return the place of this process in its default process group.

    Raises:
        ConfigurationError: It was started as one of several ranks, and there is no process group yet.
    """
    if is_initialized():
        group = default_group()
        return Place(group.rank(), group.size(), group)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigurationError(
            f"This process is one of {os.environ['WORLD_SIZE']} ranks, but has no process group yet.\n"
            "Call monitor() behind lockstep.init() or torch.distributed.init_process_group()."
        )
    return Place(0, 1)


class Session:
    """The record of a script from one start to its end.

    Collective if ``place`` has a group: every rank makes one. Blocks until all have.

    Args:
        folder: Made if it is not there; the ranks of several machines may have one each.
        place: This rank.
        device: Where it computes.
        models: That are trained.
        facts: Settings, as far as they are known.
        first_step: Steps done before; the record goes on behind what is in the folder then.
        provenance: What was found out before; looked for now if ``None``.

    Attributes:
        num_restarts: How often the launcher has started all ranks again.

    Raises:
        ConfigurationError: On every rank: a rank cannot write there.
    """

    def __init__(
        self,
        folder: Path,
        place: Place,
        device: torch.device,
        models: Sequence[nn.Module],
        facts: dict[str, Any],
        *,
        first_step: int = 0,
        provenance: Provenance | None = None,
    ) -> None:
        self._place = place
        self.num_restarts = num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        fresh = not first_step
        if fresh and num_restarts:
            _set_aside(folder, place.rank, num_restarts)
        opened = open_rank_file(folder, place.rank, [device], fresh=fresh)
        began_at = time.time()
        mine = describe_rank([device])
        if place.name is not None:
            mine["run"] = place.name
        self.writer: LineWriter
        self.writer, ranks = meet(opened, mine, place.gather)
        name = ranks[0]["run"]
        self.writer.add(start_line(name, place.rank, mine, began_at=began_at, first_step=first_step))
        self._file: RunFile | None = None
        offsets = place.offsets()
        if place.rank == 0:
            known = [{key: rank[key] for key in ("host", "pid", "device", "machine")} for rank in ranks]
            session = {
                "run": name,
                "began_at": began_at,
                "first_step": first_step,
                "num_steps": None,
                "num_restarts": num_restarts,
                "recorded_by": "monitor",
                "task": Path(sys.argv[0]).name or "a script",
                **how_called(),
                "settings": {key: value for key, value in facts.items() if value is not None},
                **_sizes(models),
                "backend": backend_name(default_group()) if is_initialized() else None,
                "ranks": [*known, *({} for _ in range(place.num_ranks - len(known)))],
                "clocks": {"start": clocks_line(offsets, began_at)} if offsets else {},
                "provenance": asdict(provenance or gather(Path(sys.argv[0]) if sys.argv[0] else None)),
            }
            self._file = RunFile(folder, session, world_size=place.num_ranks, fresh=fresh)
            self._file.write()

    def finish(self, sizes: Counter[int], num_steps: int, offsets: Sequence[Offset] = ()) -> None:
        """Keep what is known at the end. Blocks for the disk, on rank zero.

        Args:
            sizes: How many steps had how many samples of this rank.
            num_steps: That were done.
            offsets: Of the ranks' clocks, if they were compared.
        """
        if self._file is None:
            return
        self._file.session["num_steps"] = num_steps
        if sizes:
            self._file.session["global_batch_size"] = sizes.most_common(1)[0][0] * self._place.num_ranks
        if offsets:
            self._file.session["clocks"]["end"] = clocks_line(offsets, time.time())
        self._file.write()


def _sizes(models: Sequence[nn.Module]) -> dict[str, int]:
    """Return how much is trained, by name."""
    trained = [each for model in models for each in model.parameters() if each.requires_grad]
    unique = list({id(each): each for each in trained}.values())
    return {
        "num_parameters": sum(each.numel() for each in unique),
        "gradient_bytes": sum(each.numel() * each.element_size() for each in unique),
    }


def _set_aside(folder: Path, rank: int, num_restarts: int) -> None:
    """Keep what was recorded before a restart under another name: nobody has said at which step the script goes on."""
    with suppress(OSError):
        os.replace(folder / f"rank-{rank}.jsonl", folder / f"before-restart-{num_restarts}.rank-{rank}.jsonl")
