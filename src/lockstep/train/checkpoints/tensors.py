"""Tensors as the bytes of a safetensors file, without a second copy in memory; and a copy on the host to write from.

Written here rather than by the safetensors package, which returns a file as one object of bytes: a large state would
be in memory once more, and could not be copied into memory that is kept from save to save. It is read by that package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Pieces = Iterable[bytes | memoryview]
"""The content of a file, in order."""

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""What can be written, and safetensors' name for it."""


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in a file.

    Attributes:
        header: What comes before them.
        order: Their names, as they follow each other: wide dtypes first, so that each lies at a multiple of its width.
        starts: Of each, from the end of the header.
        num_bytes: Of all, without the header.
    """

    header: bytes
    order: tuple[str, ...]
    starts: tuple[int, ...]
    num_bytes: int


def lay_out(tensors: Mapping[str, Tensor]) -> Layout:
    """Return how ``tensors`` lie in a file."""
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    starts, entries, end = [], {}, 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        starts.append(start)
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Layout(len(text).to_bytes(8, "little") + text, tuple(order), tuple(starts), end)


def pieces_of(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a file's content: each tensor from where it lies, if that is on the host in one piece."""
    layout = lay_out(tensors)
    yield layout.header
    for name in layout.order:
        if tensors[name].numel():
            yield _bytes_of(tensors[name].cpu().contiguous().reshape(-1).view(torch.uint8))


class HostCopy:
    """Memory on the host that takes a copy of tensors; the same memory again as long as they are of the same shapes."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._views: list[Tensor] = []

    def take(self, tensors: Mapping[str, Tensor]) -> Callable[[], Iterator[bytes | memoryview]]:
        """Copy ``tensors``; return what gives a file's content, once, from any thread, before the next copy is taken.

        Blocks until the copy is made; with CUDA not at all: what is queued on a device later waits for it there.
        """
        layout = lay_out(tensors)
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        if layout != self._layout or self._flat.is_pinned() != bool(devices):
            # Let go of the old one first; there may be no room for both.
            self._views, self._flat = [], torch.empty(0, dtype=torch.uint8)
            self._flat = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=bool(devices))
            self._views = views_of(self._flat, layout, tensors)
            self._layout = layout
        copy_tensors(self._views, [tensors[name] for name in layout.order])
        arrivals = []
        for device in devices:
            arrivals.append(torch.cuda.Event())
            arrivals[-1].record(torch.cuda.current_stream(device))
        flat = self._flat

        def content() -> Iterator[bytes | memoryview]:
            for arrival in arrivals:
                arrival.synchronize()
            yield layout.header
            if flat.numel():
                yield _bytes_of(flat)

        return content


def views_of(flat: Tensor, layout: Layout, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return where ``tensors`` lie in ``flat``, the bytes behind a file's header, in the order in the file."""
    return [
        flat[start : start + tensors[name].nbytes].view(tensors[name].dtype).view(tensors[name].shape)
        for name, start in zip(layout.order, layout.starts, strict=True)
    ]


@torch.no_grad()
def copy_tensors(views: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy ``sources`` into ``views`` on the host; with CUDA does not wait for it, if these are page-locked."""
    pairs: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for view, source in zip(views, sources, strict=True):
        into, outof = pairs.setdefault(source.device, ([], []))
        into.append(view)
        outof.append(source)
    for device, (into, outof) in pairs.items():
        torch._foreach_copy_(into, outof, non_blocking=device.type == "cuda")


def _bytes_of(flat: Tensor) -> memoryview:
    array: Any = flat.detach().numpy()  # a buffer, though its annotations do not say so
    return memoryview(array)
