"""``lockstep train``: find the task, start the ranks if need be, and train."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from typing import Any

import click

from lockstep.cli.log_options import log_options, take_logs
from lockstep.cli.settings_options import SettingsCommand, settings_from, settings_options
from lockstep.errors import CollectiveError, ConfigurationError, LockstepError, RankFailed
from lockstep.launcher.logs import Logs
from lockstep.train.settings import FitSettings, Settings

EXAMPLES = """\b
Examples:
  lockstep train examples/digits.py
      one process on every GPU, or on the CPU if there is none
  lockstep train examples/digits.py --devices 2
      the same training run on two
  lockstep train examples/gpt.py --steps 500 --checkpoint runs/gpt --export gpt.safetensors
      stop it with Ctrl-C, and go on with the same command
  lockstep train examples/gpt.py --devices 4 --checkpoint runs/gpt --checkpoint-every 50 --max-restarts 3
      when a rank dies, all start again by themselves, from the newest checkpoint
  lockstep train examples/gpt.py --devices 4 --memory-checkpoint-every 1 --max-restarts 3
      the same from memory: no more than a step is lost
  lockstep train examples/gpt.py --global-batch-size 128 --lr-scaling sqrt --warmup 100 --accumulate 4
      a larger batch than the task's, in smaller pieces
  lockstep train examples/gpt.py --settings gpt-tuned.toml --workers 0
      with what lockstep tune found to be fastest here, but without loader processes

\b
On several machines, or where ranks are started already, start the same command in each of them:
  lockstep run --nnodes 2 ... --no-python lockstep train TASK.py
"""


@click.command(
    cls=SettingsCommand,
    context_settings={"max_content_width": 110},
    epilog=EXAMPLES,
    sections={"How to train": Settings, "On what, and what to keep": FitSettings},
)
@click.argument("task_file", metavar="TASK.py")
@settings_options(FitSettings)
@click.option(
    "--settings",
    "settings_file",
    metavar="FILE",
    help="TOML file with settings, as lockstep tune writes it; flags that are given win over it.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="How often all ranks are started again after one has failed; they go on from the newest state kept.",
)
@click.option(
    "--min-devices",
    type=click.IntRange(1),
    metavar="N",
    help="After a rank was killed, go on with one fewer, but no fewer than N; as many as before if not given.",
)
@click.option(
    "--watchdog",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="How long ranks may wait for one that does nothing before a report says who waits for whom; 60 if not given.",
)
@click.option(
    "--watchdog-action",
    type=click.Choice(["end", "warn"]),
    help="What follows the report: the job ends with exit code 83, or goes on.",
)
@log_options
def train(
    task_file: str,
    settings_file: str | None,
    max_restarts: int,
    min_devices: int | None,
    watchdog: float | None,
    watchdog_action: str | None,
    **values: Any,
) -> int:
    """Train the task of TASK.py: its attribute `task`, or NAME with TASK.py:NAME.

    The attribute is a lockstep.Task, or a function that returns one. A task says what to train, the options say how.
    """
    os.environ.setdefault("LOCKSTEP_COMMAND", shlex.join(["lockstep", *sys.argv[1:]]))  # for the record of the run
    logs = take_logs(values)
    settings = settings_from(values, settings_file)
    if _starts_ranks(settings, even_one=max_restarts > 0 or bool(logs.names)):
        if settings.memory_checkpoint_every is not None and max_restarts == 0:
            raise ConfigurationError(
                "memory_checkpoint_every is for ranks that are started again.\nAdd --max-restarts N, or leave it out."
            )
        _launch(
            task_file,
            settings,
            max_restarts=max_restarts,
            min_ranks=min_devices,
            watchdog=watchdog,
            action=watchdog_action,
            logs=logs,
        )
        return 0
    if logs.names:
        raise ConfigurationError(
            f"{' and '.join(logs.names)} is for ranks that this command starts, and it starts none.\n"
            f"Give it to the command that does; the output of strategy {settings.strategy} in one process can be "
            "redirected."
        )
    return _train_here(task_file, settings)


def _starts_ranks(settings: FitSettings, *, even_one: bool) -> bool:
    """Return whether this process starts the ranks: not if it is one, and a single one only if that is asked for."""
    from lockstep.env import Launcher, RankEnv
    from lockstep.train.devices import PER_PROCESS, num_devices

    if RankEnv.from_environ(os.environ).launcher is not Launcher.NONE:
        return False
    return settings.strategy in PER_PROCESS and (even_one or num_devices(settings.devices) > 1)


def _launch(
    task_file: str,
    settings: FitSettings,
    *,
    max_restarts: int,
    min_ranks: int | None,
    watchdog: float | None,
    action: str | None,
    logs: Logs,
) -> None:
    from lockstep.launcher.api import launch_with
    from lockstep.launcher.response import watch_of
    from lockstep.telemetry.sinks.opening import require_package
    from lockstep.telemetry.sinks.targets import parse_targets
    from lockstep.train.devices import num_devices
    from lockstep.train.load import load_task
    from lockstep.train.plan import check_batch

    num_ranks = num_devices(settings.devices)
    # What can be wrong is found here, before any process is started.
    task = load_task(task_file)
    for count in range(min(min_ranks or num_ranks, num_ranks), num_ranks + 1):
        check_batch(task, settings, count)
    for target in parse_targets(settings.log_to or ()):
        require_package(target)
    try:
        launch_with(
            _train_here,
            (task_file, settings, _checkpoints(settings)),
            devices=num_ranks,
            max_restarts=max_restarts,
            min_ranks=min_ranks,
            logs=logs,
            watch=watch_of(watchdog, action),
        )
    except RankFailed as error:
        # What a rank found wrong with task or settings needs no traceback; the other ranks found the same.
        cause = error.__cause__
        if isinstance(cause, LockstepError) and not isinstance(cause, CollectiveError):
            raise cause from None
        raise


def _checkpoints(settings: FitSettings) -> frozenset[tuple[str, int]]:
    """Return the names and inodes of what is in the folder for checkpoints."""
    try:
        return frozenset(
            (entry.name, entry.inode()) for entry in os.scandir(settings.checkpoint or "") if entry.is_dir()
        )
    except OSError:
        return frozenset()


def _train_here(task_file: str, settings: FitSettings, before: frozenset[tuple[str, int]] = frozenset()) -> int:
    """Train in this process; return its exit code.

    Args:
        task_file: Where the task is.
        settings: How to train it.
        before: The checkpoints that were there before the first start.
    """
    from lockstep.train.fit import fit_with
    from lockstep.train.load import load_task

    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        settings = replace(settings, devices=None)  # there may be fewer by now
        if settings.resume is False and not before & _checkpoints(settings):
            # A fresh start was asked for, and has been: the old ones go when there is a new one.
            settings = replace(settings, resume=None)
    return fit_with(load_task(task_file), settings).exit_code
