"""The folder in which a run is recorded: whose files are in it, and what is known of the run as a whole."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, final

from lockstep.comm.clocks import measure_offsets
from lockstep.comm.collectives import all_gather_object
from lockstep.comm.world import World
from lockstep.telemetry.provenance import gather
from lockstep.train.loop import Loop
from lockstep.train.run_file import RunFile, clocks_line, describe_rank, how_called, meet, open_rank_file, start_line
from lockstep.train.settings import FitSettings
from lockstep.train.task import Task


@final
class RunDir:
    """The folder of a run: each rank writes its own steps, rank zero also keeps ``run.json``.

    Collective: every rank makes one. Blocks until all have.

    Args:
        task, settings, world, loop: Of the run; the settings name the folder. It is made if it is not there; the ranks
            of several machines may have one each.
        num_steps: Of the whole run.
        sample: Tells of this rank's machine.

    Attributes:
        writer: Of this rank's file.

    Raises:
        ConfigurationError: On every rank: a rank cannot write there.
    """

    def __init__(
        self,
        task: Task,
        settings: FitSettings,
        world: World,
        loop: Loop,
        *,
        num_steps: int,
        sample: Callable[[], dict[str, Any]],
    ) -> None:
        assert settings.run_dir is not None
        folder = Path(settings.run_dir)
        self._world, self._loop = world, loop
        num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        first_step = loop.num_steps_done
        fresh = not first_step and not num_restarts
        provenance = asdict(gather(_file_of(task))) if world.is_rank_zero else {}
        opened = open_rank_file(folder, world.rank, loop.devices, fresh=fresh, sample=sample)
        began_at = time.time()
        mine = describe_rank(loop.devices)
        gather_all = partial(all_gather_object, group=world.group, device=world.device)
        self.writer, ranks = meet(opened, mine, gather_all)
        name = ranks[0]["run"]
        self.writer.add(start_line(name, world.rank, mine, began_at=began_at, first_step=first_step))
        self._file: RunFile | None = None
        offsets = measure_offsets(world.group, world.device)
        if world.is_rank_zero:
            parameters = [parameter for group in loop.optimizer.param_groups for parameter in group["params"]]
            session = {
                "run": name,
                "began_at": began_at,
                "first_step": first_step,
                "num_steps": num_steps,
                "num_restarts": num_restarts,
                "task": task.name,
                "counts": task.counts,
                **how_called(),
                "settings": {name: _plain(value) for name, value in asdict(settings).items()},
                "global_batch_size": loop.plan.batch_size,
                "num_parameters": sum(parameter.numel() for parameter in parameters),
                "gradient_bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
                "backend": world.backend if loop.group is not None else None,
                "ranks": [{name: rank[name] for name in ("host", "pid", "device", "machine")} for rank in ranks],
                "clocks": {"start": clocks_line(offsets, began_at)},
                "provenance": provenance,
            }
            self._file = RunFile(folder, session, world_size=world.world_size, fresh=fresh)
            self._file.write()

    def finish(self) -> None:
        """Take down what is known at the end. Collective: every rank. Blocks for some small messages."""
        offsets = measure_offsets(self._world.group, self._world.device)
        if self._file is not None:
            self._file.session["clocks"]["end"] = clocks_line(offsets, time.time())
            self._file.session["workers"] = self._loop.workers
            self._file.write()


def _file_of(task: Task) -> Path | None:
    with suppress(OSError, TypeError):
        return Path(inspect.getfile(task.loss))
    return None


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
