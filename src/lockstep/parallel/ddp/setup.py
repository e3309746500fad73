"""Wrapping a model: checks of the arguments, and the broadcast of parameters and buffers."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base.torch_internals import DDP_IGNORED, own_buffers
from lockstep.comm.collectives import Group, RepeatedBroadcast, backend_name, broadcast_coalesced, sums_sparse_tensors
from lockstep.errors import ConfigurationError
from lockstep.parallel.consistency import check_models_agree
from lockstep.parallel.ddp.buckets import DEFAULT_CAP_BYTES, FIRST_CAP_BYTES, MIB
from lockstep.parallel.module_io import Registered
from lockstep.parallel.sync_batchnorm import SyncBatchNorm, TorchSyncBatchNorm

# --- checks of the arguments, before anything is sent to another rank -------------------------------------------------


def refuse_unsupported(mixed_precision: object, delayed: object, trigger: object) -> None:
    """Raise ConfigurationError if the caller uses a feature that torch's class has and ours does not."""
    if mixed_precision is not None:
        arguments = "mixed_precision is"
        advice = "Run forward under torch.autocast, or fit() with precision='bf16'"
    elif delayed is not None or trigger is not None:
        arguments = "delay_all_reduce_named_params and param_to_hook_all_reduce are"
        advice = "Leave both out: these gradients are then reduced with the others"
    else:
        return
    raise ConfigurationError(f"{arguments} not supported by lockstep.DistributedDataParallel.\n{advice}.")


def check_parameters(parameters: Sequence[nn.Parameter]) -> None:
    """Refuse a module without trainable parameters, or with uninitialized ones.

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


def check_placement(
    devices: Collection[torch.device], device_ids: Any, output_device: Any
) -> tuple[torch.device | None, int | None]:
    """Check ``device_ids`` against the devices that a module lies on.

    Returns:
        Where inputs are moved to before ``forward`` (None: they stay where they are), and torch's ``output_device``.

    Raises:
        ValueError: ``device_ids`` holds several devices, or does not fit the module, or the module mixes device types.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    types = {device.type for device in devices}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, "
            f"but input module parameters locate in {types}."
        )
    (device_type,) = types
    if (device_ids and (device_type == "cpu" or len(devices) > 1)) or (output_device and not device_ids):
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with single-device/"
            f"multiple-device GPU modules or CPU modules, but got device_ids {device_ids}, output_device "
            f"{output_device}, and module parameters {set(devices)}."
        )
    if not device_ids:
        return None, None
    index = _device_index(device_ids[0])
    input_device = torch.device(device_type, index)
    if set(devices) != {input_device}:
        raise ValueError(
            f"The module lies on {next(iter(devices))}, but device_ids is {list(device_ids)}.\n"
            f"Move the module first: module.to('{input_device}')."
        )
    return input_device, index if output_device is None else _device_index(output_device)


def _device_index(device: Any) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def bucket_caps_bytes(
    bucket_cap_mb: float | None,
    bucket_cap_mb_list: Sequence[float] | None,
    *,
    can_overlap: bool,
    is_compressed: bool,
    num_devices: int = 1,
) -> tuple[int, ...]:
    """Return one cap per bucket, the last for all that follow.

    Args:
        bucket_cap_mb: As the user gave it.
        bucket_cap_mb_list: As the user gave it.
        can_overlap: Whether buckets are reduced while backward goes on at full speed.
        is_compressed: Whether gradients are compressed.
        num_devices: The number of ranks, if each has an accelerator.

    Raises:
        ValueError: Both are given, or a cap is not positive.
    """
    if bucket_cap_mb_list and bucket_cap_mb is not None:
        raise ValueError("bucket_cap_mb and bucket_cap_mb_list cannot both be given.\nUse one of them.")
    caps = list(bucket_cap_mb_list or []) if bucket_cap_mb is None else [bucket_cap_mb]
    if not caps:
        # Without overlap an early start gains nothing, and each bucket costs two thread switches.
        if not can_overlap:
            return (DEFAULT_CAP_BYTES,)
        # On a slow network the exchange should start early in backward, and its rounds overlap: at 100 Mbit/s that
        # reduces a step from 1.4 s to 1.1 s.
        if is_compressed:
            return (FIRST_CAP_BYTES, 8 * MIB)
        # A ring passes each bucket on 2(n - 1) times. A bucket that grows with n keeps that latency, of 5 to 10 us, a
        # tenth of its time at 50 GB/s. Source: the rule of Megatron-LM, 1M parameters for each rank.
        return (FIRST_CAP_BYTES, max(DEFAULT_CAP_BYTES, 4 * MIB * num_devices * (num_devices > 8)))
    for cap in caps:
        if not isinstance(cap, int | float) or cap <= 0:
            raise ValueError(f"A bucket's size must be a positive number of MiB, but got {cap!r}.")
    return tuple(int(cap * MIB) for cap in caps)


def buffer_policy(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Combine torch's two flags, and warn of the older one as torch 2.13 does.

    Returns:
        Whether buffers are broadcast at construction, and whether before every ``forward``.
    """
    text = ""
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        text = (
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated "
            "and its value is ignored when `forward_sync_buffers` is provided."
        )
    elif broadcast_buffers is not None:
        text = (
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. IMPORTANT: unlike "
            "`broadcast_buffers=False`, `forward_sync_buffers=False` still syncs buffers at init."
        )
    if text:
        warnings.warn(text, FutureWarning, stacklevel=3)  # points to the code that wraps a model
    if forward_sync_buffers is not None:
        return True, forward_sync_buffers
    return (True, True) if broadcast_buffers is None else (broadcast_buffers, broadcast_buffers)


def check_batch_norms(module: nn.Module, device_type: str) -> None:
    """Raise ValueError if ``module`` has synchronised batch norms that do not run on its device."""
    if device_type == "cpu":
        for name, layer in module.named_modules():
            if isinstance(layer, TorchSyncBatchNorm) and not isinstance(layer, SyncBatchNorm):
                raise ValueError(
                    f"SyncBatchNorm layers only work with GPU modules, and {name} is torch's.\n"
                    "Convert the model: model = lockstep.SyncBatchNorm.convert_sync_batchnorm(model)."
                )


def sparse_parameters(module: nn.Module, group: Group, device: torch.device) -> set[torch.Tensor]:
    """Return the weights of embeddings that produce sparse gradients.

    Raises:
        ConfigurationError: Some are trained, and ``group`` cannot sum them on ``device``.
    """
    sparse: set[torch.Tensor] = set()
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            if layer.weight.requires_grad and not sums_sparse_tensors(group, device):
                backend = backend_name(group)
                raise ConfigurationError(
                    f"{name} is an embedding with sparse=True, but {backend} cannot sum sparse gradients.\n"
                    "Build it with sparse=False, or give the model a process_group with the backend gloo."
                )
            sparse.add(layer.weight)
    return sparse


# --- the same model on every rank -------------------------------------------------------------------------------------


# What this rank waits in, and the advice if it waits for ever.
_SYNC = "broadcast (of the buffers, which begins a forward: for a forward on one rank, call model.module)"

_CHANGED = (
    "Buffers have changed since the model was wrapped; all ranks must change them alike, before the same forward. If "
    "one depends on the rank's data, make it a plain attribute, or set "
    f"model.{DDP_IGNORED} = [NAME] before you wrap the model."
)

_nbytes_of = attrgetter("nbytes")


def _layout_of(buffers: Mapping[str, Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, buffer.dtype, buffer.shape) for name, buffer in buffers.items()]


def _memory_of(buffer: Tensor) -> Tensor:
    """Return a buffer in which each element is stored once: ``buffer``, or that under an expanded one."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
    return buffer if buffer.numel() <= extent else buffer.as_strided((extent,), (1,))


def _refuse_sparse(buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        if buffer.layout is not torch.strided:
            raise ConfigurationError(
                f"Buffer {name} is sparse ({buffer.layout}), and cannot be broadcast from rank 0.\n"
                "Register its indices and values as buffers, and build the sparse tensor in forward. Or, if all ranks "
                f"have the same, set model.{DDP_IGNORED} = ['{name}'] before you wrap the model."
            )


def _refuse_views(parameters: Mapping[str, Tensor]) -> None:
    for name, value in parameters.items():
        strides = value.stride() if value.layout is torch.strided else value.shape
        is_expanded = any(size > 1 and stride == 0 for size, stride in zip(value.shape, strides, strict=True))
        if is_expanded or value.is_conj() or value.is_neg():
            problem = "expanded, so that elements share memory" if is_expanded else "a view by conj()"
            raise ConfigurationError(
                f"Parameter {name} is {problem}; it cannot be broadcast from rank 0.\n"
                "Create it from a copy: nn.Parameter(tensor.resolve_conj().resolve_neg().contiguous())."
            )


class ModelSync:
    """Compares and broadcasts the state of ``module``, except for the names in ``ignore``."""

    def __init__(self, module: nn.Module, ignore: set[str], group: Group, device: torch.device) -> None:
        self._module, self._ignore, self._group, self._device = module, ignore, group, device
        self._registered = Registered(module, own_buffers)
        self._buffers: list[Tensor] = []
        self._sizes_bytes: list[int] | None = None
        # What the ranks have when they wrap their modules is compared at once, and later again after each change.
        self._layout, self._is_agreed = _layout_of(self.named_buffers()), True

    def named_parameters(self, *, all_names: bool = False) -> dict[str, nn.Parameter]:
        """Return the parameters by name, each once, unless ``all_names``."""
        named = self._module.named_parameters(remove_duplicate=not all_names)
        return {name: value for name, value in named if name not in self._ignore}

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the buffers by name. Call it again each time, since modules may assign new ones."""
        return {name: value for name, value in self._module.named_buffers() if name not in self._ignore}

    def check(self, *, with_buffers: bool) -> None:
        """Raise ModelMismatch on every rank if names, shapes or dtypes differ. Collective: every rank. Blocks.

        Raises:
            ConfigurationError: Instead, if a buffer is sparse, or a parameter is a view that cannot be written to.
        """
        parameters = self.named_parameters(all_names=True)
        buffers = self.named_buffers() if with_buffers else {}
        check_models_agree(parameters.items(), buffers.items(), group=self._group, device=self._device)
        _refuse_views(parameters)
        _refuse_sparse(buffers)

    def broadcast(self, *, src: int, with_buffers: bool) -> None:
        """Overwrite parameters and buffers with those of rank ``src``. Collective: every rank. Blocks."""
        tensors = [value.detach() for value in self.named_parameters().values()]
        if with_buffers:
            tensors += [_memory_of(value.detach()) for value in self.named_buffers().values()]
        broadcast_coalesced(tensors, group=self._group, src=src)

    def find_buffers(self) -> bool:
        """Look up the buffers, which may come and go; return whether there are any. Quick if they are as before."""
        if self._registered.have_changed() or list(map(_nbytes_of, self._buffers)) != self._sizes_bytes:
            self._registered.note()
            named = self.named_buffers()
            _refuse_sparse(named)
            self._buffers, layout = list(named.values()), _layout_of(named)
            self._sizes_bytes = list(map(_nbytes_of, self._buffers))
            self._memory, self._broadcast = list(map(_memory_of, self._buffers)), RepeatedBroadcast(self._group, _SYNC)
            self._is_agreed, self._layout = self._is_agreed and layout == self._layout, layout
        return bool(self._buffers)

    @torch.inference_mode()  # in which also buffers that were made in this mode may be written to
    def sync_buffers(self, *, src: int) -> None:
        """Overwrite the buffers that `find_buffers` has found with those of rank ``src``.

        Collective: every rank. Blocks until complete.
        """
        if not self._is_agreed:
            named, group = self.named_buffers().items(), self._group
            check_models_agree((), named, group=group, device=self._device, advice=_CHANGED)
            self._is_agreed = True
        self._broadcast(self._memory, src=src)
