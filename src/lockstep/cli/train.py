"""``lockstep train``: find the task, start the ranks if need be, and train."""

from __future__ import annotations

import os
from typing import Any

import click

from lockstep.cli.settings_options import SettingsCommand, settings_options
from lockstep.errors import CollectiveError, LockstepError, RankFailed
from lockstep.train.settings import FitSettings, Settings

EXAMPLES = """\b
Examples:
  lockstep train examples/digits.py
      one process on every GPU, or on the CPU if there is none
  lockstep train examples/digits.py --devices 2
      the same training run on two
  lockstep train examples/gpt.py --steps 500 --checkpoint runs/gpt --export gpt.safetensors
      stop it with Ctrl-C, and go on with the same command
  lockstep train examples/gpt.py --global-batch-size 128 --lr-scaling sqrt --warmup 100 --accumulate 4
      a larger batch than the task's, in smaller pieces

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
def train(task_file: str, **values: Any) -> None:
    """Train the task of TASK.py: its attribute `task`, or NAME with TASK.py:NAME.

    The attribute is a lockstep.Task, or a function that returns one. A task says what to train, the options say how.
    """
    settings = FitSettings(**values)
    if _starts_ranks(settings):
        _launch(task_file, settings)
    else:
        _train_here(task_file, settings)


def _starts_ranks(settings: FitSettings) -> bool:
    """Return whether this process is to start the ranks: not if it is one, and not for a single one."""
    from lockstep.env import Launcher, RankEnv
    from lockstep.train.devices import PER_PROCESS, num_devices

    if RankEnv.from_environ(os.environ).launcher is not Launcher.NONE:
        return False
    return settings.strategy in PER_PROCESS and num_devices(settings.devices) > 1


def _launch(task_file: str, settings: FitSettings) -> None:
    from lockstep.launcher.api import launch
    from lockstep.train.devices import num_devices
    from lockstep.train.load import load_task
    from lockstep.train.plan import check_batch

    num_ranks = num_devices(settings.devices)
    # What can be wrong is found here, before any process is started.
    task = load_task(task_file)
    check_batch(task, settings, num_ranks)
    try:
        launch(_train_here, task_file, settings, devices=num_ranks)
    except RankFailed as error:
        # What a rank found wrong with task or settings needs no traceback; the other ranks found the same.
        cause = error.__cause__
        if isinstance(cause, LockstepError) and not isinstance(cause, CollectiveError):
            raise cause from None
        raise


def _train_here(task_file: str, settings: FitSettings) -> None:
    from lockstep.train.fit import fit_with
    from lockstep.train.load import load_task

    fit_with(load_task(task_file), settings)
