"""Asynchronous work of a device: its events, copies to the host, and features that only CUDA has.

``torch.accelerator``, ``torch.Stream`` and ``torch.Event`` support CUDA, ROCm, XPU and PrivateUse1 devices in the same
way, so the package uses these. On the CPU, work is done when a call returns; code checks ``device.type`` where this
matters.

[Note: streams and threads]
A ``torch.Stream`` is a context manager that stores the stream it replaced in the object itself. So threads that run at
the same time must not enter the same object: each gets its own from ``torch.accelerator.current_stream``. Entering
makes the stream's device the current one, except if the stream is already that device's current stream.

The current device belongs to a thread, and is device 0 in a new one. Copies, ``elapsed_time`` and the release of an
event change to its device, and then set the device back to the thread's own. With CUDA 12, setting a device creates a
context of this process there, of about 0.5 GB: each rank of a machine would have one on GPU 0. So a thread that uses a
device, even one that only drops the last reference to an event, is started by `start_thread`.

[Note: waits of the host]
A host that waits for its device may wait for another rank: with NCCL, a collective blocks a stream, and the host blocks
only where it reads a result. So these waits are marked for the watchdog, see `lockstep.base.activity.DEVICE`.
"""

import ctypes
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.base import activity
from lockstep.base.torch_internals import apply_to_tensors, has_compatible_shallow_copy_type
from lockstep.errors import ConfigurationError

# By type of device, the variable that names the devices that a process may use; ROCm reads CUDA's, too.
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def default_device() -> torch.device:
    """Return the accelerator that torch finds, without an index, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def check_count(wanted: int) -> None:
    """Raise a ConfigurationError if a machine with accelerators has fewer than ``wanted`` of them."""
    count = torch.accelerator.device_count()
    if 0 < count < wanted:
        accelerator = torch.accelerator.current_accelerator()
        variable = VISIBLE_DEVICES.get("cuda" if accelerator is None else accelerator.type)
        hidden = "" if variable is None else f", or hide the GPUs to use the CPU, as with {variable}= "
        raise ConfigurationError(
            f"{wanted} devices were requested, but this machine has {count} GPU{'s' if count > 1 else ''}.\n"
            f"Request at most {count}{hidden}."
        )


@cache
def widest_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums on ``device``: float64, or float32 if it has no float64, as some GPUs."""
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def check_float64(device: torch.device, name: str) -> None:
    """Raise a ConfigurationError if ``device`` lacks float64, which the feature ``name`` needs."""
    if widest_dtype(device) is not torch.float64:
        raise ConfigurationError(
            f"{name} needs sums in float64, which {device} cannot compute.\nLeave it out, or use another device."
        )


def start_thread(target: Callable[[], object], *, name: str, device: torch.device | None) -> threading.Thread:
    """Start a daemon thread in which ``device`` is the current one; see [Note: streams and threads].

    Args:
        target: Called in the thread.
        name: Of the thread.
        device: Has an index. Nothing is done for the CPU and for ``None``.
    """

    def run() -> None:
        if device is not None and device.type != "cpu":
            torch.accelerator.set_device_index(device)
            _stay_out_of_captures(device)
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def synchronize(awaited: torch.device | torch.Event) -> None:
    """Block until a device has done all queued work, or has reached an event; return at once for the CPU."""
    with activity.waiting(activity.DEVICE):
        if isinstance(awaited, torch.Event):
            awaited.synchronize()
        elif awaited.type != "cpu":
            torch.accelerator.synchronize(awaited)


# [Note: events and host buffers are reused]
# A step of `fit` records about ten events and copies two small tensors to the host. New ones would cost some calls of
# the driver each, and whoever drops the last reference to an event sets the device of its thread, see [Note: streams
# and threads]. So they stay in a pool, and serve again when only the pool refers to them: the object itself, not a view
# of a buffer. A buffer belongs to one stream, so that its next copy is written after the last one.
_pools: defaultdict[Hashable, deque[Any]] = defaultdict(deque)
_pools_lock = threading.Lock()


# The sys.getrefcount of an object that only its pool refers to, called in the same way as below.
_UNUSED = next(map(sys.getrefcount, deque([object()])))


def _reused(kind: Hashable, make: Callable[[], Any]) -> Any:
    """Return an object of ``kind`` that nothing refers to any more, or a new one; see the note above."""
    with _pools_lock:
        pool = _pools[kind]
        is_unused = next(map(sys.getrefcount, pool), None) == _UNUSED  # the oldest
        pool.rotate(-1)
        if not is_unused:
            pool.append(make())
        return pool[-1]


def recorded_event(device: torch.device, *, timing: bool = False) -> torch.Event:
    """Return an event that completes when the current stream of ``device`` reaches this point. Does not block.

    Without ``timing``, it is for waits of the host: on CUDA, no stream of ``torch.accelerator`` may wait for it.
    """
    # With `blocking` the host sleeps while it waits; otherwise it takes a core, which the loader may need. torch.Event
    # ignores that on CUDA. CUDA's own class does not, but accepts only streams of CUDA's own class.
    sleeps = device.type == "cuda" and not timing
    make = partial(torch.cuda.Event, blocking=True) if sleeps else partial(torch.Event, device, enable_timing=timing)
    event: torch.Event = _reused((device, timing), make)
    event.record(torch.cuda.current_stream(device) if sleeps else torch.accelerator.current_stream(device))
    return event


def mark_on(device: torch.device) -> float | torch.Event:
    """Return the current time, or an event for the time when the stream of ``device`` gets here. Does not block."""
    return time.perf_counter() if device.type == "cpu" else recorded_event(device, timing=True)


class HostCopy:
    """A small tensor that is being copied to the host, where it can be read later without waiting for later work.

    Attributes:
        value: Valid once ``arrived`` has completed; at once if that is None. Overwritten when nothing refers to this
            very object any more: keep no view of it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.arrived: torch.Event | None = None
        self.value = tensor.detach()
        if not tensor.is_cpu:
            kind = tensor.shape, tensor.dtype, torch.accelerator.current_stream(tensor.device)
            self.value = _reused(kind, partial(torch.empty, tensor.shape, dtype=tensor.dtype, pin_memory=True))
            self.value.copy_(tensor.detach(), non_blocking=True)
            self.arrived = recorded_event(tensor.device)

    def has_arrived(self) -> bool:
        """Return whether it can be read without a wait."""
        return self.arrived is None or self.arrived.query()

    def read(self) -> Tensor:
        """Return it, on the host. Blocks until it has arrived."""
        if self.arrived is not None:
            synchronize(self.arrived)
        return self.value


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of ``values`` on ``device``. Does not block: it is copied from pinned memory."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type != "cpu").to(device, non_blocking=True)


def keeps_objects(device: torch.device | str) -> bool:
    """Return whether ``module.to(device)`` keeps parameter objects; for PrivateUse1 it replaces them."""
    return has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device))


def is_on_meta(module: nn.Module) -> bool:
    """Return whether any of its tensors are on the meta device, where they have neither memory nor values."""
    return any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def move(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Return ``module``, moved to ``device``; a parameter that layers share stays shared on any device.

    Tensors on the meta device get memory, without values.
    """
    swaps, on_meta = torch.__future__.get_swap_module_params_on_conversion(), is_on_meta(module)
    torch.__future__.set_swap_module_params_on_conversion(swaps or on_meta or not keeps_objects(device))
    try:
        if on_meta:
            apply_to_tensors(module, lambda value: torch.empty_like(value, device=device) if value.is_meta else value)
        return module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


# --- features that only CUDA has --------------------------------------------------------------------------------------


def _stay_out_of_captures(device: torch.device) -> None:
    """Let this thread query events while another one captures a CUDA graph, which would otherwise fail.

    Source: torch's NCCL watchdog does this, https://github.com/pytorch/pytorch/pull/148594.
    """
    # During a capture in the mode "global", torch's default, CUDA allows such calls only to threads with another mode.
    if device.type == "cuda" and torch.version.cuda is not None:
        with suppress(OSError, AttributeError):  # loaded by torch already, unless it is linked statically
            runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
            relaxed = ctypes.c_int(2)  # the number of cudaStreamCaptureModeRelaxed
            runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of ``device`` is being captured into a graph; see [Note: capture].

    [Note: capture]
    While a CUDA graph is captured, hooks and callbacks run once, and everything they put on streams is captured with
    it: the copies into the buckets, the all-reduces (NCCL joins the capture), the waits of streams for each other. In a
    replay no Python runs, and the host must not read from the device. So the buckets must be final before the capture:
    as with torch's class, run some steps before it, on a side stream on which the wrapper was created.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def nccl_version() -> str:
    """Return the version of NCCL, which a torch with CUDA has."""
    return ".".join(map(str, torch.cuda.nccl.version()))
