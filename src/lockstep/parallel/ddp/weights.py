"""How the ranks agree on the sum of their weights, and what gradients are multiplied by. See window.py, ballot.py.

[Note: where the weights travel]
In the tail of the buckets, in the same collective as the gradients. The tail of the widest bucket is read; which one
that is, all ranks see alike. float16 and bfloat16 can tell that there are weights, and which ranks lack one, but cannot
hold a weight, so if all buckets are so narrow, one number follows them in a collective of its own. So do all ballots
where only sparse buckets leave, which have no tail. With a communication hook they travel with the use counts.

[Note: typical weight]
Before the sum, gradients are multiplied by weight / (typical weight * ranks), where the typical weight is the mean over
the ranks in the last step with weights: the same number everywhere. So they keep the size that they have without
weights, which float16 needs, and if the sum of the weights has not changed, what arrives is the mean already.
Otherwise it is multiplied by typical weight * ranks / sum. Before the first step's buckets leave, the ranks say what
they weigh.

[Note: accelerators]
Reading a tail blocks the host. With weights, it waits on a stream of its own for one bucket only, and the device goes
on with the rest of backward meanwhile. Without weights it does not wait at all: that other ranks gave weights is
noticed when the next backward begins. So the host is less than a step ahead of the device, which has the next forward
to do when the host looks; to look later would be to wait for ranks that have failed already. A step that is captured
in a CUDA graph cannot look: with weights it is refused, without it is believed that the others give none either.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lockstep.comm.collectives import Group, all_reduce
from lockstep.errors import CollectiveError, ConfigurationError
from lockstep.parallel.ddp.ballot import Ballot, Tally
from lockstep.parallel.ddp.bucket import Bucket, Share
from lockstep.parallel.ddp.capture import is_capturing
from lockstep.parallel.ddp.window import Window, all_zero

_WIDTHS = {torch.float32: 1, torch.complex64: 1, torch.float64: 2, torch.complex128: 2}
"""The dtypes that can hold a sum of weights, as exact as the gradients that travel with it."""


def find_carrier(
    left: Iterable[tuple[Bucket, Future[Any]]],
    ballot_of: Callable[[Bucket], Tensor | None] = operator.attrgetter("ballot"),
) -> tuple[Tensor, Future[Any]] | None:
    """Return the ballots that are to be read, and their bucket's reduction; None if no bucket has a tail.

    Args:
        left: The buckets of a step.
        ballot_of: Returns the ballots of a bucket in the dtype in which they travelled.
    """
    found = [(ballot_of(bucket), future) for bucket, future in left]
    ballots = [(ballot, future) for ballot, future in found if ballot is not None]
    return max(ballots, key=lambda item: _WIDTHS.get(item[0].dtype, 0), default=None)


class Weights:
    """What a rank weighs in each step, and what all ranks weigh together.

    Attributes:
        window: This rank's micro-batches; None as long as no weight was ever given.
        sum: Of all weights in the last step that had some.
        device: Where tensors lie that the ranks can exchange.
        rank: This one.
        refusal: Why there can be no weights; None: there can.
        shares_batch: See `Window`.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.window: Window | None = None
        self.sum = 0.0
        self.device, self.rank = device, group.rank()
        self._group, self._world_size = group, group.size()
        self._typical = 1.0
        # Ballots on their way to the host, and the event of their arrival.
        self._doubt: tuple[Tensor, Any] | None = None
        self.refusal: str | None = None
        self.shares_batch = False

    def give(self, weight: float, parameters: Sequence[torch.nn.Parameter], used: Sequence[int]) -> None:
        """Take note of the weight of the coming backward; see `Window` for the other arguments.

        Raises:
            ConfigurationError: There can be no weights.
        """
        if self.refusal is not None:
            raise ConfigurationError(self.refusal)
        if self.window is None:
            local = [parameter.grad for parameter, is_used in zip(parameters, used, strict=False) if is_used]
            has_unweighed = not all_zero(gradient for gradient in local if gradient is not None)
            self.window = Window(parameters, has_unweighed=has_unweighed, shares_batch=self.shares_batch)
        self.window.give(weight)

    def silenced(self, gradient: Tensor) -> Tensor | None:
        """Return what is to enter the model instead of the gradient of an output; None: the gradient itself."""
        return torch.zeros_like(gradient) if self.window is not None and self.window.is_silent else None

    def encode(self, ballot: Ballot) -> list[float]:
        """Return the numbers that ``ballot`` is on this rank."""
        return ballot.encode(self.rank, self._world_size)

    def ballot(self) -> Ballot:
        """Return what this rank has to say at the end of a step."""
        return Ballot(is_missing=True) if self.window is None else self.window.ballot(self._typical)

    def share(self, indices: Sequence[int], used: Sequence[int], divisor: float | None) -> Share:
        """Make the gradients of a bucket ready to leave, and return what they count.

        Args:
            indices: The bucket's parameters.
            used: By parameter, whether it received a gradient since the last step.
            divisor: What gradients are divided by where there are no weights; None: by nothing, the hook divides.
        """
        window = self.window
        if window is None or not window.is_weighed:
            factor = 1.0 if divisor is None else 1.0 / divisor
            return Share(factor, factor)
        window.leave(indices, used)
        scale = self._typical * (1 if divisor is None else self._world_size)
        return Share(window.unit / scale, window.total / scale, self.encode(self.ballot()))

    def call_the_roll(self, ballot: Ballot) -> None:
        """Agree on the typical weight before anything has left. Collective: every rank. Blocks until complete.

        Raises:
            ConfigurationError: On every rank: only some have given weights.
        """
        self._conclude(self._exchange(ballot))

    # --- the end of a step ------------------------------------------------------------------------------------------

    def conclude(self, ballots: Tensor, future: Future[Any] | None = None, *, is_urgent: bool) -> float | None:
        """Return what the reduced gradients are to be multiplied by; None if ``ballots`` is too narrow to tell.

        Args:
            ballots: The sum of all ranks' ballots, valid on the current stream.
            future: The reduction that made it, if others are still under way.
            is_urgent: False: a rank without weights, which can look at them later.

        Raises:
            ConfigurationError: On every rank: only some have given weights.
        """
        if is_capturing(ballots.device):
            if is_urgent:
                raise ConfigurationError(
                    "A step with weights cannot be captured in a CUDA graph: the host has to read their sum.\n"
                    "Capture without weight(), or train eagerly."
                )
            return 1.0
        if ballots.device.type == "cuda" and not is_urgent:
            event = torch.cuda.Event()
            self._doubt = ballots.to("cpu", non_blocking=True), event
            event.record(torch.cuda.current_stream(ballots.device))
            return 1.0
        if ballots.device.type == "cuda" and future is not None:
            with torch.cuda.stream(torch.cuda.Stream(ballots.device)):
                future.wait()
                numbers = ballots.tolist()
        else:
            numbers = ballots.tolist()
        if numbers[1] and ballots.dtype not in _WIDTHS:
            Tally.decode(numbers).check()
            return None
        return self._conclude(numbers, ballots.dtype)

    def conclude_apart(self, ballot: Ballot) -> float:
        """Do the same in a collective of its own. Collective: every rank. Blocks until complete."""
        return self._conclude(self._exchange(ballot))

    def resolve_doubt(self) -> None:
        """Raise ConfigurationError if other ranks gave weights in the last step, and this one did not look then."""
        if self._doubt is None or is_capturing(self.device):  # no event may be waited for in a capture
            return
        ballots, event = self._doubt
        self._doubt = None
        event.synchronize()
        self._conclude(ballots.tolist())

    def _exchange(self, ballot: Ballot) -> list[float]:
        """Return the sum of all ballots. Collective: every rank. Blocks until complete."""
        sums = torch.tensor(self.encode(ballot), dtype=torch.float64, device=self.device)
        try:
            all_reduce(sums, group=self._group)
        except RuntimeError as error:
            raise CollectiveError(
                f"Rank {self.rank}: the exchange of the ranks' weights failed: {error}\n"
                "Another rank probably ended or ran no backward; look at the first error of the job."
            ) from error
        numbers: list[float] = sums.tolist()
        return numbers

    def _conclude(self, numbers: Sequence[float], dtype: torch.dtype = torch.float64) -> float:
        """Draw the conclusions from all ranks' ballots; return what the reduced gradients are to be multiplied by."""
        if not numbers[1]:
            return 1.0
        tally = Tally.decode(numbers)
        tally.check()
        self.sum = tally.weight * self._typical
        if self.sum:
            self._typical = self.sum / self._world_size
        return tally.correction(self._world_size, tolerance=4 * torch.finfo(dtype).eps)
