"""``lockstep train``: flags from the declared settings, then find the task, start the ranks if need be, and train."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from lockstep.base.record_files import hide_secrets
from lockstep.base.setting import Setting, settings_of
from lockstep.cli import command
from lockstep.errors import ConfigurationError
from lockstep.launcher import fork_server
from lockstep.launcher.bootstrap import RANK_SETUP
from lockstep.launcher.output import LogSettings
from lockstep.train.settings import FitSettings, LaunchSettings, merge_settings, read_settings
from lockstep.train.task_file import TaskSpec, find_task, is_script

F = TypeVar("F", bound=Callable[..., Any])


def takes_task(function: Callable[..., Any], run_script: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Give a command the argument TASK.py and ``--set NAME=VALUE ...``; it gets both as ``task_file``, a `TaskSpec`.

    For a script, ``run_script`` is called instead, with the script and its arguments as ``command``.

    Raises:
        ConfigurationError: The file does not exist, or has no such task.
    """

    @wraps(function)
    def called(*, task_file: str, texts: Sequence[str], arguments: Sequence[str], **options: Any) -> Any:
        if run_script is not None and is_script(task_file):
            return run_script(command=[task_file, *arguments], **options)
        pairs = [text.partition("=") for text in (*texts, *arguments)]
        if wrong := [*arguments] * (not texts) or [name for name, sign, _ in pairs if not (name and sign)]:
            raise click.UsageError(f"Got unexpected extra argument ({wrong[0]}). Give --set NAME=VALUE.")
        find_task(task_file)
        spec = TaskSpec(task_file)
        spec.parameters = {name: text for name, _, text in pairs}
        return function(task_file=spec, **options)

    help_text = "Value of a parameter of the task's function; several may follow."
    option = click.option("--set", "texts", multiple=True, metavar="NAME=VALUE", help=help_text)
    metavar = "TASK.py" if run_script is None else "TASK_OR_SCRIPT"
    task, arguments = click.argument("task_file", metavar=metavar), click.argument("arguments", metavar="", nargs=-1)
    return task(arguments(option(called)))


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
    flag_values = {name: value for name, value in values.items() if source(name) is not ParameterSource.DEFAULT}
    try:
        return FitSettings(**merge_settings(read_settings(file), flag_values))
    except ConfigurationError as error:
        if str(error).startswith(f"{file}"):
            raise
        raise ConfigurationError(f"{error}\nSettings without a flag are from {file}.") from None


def _numbers(text: str | tuple[float, ...]) -> tuple[float, ...]:
    """Read numbers with commas between them."""
    try:
        words = text.split(",") if isinstance(text, str) else text
        return tuple(int(word) if str(word).strip().isdecimal() else float(word) for word in words)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 2,1,1.") from None


def devices_of_flag(text: str) -> Any:
    """Read a number of devices; None: the word auto, which is the default."""
    return None if text == "auto" else click.INT(text)


def _option(setting: Setting) -> Callable[[F], F]:
    flag = "--" + setting.name.replace("_", "-")
    attributes: dict[str, Any] = {"default": setting.default, "help": setting.help}
    if setting.kind == "bool":
        switch = f"{flag}/--no-{flag[2:]}" if setting.optional else flag
        return click.option(switch, setting.name, is_flag=True, **attributes)
    kinds: dict[str, Any] = {
        "int": click.INT,
        "devices": devices_of_flag,
        "float": click.FLOAT,
        "path": click.Path(),
        "choice": click.Choice(setting.choices),
        "numbers": _numbers,
    }  # others are texts
    if setting.kind == "metric":  # the flag alone means True
        return click.option(
            flag, setting.name, type=click.STRING, is_flag=False, flag_value="loss", metavar="[METRIC]", **attributes
        )
    attributes |= {"metavar": setting.unit, "show_default": setting.default is not None}
    return click.option(flag, setting.name, type=kinds.get(setting.kind, click.STRING), **attributes)


# The sections of ``--help-all``; ``--help`` shows the first.
_SECTIONS = {
    "Common options": "devices strategy epochs steps global_batch_size precision compile workers seed reproducible "
    "checkpoint resume export run_dir settings_file texts",
    "Batch and learning rate": "accumulate shares clip schedule warmup lr_scaling base_batch_size",
    "Data and checks": "prefetch bad_samples on_nan check_replicas threads",
    "Exchange of gradients": "compression bucket_cap_mb overlap_optimizer sync_batchnorm",
    "Strategies local-sgd and diloco": "sync_every fragments sync_delay sync_patience across outer_lr outer_momentum",
    "Checkpoints and evaluation": "checkpoint_every checkpoint_blocking keep keep_best load_best eval_every "
    "early_stopping patience",
    "Recorded and shown": "profile profile_steps profile_dir log_to view quiet price logs log_level log_dir",
    "When ranks fail or hang": "max_restarts min_devices spares recover redundancy watchdog watchdog_action",
}


class _TrainCommand(click.Command):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags that most people use, or with ``--help-all`` every one."""
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        records = {str(option.name): option.get_help_record(ctx) or ("", "") for option in options}
        sections = {heading: [records.pop(name) for name in names.split()] for heading, names in _SECTIONS.items()}
        for number, (heading, rows) in enumerate({**sections, "Help": list(records.values())}.items()):
            if number in (0, len(sections)) or ctx.meta.get(_HELP_ALL):
                with formatter.section(heading):
                    formatter.write_dl(rows)


_HELP_ALL = "lockstep.help_all"


def _help_all(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


@command(cls=_TrainCommand)
@takes_task
@settings_options(FitSettings)
@click.option(
    "--settings",
    "settings_file",
    metavar="FILE",
    help="TOML file, such as lockstep tune writes; flags take precedence.",
)
@settings_options(LaunchSettings)
@click.option(
    "--help-all", is_flag=True, is_eager=True, expose_value=False, callback=_help_all, help="Show all options and exit."
)
def train(task_file: str, settings_file: str | None, **values: Any) -> int:
    """Train a lockstep.Task, or what a function returns: `task` of TASK.py, or NAME of TASK.py:NAME.

    Examples:
      lockstep train examples/digits.py
          one process on each GPU, or one on the CPU if there is no GPU
      lockstep train examples/digits.py --devices 2
          the same training run on two
      lockstep train examples/gpt.py --steps 500 --checkpoint runs/gpt --export gpt.safetensors
          stop it with Ctrl-C, and go on with the same command
      lockstep train examples/gpt.py --devices 4 --checkpoint runs/gpt --max-restarts 3
          a rank that dies is replaced while the others go on, or all start again

    On several machines, or where ranks are started already, start the same command in each of them:
      lockstep run --nnodes 2 ... --no-python lockstep train TASK.py
    """
    os.environ.setdefault("LOCKSTEP_COMMAND", hide_secrets(["lockstep", *sys.argv[1:]]))  # for the record of the run
    launching = LaunchSettings(**{setting.name: values.pop(setting.name) for setting in settings_of(LaunchSettings)})
    log_settings = LogSettings(
        folder=launching.log_dir, level=launching.log_level, excluded_by="--logs raw" * (launching.logs == "raw")
    )
    settings = settings_from(values, settings_file)
    # `lockstep rehearse` has something called in each rank, which only a launched one does.
    is_rehearsed = RANK_SETUP in os.environ
    flags = " and ".join(filter(None, (launching.flags, log_settings.flags)))
    if not _starts_ranks(settings, even_one=bool(flags) or is_rehearsed):
        if is_rehearsed:
            raise ConfigurationError(
                f"Faults are injected in ranks, and strategy {settings.strategy} in one process starts no ranks.\n"
                "Rehearse with a strategy of one process for each device, such as ddp."
            )
        if flags:
            raise ConfigurationError(
                f"{flags} is for ranks that this command starts, but it starts none.\n"
                f"Pass it to the command that starts them; the output of strategy {settings.strategy} in one "
                "process can be redirected."
            )
        return _train_here(task_file, settings)
    # Imported late: it takes as long as all else, and a rank of another launcher does not need it.
    from lockstep.launcher.api import launch_with, raising_task_errors
    from lockstep.telemetry.sinks import require_package
    from lockstep.train.plan import check_batch, check_task, num_devices
    from lockstep.train.task import load_task

    fork_server.preload("lockstep.train.fit")
    # What is wrong with task, batch and sinks is found before any process is started.
    num_ranks = num_devices(settings.devices)
    task = load_task(task_file)
    check_task(task, settings)
    # With --min-devices the job may go on with any number down to that: the batch must divide over each.
    for count in range(min(launching.min_devices or num_ranks, num_ranks), num_ranks + 1):
        check_batch(task, settings, count)
    for sink in settings.log_to or ():
        require_package(sink)

    with raising_task_errors():
        launch_with(
            _train_here,
            (task_file, settings),
            devices=num_ranks,
            max_restarts=launching.max_restarts,
            min_ranks=launching.min_devices,
            num_spares=launching.spares or 0,
            recover=launching.recover,
            logs=log_settings,
            watchdog_s=launching.watchdog,
            watchdog_action=launching.watchdog_action,
        )
    return 0


def _starts_ranks(settings: FitSettings, *, even_one: bool) -> bool:
    """Return whether this process starts the ranks: not if it is one, and a single one only if that is requested."""
    from lockstep.base.env import Launcher, RankEnv

    if RankEnv.from_environ(os.environ).launcher is not Launcher.NONE:
        return False
    fork_server.start()  # before anything else imports torch, the task is loaded, and devices are counted
    from lockstep.train.plan import PER_PROCESS, num_devices

    return settings.strategy in PER_PROCESS and (even_one or num_devices(settings.devices) > 1)


def _train_here(task_file: str, settings: FitSettings) -> int:
    """Train in this process; return its exit code."""
    fork_server.import_modules(["lockstep.train.fit", fork_server.OPTIMIZER])
    from lockstep.train.fit import fit_with
    from lockstep.train.task import load_task

    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        settings = replace(settings, devices=None)  # there may be fewer by now
    return fit_with(load_task(task_file), settings).exit_code


def _checked_checkpoint(_context: click.Context, _parameter: click.Parameter, checkpoint: str) -> str:
    if checkpoint.endswith(".py"):
        raise ConfigurationError(
            f"{checkpoint} is not a checkpoint.\nName the checkpoint first: lockstep evaluate CHECKPOINT {checkpoint}"
        )
    if "://" not in checkpoint and not os.path.exists(checkpoint):
        raise ConfigurationError(f"{checkpoint} does not exist.\nName the folder of a run, or a file of --export.")
    return checkpoint


@command()
@click.argument("checkpoint", callback=_checked_checkpoint)
@takes_task
@click.option("--best", is_flag=True, help="Of a run, the checkpoint that --keep-best has kept; default: the newest.")
@settings_options(FitSettings, "devices", "global_batch_size", "precision", "workers", "reproducible")
def evaluate(checkpoint: str, task_file: str, best: bool, devices: int | None, **options: Any) -> int:
    """Print loss and metrics of CHECKPOINT on the evaluation data of a task, each sample once.

    CHECKPOINT is the folder of a run or of one checkpoint, a URL such as s3://bucket/run, or a file of --export.

    Examples:
      lockstep evaluate runs/digits examples/digits.py
          the newest checkpoint of a run
      lockstep evaluate runs/digits examples/digits.py --best --devices 2
          the best one, on two devices
      lockstep evaluate weights.safetensors examples/digits.py --precision bf16
    """
    fork_server.start()
    fork_server.import_modules(["lockstep.train.fit"])
    from lockstep.train import inference
    from lockstep.train.plan import num_devices
    from lockstep.train.task import load_task

    task = load_task(task_file)
    step, results = inference.evaluate_at(task, model=checkpoint, best=best, devices=num_devices(devices), **options)
    if int(os.environ.get("RANK", 0)) == 0:
        after = "" if step is None else f" after step {step}"
        click.echo(f"{task.name}{after}: {'  '.join(f'{name} {value:.4f}' for name, value in results.items())}")
    return 0
