"""Every setting of a training run, declared once: ``fit``'s keywords and ``lockstep train``'s flags derive from it.

`Settings` is what determines the arithmetic, and all that the step loop needs. `FitSettings` adds what goes on
around the steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from lockstep.errors import ConfigurationError
from lockstep.telemetry.sinks.targets import parse_targets
from lockstep.train.declared import FilePath, Flag, check_all
from lockstep.train.profile_steps import check_steps

Precision = Literal["fp32", "bf16", "fp16"]
Schedule = Literal["constant", "linear", "cosine"]
Scaling = Literal["none", "linear", "sqrt"]
BadSamplesRule = Literal["stop", "skip"]
NanRule = Literal["raise", "skip", "rewind"]
Wire = Literal["bf16", "fp16"]
ViewName = Literal["auto", "live", "lines", "none"]
StrategyName = Literal["single", "dp", "dp-zero1", "ddp", "ddp-zero1", "fsdp", "torch-dp", "torch-ddp"]


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
    micro_batch: Annotated[
        Literal["auto"] | None,
        Flag("Cut into more micro-batches when a rank runs out of memory, and do the step again; the same training."),
    ] = None
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
    workers: Annotated[
        int | Literal["auto"], Flag("Processes per rank that load samples; auto tries how many pay.", "N|auto", 0)
    ] = 0
    prefetch: Annotated[
        int | None, Flag("Micro-batches that each loader process loads ahead; 2 if not given.", "N", 1)
    ] = None
    bad_samples: Annotated[
        BadSamplesRule, Flag("When a sample cannot be read, stop, or go on without it and count it.")
    ] = "stop"
    on_nan: Annotated[
        NanRule,
        Flag("When a gradient is NaN or infinite: end the run, skip the step, or go back to the last good state."),
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
        float | Literal["auto"] | None,
        Flag("Size of a bucket of gradients; auto measures which pays; 25, the first 1, if not given.", "MIB|auto"),
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
    if isinstance(cap_mb, int | float) and not 0 < cap_mb < math.inf:
        raise ConfigurationError(f"bucket_cap_mb={cap_mb} is no size.\nGive a number of MiB above 0, or auto.")
    needs_the_end = {
        "clip": (settings.clip is not None, "the norm of the whole gradient is known"),
        "precision=fp16": (settings.precision == "fp16", "the whole gradient is known to be finite"),
        "micro_batch=auto": (settings.micro_batch is not None, "all ranks are known to have had the memory"),
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
    if settings.reproducible is not None and settings.micro_batch is not None:
        raise ConfigurationError(
            "With reproducible each virtual shard is a micro-batch, which micro_batch=auto cannot make smaller.\n"
            "Cut the batch into more of them, or leave one of the two out."
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
    memory_checkpoint_every: Annotated[
        int | None,
        Flag("Steps between copies of the state in each host's memory, for ranks that are started again.", "STEPS", 1),
    ] = None
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
            "wandb:[ENTITY/]PROJECT, mlflow:[URI], jsonl:FILE.",
            "SINK,..",
        ),
    ] = None
    log_file: Annotated[
        FilePath | None, Flag("File that gets a line of JSON for each step and evaluation.", "FILE")
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
        check_steps(self.profile_steps)
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
