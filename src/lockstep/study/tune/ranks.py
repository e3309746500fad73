"""What each rank does: whatever rank zero reads out, which alone knows the journal and decides."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import IterableDataset

from lockstep.comm.collectives import all_gather_object, broadcast_object
from lockstep.comm.world import World, init
from lockstep.study.compare.benchmark import (
    TURN_TIMEOUT_S,
    choose_steps,
    devices_for,
    load,
    order_of_round,
    split_layers,
    start_together,
    takes_part,
    time_steps,
)
from lockstep.study.tune.ask import OVERDUE, RECORD, Ask, read_journal, write_entry, write_mark
from lockstep.study.tune.baseline import describe, num_recorded, record_run
from lockstep.study.tune.entrant import Entrant, task_to_tune
from lockstep.study.tune.judge import NOW
from lockstep.study.tune.probe import probe
from lockstep.study.tune.search import Action, Search
from lockstep.study.tune.values import key_of, strategy_of, threads, value_of

GIVEN_UP = 97
"""With this exit code a rank ends that has waited too long for something to end."""


def run_ranks(ask: Ask, folder: str) -> None:
    """Measure what there is to measure, and note it in the journal, until there is nothing left or time is up.

    Collective: every rank of a launched job.
    """
    _make_ready(folder)
    with init() as world:
        ranks = Ranks(ask, Path(folder), world)
        try:
            ranks.run()
        finally:
            ranks.close_all()


def _make_ready(folder: str) -> None:
    """Make this process one that can be ended at any time, and leaves nothing behind."""
    # Python would raise an exception wherever it is; in what runs while memory is cleared, that is dropped.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # More processes than cores: whether that pays is for us to find.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    before, tempfile.tempdir = tempfile.tempdir, folder
    util.get_temp_dir()  # of this process and its loader processes from now on
    tempfile.tempdir = before


class Ranks:
    """One rank: the entrants that it holds, and on rank zero the journal.

    Args:
        ask: What to do.
        folder: With the journal.
        world: All ranks.
    """

    def __init__(self, ask: Ask, folder: Path, world: World) -> None:
        self._ask, self._folder, self._world = ask, folder, world
        seed = value_of(ask.start, "seed")
        self._task = task_to_tune(load(ask.task), ask.global_batch_size, seed=seed, device=world.device)
        self._before_bytes = psutil.Process().memory_info().rss
        self._entrants: dict[str, Entrant] = {}
        self._search = Search(ask) if world.is_rank_zero else None
        if self._search is not None:
            for entry in read_journal(folder):
                self._search.next()
                self._search.record(entry)

    def run(self) -> None:
        """Do what rank zero reads out. Collective: every rank."""
        while True:
            action: Action = self._read_out(self._search.next() if self._search is not None else None)
            if action["do"] == "done":
                return
            if self._is_overdue():
                continue
            entry = {"probe": self._probe, "baseline": self._baseline, "race": self._race}[action["do"]](action)
            self._note(entry)

    def close_all(self) -> None:
        """Let go of all entrants."""
        self._keep(set())

    # --- what there is to do ----------------------------------------------------------------------------------------

    def _probe(self, action: Action) -> dict[str, Any]:
        """Measure the memory of a micro-batch, agreed over the ranks. Collective: every rank."""
        base, size = action["base"], action["size"]
        strategy, peaks = strategy_of(base), []
        with self._watched("memory", f"micro-batch {size}"):
            if start_together(strategy, self._threads(base), self._world):
                devices = devices_for(strategy, self._world, self._ask.num_devices)
                before_bytes = self._before_bytes
                peaks.append(probe(self._task, base, size, self._world, devices, before_bytes=before_bytes))
            self._clear()
            found = [peak for rank in self._gather(peaks) for peak in rank]
        return {"kind": "probe", "size": size, "peak_bytes": None if None in found else max(found)}

    def _baseline(self, action: Action) -> dict[str, Any]:
        """Record a run with the settings to begin with, and look at it. Collective: every rank."""
        base = action["base"]
        self._keep({key_of(base)})
        patient_s = max(self._ask.longest_s, 0.4 * self._ask.seconds)  # there is nothing else to go on with
        with self._watched("warm-up", NOW, limit_s=patient_s):
            self._open(base)
        entrant = self._entrants[key_of(base)]
        step_s = float(self._read_out(entrant.step_s))
        entry: dict[str, Any] = {"kind": "baseline", "advice": [], "step_s": step_s}
        self._note({"kind": "layers", "split": split_layers(entrant.loop.model) if entrant.loop is not None else ()})
        count = num_recorded(step_s, self._ask)
        if strategy_of(base) == "dp" or (strategy_of(base) == "single" and self._world.world_size > 1):
            return entry | {"skipped": "with this strategy one process trains for all, and no run was recorded"}
        if count is None:
            return entry | {"skipped": f"a step takes {step_s:.1f} s, too long to record a run in this time"}
        samples = None if entrant.loop is None else entrant.loop.samples
        num_samples = None if samples is None or isinstance(samples, IterableDataset) else len(samples)
        self._keep(set())  # the recorded run has the memory for itself
        torch.set_num_threads(self._threads(base))
        with self._watched("recording", NOW, limit_s=patient_s):
            record_run(self._task, base, self._folder / RECORD, count)
        if not self._world.is_rank_zero:
            return entry
        return entry | describe(self._folder / RECORD, base, self._ask, num_samples)

    def _race(self, action: Action) -> dict[str, Any]:
        """Run a round: everybody's turn once. Collective: every rank."""
        contenders: dict[str, Any] = action["contenders"]
        keys = {name: key_of(values) for name, values in contenders.items()}
        is_alone = action["alone"]
        self._keep(set() if is_alone else set(keys.values()))
        if not is_alone:
            for name, values in contenders.items():
                with self._watched(action["stage"], name, action["round"]):
                    self._open(values)
        seconds: dict[str, float] = {}
        samples: dict[str, int] = {}
        for name in order_of_round(list(contenders), action["round"]):
            with self._watched(action["stage"], name, action["round"]):
                self._open(contenders[name])
                entrant = self._entrants[keys[name]]
                num_steps = self._choose_steps(entrant)
                if start_together(entrant.strategy, entrant.num_threads, self._world):
                    entrant.settle()
                if start_together(entrant.strategy, entrant.num_threads, self._world):
                    assert entrant.loop is not None
                    seconds[name], records = time_steps(entrant.loop, num_steps)
                    samples[name] = sum(record.num_samples for record in records)
                    entrant.rest()
                if is_alone:
                    self._keep(set())
        self._world.barrier(TURN_TIMEOUT_S)  # asleep: the last turn may have been one process's
        ranks = self._gather(seconds)
        rates = {name: samples[name] / max(rank[name] for rank in ranks if name in rank) for name in samples}
        return {"kind": "round", "stage": action["stage"], "rates": rates}

    def _choose_steps(self, entrant: Entrant) -> int:
        """Return the steps of a turn, which takes everybody as long. Collective: every rank."""
        turn_s = self._ask.turn_s
        chosen = choose_steps([entrant.step_s], turn_s=turn_s, longest_s=10 * turn_s, fewest=2) if self._search else 0
        return int(self._read_out(chosen))

    # --- entrants ---------------------------------------------------------------------------------------------------

    def _open(self, values: dict[str, Any]) -> None:
        """Make a contender and warm it up, if it is not there. Collective: every rank."""
        key = key_of(values)
        if key in self._entrants:
            return
        strategy, count = strategy_of(values), self._threads(values)
        start_together(strategy, count, self._world)
        devices = devices_for(strategy, self._world, self._ask.num_devices)
        is_here = takes_part(strategy, self._world)
        self._entrants[key] = Entrant(self._task, values, self._world, devices, count, is_here=is_here)
        if start_together(strategy, count, self._world):
            self._entrants[key].warm_up()

    def _keep(self, keys: set[str]) -> None:
        """Let go of all contenders but some."""
        gone = [key for key in self._entrants if key not in keys]
        for key in gone:
            self._entrants.pop(key).close()
        if gone:
            self._clear()

    def _clear(self) -> None:
        gc.collect()
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _threads(self, values: dict[str, Any]) -> int:
        return threads(values, self._ask.num_cores, self._ask.num_devices)

    # --- rank zero and the others -----------------------------------------------------------------------------------

    def _read_out(self, value: Any) -> Any:
        """Return rank zero's value. Collective: every rank."""
        return broadcast_object(value, group=self._world.group, device=self._world.device)

    def _gather(self, value: Any) -> list[Any]:
        """Return every rank's value. Collective: every rank."""
        return all_gather_object(value, group=self._world.group, device=self._world.device)

    def _note(self, entry: dict[str, Any]) -> None:
        if self._search is not None:
            entry["at"] = self._ask.elapsed_s
            write_entry(self._folder, entry)
            self._search.record(entry)

    def _is_overdue(self) -> bool:
        """End the stage, or all, if time is up; return whether that was so. Collective: every rank."""
        found = self._search.overdue(self._ask.elapsed_s) if self._search is not None else None
        entry = self._read_out(None if found is None else dict(found))
        if entry is not None:
            self._note(entry)
        return entry is not None

    @contextmanager
    def _watched(self, stage: str, name: str, number: int = 0, *, limit_s: float | None = None) -> Iterator[None]:
        """Have everybody know what is under way, and end this process if it takes too long."""
        if self._search is None:
            yield
            return
        _, over, count = self._search.under_way()
        write_mark(self._folder, {"stage": stage, "name": name, "round": number, "over": over, "stages": count})
        timer = threading.Timer(limit_s or self._ask.longest_s, _give_up, [self._folder])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _give_up(folder: Path) -> None:
    (folder / OVERDUE).touch()
    os._exit(GIVEN_UP)
