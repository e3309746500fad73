"""``lockstep train``: flags from the declared settings, then find the task, start the ranks if need be, and train."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from lockstep.cli import command
from lockstep.errors import CollectiveError, ConfigurationError, LockstepError, RankFailed
from lockstep.launcher import fork_server
from lockstep.launcher.bootstrap import RANK_SETUP
from lockstep.launcher.output import LEVELS, LogSettings
from lockstep.run_folder import hide_secrets
from lockstep.train.settings import FitSettings, Setting, Settings, merge_settings, read_settings, settings_of

F = TypeVar("F", bound=Callable[..., Any])


def settings_options(cls: type, *names: str) -> Callable[[F], F]:
    """Give a command a flag for each field of ``cls``, or those of ``names``; it gets the values by these names."""

    def decorate(function: F) -> F:
        for setting in reversed(settings_of(cls)):
            if not names or setting.name in names:
                function = _option(setting)(function)
        return function

    return decorate


def settings_from(values: Mapping[str, Any], file: str | None) -> FitSettings:
    """Return the settings of the flags, and of a file where no flag was given.

    Args:
        values: Of all flags of the command that is being run, given or not, by the settings' names.
        file: With settings, if one was named.

    Raises:
        ConfigurationError: The file cannot be read, or names or values are wrong.
    """
    if file is None:
        return FitSettings(**values)
    # A value alone does not show whether its flag was given: ``--seed 0`` wins over a file that has another.
    source = click.get_current_context().get_parameter_source
    given = {name: value for name, value in values.items() if source(name) is not ParameterSource.DEFAULT}
    try:
        return FitSettings(**merge_settings(read_settings(file), given))
    except ConfigurationError as error:
        if str(error).startswith(f"{file}"):
            raise
        raise ConfigurationError(f"{error}\nWhat no flag says is from {file}.") from None


def _numbers(text: str | tuple[float, ...]) -> tuple[float, ...]:
    """Read numbers with commas between them."""
    try:
        words = text.split(",") if isinstance(text, str) else text
        return tuple(int(word) if str(word).strip().isdecimal() else float(word) for word in words)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers such as 2,1,1.") from None


def _option(setting: Setting) -> Callable[[F], F]:
    flag = "--" + setting.name.replace("_", "-")
    text = setting.help
    if setting.kind == "bool":
        switch = f"{flag}/--no-{flag[2:]}" if setting.optional else flag
        return click.option(switch, setting.name, is_flag=True, default=setting.default, help=text)
    kinds: dict[str, Any] = {
        "int": click.INT,
        "float": click.FLOAT,
        "path": click.Path(),
        "choice": click.Choice(setting.choices),
        "numbers": _numbers,
        "text": click.STRING,
        "words": click.STRING,
    }
    return click.option(
        flag,
        setting.name,
        type=kinds[setting.kind],
        default=setting.default,
        show_default=setting.default is not None,
        metavar=setting.unit,
        help=text,
    )


# Headings of ``--help``; a flag is listed under the first class that declares it.
_SECTIONS = {"How to train": Settings, "On what, and what to keep": FitSettings}


class _TrainCommand(click.Command):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section of flags for each class of settings, and one for the rest."""
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        records = {option.name: option.get_help_record(ctx) for option in options}
        names = {heading: [setting.name for setting in settings_of(cls)] for heading, cls in _SECTIONS.items()}
        for heading, those in {**names, "Other": list(records)}.items():
            with formatter.section(heading):
                formatter.write_dl([record for name in those if (record := records.pop(name, None)) is not None])


@command(cls=_TrainCommand)
@click.argument("task_file", metavar="TASK.py")
@settings_options(FitSettings)
@click.option("--settings", "settings_file", metavar="FILE", help="TOML file, as of lockstep tune; flags win over it.")
@click.option("--max-restarts", type=click.IntRange(0), default=0, metavar="N", help="Starts after a rank has failed.")
@click.option("--min-devices", type=click.IntRange(1), metavar="N", help="Go on without killed ranks, with N at least.")
@click.option(
    "--watchdog",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Report who waits for whom after so long; 60 if not given.",
)
@click.option("--watchdog-action", type=click.Choice(["end", "warn"]), help="After it: end with code 83, or go on.")
@click.option("--logs", type=click.Choice(("merged", "raw")), default="merged", help="Merge what ranks write, or not.")
@click.option(
    "--log-level", type=click.Choice(tuple(LEVELS)), default="info", help="Show all, stderr, or reports only."
)
@click.option("--log-dir", metavar="DIR", help="Folder for a file rank-N.log of all that each rank writes.")
def train(
    task_file: str,
    settings_file: str | None,
    max_restarts: int,
    min_devices: int | None,
    watchdog: float | None,
    watchdog_action: str | None,
    logs: str,
    log_level: str,
    log_dir: str | None,
    **values: Any,
) -> int:
    """Train the task of TASK.py: its attribute `task`, or NAME with TASK.py:NAME.

    The attribute is a lockstep.Task, or a function that returns one. A task says what to train, the options say how.

    Examples:
      lockstep train examples/digits.py
          one process on every GPU, or on the CPU if there is none
      lockstep train examples/digits.py --devices 2
          the same training run on two
      lockstep train examples/gpt.py --steps 500 --checkpoint runs/gpt --export gpt.safetensors
          stop it with Ctrl-C, and go on with the same command
      lockstep train examples/gpt.py --devices 4 --checkpoint runs/gpt --checkpoint-every 50 --max-restarts 3
          when a rank dies, all start again by themselves, from the newest checkpoint
      lockstep train examples/gpt.py --global-batch-size 128 --lr-scaling sqrt --warmup 100 --accumulate 4
          a larger batch than the task's, in smaller pieces
      lockstep train examples/gpt.py --settings gpt-tuned.toml --workers 0
          with what lockstep tune found to be fastest here, but without loader processes

    On several machines, or where ranks are started already, start the same command in each of them:
      lockstep run --nnodes 2 ... --no-python lockstep train TASK.py
    """
    os.environ.setdefault("LOCKSTEP_COMMAND", hide_secrets(["lockstep", *sys.argv[1:]]))  # for the record of the run
    log_settings = LogSettings(folder=log_dir, level=log_level, excluded_by="--logs raw" * (logs == "raw"))
    settings = settings_from(values, settings_file)
    # `lockstep rehearse` has something called in each rank, which only a launched one does.
    is_rehearsed = RANK_SETUP in os.environ
    if not _starts_ranks(settings, even_one=max_restarts > 0 or bool(log_settings.flags) or is_rehearsed):
        if is_rehearsed:
            raise ConfigurationError(
                f"Faults strike in ranks, and strategy {settings.strategy} in one process starts none.\n"
                "Rehearse with a strategy of one process for each device, such as ddp."
            )
        if log_settings.flags:
            raise ConfigurationError(
                f"{log_settings.flags} is for ranks that this command starts, and it starts none.\n"
                f"Give it to the command that does; the output of strategy {settings.strategy} in one process can be "
                "redirected."
            )
        return _train_here(task_file, settings)
    # Imported late: it takes as long as all else, and a rank of another launcher does not need it.
    from lockstep.launcher.api import launch_with
    from lockstep.telemetry.sinks import parse_targets, require_package
    from lockstep.train.plan import check_batch, num_devices
    from lockstep.train.task import load_task

    fork_server.preload("lockstep.train.fit")
    # What is wrong with task, batch and sinks is found before any process is started.
    num_ranks = num_devices(settings.devices)
    task = load_task(task_file)
    # With --min-devices the job may go on with any number down to that: the batch must divide over each.
    for count in range(min(min_devices or num_ranks, num_ranks), num_ranks + 1):
        check_batch(task, settings, count)
    for sink in parse_targets(settings.log_to or ()):
        require_package(sink)

    try:
        launch_with(
            _train_here,
            (task_file, settings, _checkpoints(settings)),
            devices=num_ranks,
            max_restarts=max_restarts,
            min_ranks=min_devices,
            logs=log_settings,
            watchdog_s=watchdog,
            watchdog_action=watchdog_action,
        )
    except RankFailed as error:
        # What a rank found wrong with task or settings needs no traceback; the other ranks found the same.
        cause = error.__cause__
        if isinstance(cause, LockstepError) and not isinstance(cause, CollectiveError):
            raise cause from None
        raise
    return 0


def _starts_ranks(settings: FitSettings, *, even_one: bool) -> bool:
    """Return whether this process starts the ranks: not if it is one, and a single one only if that is requested."""
    from lockstep.env import Launcher, RankEnv
    from lockstep.train.plan import PER_PROCESS, num_devices

    if RankEnv.from_environ(os.environ).launcher is not Launcher.NONE or settings.strategy not in PER_PROCESS:
        return False
    fork_server.start()  # before the task is loaded, and devices are counted
    return even_one or num_devices(settings.devices) > 1


def _checkpoints(settings: FitSettings) -> frozenset[tuple[str, float]]:
    """Return the checkpoints that are there, if old ones are to be told from new ones: their names and numbers."""
    if settings.checkpoint is None or settings.resume is not False:
        return frozenset()
    from lockstep.train.checkpoints.checkpoint import find_checkpoints
    from lockstep.train.checkpoints.object_store import place_of

    try:
        # One of the same step that was written anew has the old name, but another number.
        return frozenset((each.path.name, each.number) for each in find_checkpoints(place_of(settings.checkpoint)))
    except OSError:
        return frozenset()


def _train_here(task_file: str, settings: FitSettings, before: frozenset[tuple[str, float]] = frozenset()) -> int:
    """Train in this process; return its exit code.

    Args:
        task_file: Where the task is.
        settings: How to train it.
        before: The checkpoints that were there before the first start.
    """
    from lockstep.train.fit import fit_with
    from lockstep.train.task import load_task

    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        settings = replace(settings, devices=None)  # there may be fewer by now
        if settings.resume is False and not before & _checkpoints(settings):
            # A fresh start was requested, and has been: the old ones go when there is a new one.
            settings = replace(settings, resume=None)
    return fit_with(load_task(task_file), settings).exit_code
