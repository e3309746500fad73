"""``DataParallel``: one process, one thread and one replica for each device. Design: docs/design/dp.md."""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.nn.utils.rnn import PackedSequence

from lockstep.base import torch_internals
from lockstep.base.accelerator import VISIBLE_DEVICES
from lockstep.base.containers import items_of, with_items
from lockstep.errors import ConfigurationError
from lockstep.parallel.dp.replicas import Replicas, check_devices
from lockstep.parallel.dp.threads import CallerModes, LossFunction, ReplicaEngine, Scale, as_listed, differentiate
from lockstep.parallel.module_io import Wrapper

Wrapped = TypeVar("Wrapped", bound=nn.Module)

# The index of a GPU (-1 is the CPU, as in torch), a name such as "cpu" or "cuda:1", or a ``torch.device``. A GPU is a
# device of the accelerator that torch finds, CUDA's or another.
Device = int | str | torch.device
Devices = Sequence[Device]

# Held while a wrapper looks up or creates its engine, so that two threads do not create two.
_ENGINES = Lock()


class DataParallel(Wrapper, Generic[Wrapped]):
    """Run a module on several devices at once, each with a part of the batch; drop-in for ``torch.nn.DataParallel``.

    Unlike torch's class, it runs on the CPU (``device_ids=["cpu", "cpu"]`` is two replicas in two threads) and with one
    GPU named twice, its replicas persist, and a training loop can compute the loss in them (``backward``).

    On the CPU every replica computes with ``torch.get_num_threads() // len(device_ids)`` cores. Replicas on one device
    share its random generator, so the elements that dropout drops there depend on the order of the threads.

    As with torch's class: with one device the module is moved there and called directly, without devices it is called
    directly. An attribute that a forward sets is lost, and writes into a buffer persist only in the first replica.
    Several forwards before one backward, calls from several threads, ``copy.deepcopy`` and ``pickle`` work.

    Args:
        module: The module; before a call its parameters and buffers must be on the first device.
        device_ids: GPUs by index, name or ``torch.device``, or the CPU, once for each replica. Default: all GPUs; no
            devices if there are no GPUs.
        output_device: Where outputs are gathered; -1 or "cpu" is the CPU. Default: the first device.
        dim: The dimension along which tensors are split and outputs joined.

    Attributes:
        module: The wrapped module.
        device_ids: As given, GPUs as their indices; empty if the module is called directly.
        output_device: As given, a GPU as its index; None without devices.
        dim: As given.
        src_device_obj: The first device, where the module must be; None without devices.
        overhead_s: The time of the last ``backward`` outside of the replicas: updating them and summing the gradients.
            Measured by the host's clock.

    Raises:
        ConfigurationError: A device does not exist, or types of devices are mixed.
    """

    def __init__(
        self, module: Wrapped, device_ids: Devices | None = None, output_device: Device | None = None, dim: int = 0
    ) -> None:
        super().__init__()
        devices = _choose_devices(device_ids)
        self.module = module
        self.dim = dim
        self.device_ids = [as_listed(device) for device in devices]
        self.output_device: int | torch.device | None = None
        if devices:
            place = devices[0] if output_device is None else output_device
            self.output_device = as_listed(torch.device("cpu") if place == -1 else _existing(place, "output_device"))
        self.src_device_obj = devices[0] if devices else None
        self.overhead_s = 0.0
        self._engine: ReplicaEngine | None = None
        if len(devices) == 1:
            self.module.to(devices[0])

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of the replicas; empty if the module is called directly."""
        return tuple(as_device(device) for device in self.device_ids)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Split the arguments, call the replicas, and return their outputs joined on ``output_device``.

        Backward sums the gradients of all replicas into the parameters of ``module``.

        Raises:
            BaseException: The error of the lowest failing replica; the text contains the replica, its device and its
                traceback. It has the same type if that can be created from a text, else ``RuntimeError``, as in torch.
            ConfigurationError: The module is not on the first device; or arguments or outputs do not fit together.
        """
        with record_function("DataParallel.forward"):
            # Transforms of torch.func belong to this thread, and to the module's own parameters.
            is_transformed = torch_internals.interpreter_stack() is not None
            if self.src_device_obj is None or self.output_device is None or is_transformed:
                return self.module(*inputs, **kwargs)
            # With several devices, the replicas check it when they are updated.
            if len(self.device_ids) == 1:
                check_devices([*self.module.parameters(), *self.module.buffers()], self.src_device_obj)
            parts, keyword_parts = self.scatter(inputs, kwargs, self.device_ids)
            if not parts and not keyword_parts:  # a call without arguments runs once
                parts, keyword_parts = ((),), ({},)
            # Scatter anyway, so that inputs are moved to the device and errors are the same.
            if len(self.device_ids) == 1:
                return self.module(*parts[0], **keyword_parts[0])
            # One turn for both: otherwise another thread could update the same replicas in between.
            with self._current_engine().turn():
                replicas = self.replicate(self.module, self.device_ids[: len(parts)])
                outputs = self.parallel_apply(replicas, parts, keyword_parts)
            return self.gather(outputs, self.output_device)

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Devices) -> Any:
        """Split the arguments: a sequence of positional and one of keyword arguments, with one item per replica."""
        return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    def replicate(self, module: nn.Module, device_ids: Devices) -> list[nn.Module]:
        """Return updated replicas of ``module``; for the wrapped module they are always the same objects."""
        engine = self._current_engine()
        replicas = engine.replicas
        # A user's subclass may replicate another module, or to other devices.
        if module is not self.module or list(device_ids) != self.device_ids[: len(device_ids)]:
            replicas = Replicas(module, [as_device(device) for device in device_ids])
        with engine.turn():
            return replicas.refresh(len(device_ids), leaves=False)

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Call each of ``replicas`` in its thread and return the outputs in order."""
        engine = self._current_engine()
        with engine.turn():
            return engine.apply(replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: Device) -> Any:
        """Join the outputs of the replicas on ``output_device``."""
        return gather(outputs, output_device, self.dim)

    def backward(self, loss: LossFunction, shards: Sequence[Any], scales: Sequence[Scale]) -> list[Tensor]:
        """Compute ``loss(replica, shard)`` for every shard and add the gradients of ``scale * loss`` to the module's.

        Shard i belongs to replica i: the replica's thread computes and differentiates its loss, on its device. All
        replicas run at the same time, no output is copied, and the first device does no extra work. The gradients are
        summed in a fixed order into the ``grad`` of the module's parameters; a parameter that no replica used keeps its
        ``grad``. The calling thread's autocast applies to the loss; gradients are enabled in any case. Without devices,
        or with one, the module itself computes in the calling thread.

        Args:
            loss: Returns a tensor of one element. It must not change state that the threads share.
            shards: At most one per device, on that device (nothing is moved); None is skipped.
            scales: One per shard: its share of the whole loss, times the scale of a gradient scaler if there is one.

        Returns:
            The losses, detached and not scaled, of the shards that are not None, each on its device.

        Raises:
            BaseException: The error of the lowest failing replica, as in ``forward``; no gradient has changed then.
            ConfigurationError: The shards do not fit the devices or the scales, or as in ``forward``.
        """
        room = max(1, len(self.device_ids))
        if len(shards) > room or len(shards) != len(scales):
            raise ConfigurationError(
                f"DataParallel.backward got {len(shards)} shards and {len(scales)} scales for {room} devices.\n"
                "Give at most one shard a device, and one scale for each shard."
            )
        if len(self.device_ids) > 1:
            engine = self._current_engine()
            with engine.turn():
                losses, refresh_s = engine.differentiate(loss, shards, scales)
                start = time.perf_counter()
                # Without a shard, no replicas were updated.
                if losses:
                    engine.replicas.reduce_gradients()
                self.overhead_s = refresh_s + time.perf_counter() - start
            return list(losses.values())
        modes = CallerModes(self.src_device_obj or torch.device("cpu"), differentiates=True)
        present = [pair for pair in zip(shards, scales, strict=True) if pair[0] is not None]
        return [differentiate(loss, self.module, shard, scale, modes) for shard, scale in present]

    def __getstate__(self) -> dict[str, Any]:
        # Threads cannot be copied. A copied or unpickled object creates its own engine at its first call.
        return {**vars(self), "_engine": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A pickle from before adopt() holds an object of torch's class, which on the CPU lacks most attributes.
        absent = {"output_device": None, "dim": 0, "src_device_obj": None, "overhead_s": 0.0, "_engine": None}
        super().__setstate__(absent | state)  # type: ignore[no-untyped-call]

    def _current_engine(self) -> ReplicaEngine:
        """Return the engine of the current module. A replica of this wrapper has another module, and its own engine."""
        with _ENGINES:
            if self._engine is None or self._engine.replicas.module is not self.module:
                self._engine = ReplicaEngine(self.module, self.devices)
            return self._engine


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Devices | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call ``module`` once on several devices; drop-in for ``torch.nn.parallel.data_parallel``.

    Starts and ends threads in each call; for more than one call wrap the module in ``DataParallel``.

    Args:
        module: On the first device.
        inputs: The tuple of positional arguments, or a single one; None: no arguments.
        device_ids: As in ``DataParallel``.
        output_device: As in ``DataParallel``.
        dim: As in ``DataParallel``.
        module_kwargs: Keyword arguments.
    """
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    return DataParallel(module, device_ids, output_device, dim)(*inputs, **(module_kwargs or {}))


def _choose_devices(device_ids: Devices | None) -> list[torch.device]:
    """Return the devices to replicate to: the given ones, else all GPUs; an empty list if there are no GPUs.

    As with torch's class, GPUs given on a machine without GPUs result in no devices: the module is called directly.

    Raises:
        ConfigurationError: Devices of several types, neither CPUs nor GPUs, or that do not exist.
    """
    gpu, num_gpus = _gpus()
    named: list[Device] = list(range(num_gpus)) if device_ids is None else list(device_ids)
    types = {gpu if isinstance(device, int) else torch.device(device).type for device in named}
    if not named or (types == {gpu} and num_gpus == 0):
        return []
    if len(types) > 1 or not types <= {"cpu", gpu}:
        raise ConfigurationError(
            f"DataParallel cannot use the devices {sorted(types)} together.\n"
            'Name devices of one type in device_ids: GPUs, as in [0, 1], or the CPU, as in ["cpu", "cpu"].'
        )
    return [_existing(device, "device_ids") for device in named]


def _existing(device: Device, argument: str) -> torch.device:
    """Return ``device``. Raises ``ConfigurationError`` if it is a GPU that this process does not have."""
    index = device if isinstance(device, int) else torch.device(device).index
    gpu, num_gpus = _gpus()
    is_gpu = isinstance(device, int) or torch.device(device).type == gpu
    if is_gpu and index is not None and not 0 <= index < num_gpus:
        variable = VISIBLE_DEVICES.get(gpu)
        raise ConfigurationError(
            f"{argument} names GPU {index}, but this process sees {num_gpus} (numbered from 0).\n"
            f"Name fewer devices, or make more visible{f' with {variable}' if variable else ''}."
        )
    return as_device(device)


def _gpus() -> tuple[str, int]:
    """Return the device type that an index refers to (CUDA if there is no accelerator), and the number of devices."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cuda", 0) if accelerator is None else (accelerator.type, torch.accelerator.device_count())


# --- inputs are split, outputs joined ---------------------------------------------------------------------------------


def as_device(device: Device) -> torch.device:
    """Return ``device`` as a ``torch.device``; a GPU without an index is the current one."""
    if isinstance(device, int):
        return torch.device("cpu") if device == -1 else torch.device(_gpus()[0], device)
    named = torch.device(device)
    if named.type == "cpu":
        return torch.device("cpu")
    return named if named.index is not None else torch.device(named.type, torch.accelerator.current_device_index())


def scatter(inputs: Any, devices: Devices, dim: int = 0) -> Sequence[Any]:
    """Split ``inputs`` over ``devices``: one item per chunk, at most one per device.

    Tensors of at least one dimension are split along ``dim`` as by ``torch.chunk`` and copied to their devices; others
    are copied whole. Tuples, lists, mappings, dataclasses and what is derived from them are rebuilt with the parts of
    their contents (a dataclass without tensors is shared). Without any tensor there is one item per device.

    Raises:
        ConfigurationError: The tensors give different numbers of chunks, or one is a ``PackedSequence``.
    """
    places = [as_device(device) for device in devices]
    # Of all arguments together: keyword arguments must not give more parts than positional ones.
    tensors = [tensor for tensor in _tensors_in(inputs) if tensor.dim() > 0]
    counts = [len(tensor.chunk(len(places), dim)) for tensor in tensors] or [len(places)]
    # torch would use the smallest number for all, and silently skip the samples of the remaining chunks.
    if min(counts) < max(counts):
        fewest, most = tensors[counts.index(min(counts))], tensors[counts.index(max(counts))]
        raise ConfigurationError(
            f"Cannot split the inputs along dimension {dim} over {len(places)} devices: one tensor has "
            f"{fewest.size(dim)} entries there {tuple(fewest.shape)}, another has {most.size(dim)} "
            f"{tuple(most.shape)}.\n"
            "Give every tensor one entry for each sample. A tensor that all replicas need whole can be a buffer of the "
            "module, or be expanded along that dimension."
        )
    return _split(inputs, places[: counts[0]], len(places), dim)


def scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, devices: Devices, dim: int = 0
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Split positional and keyword arguments: one tuple and one dict per replica, none without arguments.

    Raises:
        ConfigurationError: As in ``scatter``.
    """
    if not inputs and not kwargs:
        return (), ()
    parts = scatter((inputs, kwargs or {}), devices, dim)
    return tuple(part[0] for part in parts), tuple(part[1] for part in parts)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for item in _contents(value) or ():
        yield from _tensors_in(item)


def _contents(value: Any) -> list[Any] | None:
    """Return the contents of a container that can be split and joined; None if ``value`` is none."""
    if isinstance(value, PackedSequence):
        raise ConfigurationError(
            "A PackedSequence cannot be split along the batch.\n"
            "Pass the padded tensor and the lengths to the module, and call pack_padded_sequence in its forward."
        )
    return None if isinstance(value, set | frozenset) else items_of(value)


def _split(value: Any, devices: Sequence[torch.device], num_devices: int, dim: int) -> Sequence[Any]:
    """Return one part of ``value`` for each of ``devices``, the first of ``num_devices``."""
    if isinstance(value, Tensor):
        chunks = value.chunk(num_devices, dim) if value.dim() > 0 else [value] * len(devices)
        return tuple(_on_device(chunk, device) for chunk, device in zip(chunks, devices, strict=True))
    # A dataclass without tensors is shared, not copied: it may be a configuration, or hold objects without a copy.
    contents = _contents(value)
    is_dataclass = not isinstance(value, (tuple, list, Mapping))
    if not contents or (is_dataclass and next(_tensors_in(contents), None) is None):
        return [value for _ in devices]
    parts = zip(*(_split(item, devices, num_devices, dim) for item in contents), strict=True)
    return [with_items(value, part) for part in parts]


def gather(outputs: Sequence[Any], target_device: Device, dim: int = 0) -> Any:
    """Join the replicas' outputs on ``target_device``; differentiable.

    Tensors are concatenated along ``dim``; tensors without a dimension are joined to a vector (with a warning, since it
    has one entry per replica, not per sample). Tuples, lists, mappings and dataclasses are joined item by item; None
    stays None.

    Args:
        outputs: One per replica, all with the same structure.
        target_device: -1 is the CPU.
        dim: The dimension along which the inputs were scattered.

    Raises:
        ConfigurationError: The outputs differ in more than their sizes along ``dim``, or hold something that cannot be
            joined.
    """
    first, device = outputs[0], as_device(target_device)
    kind = type(first).__name__
    for replica, output in enumerate(outputs):
        if isinstance(first, Tensor) != isinstance(output, Tensor) or (first is None) != (output is None):
            raise ConfigurationError(
                f"The replicas returned different outputs: replica 0 a {kind}, replica {replica} a "
                f"{type(output).__name__}.\nReturn the same structure for every part of a batch."
            )
    if isinstance(first, Tensor):
        return _concatenate(outputs, device, dim)
    if first is None:
        return None
    contents = [_contents(output) for output in outputs]
    if contents[0] is None:
        raise ConfigurationError(
            f"DataParallel cannot gather an output of type {kind}.\n"
            "Return tensors, None, or tuples, lists, dicts and dataclasses of them."
        )
    if isinstance(first, Mapping):
        if any(output.keys() != first.keys() for output in outputs):
            keys = ", ".join(str(list(output)) for output in outputs)
            raise ConfigurationError(f"All dicts must have the same keys, but the replicas returned {keys}")
        contents = [[output[key] for key in first] for output in outputs]  # in the order of the first
    lengths = [len(content or ()) for content in contents]
    if len(set(lengths)) > 1:
        raise ConfigurationError(f"The replicas returned {kind}s of different lengths: {lengths}")
    return with_items(first, [gather(items, device, dim) for items in zip(*contents, strict=True)])


def _concatenate(tensors: Sequence[Tensor], device: torch.device, dim: int) -> Tensor:
    if dim == 0 and all(tensor.dim() == 0 for tensor in tensors):
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze and "
            "return a vector.",
            stacklevel=2,
        )
        tensors = [tensor.unsqueeze(0) for tensor in tensors]
    expected = list(tensors[0].shape)
    for replica, tensor in enumerate(tensors):
        shape = list(tensor.shape)
        if len(shape) == len(expected) > 0:
            expected[dim] = shape[dim]  # the shapes may differ in this dimension only
        if shape != expected or not shape:
            raise ConfigurationError(
                f"Gather got an input of invalid size: got {shape}, but expected {expected} (replica {replica})"
            )
    parts = [_on_device(tensor, device) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    # A copy to the CPU must be complete when this returns: code on the CPU does not wait for a stream.
    return tensor.to(device, non_blocking=device.type != "cpu")
