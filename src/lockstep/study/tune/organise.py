"""`tune`: start the ranks, start them again without what broke them, stop in time, and say what was found."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep.errors import ConfigurationError, JobHangs, LaunchTimeout, LockstepError, RankFailed
from lockstep.launcher.api import launch_with
from lockstep.launcher.supervise import WatchdogPolicy
from lockstep.study.compare.benchmark import load
from lockstep.study.tune.ask import OVERDUE, RECORD, Ask, read_journal, read_mark, write_entry
from lockstep.study.tune.effects import effect_of
from lockstep.study.tune.judge import NOW
from lockstep.study.tune.outcome import Outcome, checks_of, memory_in_words
from lockstep.study.tune.progress import TuneProgress
from lockstep.study.tune.ranks import run_ranks
from lockstep.study.tune.search import Search
from lockstep.study.tune.values import Values, changed, strategy_of, value_of
from lockstep.telemetry.resources import free_and_total_bytes
from lockstep.train.plan import check_batch, check_gpus
from lockstep.train.settings import FitSettings
from lockstep.train.step import is_out_of_memory
from lockstep.train.task import Task

STRATEGIES = ("single", "dp", "ddp", "ddp-zero1")
"""Those that are tried if none are named."""

POSSIBLE = (*STRATEGIES, "fsdp")

_GAVE_UP = "Gave up after"

_WATCH = WatchdogPolicy(reports_slow=False)
"""Some changes make a rank slow: that is for us to find."""

_USABLE = 0.8
"""Of the memory that is free before anything starts: the rest is for what else goes on."""


def tune(
    task: Task | str,
    *,
    devices: int = 2,
    minutes: float = 5.0,
    start: Mapping[str, Any] | None = None,
    strategies: Sequence[str] = STRATEGIES,
    allow_precision: bool = False,
    allow_division: bool = False,
    limit_bytes: int | None = None,
    quiet: bool = False,
    began_at: float | None = None,
) -> Outcome:
    """Try settings on ``task`` for some minutes, and return those that train it fastest, with what each gave.

    The global batch, the order of the samples and the loss stay as they are. Starts processes of its own, and blocks
    until they are done; Ctrl-C ends it with what was found by then.

    Args:
        task: A task, or where to find it: ``FILE.py`` or ``FILE.py:NAME``.
        devices: Devices for all strategies but ``single``.
        minutes: How long it may take.
        start: Settings to begin with, by name, as `FitSettings` takes them.
        strategies: That may be tried.
        allow_precision: Whether another arithmetic may be taken: bf16 in computing, or on the way of gradients.
        allow_division: Whether a batch may be divided otherwise though layers see that, as batch norm does.
        limit_bytes: What one process may use of the memory; what is free now, divided by their number, if None.
        quiet: Whether to show no progress.
        began_at: From when on the time counts, in Unix time; now if None.

    Raises:
        ConfigurationError: Task, settings and devices do not go together; says what to change.
        LockstepError: The task cannot be trained with the settings to begin with.
    """
    ask = _ask(task, devices, minutes, dict(start or {}), strategies)
    ask = replace(ask, allow_precision=allow_precision, allow_division=allow_division)
    if began_at is not None:
        ask = replace(ask, began_at=began_at)
    if limit_bytes is not None:
        ask = replace(ask, limit_bytes=limit_bytes)
    found = load(task)
    folder = Path(tempfile.mkdtemp(prefix="lockstep-tune-"))
    runner = _Runner(ask, folder)
    try:
        with _clearing_up_after_sigterm(), TuneProgress(ask, folder, shown=not quiet):
            interrupted = runner.run()
        return _outcome(runner.search(finished=True), found, runner.notes, interrupted=interrupted)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _clearing_up_after_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process by an exception, so that nothing stays behind. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


class _Runner:
    """Starts the ranks until they have nothing left to do.

    Attributes:
        notes: What there is to say of it.
    """

    def __init__(self, ask: Ask, folder: Path) -> None:
        self._ask, self._folder = ask, folder
        self.notes: list[str] = []

    def search(self, *, finished: bool = False) -> Search:
        """Return the search as the journal leaves it."""
        search = Search(self._ask)
        for entry in read_journal(self._folder):
            search.next()
            search.record(entry)
        if finished:
            search.finish()
        return search

    def run(self) -> bool:
        """Measure until all is done, or time is up; return whether Ctrl-C came first.

        Raises:
            LockstepError: The task cannot be trained with the settings to begin with.
        """
        try:
            while True:
                left_s = self._ask.seconds - self._ask.elapsed_s
                if left_s <= 0:
                    return False
                try:
                    devices, args = self._ask.num_devices, (self._ask, str(self._folder))
                    launch_with(run_ranks, args, devices=devices, timeout_s=left_s, policy=_WATCH)
                    return False
                except LaunchTimeout:
                    continue
                except (RankFailed, JobHangs) as error:
                    if not self._goes_on_without(error):
                        return False
        except KeyboardInterrupt:
            self.notes.append("Stopped by Ctrl-C: this is what was found by then.")
            return True

    def _goes_on_without(self, error: LockstepError) -> bool:
        """Note what the ranks died of, and that it is left out from now on; return whether there is more to try.

        Raises:
            LockstepError: It was none of the changes.
        """
        why = self._took_too_long() or _reason(error)
        name, search = read_mark(self._folder).get("name"), self.search()
        action = search.next()
        shutil.rmtree(self._folder / RECORD, ignore_errors=True)
        if action["do"] == "probe" and _is_memory(error):
            return self._note({"kind": "probe", "size": action["size"], "peak_bytes": None})
        if action["do"] == "race" and not action["alone"] and _is_memory(error):
            return self._note({"kind": "alone"})
        if not search.results and _is_memory(error) and (size := search.untried_size) is not None:
            return self._note({"kind": "too large", "size": size})
        if action["do"] == "race" and name in action["contenders"] and name != NOW:
            return self._note({"kind": "lost", "name": name, "why": why})
        if action["do"] == "baseline" and why.startswith(_GAVE_UP) and read_mark(self._folder)["stage"] == "recording":
            return self._note({"kind": "baseline", "advice": [], "skipped": "it took too long to record a run"})
        if search.results:
            self.notes.append(f"Ended early: {why}.")
            return False
        if why.startswith(_GAVE_UP):
            raise LockstepError(
                "There is not enough time: the first steps with the settings to begin with took most of it.\n"
                "Give it more (--minutes M), or a smaller global batch."
            )
        cause = error.__cause__
        raise cause if isinstance(cause, LockstepError) else error

    def _note(self, entry: dict[str, Any]) -> bool:
        write_entry(self._folder, {**entry, "at": self._ask.elapsed_s})
        return True

    def _took_too_long(self) -> str:
        """Return that rank zero gave up waiting; nothing if it did not."""
        overdue = self._folder / OVERDUE
        if not overdue.exists():
            return ""
        overdue.unlink()
        return f"{_GAVE_UP} {self._ask.longest_s:.0f} s"


def _reason(error: LockstepError) -> str:
    """Return in one line what was wrong."""
    cause = error.__cause__ or error
    lines = str(cause).splitlines() or [type(cause).__name__]
    first = (lines[-1] if lines[0].startswith("Caught ") else lines[0]).rstrip(".")  # what a thread has raised
    return first if isinstance(cause, LockstepError) else f"{type(cause).__name__}: {first}"


def _is_memory(error: LockstepError) -> bool:
    """Return whether ranks died for lack of memory: they said so, or the kernel killed one."""
    cause = error.__cause__
    if cause is not None:
        return is_out_of_memory(cause)
    return "SIGKILL" in str(error).partition("\n")[0]


def _ask(task: Task | str, devices: int, minutes: float, start: Values, strategies: Sequence[str]) -> Ask:
    """Return what to do.

    Raises:
        ConfigurationError: It cannot be done.
    """
    began_at = time.time()
    if devices < 1:
        raise ConfigurationError(f"devices={devices} is not allowed.\nGive a whole number of at least 1.")
    if not 0 < minutes < 10_000:
        raise ConfigurationError(f"minutes={minutes:g} is not allowed.\nGive a number above 0.")
    unknown = [name for name in strategies if name not in POSSIBLE]
    if unknown:
        raise ConfigurationError(f"There is no strategy {unknown[0]!r} to try.\nChoose from: {', '.join(POSSIBLE)}.")
    check_gpus(devices)
    start = changed(start, {"strategy": start.get("strategy", "ddp")})
    start.pop("devices", None)
    settings = FitSettings(**start)
    if settings.strategy not in POSSIBLE:
        raise ConfigurationError(
            f"Tuning cannot begin with strategy {settings.strategy}.\nChoose from: {', '.join(POSSIBLE)}."
        )
    found = load(task)
    check_batch(found, settings, 1 if settings.strategy == "single" else devices)
    on_cuda = torch.cuda.is_available()
    return Ask(
        task=task,
        num_devices=devices,
        on_cuda=on_cuda,
        num_cores=torch.get_num_threads(),
        global_batch_size=value_of(start, "global_batch_size") or found.global_batch_size,
        start=start,
        strategies=tuple(strategies),
        seconds=60 * minutes,
        began_at=began_at,
        limit_bytes=_limit_bytes(devices, strategy_of(start), on_cuda=on_cuda),
    )


def _limit_bytes(devices: int, strategy: str, *, on_cuda: bool) -> int:
    """Return how much memory one process may use, or one GPU."""
    if on_cuda:
        return int(_USABLE * min(torch.cuda.get_device_properties(device).total_memory for device in range(devices)))
    free, total = free_and_total_bytes()
    free = free if total else psutil.virtual_memory().available
    return int(_USABLE * free / (1 if strategy == "single" else devices))


def _outcome(search: Search, task: Task, notes: Sequence[str], *, interrupted: bool) -> Outcome:
    ask = search.ask
    layers = search.split_layers
    said = [*notes]
    if search.is_out_of_time and not interrupted:
        said.append("Time was up before all was tried: more of it (--minutes M) may find more.")
    if (search.baseline or {}).get("skipped"):
        said.append(f"There is no advice to check: {search.baseline['skipped']}.")  # type: ignore[index]
    return Outcome(
        task=Path(ask.task).name if isinstance(ask.task, str) else task.name,
        device="cuda" if ask.on_cuda else "cpu",
        num_devices=ask.num_devices,
        num_cores=ask.num_cores,
        global_batch_size=ask.global_batch_size,
        start=search.start,
        found=search.base,
        effect=effect_of(search.start, search.base, num_devices=ask.num_devices, split_layers=layers),
        results=tuple(search.results),
        skips=tuple(search.skips),
        checks=checks_of(search),
        total=search.total,
        memory=memory_in_words(search),
        notes=tuple(said),
        seconds=ask.elapsed_s,
        interrupted=interrupted,
    )
