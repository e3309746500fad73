"""Streams beside those that compute, so that a device sends and receives at the same time and the host never waits.

[Note: lanes]

A copy between GPUs is ordered with the current streams of both: torch queues it on that of the sender, and makes that
of the receiver wait for it. With one stream a device, a device that is to send after it has received would so wait for
what arrives, and the copies of a ring would run one after the other. So each device has two streams of its own, a
*lane* out and a lane in, and a copy has the sender's lane out and the receiver's lane in current.

Lanes begin where the current streams are (``fork``) and these go on where the lanes end (``join``). What a lane uses is
held until after ``join``; so its memory cannot be given to somebody else before the lane is through with it.

On the CPU there are no streams: everything is done when the call returns.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock

import torch
from torch import Tensor


class Lanes:
    """The lanes of several devices.

    Args:
        devices: Each may be named several times.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self._making = Lock()  # autograd's threads come here too

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Have the lanes wait for the current streams, and these for the lanes at the end. Does not block."""
        with self._making:
            if not self._streams:
                self._streams = {
                    device: (torch.cuda.Stream(device), torch.cuda.Stream(device)) for device in self._devices
                }
        for device in self._devices:
            for lane in self._streams[device]:
                lane.wait_stream(torch.cuda.current_stream(device))
        try:
            yield
        finally:
            for device in self._devices:
                for lane in self._streams[device]:
                    torch.cuda.current_stream(device).wait_stream(lane)

    def copy(self, source: Tensor, origin: torch.device, out: Tensor, target: torch.device) -> None:
        """Copy ``source``, which is on ``origin``, to ``out`` on ``target``, a device of another name."""
        with ExitStack() as stack:
            if origin in self._streams:
                stack.enter_context(torch.cuda.stream(self._streams[origin][0]))
            if target in self._streams:
                stack.enter_context(torch.cuda.stream(self._streams[target][1]))
            out.copy_(source, non_blocking=True)

    def turn_around(self, device: torch.device) -> None:
        """Let what ``device`` sends from now on wait for what it has been sent until now."""
        if device in self._streams:
            out, into = self._streams[device]
            out.wait_stream(into)
