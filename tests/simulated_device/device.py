"""`torch.sim`: the functions that every device module of torch has, and those of a simulation (at the end)."""

import contextlib
import sys
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist

native = sys.modules["simulated_device_native"]

Stream = torch.Stream
Event = torch.Event
OutOfMemoryError = torch.OutOfMemoryError


def register(devices):
    native.set_device_count(devices)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("simccl", _create_backend, devices=["sim"])
    for name in ("numpy", "tolist"):
        setattr(torch.Tensor, name, _checked(getattr(torch.Tensor, name)))


def _create_backend(store, rank, size, timeout):
    return native.make_backend(dist.ProcessGroupGloo(store, rank, size, timeout))


def _checked(read):
    """Have a method that reads memory past the dispatcher read pinned memory as an operator would, which is checked."""

    def checked(tensor, *args, **kwargs):
        if tensor.device.type == "cpu" and tensor.numel() and tensor.is_pinned():
            tensor.flatten()[:1].clone()
        return read(tensor, *args, **kwargs)

    return checked


# --- Devices and streams


def is_available():
    return True


def is_initialized():
    return True


def init():
    pass


_lazy_init = init


def _is_in_bad_fork():
    return False


def _index(device):
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    return current_device() if index is None or index < 0 else index


def device_count():
    return native.device_count()


def current_device():
    return torch.accelerator.current_device_index()


def get_device_name(device=None):
    return "simulated accelerator"


def get_device_properties(device=None):
    return SimpleNamespace(name=get_device_name(device), total_memory=native.memory_limit(_index(device)))


def set_device(device):
    torch.accelerator.set_device_index(_index(device))


@contextlib.contextmanager
def device(device):
    with torch.accelerator.device_index(_index(device)):
        yield


def current_stream(device=None):
    return torch.accelerator.current_stream(_index(device))


def default_stream(device=None):
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=native.device_type)


def set_stream(stream):
    torch.accelerator.set_stream(stream)


def stream(stream):
    return contextlib.nullcontext() if stream is None else stream


def synchronize(device=None):
    torch.accelerator.synchronize(_index(device))


# --- Memory

empty_cache = torch.accelerator.empty_cache


def memory_stats(device=None):
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device=None):
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device=None):
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device=None):
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device=None):
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device=None):
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device=None):
    return torch.accelerator.get_memory_info(_index(device))


# --- Random numbers


def _generator(device):
    return native.default_generator(_index(device))


def get_rng_state(device="sim"):
    return _generator(device).get_state()


def set_rng_state(new_state, device="sim"):
    _generator(device).set_state(new_state)


def get_rng_state_all():
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states):
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed):
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed):
    for index in range(device_count()):
        _generator(index).manual_seed(int(seed))


def initial_seed():
    return _generator(None).initial_seed()


# --- Autocast


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16]


def is_bf16_supported():
    return True


# --- Of a simulation only


def set_memory_limit(num_bytes, device=None):
    """Have allocations beyond ``num_bytes`` raise torch.OutOfMemoryError."""
    native.set_memory_limit(_index(device), num_bytes)


def set_float64(has_float64):
    """Say whether the devices have float64, as they do at first."""
    native.set_float64(has_float64)


def set_check(mode):
    """Say what happens at an access without order: ``raise`` at once (as at first), ``collect`` it, or ``off``."""
    native.set_check(mode)


def take_errors():
    """Return the errors of order since the last call, also those that something caught."""
    return native.take_errors()


def contexts():
    """Return the devices on which this process has a context, each with where it opened that."""
    return native.contexts()


def forget_contexts():
    """Have no context, no current device in this thread, and nothing on its way, as a new process."""
    native.forget_contexts()


def registered_bytes():
    """Return how many bytes this process has allocated in memory that the backend of its groups registers."""
    return native.registered_bytes()


def set_backend_kind(name):
    """Choose how collectives behave: as ``nccl`` (at first), as ``nccl2`` of torch 2.15, or as ``gloo`` on a GPU."""
    native.set_backend_kind(name)


def set_patience(seconds):
    """Say how long an operator waits for the collective whose result it needs; at first without a limit.

    Then it goes on with the numbers as they are, as if it were queued, and what the host waits for later does not come:
    so the host gets to the wait in which it would be on a real device while a peer is stopped. Nothing computed since
    is right.
    """
    native.set_patience(seconds)


def is_current_stream_capturing():
    return native.is_capturing(current_device())


def occupied(device=None):
    """Return whether a collective occupies a part of the device: it has its inputs, and may wait for its peers."""
    return native.is_occupied(_index(device))


class Graph:
    """Stands in for ``torch.cuda.CUDAGraph``."""

    def __init__(self):
        self._captured = None

    def replay(self):
        """Run the operators and collectives again, in the memory that they had; on the stream that is current."""
        self._captured.replay()


@contextlib.contextmanager
def capturing():
    """Capture a `Graph`, on a stream of its own that is current here, as with ``torch.cuda.graph``; yields it.

    Nothing is computed before its first replay. Errors are those of CUDA: the host, in any thread, asks for the state
    of an event, or waits; a stream of the graph waits for work that is not part of it; a stream that has joined is not
    waited for at the end. An exception in the block ends the capture, too, and the error of that hides it.
    """
    synchronize()
    graph = Graph()
    with torch.Stream("sim"):
        native.begin_capture(current_device())
        try:
            yield graph
        finally:
            graph._captured = native.end_capture()


class Wait(NamedTuple):
    """A wait of the host for a device.

    Attributes:
        kind: ``event``, ``stream``, ``device``, ``item``, ``result`` (an operator whose shape, or answer, the host
            needs), ``copy to pageable memory``, ``copy from pageable memory``, ``blocking copy`` (of pinned memory),
            ``barrier``.
        line: Where.
        queued: How many kernels of the device the host had launched that it did not wait for. With 0 the device runs
            dry: it idles from the end of the wait until the host has launched the next kernel.
        thread: Name of the thread that waited.
    """

    kind: str
    line: str
    queued: int
    thread: str


class Counts:
    """What was counted in a block of `counting()`.

    Attributes:
        synchronizations: How often the host waited until a stream, or a device, had nothing left to do.
        event_waits: How often it waited for an event that it did not know to be over, however long ago it was recorded.
        kernels: Operators launched, of all streams; views launch none.
        kernels_by_stream: The same by the name of the stream.
        collectives: Collectives launched.
        slowed_kernels: Kernels that ran while a collective occupied a part of their device.
        slowed_s: How long they took because of that.
        host_to_device_bytes: Bytes copied; also ``device_to_host_bytes`` and ``device_to_device_bytes``.
        allocations: Tensors that were given memory of a device.
        segments: Those of them that freed memory could not serve, which cost a real device a synchronization.
        places: How often each line caused a synchronization, an event wait (with how many kernels the host had
            launched since it recorded the event: with many, it hardly waited), a copy or a segment: ``(kind, line)``.
        waits: All waits of the host, of all threads, in their order: `Wait`. It does not wait for an event that it
            knows to be over, from a query or from a wait for something later.
    """

    def __init__(self):
        self.places = Counter()
        self.waits = []

    def __repr__(self):
        shown = {name: value for name, value in vars(self).items() if name not in ("places", "waits")}
        return f"Counts({', '.join(f'{name}={value}' for name, value in shown.items())})"


@contextlib.contextmanager
def counting():
    """Count from here to the end of the block; yields the `Counts`, which are there afterwards. Not to be nested."""
    counts = Counts()
    native.take_counters()
    try:
        yield counts
    finally:
        taken = native.take_counters()
        counts.places = Counter(taken.pop("places"))
        counts.waits = [Wait(*wait) for wait in taken.pop("waits")]
        vars(counts).update(taken)
