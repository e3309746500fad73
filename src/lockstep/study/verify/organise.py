"""`verify`: check what is asked for, start the processes, and have them find out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.comm.world import init
from lockstep.errors import ConfigurationError, LockstepError, RankFailed
from lockstep.launcher.api import launch
from lockstep.study.compare.progress import say
from lockstep.study.verify.diagnose import Verification, diagnose
from lockstep.study.verify.experiment import Subject, of_task
from lockstep.study.verify.inside import Alone
from lockstep.study.verify.perform import require_some
from lockstep.train.devices import check_gpus
from lockstep.train.load import load_task
from lockstep.train.plan import require_even
from lockstep.train.settings import Settings
from lockstep.train.task import Task

ALONE_TIMEOUT_S = 3600.0
"""How long one process may take to train its steps twice."""

RANKS_TIMEOUT_S, RUNS = 120.0, 50
"""How long the ranks may take: this, and so many times what one run took one process, for each rank."""


def verify(
    task: Task | str,
    *,
    devices: int = 2,
    steps: int = 4,
    torch_ddp: bool = False,
    settings: Settings | None = None,
    quiet: bool = False,
) -> Verification:
    """Train some steps of ``task`` as one process and as N ranks, and say whether it is the same run.

    Starts processes of its own and blocks until they are done. If the runs differ, finds out why by turning one thing
    off at a time.

    Args:
        task: A task, or where to find it: ``FILE.py`` or ``FILE.py:NAME``.
        devices: Ranks.
        steps: Steps to train; the last one is the last of the epoch if its batch is not full.
        torch_ddp: Whether to examine torch's DistributedDataParallel, as a hand-written loop uses it.
        settings: How to train; ``steps``, ``epochs`` and ``workers`` have no meaning here.
        quiet: Whether to show no progress.

    Raises:
        ConfigurationError: The task or the devices cannot be used; says what to change.
        RankFailed: A rank failed.
        LaunchTimeout: The processes did not finish in time.
    """
    settings = settings or Settings()
    subject = Subject(of_task(task), settings, devices, torch_ddp, steps)
    require_some(subject)
    check_gpus(devices)
    found = _load(task)
    if found is not None:
        require_even(settings.global_batch_size or found.global_batch_size, devices, settings.accumulate)
    return diagnose(subject, _Launched(), (lambda _: None) if quiet else say)


def _load(task: Task | str) -> Task | None:
    """Return the task itself; None if its file fails here, where it is no rank, as it may well run in one."""
    if isinstance(task, Task):
        return task
    try:
        return load_task(task)
    except ConfigurationError as error:
        if error.__cause__ is None:  # there is no such file, or no task in it
            raise
        return None


class _Launched:
    """Starts processes with `launch`; once one process has trained, it is known how long ranks may take."""

    def __init__(self) -> None:
        self._timeout_s = ALONE_TIMEOUT_S

    def __call__(self, num: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return ``function(*args, world)`` of each process."""
        try:
            results = launch(_in_world, function, args, devices=num, timeout_s=self._timeout_s)
        except RankFailed as error:
            if isinstance(error.__cause__, LockstepError):
                raise error.__cause__ from None
            raise
        if isinstance(results[0], Alone):
            self._timeout_s = RANKS_TIMEOUT_S + RUNS * results[0].seconds * max(2, results[0].subject.num_devices)
        return results


def _in_world(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with init() as world:
        return function(*args, world)
