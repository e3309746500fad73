"""What settings ask of the engine, and how its gradients become an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.errors import ConfigurationError
from lockstep.train.gradients import BucketGradients, Gradients, ParameterGradients
from lockstep.train.precision import GradScaler
from lockstep.train.schedule import LearningRate
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.update import Updater

_OURS = ("ddp",)


def check_engine(name: StrategyName, settings: Settings) -> None:
    """Refuse what only our DistributedDataParallel does with another strategy.

    Raises:
        ConfigurationError: Names the setting.
    """
    given = {
        "wire": settings.wire is not None,
        "bucket_cap_mb": settings.bucket_cap_mb is not None,
        "overlap_optimizer": settings.overlap_optimizer,
    }
    for setting, is_given in given.items():
        if is_given and name not in _OURS:
            raise ConfigurationError(
                f"{setting} is for strategy {' or '.join(_OURS)}, but the strategy is {name}.\nLeave {setting} out."
            )
    if settings.micro_batch is not None and name == "fsdp":
        raise ConfigurationError(
            "micro_batch=auto cannot be had with fsdp, whose ranks exchange parameters in each layer, in forward and "
            "in backward: one that runs out of memory on the way would keep the others waiting.\n"
            "Set accumulate by hand, or use strategy ddp-zero1."
        )


def our_wrapper(settings: Settings) -> Callable[..., nn.Module]:
    """Return what wraps a model as ``settings`` say."""
    from lockstep.parallel.distributed import DistributedDataParallel

    return partial(DistributedDataParallel, wire_dtype=settings.wire, bucket_cap_mb=settings.bucket_cap_mb)


def gradients_of(module: nn.Module) -> Gradients:
    """Return the gradients that a wrapper, ours or torch's, leaves alike on every rank."""
    from lockstep.parallel.distributed import DistributedDataParallel

    return BucketGradients(module) if isinstance(module, DistributedDataParallel) else ParameterGradients(module)


def is_ours(module: nn.Module) -> bool:
    """Return whether a wrapper is our `DistributedDataParallel`, and not torch's."""
    from lockstep.parallel.distributed import DistributedDataParallel

    return isinstance(module, DistributedDataParallel)


def watch_part(module: nn.Module) -> Callable[[], bool]:
    """Return what tells whether this rank's part of the last gradient was not finite, if the wrapper is ours."""
    from lockstep.parallel.distributed import DistributedDataParallel

    return module.watch_part() if isinstance(module, DistributedDataParallel) else nobody_knows


def nobody_knows() -> bool:
    """Return that nothing is known of a rank's part of the gradient."""
    return False


def make_updater(
    model: nn.Module, optimizer: Optimizer, learning_rate: LearningRate, settings: Settings, gradients: Gradients
) -> Updater:
    """Return what ends a step, and let the optimizer step within backward if ``settings`` say so.

    Raises:
        ConfigurationError: That optimizer cannot.
    """
    if settings.overlap_optimizer:
        assert isinstance(gradients, BucketGradients), "checked when the strategy was made"
        gradients.model.overlap_optimizer(optimizer)
    return Updater(
        model,
        optimizer,
        learning_rate,
        clip=settings.clip,
        scaler=GradScaler() if settings.precision == "fp16" else None,
        gradients=gradients,
        in_backward=settings.overlap_optimizer,
        looks_later=settings.on_nan == "raise" and next(model.parameters()).device.type == "cuda",
    )


def remarks_of(gradients: Gradients | None) -> list[str]:
    """Return what the engine has found out since it was asked last."""
    return gradients.model.take_remarks() if isinstance(gradients, BucketGradients) else []


def leave_alone(model: nn.Module) -> None:
    """Keep synchronised layers from waiting for ranks that do not train the model; there may be a group of them."""
    from lockstep.parallel.batchnorm.layer import SyncBatchNorm

    for layer in model.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.alone = True


def torch_data_parallel(model: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """Return torch's DataParallel around ``model``.

    Raises:
        ConfigurationError: A device is no GPU.
    """
    if any(device.type != "cuda" for device in devices):
        raise ConfigurationError(
            "Strategy torch-dp needs CUDA devices: torch.nn.DataParallel does nothing on CPUs.\n"
            "Use strategy dp, which runs on CPUs too."
        )
    return nn.DataParallel(model, device_ids=[device.index for device in devices])
