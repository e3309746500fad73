"""The end of a synchronised step: all buckets are waited for, and the weights of the ranks are settled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.futures import Future

from lockstep.errors import CollectiveError
from lockstep.parallel.ddp.ballot import Ballot
from lockstep.parallel.ddp.bucket import Bucket
from lockstep.parallel.ddp.transport import Transport
from lockstep.parallel.ddp.weights import Weights, find_carrier


def complete(
    left: Sequence[tuple[Bucket, Future[Any]]],
    used: Sequence[int],
    ballot: Ballot,
    transport: Transport,
    weights: Weights,
) -> list[int] | None:
    """Block until all buckets hold the mean; return how many ranks used each parameter, unless the tails say it.

    Collective: every rank, with buckets that left in the same order.

    Args:
        left: The buckets of the step and their reductions, in the order in which they left.
        used: By parameter, whether it received a gradient on this rank.
        ballot: What this rank said of its weight when the buckets left.
        transport: What started them.
        weights: What the ranks weigh.

    Raises:
        CollectiveError: Another rank ended or did not take part.
        ConfigurationError: On every rank: some ranks gave weights and others did not; names the latter.
    """
    for position, (bucket, future) in enumerate(left):
        try:
            transport.finish(bucket, future)
        except RuntimeError as error:
            raise CollectiveError(
                f"Rank {weights.rank}: the gradient reduction of bucket {position} "
                f"({bucket.names[0]} ... {bucket.names[-1]}) failed: {error}\n"
                "Another rank probably ended or ran no backward; look at the first error of the job."
            ) from error
    counts = transport.count(used, weights.encode(ballot), weights.device)
    must_know = ballot != Ballot(is_missing=True)
    factor: float | None = None
    if counts is not None:
        factor = weights.conclude(counts.ballots, is_urgent=must_know)
    elif (carrier := find_carrier(left)) is not None:
        factor = weights.conclude(*carrier, is_urgent=must_know)
    if factor is None:
        factor = weights.conclude_apart(ballot) if left else 1.0
    if factor != 1.0:
        for bucket, _ in left:
            bucket.scale(factor)
    return None if counts is None else counts.num_users
