"""Copies of many tensors on other devices: one transfer a device and dtype."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Broadcast = Callable[[Tensor, Sequence[torch.device]], list[Tensor]]
"""Returns copies of a flat tensor on other devices; see `Transport.broadcast`."""


def coalesced_copies(
    tensors: Sequence[Tensor], devices: Sequence[torch.device], broadcast: Broadcast
) -> list[list[Tensor]]:
    """Copy ``tensors``, which share one device, to each of ``devices``.

    The tensors of a dtype are packed into one flat buffer, which is sent whole. Does not block; CUDA copies are in
    order with the current streams.

    Args:
        tensors: On the first device of who broadcasts.
        devices: Several may be one, also the tensors' own.
        broadcast: Sends a flat buffer to other devices.

    Returns:
        One list a device, in the order of ``devices``; tensors as ``tensors``, with the same shapes and strides. They
        share memory only with the flat buffer that they came in (each has a version counter of its own), do not
        require gradients, and are never written again: a later call makes new ones.
    """
    if tensors and not any(worth_packing(tensors[0].device, device) for device in devices):
        with torch.inference_mode(False), torch.no_grad():
            return [[tensor.clone() for tensor in tensors] for _ in devices]
    copies = [list(tensors) for _ in devices]
    groups: dict[torch.dtype, list[int]] = {}
    with torch.inference_mode(False), torch.no_grad():
        for index, tensor in enumerate(tensors):
            if is_plain(tensor):
                groups.setdefault(tensor.dtype, []).append(index)
            else:
                for copy, device in zip(copies, devices, strict=True):
                    copy[index] = tensor.detach().to(device, copy=True)
        for indices in groups.values():
            parts = [tensors[index] for index in indices]
            packed = torch.cat([flattened(part) for part in parts])
            for copy, flat in zip(copies, _sent(packed, devices, broadcast), strict=True):
                for index, view in zip(indices, unpacked(flat, parts), strict=True):
                    copy[index] = view
    return copies


class FixedMemory:
    """Tensors that stay where they are while their values change."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    @torch.no_grad()
    def renew(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors with these values, at the same place as the last time if they are like those of then."""
        known = self._tensors
        if len(known) != len(values) or not all(map(_is_like, known, values)):
            self._tensors = list(values)
        elif values:
            torch._foreach_copy_(known, list(values))
        return list(self._tensors)


def _is_like(one: Tensor, other: Tensor) -> bool:
    return is_plain(one) and is_plain(other) and one.dtype == other.dtype and one.shape == other.shape


def is_remote(device: torch.device, source: torch.device) -> bool:
    """Whether a replica on ``device`` needs copies of what is on ``source``."""
    return device != source


def worth_packing(source: torch.device, device: torch.device) -> bool:
    """Whether one large copy beats many: on the CPU there is neither a transfer nor a kernel launch to save."""
    return source.type != "cpu" or device.type != "cpu"


def is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` is an ordinary strided tensor or parameter: no sparse or quantized one, no other subclass."""
    kind = type(tensor)
    return (
        (kind is Tensor or issubclass(kind, torch.nn.Parameter))
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def alias(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that is no view in autograd's eyes and may be pointed elsewhere.

    Unlike ``detach()``, the result may be ``set_()`` to other memory, which ``flatten_parameters`` of a recurrent
    layer does; and it has a version counter of its own.
    """
    with torch.inference_mode(False), torch.no_grad():
        if not is_plain(tensor):
            return tensor.detach()
        other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        other.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return other


def _sent(packed: Tensor, devices: Sequence[torch.device], broadcast: Broadcast) -> list[Tensor]:
    """Return one tensor a device, each with memory of its own; the first on the device of ``packed`` is ``packed``."""
    elsewhere = [device for device in dict.fromkeys(devices) if device != packed.device]
    first = {packed.device: packed} | dict(
        zip(elsewhere, broadcast(packed, elsewhere) if elsewhere else (), strict=True)
    )
    given: set[torch.device] = set()
    sent = []
    for device in devices:
        sent.append(first[device].clone() if device in given else first[device])
        given.add(device)
    return sent


def flattened(tensor: Tensor) -> Tensor:
    """Return the elements in the order in which they lie in memory, where they lie without gaps."""
    if not tensor.is_contiguous() and is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def unpacked(flat: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Cut ``flat`` into tensors of the shapes and, for dense ones, the strides of ``parts``."""
    views = []
    offset = 0
    for part in parts:
        size = part.numel()
        if part.is_contiguous() or not is_dense(part):
            view = flat.narrow(0, offset, size).view(part.shape)
        else:
            view = flat.as_strided(part.shape, part.stride(), offset)
        views.append(view.data)  # .data, not detach(): a version counter that the neighbours do not move
        offset += size
    return views


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps and overlaps, in whichever order (channels last, say)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
