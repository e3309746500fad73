"""The state that torch keeps per thread, taken along from the calling thread into the replicas' threads."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class _Autocast:
    device_type: str
    dtype: torch.dtype


@dataclass(frozen=True)
class ReplicaContext:
    """What a replica's thread must enter before it computes; read in the calling thread by ``capture``.

    Grad mode, inference mode and autocast belong to a thread; so do the current CUDA device and its stream. Work on
    the stream that is current in the caller keeps the order that the caller sees; ``streams`` says which replicas have
    another. (The default dtype, deterministic mode and the random generators belong to the process and need nothing.)
    """

    device: torch.device
    grad_enabled: bool
    inference: bool
    autocasts: tuple[_Autocast, ...]
    autocast_cache: bool
    stream: torch.cuda.Stream | None
    home: torch.cuda.Stream | None = None
    """The caller's stream on the first replica's device, if that is another one, for copies from and to there."""

    @classmethod
    def capture(cls, device: torch.device, first: torch.device) -> "ReplicaContext":
        """Read the calling thread's state, for a replica on ``device``; that of the first replica is ``first``."""
        device_types = ("cpu", "cuda") if device.type == "cuda" else ("cpu",)
        return cls(
            device=device,
            grad_enabled=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocasts=tuple(
                _Autocast(kind, torch.get_autocast_dtype(kind))
                for kind in device_types
                if torch.is_autocast_enabled(kind)
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            stream=torch.cuda.current_stream(device) if device.type == "cuda" else None,
            home=torch.cuda.current_stream(first) if device.type == "cuda" and device != first else None,
        )

    def on_stream(self, stream: torch.cuda.Stream | None) -> "ReplicaContext":
        """Return the same context with another stream; None leaves the device and the stream as they are."""
        return replace(self, stream=stream, home=None if stream is None else self.home)

    def for_training(self) -> "ReplicaContext":
        """Return the same context with gradients enabled."""
        return replace(self, grad_enabled=True, inference=False)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the device and its stream current in this thread."""
        if self.stream is None:
            yield
        else:
            with torch.cuda.stream(self.home), torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                yield

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter everything: device, stream, inference mode, grad mode and autocast."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.on_device())
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for cast in self.autocasts:
                stack.enter_context(
                    torch.autocast(cast.device_type, dtype=cast.dtype, cache_enabled=self.autocast_cache)
                )
            yield
