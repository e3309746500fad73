"""Every setting of a training run, declared once: ``fit``'s keywords, ``lockstep train``'s flags and settings files."""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from lockstep.errors import ConfigurationError
from lockstep.telemetry.sinks.factory import parse_targets

# Settings as data: what a dataclass of annotated fields declares, for checking values and for making flags.

FilePath = str | Path
Kind = Literal["int", "float", "bool", "path", "choice", "numbers", "words"]


@dataclass(frozen=True)
class Flag:
    """What a field says of itself, besides its type and default.

    Args:
        help: One sentence for ``--help``.
        unit: What its number or path stands for.
        at_least: Smallest number allowed.
    """

    help: str
    unit: str | None = None
    at_least: int | None = None


@dataclass(frozen=True)
class Setting:
    """One field, as checked and shown; ``optional`` ones may be None, and numbers may be one of the ``choices``."""

    name: str
    kind: Kind
    optional: bool
    choices: tuple[str, ...]
    default: Any
    flag: Flag

    def check(self, value: object) -> None:
        """Check a value.

        Raises:
            ConfigurationError: It is of the wrong kind or out of range; says what is allowed.
        """
        if value is None and self.optional:
            return
        allowed = self._allowed(value)
        if allowed is not None:
            raise ConfigurationError(f"{self.name}={value!r} is not allowed.\nGive {allowed}.")

    def _allowed(self, value: object) -> str | None:
        """Return in words what is allowed if ``value`` is not."""
        if self.kind == "choice":
            return None if value in self.choices else "one of " + ", ".join(self.choices)
        if self.kind == "bool":
            return None if isinstance(value, bool) else "True or False"
        if self.kind == "path":
            return None if isinstance(value, (str, Path)) else "a path"
        if self.kind == "numbers":
            return None if _are_positive(value) else "numbers above 0, such as (2, 1, 1)"
        if self.kind == "words":
            return None if _are_words(value) else "a text, or several"
        if isinstance(value, str) and value in self.choices:
            return None
        numbers = (int,) if self.kind == "int" else (int, float)
        smallest = self.flag.at_least
        if isinstance(value, numbers) and not isinstance(value, bool) and (smallest is None or value >= smallest):
            return None
        number = "a whole number" if self.kind == "int" else "a number"
        words = "".join(f", or {choice}" for choice in self.choices)
        return (number if smallest is None else f"{number} of at least {smallest}") + words


def _are_positive(value: object) -> bool:
    """Return whether ``value`` is a sequence of finite numbers above 0, of one at least."""
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(
            isinstance(number, (int, float)) and not isinstance(number, bool) and 0 < number < math.inf
            for number in value
        )
    )


def _are_words(value: object) -> bool:
    """Return whether ``value`` is a text, or a sequence of texts, of one at least."""
    if isinstance(value, str):
        return True
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(word, str) for word in value)


@cache
def settings_of(cls: type) -> tuple[Setting, ...]:
    """Return what the dataclass ``cls`` declares, in the order of its fields."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(_setting(field.name, hints[field.name], field.default) for field in fields(cls))


def _setting(name: str, hint: Any, default: object) -> Setting:
    assert typing.get_origin(hint) is Annotated and default is not MISSING, name
    inner, flag = typing.get_args(hint)
    assert isinstance(flag, Flag), name
    members = typing.get_args(inner) if typing.get_origin(inner) in (Union, types.UnionType) else (inner,)
    optional = type(None) in members
    members = tuple(member for member in members if member is not type(None))
    choices = tuple(
        word for member in members if typing.get_origin(member) is Literal for word in typing.get_args(member)
    )
    members = tuple(member for member in members if typing.get_origin(member) is not Literal)
    if not members:
        return Setting(name, "choice", optional, choices, default, flag)
    kinds: dict[frozenset[Any], Kind] = {
        frozenset({int}): "int",
        frozenset({float}): "float",
        frozenset({bool}): "bool",
        frozenset({str, Path}): "path",
        frozenset({Sequence[float]}): "numbers",
        frozenset({str, Sequence[str]}): "words",
    }
    return Setting(name, kinds[frozenset(members)], optional, choices, default, flag)


def check_all(settings: object) -> None:
    """Check every field of a dataclass of settings; see `Setting.check`."""
    cls: type = type(settings)
    for setting in settings_of(cls):
        setting.check(getattr(settings, setting.name))


# Which steps of a run are profiled: pure arithmetic.

FIRST_PROFILED, NUM_PROFILED = 11, 3
"""By then memory is allocated, kernels are chosen and buckets have found their order."""


@dataclass(frozen=True)
class ProfileWindows:
    """Steps in a row, once or again and again; counted from 1, in this start of the run.

    Args:
        first: The first step.
        count: How many, one after the other.
        every: Steps from the beginning of one stretch to that of the next; None: there is only one.
    """

    first: int = FIRST_PROFILED
    count: int = NUM_PROFILED
    every: int | None = None

    def is_first(self, step: int) -> bool:
        """Return whether a stretch begins with ``step``."""
        return step == self.first or (
            self.every is not None and step > self.first and (step - self.first) % self.every == 0
        )

    def is_last(self, step: int) -> bool:
        """Return whether a stretch ends with ``step``."""
        return self.is_first(step - self.count + 1)


def check_profile_steps(numbers: Sequence[float] | None) -> None:
    """Check what was given as ``profile_steps``.

    Raises:
        ConfigurationError: It is not two or three whole numbers, or stretches would overlap.
    """
    if numbers is None:
        return
    if len(numbers) not in (2, 3) or any(number != int(number) for number in numbers):
        raise ConfigurationError(
            f"profile_steps={tuple(numbers)} is not allowed.\n"
            "Give the first step and how many, such as 101,5; to do so again and again, also the steps from one "
            "beginning to the next, such as 101,5,1000."
        )
    if len(numbers) == 3 and numbers[2] <= numbers[1]:
        raise ConfigurationError(
            f"profile_steps={tuple(numbers)}: {numbers[1]:.0f} steps every {numbers[2]:.0f} leave none out.\n"
            "Make the third number larger than the second."
        )


def profile_windows(numbers: Sequence[float] | None, num_steps: int) -> ProfileWindows:
    """Return the stretches that checked ``numbers`` stand for, in a run of so many steps.

    Without numbers, they are a few steps after the first ones; of a short run, its last.
    """
    if numbers is None:
        return ProfileWindows(first=max(1, min(FIRST_PROFILED, num_steps - NUM_PROFILED + 1)))
    first, count, *every = map(int, numbers)
    return ProfileWindows(first, count, every[0] if every else None)


# Every setting of a training run, declared once: ``fit``'s keywords and ``lockstep train``'s flags derive from it.
#
# `Settings` is what determines the arithmetic, and all that the step loop needs. `FitSettings` adds what goes on
# around the steps.

Precision = Literal["fp32", "bf16", "fp16"]
Schedule = Literal["constant", "linear", "cosine"]
Scaling = Literal["none", "linear", "sqrt"]
BadSamplesRule = Literal["stop", "skip"]
NanRule = Literal["raise", "skip"]
Wire = Literal["bf16", "fp16"]
ViewName = Literal["auto", "live", "lines", "none"]
StrategyName = Literal["single", "dp", "ddp", "ddp-zero1", "fsdp", "torch-dp", "torch-ddp"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a task is trained, apart from where.

    Raises:
        ConfigurationError: A value is of the wrong kind or out of range; says which, and what is allowed.
    """

    epochs: Annotated[int | None, Flag("Passes over the data set; the task's own number if not given.", "N", 1)] = None
    steps: Annotated[int | None, Flag("Optimizer steps, instead of epochs.", "N", 1)] = None
    seed: Annotated[int, Flag("Where initial weights, sample order and dropout derive from.", "N", 0)] = 0
    global_batch_size: Annotated[
        int | None, Flag("Samples in an optimizer step over all devices, instead of the task's own.", "SAMPLES", 1)
    ] = None
    accumulate: Annotated[int, Flag("Micro-batches that a device's part of a global batch is cut into.", "N", 1)] = 1
    precision: Annotated[Precision, Flag("Autocast to bf16, or to fp16 with gradient scaling.")] = "fp32"
    clip: Annotated[float | None, Flag("Largest global norm of the gradient; a longer one is cut.", "NORM")] = None
    schedule: Annotated[
        Schedule | None, Flag("How the learning rate falls over the steps; the task's own schedule, else constant.")
    ] = None
    warmup: Annotated[int, Flag("Optimizer steps over which the learning rate rises from 0.", "STEPS", 0)] = 0
    lr_scaling: Annotated[
        Scaling, Flag("How the learning rate follows the global batch, relative to the base batch.")
    ] = "none"
    base_batch_size: Annotated[
        int | None,
        Flag("Global batch that the learning rate was chosen for; else the task's own.", "SAMPLES", 1),
    ] = None
    shares: Annotated[
        Sequence[float] | None,
        Flag("Sizes of the devices' parts of a global batch, relative to each other; the same if not given.", "N,N,.."),
    ] = None
    workers: Annotated[int, Flag("Processes per rank that load samples.", "N", 0)] = 0
    prefetch: Annotated[
        int | None, Flag("Micro-batches that each loader process loads ahead; 2 if not given.", "N", 1)
    ] = None
    bad_samples: Annotated[
        BadSamplesRule, Flag("When a sample cannot be read, stop, or go on without it and count it.")
    ] = "stop"
    on_nan: Annotated[
        NanRule,
        Flag("When a gradient is NaN or infinite: end the run, or skip the step."),
    ] = "raise"
    check_replicas: Annotated[
        int, Flag("Steps between checks that all ranks still hold the same bits; 0 for never.", "STEPS", 0)
    ] = 100
    reproducible: Annotated[
        int | None,
        Flag("Cut each global batch into V virtual shards: the same bits on 1 to V devices.", "V", 1),
    ] = None
    wire: Annotated[Wire | None, Flag("Round gradients to bf16 or fp16 for the way between the ranks.")] = None
    bucket_cap_mb: Annotated[
        float | None, Flag("Size of a bucket of gradients; 25, the first 1, if not given.", "MIB")
    ] = None
    overlap_optimizer: Annotated[bool, Flag("Step each bucket of parameters as soon as it is reduced.")] = False
    threads: Annotated[
        int | None, Flag("CPU cores that an operation may use; 1 with reproducible, else up to torch.", "N", 1)
    ] = None

    def __post_init__(self) -> None:
        check_all(self)
        if self.reproducible is not None and self.accumulate > 1:
            raise ConfigurationError(
                f"Both reproducible={self.reproducible} and accumulate={self.accumulate} are given.\n"
                "Each virtual shard is a micro-batch already: for smaller ones, cut the batch into more of them "
                f"(reproducible={self.reproducible * self.accumulate})."
            )
        if self.shares is not None:
            object.__setattr__(self, "shares", tuple(self.shares))  # so that nobody changes it
        if self.steps is not None and self.epochs is not None:
            raise ConfigurationError(
                f"Both steps={self.steps} and epochs={self.epochs} are given.\nGive the one that should end the run."
            )
        if self.clip is not None and not self.clip > 0:
            raise ConfigurationError(f"clip={self.clip} is no length.\nGive a number above 0, or leave it out.")
        check_combinations(self)


def check_combinations(settings: Settings) -> None:
    """Refuse settings that cannot be had together.

    Raises:
        ConfigurationError: Names both, and says why.
    """
    cap_mb = settings.bucket_cap_mb
    if cap_mb is not None and not 0 < cap_mb < math.inf:
        raise ConfigurationError(f"bucket_cap_mb={cap_mb} is no size.\nGive a number of MiB above 0.")
    needs_the_end = {
        "clip": (settings.clip is not None, "the norm of the whole gradient is known"),
        "precision=fp16": (settings.precision == "fp16", "the whole gradient is known to be finite"),
        "bad_samples=skip": (settings.bad_samples == "skip", "it is known how many samples there were"),
        "on_nan=skip": (settings.on_nan == "skip", "the whole gradient is known to be finite"),
        "reproducible": (settings.reproducible is not None, "all virtual shards are summed"),
    }
    for name, (is_given, when) in needs_the_end.items():
        if settings.overlap_optimizer and is_given:
            raise ConfigurationError(
                f"With {name} no parameter can be stepped before {when}, so overlap_optimizer cannot be had with it.\n"
                "Leave one of the two out."
            )
    for name in ("wire", "bucket_cap_mb"):
        if settings.reproducible is not None and getattr(settings, name) is not None:
            raise ConfigurationError(
                f"{name} does nothing with reproducible, which exchanges gradients in its own way.\n"
                "Leave one of the two out."
            )


@dataclass(frozen=True, kw_only=True)
class FitSettings(Settings):
    """`Settings`, on what the run happens, and what is kept of it."""

    strategy: Annotated[
        StrategyName, Flag("Who computes: one device, one process with a thread a device, or a process a device.")
    ] = "ddp"
    devices: Annotated[int | None, Flag("Devices to train on; all GPUs, or 1 CPU if there are none.", "N", 1)] = None
    checkpoint: Annotated[FilePath | None, Flag("Folder for checkpoints.", "DIR")] = None
    checkpoint_every: Annotated[
        int | None, Flag("Steps between checkpoints; each epoch if not given, and always at the end.", "STEPS", 1)
    ] = None
    checkpoint_blocking: Annotated[
        bool, Flag("Let the next step wait until a checkpoint is on disk; saves a copy of the state in host memory.")
    ] = False
    keep: Annotated[int, Flag("Newest checkpoints that are kept.", "N", 1)] = 2
    keep_best: Annotated[bool, Flag("Save when an evaluation finds the lowest loss so far, and keep that, too.")] = (
        False
    )
    resume: Annotated[
        bool | None,
        Flag("Insist on a checkpoint to go on from, or start anew and replace it; else go on if there is one."),
    ] = None
    export: Annotated[FilePath | None, Flag("File for the bare model's weights at the end, .safetensors.", "FILE")] = (
        None
    )
    eval_every: Annotated[
        int | None, Flag("Steps between evaluations; each epoch if not given, and always at the end.", "STEPS", 1)
    ] = None
    run_dir: Annotated[
        FilePath | None,
        Flag("Folder in which every rank records its steps, times and events, for lockstep report.", "DIR"),
    ] = None
    profile: Annotated[
        bool, Flag("Hand some steps over to torch.profiler: a Chrome trace for each rank, with the phases in it.")
    ] = False
    profile_steps: Annotated[
        Sequence[float] | None,
        Flag("The first step, how many, and after how many again; 11,3 if not given.", "FIRST,N[,EVERY]"),
    ] = None
    profile_dir: Annotated[
        FilePath | None, Flag("Folder for these traces; profile/ in the folder of the run if not given.", "DIR")
    ] = None
    nvtx: Annotated[bool, Flag("Name the phases of every step as NVTX ranges, for NVIDIA's tools.")] = False
    log_to: Annotated[
        str | Sequence[str] | None,
        Flag(
            "Where figures go as it runs, with commas between them: tensorboard:DIR, prometheus:[HOST:]PORT, "
            "wandb:[ENTITY/]PROJECT, mlflow:[URI].",
            "SINK,..",
        ),
    ] = None
    view: Annotated[
        ViewName,
        Flag("How progress is shown: live, on a terminal or in a notebook, or as lines now and then; auto decides."),
    ] = "auto"
    quiet: Annotated[bool, Flag("Print only errors, and what the task itself prints.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume and self.checkpoint is None:
            raise ConfigurationError(
                "resume needs a folder to resume from.\nName it with checkpoint=DIR (--checkpoint DIR)."
            )
        if self.checkpoint is None:
            for name, is_given in (("keep_best", self.keep_best), ("checkpoint_blocking", self.checkpoint_blocking)):
                if is_given:
                    raise ConfigurationError(
                        f"{name} needs a folder for checkpoints.\nName it with checkpoint=DIR (--checkpoint DIR)."
                    )
        if self.export is not None and Path(self.export).suffix != ".safetensors":
            raise ConfigurationError(f"export={self.export} does not end in .safetensors.\nName a file that does.")
        if self.log_to is not None:
            object.__setattr__(self, "log_to", tuple(str(target) for target in parse_targets(self.log_to)))
        self._check_profile()

    def _check_profile(self) -> None:
        check_profile_steps(self.profile_steps)
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


# Settings in a file: TOML lines such as ``workers = 2``, which `lockstep tune` writes and ``lockstep train`` reads.

_EXCLUSIVE = {"steps": "epochs", "epochs": "steps"}
"""Settings of which only one can be given: the one that has the last word takes the other's place."""

_TOML_POSITION = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$")


def read_settings(path: FilePath) -> dict[str, Any]:
    """Return the settings in a file by their names, each checked by itself.

    Raises:
        ConfigurationError: It cannot be read, or a line names no setting, or gives a value that is not allowed; names
            the file and the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}.\nName a file of settings, such as lockstep tune writes."
        ) from None
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"{path} is no text.\nName a file of settings, such as lockstep tune writes."
        ) from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _not_toml(path, text, str(error)) from None
    known = {setting.name: setting for setting in settings_of(FitSettings)}
    for name, value in values.items():
        where = _SettingsLine(path, text, name)
        if name not in known:
            raise where.error(f"there is no setting {name!r}.", _hint(name, value, list(known)))
        try:
            known[name].check(value)
        except ConfigurationError as error:
            cause, _, advice = str(error).partition("\n")
            raise where.error(cause, advice) from None
    return values


def merge_settings(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` of a file with what was ``given`` otherwise over them, which has the last word."""
    rivals = {_EXCLUSIVE[name] for name in given if name in _EXCLUSIVE}
    return {name: value for name, value in values.items() if name not in rivals} | dict(given)


def toml_line(name: str, value: object) -> str:
    """Return the line of a setting."""
    return f"{name} = {_toml_value(value)}"


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml_value(each) for each in value)}]"
    return json.dumps(str(value), ensure_ascii=False)


class _SettingsLine:
    """The line of a file that sets a name."""

    def __init__(self, path: FilePath, text: str, name: str) -> None:
        sets = re.compile(rf"""\s*\[*\s*["']?{re.escape(name)}["']?\s*[=.\]]""")
        lines = text.splitlines()
        self._path = path
        self._number = next((number for number, line in enumerate(lines, 1) if sets.match(line)), 1)
        self._line = lines[self._number - 1].strip()

    def error(self, cause: str, advice: str) -> ConfigurationError:
        return ConfigurationError(f"{self._path}, line {self._number}: {cause}\n    {self._line}\n{advice}")


def _not_toml(path: FilePath, text: str, reason: str) -> ConfigurationError:
    lines = text.splitlines() or [""]
    found = _TOML_POSITION.search(reason)
    number = int(found[1]) if found and found[1] else len(lines)
    line = lines[min(number, len(lines)) - 1].strip()
    return ConfigurationError(
        f"{path}, line {number}: {_TOML_POSITION.sub('', reason)}.\n    {line}\n"
        'Write a setting in each line, as in workers = 2 or strategy = "ddp".'
    )


def _hint(name: str, value: object, known: list[str]) -> str:
    if isinstance(value, dict):
        return "Write each setting in a line of its own, without a heading in brackets."
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"Did you mean {near[0]}?" if near else "lockstep train --help lists them all."
