"""Replaces the batch norms of a model by another class of them."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from lockstep.comm.collectives import Group
from lockstep.errors import ConfigurationError

_Layer = TypeVar("_Layer", bound=nn.SyncBatchNorm)

_PLAIN_FORWARDS = {_BatchNorm.forward, nn.SyncBatchNorm.forward}


def convert(module: nn.Module, to: type[_Layer], process_group: Group | None) -> nn.Module:
    """Return ``module`` with every batch norm in it replaced by one of class ``to`` with the same tensors.

    Args:
        module: A model, which is changed, or a batch norm, in whose place a new layer is returned.
        to: The class.
        process_group: The ranks that take part; None: as the layer says if it is synchronised already, else all.

    Raises:
        ConfigurationError: A lazy layer has not seen its first batch.
    """
    return _convert(module, to, process_group, "", {})


def _convert(
    module: nn.Module, to: type[_Layer], group: Group | None, name: str, done: dict[nn.Module, nn.Module]
) -> nn.Module:
    if module in done:  # a layer that the model holds twice stays one layer
        return done[module]
    done[module] = module
    if isinstance(module, _BatchNorm):
        done[module] = _layer_like(module, to, group, name or "the layer")
        done[done[module]] = done[module]
    for child_name, child in module._modules.items():
        if child is not None:
            done[module]._modules[child_name] = _convert(child, to, group, f"{name}.{child_name}".lstrip("."), done)
    return done[module]


def _layer_like(old: _BatchNorm, to: type[_Layer], group: Group | None, name: str) -> _Layer:
    if isinstance(old, _LazyNormBase) and old.has_uninitialized_params():
        raise ConfigurationError(
            f"{name} is a {type(old).__name__} that has not seen a batch, so its number of channels is not known yet.\n"
            "Run one batch through the model before converting it."
        )
    if type(old).forward not in _PLAIN_FORWARDS and not isinstance(old, to):
        warnings.warn(
            f"{name} is a {type(old).__name__} with a forward of its own, which the layer in its place does not have.",
            stacklevel=4,
        )
    layer = to(
        old.num_features,
        old.eps,
        old.momentum,
        old.affine,
        old.track_running_stats,
        getattr(old, "process_group", None) if group is None else group,
    )
    if old.affine:
        layer.weight, layer.bias = old.weight, old.bias
    layer.running_mean, layer.running_var = old.running_mean, old.running_var
    layer.num_batches_tracked = old.num_batches_tracked
    layer.training = old.training
    _copy_qconfig(old, layer)
    return layer


def _copy_qconfig(old: nn.Module, new: nn.Module) -> None:
    qconfig: Any = old.__dict__.get("qconfig")
    if qconfig is not None:
        new.qconfig = qconfig
