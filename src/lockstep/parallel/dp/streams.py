"""Which CUDA stream each replica computes on, so that replicas on one device do not wait for each other."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lockstep.parallel.dp.context import ReplicaContext


class ReplicaStreams:
    """Streams of replicas: the first on a device has the caller's, others there have one each.

    Own streams begin where the caller's is, and the caller's goes on where they end, so it is to the caller as if all
    had run on its own: memory that goes from one to the other needs no care, and nothing waits for the device.

    Args:
        devices: One a replica.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)
        self._own: dict[int, torch.cuda.Stream] = {}

    @contextmanager
    def contexts(self, num_replicas: int) -> Iterator[list[ReplicaContext]]:
        """Give what the first replicas' threads are to enter; at the end the caller's streams wait for theirs."""
        contexts = [ReplicaContext.capture(device, self._devices[0]) for device in self._devices[:num_replicas]]
        forked: list[tuple[torch.cuda.Stream, torch.cuda.Stream]] = []
        for index, context in enumerate(contexts):
            if context.stream is not None and context.device in self._devices[:index]:
                if index not in self._own:
                    self._own[index] = torch.cuda.Stream(context.device)
                forked.append((self._own[index], context.stream))
                self._own[index].wait_stream(context.stream)
                contexts[index] = context.on_stream(self._own[index])
        try:
            yield contexts
        finally:
            for own, callers in forked:
                callers.wait_stream(own)
