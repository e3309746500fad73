"""Every setting of a training run, declared once: ``fit``'s keywords, ``lockstep train``'s flags and settings files."""
# ruff: noqa: RUF009 - `setting` is dataclasses.field with metadata

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from lockstep.base.setting import DIR_OR_URL, setting, settings_of
from lockstep.checkpoints.best import Monitor
from lockstep.errors import ConfigurationError
from lockstep.telemetry.cost import Price
from lockstep.telemetry.destination import ViewName, read_targets

FilePath = str | Path
T = TypeVar("T")

# --- names that do not exist ----------------------------------------------------------------------------------------

# What other libraries call a setting, or a field of a task.
_FOREIGN = {
    "num_workers": "workers", "dataloader_num_workers": "workers", "prefetch_factor": "prefetch",
    "batch_size": "global_batch_size", "train_batch_size": "global_batch_size", "accumulate_grad_batches": "accumulate",
    "per_device_train_batch_size": "global_batch_size", "gradient_accumulation_steps": "accumulate",
    "max_epochs": "epochs", "num_epochs": "epochs", "num_train_epochs": "epochs", "max_steps": "steps",
    "num_steps": "steps", "gradient_clip_val": "clip", "max_grad_norm": "clip", "warmup_steps": "warmup",
    "lr_scheduler": "schedule", "scheduler": "schedule", "amp": "precision", "fp16": "precision", "bf16": "precision",
    "deterministic": "reproducible", "num_gpus": "devices", "num_devices": "devices", "nproc_per_node": "devices",
    "checkpoint_dir": "checkpoint", "output_dir": "checkpoint", "save_steps": "checkpoint_every", "logger": "log_to",
    "save_total_limit": "keep", "eval_steps": "eval_every", "resume_from_checkpoint": "resume",
    "lr": "optimizer", "learning_rate": "optimizer", "momentum": "optimizer", "weight_decay": "optimizer",
    "loss_fn": "loss", "criterion": "loss", "collate_fn": "collate", "train_dataset": "dataset",
    "early_stopping_patience": "patience", "load_best_model_at_end": "load_best", "ema_decay": "ema",
    "val_dataset": "eval_dataset", "test_dataset": "eval_dataset", "compute_metrics": "metrics",
}  # fmt: skip

_SAMPLER = (
    "The data set has the order: return torch.utils.data.Subset(dataset, indices) from Task.dataset, with indices "
    "grouped by length, or drawn with weights; fit shuffles them over the ranks."
)

# By the owner of a name, what to say to someone who gives it elsewhere.
_FIELDS_OF_TASK = {"model", "dataset", "loss", "optimizer", "eval_dataset", "metrics", "collate", "ema"}


def suggest(name: str, shown: Mapping[str, str]) -> str:
    """Return a sentence about an unknown ``name``: what was probably meant, of the names in ``shown``, as shown there.

    It is empty if there is nothing like it.
    """
    plain = name.strip("-").replace("-", "_").lower()
    meant = _FOREIGN.get(plain, plain)
    if "sampler" in plain:
        return _SAMPLER
    if meant in shown:
        return f"Did you mean {shown[meant]}?"
    if meant in _FIELDS_OF_TASK:
        return f"It is in the task: lockstep.Task({meant}=...)."
    if near := difflib.get_close_matches(plain, shown, n=1):
        return f"Did you mean {shown[near[0]]}?"
    is_setting = any(meant == each.name for each in settings_of(FitSettings))
    return f"It is a setting of the run: lockstep.fit(task, {meant}=...)." if is_setting else ""


def refusing_unknown(noun: str) -> Callable[[type[T]], type[T]]:
    """Make a dataclass refuse unknown keywords, and name the nearest; ``noun`` is what they are."""

    def decorate(cls: type[T]) -> type[T]:
        make: Callable[..., None] = cls.__init__

        @wraps(make)
        def checked(self: T, *args: Any, **values: Any) -> None:
            names = {field.name: field.name for field in fields(cls)}  # type: ignore[arg-type]
            if unknown := [name for name in values if name not in names]:
                hint = suggest(unknown[0], names) or f"There are {', '.join(names)}."
                raise ConfigurationError(f"unknown {noun} {unknown[0]!r}.\n{hint}")
            make(self, *args, **values)

        cls.__init__ = checked  # type: ignore[assignment, method-assign]
        return cls

    return decorate


# --- settings that depend on each other -----------------------------------------------------------------------------

# A setting, others that cannot be given with it, and the reason.
_CONFLICTS = (
    ("steps", "epochs", "both set the end of the run"),
    (
        "overlap_optimizer",
        "clip precision=fp16 bad_samples=skip on_nan=skip reproducible",
        "parameters are updated before the whole gradient is known",
    ),
    ("accumulate", "reproducible", "each virtual shard is a micro-batch; for smaller ones, increase reproducible"),
    ("compression", "reproducible", "reproducible uses its own exchange of gradients"),
    ("bucket_cap_mb", "reproducible", "reproducible uses its own exchange of gradients"),
    ("quiet", "view=live view=lines", "it prints only errors"),
    ("load_best", "strategy=local-sgd strategy=diloco", "their ranks hold different parameters"),
)


# What is needed (any one of these), the settings that would be ignored without it, and how to give it.
_NEEDS = (
    (
        "checkpoint",
        "resume checkpoint_every checkpoint_blocking keep keep_best load_best",
        "checkpoint=DIR (--checkpoint DIR)",
    ),
    ("eval_dataset", "eval_every keep_best early_stopping", "eval_dataset=... to the task"),
    ("keep_best", "load_best", "keep_best (--keep-best)"),
    ("early_stopping", "patience", "early_stopping=METRIC (--early-stopping METRIC)"),
    ("workers", "prefetch", "workers=N (--workers N)"),
    ("lr_scaling", "base_batch_size", "lr_scaling=linear (--lr-scaling linear)"),
    ("profile", "profile_steps profile_dir", "profile=True (--profile)"),
    ("profile_dir or run_dir", "profile", "profile_dir=DIR (--profile-dir DIR) or run_dir=DIR (--run-dir DIR)"),
    ("max_restarts", "min_devices spares recover sync_patience", "max_restarts=N (--max-restarts N)"),
    ("watchdog", "watchdog_action", "watchdog=SECONDS (--watchdog SECONDS)"),
)


# By setting, the strategies that use it.
_USED_BY = {
    "compression": "ddp local-sgd diloco",
    "reproducible": "single dp ddp",  # the others sum gradients in an order, or in slices, that depend on the devices
    **dict.fromkeys(("bucket_cap_mb", "overlap_optimizer"), "ddp"),
    "redundancy": "ddp-zero1",
    "compile": "single ddp ddp-zero1 fsdp local-sgd diloco torch-ddp",  # not replicas in threads
    **dict.fromkeys(("sync_every", "fragments", "sync_delay", "sync_patience", "across"), "local-sgd diloco"),
    **dict.fromkeys(("outer_lr", "outer_momentum"), "diloco"),
}


def check_engine(name: StrategyName, settings: Settings) -> None:
    """Refuse settings that belong to another strategy.

    Raises:
        ConfigurationError: There is one; names it.
    """
    for used, allowed in _USED_BY.items():
        if name not in allowed.split() and getattr(settings, used) not in (None, False):
            raise ConfigurationError(
                f"{used} is for strategy {', '.join(allowed.split())}, but the strategy is {name}.\nOmit {used}."
            )


def refuse_ignored(values: Mapping[str, Any]) -> None:
    """Refuse settings that would have no effect.

    Args:
        values: By name: settings, and whatever else they may need. A need of which nothing is named here is not
            checked.

    Raises:
        ConfigurationError: There is such a setting; says what it needs.
    """
    for needed, names, advice in _NEEDS:
        one_of = values.keys() & needed.split()
        if one_of and not any(_is_on(values[name]) for name in one_of):
            for name in names.split():
                if _is_on(values.get(name)):
                    raise ConfigurationError(f"{name} needs {needed}.\nAdd {advice}, or omit {name}.")


def _is_on(value: object) -> bool:
    return value not in (None, False, 0, "none")


def _is_given(settings: object, spec: str) -> bool:
    """Return whether a setting differs from its default; with ``NAME=VALUE``, whether it has that value."""
    name, _, value = spec.partition("=")
    setting = vars(settings).get(name)  # not every class has every setting
    return bool(setting == value if value else setting is not None and setting != getattr(type(settings), name))


# --- every setting of a training run --------------------------------------------------------------------------------

Precision = Literal["fp32", "bf16", "fp16"]
Schedule = Literal["constant", "linear", "cosine"]
Scaling = Literal["none", "linear", "sqrt"]
NanRule = Literal["raise", "skip"]
Across = Literal["ranks", "machines"]
StrategyName = Literal["single", "dp", "ddp", "ddp-zero1", "fsdp", "local-sgd", "diloco", "torch-dp", "torch-ddp"]


@refusing_unknown("setting")
@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a task is trained: everything that determines the arithmetic and the loop over the steps.

    Raises:
        ConfigurationError: A value has the wrong type or is out of range; names it and says what is allowed.
    """

    epochs: int | None = setting(None, "Passes over the data set; the task's own number if not given.", "N", 1)
    steps: int | None = setting(None, "Optimizer steps, instead of epochs.", "N", 1)
    seed: int = setting(0, "Seed of initial weights, sample order and dropout.", "N", 0)
    global_batch_size: int | None = setting(None, "Samples per step over all devices; default: of the task.", "N", 1)
    accumulate: int = setting(1, "Micro-batches into which a device's part of a global batch is divided.", "N", 1)
    precision: Precision = setting("fp32", "Autocast to bf16, or fp16 with gradient scaling.")
    compile: bool = setting(False, "Compile the model with torch.compile.")
    sync_batchnorm: bool | None = setting(None, "Batch norms normalise over all ranks; default: in ddp and ddp-zero1.")
    clip: float | None = setting(None, "Maximum global norm of the gradient; larger gradients are scaled down.", "NORM")
    schedule: Schedule | None = setting(None, "Learning rate schedule; the task's own schedule, else constant.")
    warmup: int = setting(0, "Optimizer steps over which the learning rate rises from 0.", "STEPS", 0)
    # Learning-rate scaling with the batch size; see `batch_scale` in step_parts.py.
    lr_scaling: Scaling = setting("none", "How the learning rate scales with global over base batch size.")
    base_batch_size: int | None = setting(
        None, "Global batch size that fits the learning rate; default: of the task.", "N", 1
    )
    shares: Sequence[float] | None = setting(None, "Relative sizes of the devices' parts; default: equal.", "N,N,..")
    workers: int = setting(0, "Processes per rank that load samples.", "N", 0)
    prefetch: int | None = setting(None, "Micro-batches that each loader process loads ahead; 2 if not given.", "N", 1)
    bad_samples: Literal["stop", "skip"] = setting("stop", "If a sample cannot be read: stop, or skip and count it.")
    on_nan: NanRule = setting("raise", "If a gradient is NaN or infinite: end the run, or skip the step.")
    check_replicas: int = setting(100, "Steps between checks that all ranks hold the same bits; 0: never.", "STEPS", 0)
    reproducible: int | None = setting(None, "Virtual shards of a global batch: same bits on 1 to V devices.", "V", 1)
    # Between ranks, for slow networks.
    compression: str | None = setting(None, "Of gradients: bf16, fp16, int8, int4 or powersgd:RANK.", "METHOD")
    bucket_cap_mb: float | None = setting(None, "Size of a gradient bucket; default: 25, and 1 for the first.", "MIB")
    overlap_optimizer: bool = setting(False, "Update each bucket of parameters as soon as it is reduced.")
    redundancy: int = setting(0, "Copies of a rank's optimizer state at others, in ddp-zero1: 0 or 1.", "N", 0)
    sync_every: int | None = setting(None, "Steps between exchanges; default: local-sgd 8, diloco 50.", "STEPS", 1)
    fragments: int | None = setting(None, "Parts of the model that are exchanged after different steps.", "N", 1)
    sync_delay: int | None = setting(None, "Number of steps that run during an exchange.", "STEPS", 0)
    sync_patience: float | None = setting(None, "Wait in an exchange for a slow rank; default: no limit.", "SECONDS", 0)
    outer_lr: float | None = setting(None, "Learning rate of diloco's outer SGD; 0.7 if not given.", "RATE")
    outer_momentum: float | None = setting(None, "Nesterov momentum of that SGD; default: 0.9.", "M")
    across: Across | None = setting(None, "What trains alone between exchanges: ranks, or machines of several ranks.")
    threads: int | None = setting(None, "CPU threads per operation; default: torch's, or 1 with reproducible.", "N", 1)

    def __post_init__(self) -> None:
        cls: type = type(self)  # may be a subclass
        for declared in settings_of(cls):
            declared.check(getattr(self, declared.name))
        if self.shares is not None:
            object.__setattr__(self, "shares", tuple(self.shares))  # immutable
        if self.compression is not None:
            from lockstep.parallel.compression import check_method

            check_method(self.compression)
        if self.clip is not None and not self.clip > 0:
            raise ConfigurationError(f"clip={self.clip} is not allowed.\nGive a number above 0, or omit it.")
        if self.redundancy > 1:
            raise ConfigurationError(f"redundancy={self.redundancy} is not allowed.\nGive 0 or 1.")
        if self.bucket_cap_mb is not None and not 0 < self.bucket_cap_mb < math.inf:
            raise ConfigurationError(f"bucket_cap_mb={self.bucket_cap_mb} is not allowed.\nGive a size in MiB above 0.")
        for one, others, why in _CONFLICTS:
            for other in others.split() if _is_given(self, one) else ():
                if _is_given(self, other):
                    raise ConfigurationError(f"{one} cannot be combined with {other}: {why}.\nOmit one of the two.")


@refusing_unknown("setting")
@dataclass(frozen=True, kw_only=True)
class FitSettings(Settings):
    """`Settings`, the devices of the run, and what is recorded and saved."""

    strategy: StrategyName = setting("ddp", f"How work is divided: {', '.join(get_args(StrategyName))}.", "NAME")
    devices: int | Literal["auto"] | None = setting(None, "Devices; auto: all GPUs, or 1 CPU if there are none.", "N")
    checkpoint: FilePath | None = setting(None, "Folder for checkpoints, or URL such as s3://bucket/run.", DIR_OR_URL)
    checkpoint_every: int | None = setting(None, "Steps between checkpoints; each epoch if not given.", "STEPS", 1)
    checkpoint_blocking: bool = setting(False, "Wait until a checkpoint is on disk; needs no copy in host memory.")
    keep: int | None = setting(None, "Number of newest checkpoints to keep; 2 if not given.", "N", 1)
    keep_best: bool | str | None = setting(
        None, "Also save at the best evaluation so far, and keep it: by loss, or by METRIC, such as accuracy:max."
    )
    load_best: bool = setting(False, "At the end, use the weights of the checkpoint that keep_best has kept.")
    early_stopping: str | None = setting(None, "End when a metric stops improving: loss, accuracy:max.", "METRIC")
    patience: int | None = setting(None, "Number of evaluations without improvement that ends it; default: 5.", "N", 1)
    resume: bool | None = setting(None, "Require a checkpoint, or start a new run; default: resume if there is one.")
    export: FilePath | None = setting(None, "File for the unwrapped model's weights at the end, .safetensors.", "FILE")
    eval_every: int | None = setting(None, "Steps between evaluations; each epoch if not given.", "STEPS", 1)
    run_dir: FilePath | None = setting(None, "Folder for a record of all steps, for lockstep report.", "DIR")
    profile: bool = setting(False, "Run some steps under torch.profiler: one Chrome trace with phases per rank.")
    profile_steps: Sequence[float] | None = setting(None, "First step to profile, and how many; else 11,3.", "FIRST,N")
    profile_dir: FilePath | None = setting(None, "Folder for traces; profile/ in run_dir if not given.", "DIR")
    log_to: str | Sequence[str] | None = setting(
        None,
        "Comma-separated sinks for metrics: tensorboard:DIR, prometheus:[HOST:]PORT, "
        "wandb:[ENTITY/]PROJECT, mlflow:[URI].",
        "SINK,..",
    )
    view: ViewName = setting("auto", "Progress: live on a terminal or in a notebook, or periodic lines; auto selects.")
    quiet: bool = setting(False, "Print only errors and the output of the task.")
    price: str | None = setting(None, 'Price of a device per hour, such as 2.50 or "2.50 EUR", for the cost.', "SUM")

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_ignored(vars(self))
        check_engine(self.strategy, self)
        if self.export is not None and Path(self.export).suffix != ".safetensors":
            raise ConfigurationError(f"export={self.export} does not end in .safetensors.\nName a file that does.")
        for spec in (self.keep_best, self.early_stopping):
            if spec not in (None, False):
                Monitor.of(spec)
        # Checked here, so that an invalid target is an error before any rank is started.
        object.__setattr__(self, "log_to", read_targets(self.log_to))
        Price.read(self.price)
        numbers = self.profile_steps
        if numbers is not None and (len(numbers) != 2 or any(number != int(number) for number in numbers)):
            raise ConfigurationError(
                f"profile_steps={tuple(numbers)} is not allowed.\nGive the first step and how many, such as 101,5."
            )


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """The ranks that ``lockstep train`` starts: what happens if one fails or hangs, and their output.

    Raises:
        ConfigurationError: A value is out of range, or would be ignored.
    """

    max_restarts: int = setting(0, "Maximum number of restarts after a rank has failed.", "N", 0)
    min_devices: int | None = setting(None, "Continue without killed ranks, with at least N ranks.", "N", 1)
    spares: int | None = setting(None, "Keep N processes ready to replace lost ranks at once.", "N", 1)
    recover: Literal["deaths", "exceptions"] | None = setting(
        None, "Ranks replaced while the others go on: those that died, or raised exceptions, too."
    )
    watchdog: float | None = setting(None, "Report a hang after this time; default: 60; 0: never.", "SECONDS", 0)
    watchdog_action: Literal["end", "warn"] | None = setting(None, "After that: end with exit code 83, or continue.")
    logs: Literal["merged", "raw"] = setting("merged", "Merge the output of the ranks, or not.")
    log_level: Literal["info", "warning", "error"] = setting("info", "Show all, stderr, or reports only.")
    log_dir: FilePath | None = setting(None, "Folder for the output of each rank, as rank-N.log.", "DIR")

    def __post_init__(self) -> None:
        for declared in settings_of(LaunchSettings):
            declared.check(getattr(self, declared.name))
        # Without a time for the watchdog, it has one.
        refuse_ignored(vars(self) | {"watchdog": self.watchdog is None or self.watchdog})

    @property
    def flags(self) -> str:
        """The given flags that only ranks have which this command starts; those of their output are `LogSettings`'."""
        names = ("max_restarts", "min_devices", "spares", "recover", "watchdog", "watchdog_action")
        return " and ".join(f"--{name.replace('_', '-')}" for name in names if _is_given(self, name))


# --- settings in a file: TOML lines such as ``workers = 2`` -----------------------------------------------------------

# Settings that exclude each other: the one given last replaces the other.
_EXCLUSIVE = {"steps": "epochs", "epochs": "steps"}


def read_settings(path: FilePath) -> dict[str, Any]:
    """Return the settings in a file by name. Each value is checked.

    Raises:
        ConfigurationError: The file cannot be read, or has an unknown setting, or a value that is not allowed.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        cause, advice = f"cannot be read: {error.strerror}", "Name a file of settings, such as lockstep tune writes."
        raise ConfigurationError(f"{path} {cause}.\n{advice}") from None
    except ValueError as error:  # invalid TOML, with the line number, or invalid UTF-8
        advice = 'Write one setting per line, such as workers = 2 or strategy = "ddp".'
        raise ConfigurationError(f"{path} is not a file of settings: {error}.\n{advice}") from None
    valid = {each.name: each for each in settings_of(FitSettings)}
    for name, value in values.items():
        if name not in valid:
            hint = suggest(name, dict(zip(valid, valid, strict=True))) or "lockstep train --help-all lists them all."
            raise ConfigurationError(f"{path}: unknown setting {name!r}.\n{hint}")
        try:
            valid[name].check(value)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from None
    return values


def merge_settings(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``values`` of a file, overridden by ``overrides``."""
    rivals = {_EXCLUSIVE[name] for name in overrides if name in _EXCLUSIVE}
    for needed, names, _ in _NEEDS:  # what would be ignored without something that was switched off
        if any(name in overrides and not _is_on(overrides[name]) for name in needed.split()):
            rivals.update(names.split())
    return {name: value for name, value in values.items() if name not in rivals} | dict(overrides)


def toml_line(name: str, value: object) -> str:
    """Return a setting as a line of TOML."""
    # Numbers, booleans, lists and strings have the same syntax in JSON.
    return f"{name} = {json.dumps(value, ensure_ascii=False, default=str)}"
