"""What happens when a model is wrapped: checks of the arguments, and the broadcast of parameters and buffers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.futures import Future

from lockstep.comm.collectives import Group, RepeatedBroadcast, broadcast_coalesced
from lockstep.errors import ConfigurationError
from lockstep.parallel.consistency import check_models_agree
from lockstep.parallel.ddp.bucket_plan import DEFAULT_CAP_BYTES, FIRST_CAP_BYTES, MIB
from lockstep.parallel.sync_batchnorm import SyncBatchNorm, TorchSyncBatchNorm

# Checks of what ``DistributedDataParallel`` is given, before anything is sent to another rank.


def ignored_names(module: nn.Module) -> set[str]:
    """Return the parameters and buffers that were marked to be left alone."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def check_combination(mixed_precision: object, delayed: object, trigger: object) -> None:
    """Refuse arguments that cannot be had, or not without each other.

    Raises:
        ConfigurationError: ``mixed_precision`` was asked for.
        ValueError: Only one of the two arguments for delayed parameters was given.
    """
    if mixed_precision is not None:
        raise ConfigurationError(
            "mixed_precision is not supported by lockstep.DistributedDataParallel.\n"
            "Run forward under torch.autocast, or fit() with precision='bf16'."
        )
    if (delayed is None) != (trigger is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")


def check_group(process_group: object, device_mesh: object) -> None:
    """Refuse two answers to the question which ranks take part.

    Raises:
        RuntimeError: Both were given.
    """
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")


def check_parameters(parameters: Sequence[nn.Parameter]) -> None:
    """Refuse a module that has nothing to reduce, or parameters that do not exist yet.

    Raises:
        RuntimeError: No parameter requires a gradient, or a lazy module was not run yet.
    """
    if not any(parameter.requires_grad for parameter in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.\n"
            "Unfreeze what is to be trained before wrapping, or use the bare module."
        )
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in parameters):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )


@dataclass(frozen=True)
class Placement:
    """Where a module lies, and where inputs are moved to before ``forward`` (None: they stay where they are)."""

    device_type: str
    is_multi_device: bool
    input_device: torch.device | None
    output_device: int | None


def check_placement(parameters: Sequence[nn.Parameter], device_ids: Any, output_device: Any) -> Placement:
    """Work out where the module lies and check ``device_ids`` against it.

    Raises:
        ValueError: ``device_ids`` holds several devices, or does not fit the module, or the module mixes device types.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {parameter.device for parameter in parameters}
    types = {device.type for device in devices}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, "
            f"but input module parameters locate in {types}."
        )
    device_type = types.pop()
    if (device_ids and (device_type == "cpu" or len(devices) > 1)) or (output_device and not device_ids):
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with single-device/"
            f"multiple-device GPU modules or CPU modules, but got device_ids {device_ids}, output_device "
            f"{output_device}, and module parameters {devices}."
        )
    if not device_ids:
        return Placement(device_type, len(devices) > 1, None, None)
    index = _device_index(device_ids[0])
    output_index = index if output_device is None else _device_index(output_device)
    input_device = torch.device(device_type, index)
    if devices != {input_device}:
        raise ValueError(
            f"The module lies on {devices.pop()}, but device_ids is {list(device_ids)}.\n"
            f"Move the module first: module.to('{input_device}')."
        )
    return Placement(device_type, False, input_device, output_index)


def _device_index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


BucketCap = float | Literal["auto"] | None


def bucket_caps_bytes(
    bucket_cap_mb: BucketCap, bucket_cap_mb_list: Sequence[float] | None, *, can_overlap: bool = True
) -> tuple[int, ...]:
    """Return one cap per bucket, the last for all that follow; for "auto", those to begin with.

    Args:
        bucket_cap_mb: As the user gave it.
        bucket_cap_mb_list: As the user gave it.
        can_overlap: Whether buckets travel while backward goes on at its pace.

    Raises:
        ValueError: Both are given, or a cap is neither positive nor "auto".
    """
    if bucket_cap_mb_list:
        if bucket_cap_mb is not None:
            raise ValueError("bucket_cap_mb and bucket_cap_mb_list cannot both be given.\nUse one of them.")
        caps = list(bucket_cap_mb_list)
    elif isinstance(bucket_cap_mb, str) and bucket_cap_mb != "auto":
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r} is no size.\nGive a number of MiB, or 'auto'.")
    elif bucket_cap_mb is not None and bucket_cap_mb != "auto":
        caps = [bucket_cap_mb]
    elif can_overlap or bucket_cap_mb == "auto":
        return FIRST_CAP_BYTES, DEFAULT_CAP_BYTES
    else:
        return (DEFAULT_CAP_BYTES,)  # an early start gains nothing, and a bucket costs two changes of threads
    if any(cap <= 0 for cap in caps):
        raise ValueError(f"A bucket's size must be positive, but got {caps} (MiB).")
    return tuple(int(cap * MIB) for cap in caps)


@dataclass(frozen=True)
class BufferPolicy:
    """When buffers are broadcast: at construction, and before every ``forward``."""

    at_start: bool
    before_forward: bool


def buffer_policy(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> BufferPolicy:
    """Combine torch's two flags: ``forward_sync_buffers`` (2.13) leaves the broadcast at construction on."""
    if forward_sync_buffers is not None:
        if broadcast_buffers is not None:
            warnings.warn(
                "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated "
                "and its value is ignored when `forward_sync_buffers` is provided.",
                FutureWarning,
                stacklevel=3,
            )
        return BufferPolicy(at_start=True, before_forward=forward_sync_buffers)
    both = broadcast_buffers is None or broadcast_buffers
    return BufferPolicy(at_start=both, before_forward=both)


def check_batch_norms(module: nn.Module, device_type: str) -> None:
    """Raise ValueError if ``module`` has synchronised batch norms that do not run on its device."""
    if device_type == "cpu":
        for name, layer in module.named_modules():
            if isinstance(layer, TorchSyncBatchNorm) and not isinstance(layer, SyncBatchNorm):
                raise ValueError(
                    f"SyncBatchNorm layers only work with GPU modules, and {name} is torch's.\n"
                    "Convert the model: model = lockstep.SyncBatchNorm.convert_sync_batchnorm(model)."
                )


def sparse_parameters(module: nn.Module) -> set[torch.Tensor]:
    """Return the weights of embeddings that produce sparse gradients."""
    return {
        layer.weight for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }


# Keeps parameters (once) and buffers (around ``forward``) equal on all ranks.

BufferHook = Callable[[Any, dict[str, Tensor]], list[Future[Any]] | None]


@dataclass(frozen=True)
class RegisteredBufferHook:
    """A user's own way to synchronise buffers, before or after ``forward``."""

    hook: BufferHook
    state: object
    after_forward: bool


class ModelSync:
    """Compares and broadcasts the state of ``module``, without what is named in ``ignore``."""

    def __init__(self, module: nn.Module, ignore: set[str], group: Group, device: torch.device) -> None:
        self.registered: RegisteredBufferHook | None = None
        self._module = module
        self._ignore = ignore
        self._group = group
        self._device = device
        self._broadcast = RepeatedBroadcast(group)
        # Asked once: walking a large model takes long. A module that assigns a buffer anew changes what its dict holds.
        self._homes = [self._home(name) for name in self.named_buffers()]
        self.has_buffers = bool(self._homes)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, each once."""
        return {name: value for name, value in self._module.named_parameters() if name not in self._ignore}

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the buffers by name. To be asked anew each time, since modules may assign new ones."""
        return {name: value for name, value in self._module.named_buffers() if name not in self._ignore}

    def _home(self, full_name: str) -> tuple[dict[str, Any], str]:
        """Return the dict that holds a buffer, and its name there."""
        module_name, _, name = full_name.rpartition(".")
        return self._module.get_submodule(module_name)._buffers, name

    def check(self, *, with_buffers: bool) -> None:
        """Raise ModelMismatch on every rank if shapes or dtypes differ. Collective: every rank. Blocks."""
        buffers = self.named_buffers().items() if with_buffers else ()
        check_models_agree(self.named_parameters().items(), buffers, group=self._group, device=self._device)

    def broadcast(self, *, src: int, with_buffers: bool) -> None:
        """Overwrite parameters and buffers with those of rank ``src``. Collective: every rank. Blocks."""
        tensors = [value.detach() for value in self.named_parameters().values()]
        if with_buffers:
            tensors += [value.detach() for value in self.named_buffers().values()]
        broadcast_coalesced(tensors, group=self._group, src=src)

    @torch.no_grad()
    def sync_buffers(self, *, after_forward: bool, src: int) -> list[Future[Any]]:
        """Synchronise buffers, if this is the moment for it; return futures to wait for at the end of backward.

        Collective: every rank. Blocks until complete, except for what a registered hook returns as futures.
        """
        if self.registered is None:
            if not after_forward:
                buffers = (home[name] for home, name in self._homes)
                self._broadcast([buffer for buffer in buffers if buffer is not None], src=src)
            return []
        if self.registered.after_forward is not after_forward:
            return []
        return self.registered.hook(self.registered.state, self.named_buffers()) or []
