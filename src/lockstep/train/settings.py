"""Every setting of a training run, declared once: ``fit``'s keywords, ``lockstep train``'s flags and settings files."""
# ruff: noqa: RUF009 - `setting` is dataclasses.field with metadata

from __future__ import annotations

import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union

from lockstep.errors import ConfigurationError
from lockstep.telemetry.sinks import parse_targets

FilePath = str | Path
Kind = Literal["int", "float", "bool", "path", "choice", "numbers", "text", "words"]

# --- a setting: what an annotated field of a dataclass declares, for checking values and for making flags -------------


def _is_number(value: object, kinds: tuple[type, ...] = (int, float)) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)  # True is an int to Python, but no number of steps


def _are_positive(value: Any) -> bool:
    if not isinstance(value, Sequence) or not value:
        return False
    return all(_is_number(number) and 0 < number < math.inf for number in value)


def _are_words(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, Sequence) and len(value) > 0 and all(isinstance(word, str) for word in value)
    )


# By kind: the types that a field is declared with, what a value must fulfil, and that in words.
_KINDS: dict[Kind, tuple[set[Any], Callable[[Any], bool], str]] = {
    "int": ({int}, lambda value: _is_number(value, (int,)), "a whole number"),
    "float": ({float}, _is_number, "a number"),
    "bool": ({bool}, lambda value: isinstance(value, bool), "True or False"),
    "path": ({str, Path}, lambda value: isinstance(value, (str, Path)), "a path"),
    "numbers": ({Sequence[float]}, _are_positive, "numbers above 0, such as (2, 1, 1)"),
    "text": ({str}, lambda value: isinstance(value, str), "a text"),
    "words": ({str, Sequence[str]}, _are_words, "a text, or several"),
}


# The unit of a path that may also be in an object store.
_DIR_OR_URL = "DIR|URL"


def setting(default: Any, help: str, unit: str | None = None, at_least: int | None = None) -> Any:
    """Return a field of a dataclass of settings; see `Setting`."""
    return field(default=default, metadata={"help": help, "unit": unit, "at_least": at_least})


@dataclass(frozen=True)
class Setting:
    """One field, as checked and shown.

    Args:
        name, kind, choices, default: As declared.
        optional: Whether it may be None.
        help: One sentence for ``--help``.
        unit: What its number or path stands for.
        at_least: Smallest number allowed.
    """

    name: str
    kind: Kind
    optional: bool
    choices: tuple[str, ...]
    default: Any
    help: str
    unit: str | None
    at_least: int | None

    def check(self, value: Any) -> None:
        """Check a value.

        Raises:
            ConfigurationError: It is of the wrong kind or out of range; says what is allowed.
        """
        if value is None and self.optional:
            return
        if self.kind == "choice":
            is_allowed, allowed = value in self.choices, "one of " + ", ".join(self.choices)
        else:
            _, test, allowed = _KINDS[self.kind]
            is_allowed = test(value)
        if self.kind == "path" and is_allowed and "://" in str(value) and self.unit != _DIR_OR_URL:
            is_allowed, allowed = False, "a path on this machine: only checkpoints can be in an object store"
        if self.at_least is not None:
            is_allowed, allowed = is_allowed and value >= self.at_least, f"{allowed} of at least {self.at_least}"
        if not is_allowed:
            raise ConfigurationError(f"{self.name}={value!r} is not allowed.\nGive {allowed}.")


@cache
def settings_of(cls: type) -> tuple[Setting, ...]:
    """Return what the dataclass ``cls`` declares, in the order of its fields."""
    hints = typing.get_type_hints(cls)
    found = []
    for declared in fields(cls):
        hint = hints[declared.name]
        members = set(typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else [hint])
        kinds = members - {type(None)}
        # Of several types none is a choice.
        choices = [choice for each in kinds if typing.get_origin(each) is Literal for choice in typing.get_args(each)]
        kind: Kind = next((kind for kind, (types_of, *_) in _KINDS.items() if types_of == kinds), "choice")
        optional = kinds != members
        found.append(Setting(declared.name, kind, optional, tuple(choices), declared.default, **declared.metadata))
    return tuple(found)


# --- every setting of a training run --------------------------------------------------------------------------------

Precision = Literal["fp32", "bf16", "fp16"]
Schedule = Literal["constant", "linear", "cosine"]
Scaling = Literal["none", "linear", "sqrt"]
BadSamplesRule = Literal["stop", "skip"]
NanRule = Literal["raise", "skip"]
Wire = Literal["bf16", "fp16"]
ViewName = Literal["auto", "live", "lines", "none"]
Across = Literal["ranks", "machines"]
StrategyName = Literal["single", "dp", "ddp", "ddp-zero1", "fsdp", "local-sgd", "diloco", "torch-dp", "torch-ddp"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a task is trained, apart from where: what determines the arithmetic, and all that the step loop needs.

    Raises:
        ConfigurationError: A value is of the wrong kind or out of range; says which, and what is allowed.
    """

    epochs: int | None = setting(None, "Passes over the data set; the task's own number if not given.", "N", 1)
    steps: int | None = setting(None, "Optimizer steps, instead of epochs.", "N", 1)
    seed: int = setting(0, "Where initial weights, sample order and dropout derive from.", "N", 0)
    global_batch_size: int | None = setting(
        None, "Samples in an optimizer step over all devices, instead of the task's own.", "SAMPLES", 1
    )
    accumulate: int = setting(1, "Micro-batches that a device's part of a global batch is cut into.", "N", 1)
    precision: Precision = setting("fp32", "Autocast to bf16, or to fp16 with gradient scaling.")
    clip: float | None = setting(None, "Largest global norm of the gradient; a longer one is cut.", "NORM")
    schedule: Schedule | None = setting(
        None, "How the learning rate falls over the steps; the task's own schedule, else constant."
    )
    warmup: int = setting(0, "Optimizer steps over which the learning rate rises from 0.", "STEPS", 0)
    # Learning-rate scaling with the batch size; see `batch_scale` in step.py.
    lr_scaling: Scaling = setting("none", "How the learning rate follows the global batch, relative to the base batch.")
    base_batch_size: int | None = setting(
        None, "Global batch that the learning rate was chosen for; else the task's own.", "SAMPLES", 1
    )
    shares: Sequence[float] | None = setting(
        None, "Sizes of the devices' parts of a global batch, relative to each other; the same if not given.", "N,N,.."
    )
    workers: int = setting(0, "Processes per rank that load samples.", "N", 0)
    prefetch: int | None = setting(None, "Micro-batches that each loader process loads ahead; 2 if not given.", "N", 1)
    bad_samples: BadSamplesRule = setting(
        "stop", "When a sample cannot be read, stop, or go on without it and count it."
    )
    on_nan: NanRule = setting("raise", "When a gradient is NaN or infinite: end the run, or skip the step.")
    check_replicas: int = setting(
        100, "Steps between checks that all ranks still hold the same bits; 0 for never.", "STEPS", 0
    )
    reproducible: int | None = setting(
        None, "Cut each global batch into V virtual shards: the same bits on 1 to V devices.", "V", 1
    )
    compression: str | None = setting(
        None,
        "How gradients travel between ranks: bf16, fp16, int8, int4 or powersgd:RANK; for slow networks.",
        "METHOD",
    )
    wire: Wire | None = setting(None, "Deprecated: as compression.")
    bucket_cap_mb: float | None = setting(None, "Size of a bucket of gradients; 25, the first 1, if not given.", "MIB")
    overlap_optimizer: bool = setting(False, "Step each bucket of parameters as soon as it is reduced.")
    sync_every: int | None = setting(
        None, "Steps between exchanges of parameters; 8 with local-sgd, 50 with diloco if not given.", "STEPS", 1
    )
    fragments: int | None = setting(None, "Parts of the model that are exchanged after different steps.", "N", 1)
    sync_delay: int | None = setting(None, "Steps that go on while an exchange is under way.", "STEPS", 0)
    outer_lr: float | None = setting(None, "Learning rate of diloco's outer SGD; 0.7 if not given.", "RATE")
    outer_momentum: float | None = setting(None, "Its Nesterov momentum; 0.9 if not given.", "M")
    across: Across | None = setting(
        None, "Who trains by itself between exchanges: ranks, or machines, whose ranks sum gradients in every step."
    )
    threads: int | None = setting(
        None, "CPU cores that an operation may use; 1 with reproducible, else up to torch.", "N", 1
    )

    def __post_init__(self) -> None:
        cls: type = type(self)  # those of the subclass, too
        for each in settings_of(cls):
            each.check(getattr(self, each.name))
        if self.shares is not None:
            object.__setattr__(self, "shares", tuple(self.shares))  # so that nobody changes it
        self._check_compression()
        if self.clip is not None and not self.clip > 0:
            raise ConfigurationError(f"clip={self.clip} is no length.\nGive a number above 0, or leave it out.")
        if self.bucket_cap_mb is not None and not 0 < self.bucket_cap_mb < math.inf:
            raise ConfigurationError(f"bucket_cap_mb={self.bucket_cap_mb} is no size.\nGive a number of MiB above 0.")
        if self.steps is not None and self.epochs is not None:
            raise ConfigurationError(
                f"Both steps={self.steps} and epochs={self.epochs} are given.\nGive the one that should end the run."
            )
        if self.overlap_optimizer:
            self._check_overlap()
        if self.reproducible is not None:
            self._check_reproducible(self.reproducible)

    def _check_compression(self) -> None:
        if self.wire is not None:
            if self.compression not in (None, self.wire):
                raise ConfigurationError(
                    f"Both compression={self.compression} and wire={self.wire} are given.\nLeave wire out."
                )
            object.__setattr__(self, "compression", self.wire)
            object.__setattr__(self, "wire", None)  # or a copy could not have another
        if self.compression is not None:
            from lockstep.parallel.compression import check_method

            check_method(self.compression)

    def _check_overlap(self) -> None:
        needs_the_end = {
            "clip": (self.clip is not None, "the norm of the whole gradient is known"),
            "precision=fp16": (self.precision == "fp16", "the whole gradient is known to be finite"),
            "bad_samples=skip": (self.bad_samples == "skip", "it is known how many samples there were"),
            "on_nan=skip": (self.on_nan == "skip", "the whole gradient is known to be finite"),
            "reproducible": (self.reproducible is not None, "all virtual shards are summed"),
        }
        for name, (is_given, when) in needs_the_end.items():
            if is_given:
                raise ConfigurationError(
                    f"With {name} no parameter can be stepped before {when}, so overlap_optimizer cannot be had with "
                    "it.\nLeave one of the two out."
                )

    def _check_reproducible(self, num_shards: int) -> None:
        if self.accumulate > 1:
            raise ConfigurationError(
                f"Both reproducible={num_shards} and accumulate={self.accumulate} are given.\n"
                "Each virtual shard is a micro-batch already: for smaller ones, cut the batch into more of them "
                f"(reproducible={num_shards * self.accumulate})."
            )
        for name in ("compression", "bucket_cap_mb"):
            if getattr(self, name) is not None:
                raise ConfigurationError(
                    f"{name} does nothing with reproducible, which exchanges gradients in its own way.\n"
                    "Leave one of the two out."
                )


@dataclass(frozen=True, kw_only=True)
class FitSettings(Settings):
    """`Settings`, on what the run happens, and what is kept of it."""

    strategy: StrategyName = setting(
        "ddp", "Who computes: one device, one process with a thread a device, or a process a device."
    )
    devices: int | None = setting(None, "Devices to train on; all GPUs, or 1 CPU if there are none.", "N", 1)
    checkpoint: FilePath | None = setting(
        None, "Folder for checkpoints, or its URL in an object store, such as s3://bucket/run.", _DIR_OR_URL
    )
    checkpoint_every: int | None = setting(
        None, "Steps between checkpoints; each epoch if not given, and always at the end.", "STEPS", 1
    )
    checkpoint_blocking: bool = setting(
        False, "Let the next step wait until a checkpoint is on disk; saves a copy of the state in host memory."
    )
    keep: int = setting(2, "Newest checkpoints that are kept.", "N", 1)
    keep_best: bool = setting(False, "Save when an evaluation finds the lowest loss so far, and keep that, too.")
    resume: bool | None = setting(
        None, "Insist on a checkpoint to go on from, or start anew and replace it; else go on if there is one."
    )
    export: FilePath | None = setting(None, "File for the bare model's weights at the end, .safetensors.", "FILE")
    eval_every: int | None = setting(
        None, "Steps between evaluations; each epoch if not given, and always at the end.", "STEPS", 1
    )
    run_dir: FilePath | None = setting(
        None, "Folder in which every rank records its steps, times and events, for lockstep report.", "DIR"
    )
    profile: bool = setting(
        False, "Hand some steps over to torch.profiler: a Chrome trace for each rank, with the phases in it."
    )
    profile_steps: Sequence[float] | None = setting(
        None, "The first step to profile, and how many; 11,3 if not given.", "FIRST,N"
    )
    profile_dir: FilePath | None = setting(
        None, "Folder for these traces; profile/ in the folder of the run if not given.", "DIR"
    )
    nvtx: bool = setting(False, "Name the phases of every step as NVTX ranges, for NVIDIA's tools.")
    log_to: str | Sequence[str] | None = setting(
        None,
        "Where figures go as it runs, with commas between them: tensorboard:DIR, prometheus:[HOST:]PORT, "
        "wandb:[ENTITY/]PROJECT, mlflow:[URI].",
        "SINK,..",
    )
    view: ViewName = setting(
        "auto", "How progress is shown: live, on a terminal or in a notebook, or as lines now and then; auto decides."
    )
    quiet: bool = setting(False, "Print only errors, and what the task itself prints.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("resume", "keep_best", "checkpoint_blocking"):
            if getattr(self, name) and self.checkpoint is None:
                raise ConfigurationError(
                    f"{name} needs a folder for checkpoints.\nName it with checkpoint=DIR (--checkpoint DIR)."
                )
        if self.export is not None and Path(self.export).suffix != ".safetensors":
            raise ConfigurationError(f"export={self.export} does not end in .safetensors.\nName a file that does.")
        # Checked here, so that a target that is none is an error before any rank is started.
        if self.log_to is not None:
            object.__setattr__(self, "log_to", tuple(str(target) for target in parse_targets(self.log_to)))
        numbers = self.profile_steps
        if numbers is not None and (len(numbers) != 2 or any(number != int(number) for number in numbers)):
            raise ConfigurationError(
                f"profile_steps={tuple(numbers)} is not allowed.\nGive the first step and how many, such as 101,5."
            )
        for name in ("profile_steps", "profile_dir"):
            if getattr(self, name) is not None and not self.profile:
                raise ConfigurationError(
                    f"{name} is given, but nothing is to be profiled.\nAdd profile=True (--profile), or leave it out."
                )
        if self.profile and self.profile_dir is None and self.run_dir is None:
            raise ConfigurationError(
                "profile needs a folder for its traces.\nName it with profile_dir=DIR (--profile-dir DIR), or record "
                "the run with run_dir=DIR (--run-dir DIR)."
            )


# --- settings in a file: TOML lines such as ``workers = 2`` -----------------------------------------------------------

# Settings of which only one can be given: the one that has the last word takes the other's place.
_EXCLUSIVE = {"steps": "epochs", "epochs": "steps"}


def read_settings(path: FilePath) -> dict[str, Any]:
    """Return the settings in a file by their names, each checked by itself.

    Raises:
        ConfigurationError: It cannot be read, or names what is no setting, or gives a value that is not allowed.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        cause, advice = f"cannot be read: {error.strerror}", "Name a file of settings, such as lockstep tune writes."
        raise ConfigurationError(f"{path} {cause}.\n{advice}") from None
    except ValueError as error:  # of TOML, which names the line, or of UTF-8
        advice = 'Write a setting in each line, as in workers = 2 or strategy = "ddp".'
        raise ConfigurationError(f"{path} is no file of settings: {error}.\n{advice}") from None
    known = {each.name: each for each in settings_of(FitSettings)}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
            hint = f"Did you mean {near[0]}?" if near else "lockstep train --help lists them all."
            raise ConfigurationError(f"{path}: there is no setting {name!r}.\n{hint}")
        try:
            known[name].check(value)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from None
    return values


def merge_settings(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` of a file with what was ``given`` otherwise over them, which has the last word."""
    rivals = {_EXCLUSIVE[name] for name in given if name in _EXCLUSIVE}
    return {name: value for name, value in values.items() if name not in rivals} | dict(given)


def toml_line(name: str, value: object) -> str:
    """Return the line of a setting."""
    # JSON's numbers, booleans, lists and strings are TOML's, too.
    return f"{name} = {json.dumps(value, ensure_ascii=False, default=str)}"
