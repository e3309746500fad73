"""The buckets in the order in which they leave, and where each parameter's gradient lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

import torch

from lockstep.comm.collectives import Group
from lockstep.parallel.ddp.bucket import Bucket
from lockstep.parallel.ddp.bucket_plan import BucketSpec, ParameterSpec, plan_buckets
from lockstep.parallel.ddp.dense_bucket import DenseBucket
from lockstep.parallel.ddp.ready_order import agree_on_order
from lockstep.parallel.ddp.sparse_bucket import SparseBucket


class BucketRow:
    """All buckets of a model: first in reverse order of registration, then, once, in the order that was observed.

    Args:
        parameters: All parameters to reduce, by name, each once; the same order, shapes and dtypes on every rank.
        sparse: Those among them that receive sparse gradients.
        caps_bytes: See :func:`plan_buckets`.
        keep_held_gradients: See [Note: held gradients] in dense_bucket.py.
        ballot: What this rank says of weights where it gives none, see [Note: ballots] in ballot.py.

    Attributes:
        parameters, names: By index, which is how a bucket names them.
        buckets: In the order in which they leave, the same on every rank.
        position_of: By parameter, the position of its bucket.
        first_sizes_bytes: Of the first buckets.
        on_rebuilt: What to call with new buckets when the ranks have made them, all ranks in the same order.
        is_rebuilt: Whether the order is the observed one.
        arrivals: The order in which gradients arrived on this rank in the first step; empty before.
        is_uneven: Whether ranks then observed different things.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        sparse: Set[torch.Tensor],
        caps_bytes: Sequence[int],
        keep_held_gradients: bool,
        ballot: Sequence[float],
    ) -> None:
        self.is_rebuilt = self.is_uneven = False
        self.arrivals: tuple[int, ...] = ()
        self.on_rebuilt: list[Callable[[Sequence[Bucket]], None]] = []
        self._group: Group | None = None  # not before the first step: a copy of the model may be made on one rank alone
        self.parameters, self.names = list(parameters.values()), list(parameters)
        self._caps_bytes = tuple(caps_bytes)
        self._keep_held_gradients = keep_held_gradients
        self._ballot = tuple(ballot)
        self._specs = [
            ParameterSpec(parameter.numel(), parameter.dtype, parameter.device, sparse=parameter in sparse)
            for parameter in self.parameters
        ]
        self._default_order = tuple(reversed(range(len(self.parameters))))
        self._install(self._default_order)
        self.first_sizes_bytes = [bucket.spec.size_bytes for bucket in self.buckets]

    @property
    def device(self) -> torch.device:
        """A device whose tensors the ranks can exchange."""
        return self._specs[0].device if self._specs else torch.device("cpu")

    def rebuild(self, arrivals: Sequence[int], *, group: Group) -> None:
        """Build the buckets anew from what the first step showed. Collective: every rank. Blocks until complete.

        Args:
            arrivals: Indices of the parameters as their gradients arrived on this rank; empty if it had no data.
            group: The ranks that take part.
        """
        self._group, self.arrivals = group, tuple(arrivals)
        agreed = agree_on_order(arrivals, self._default_order, group=group, device=self.device)
        self._specs = [replace(spec, deferred=index in agreed.repeated) for index, spec in enumerate(self._specs)]
        self._install(agreed.order)
        for bucket in self.buckets:
            bucket.adopt()
        self.is_rebuilt, self.is_uneven = True, agreed.is_uneven

    def plan(self, caps_bytes: Sequence[int]) -> tuple[BucketSpec, ...]:
        """Return the buckets that other caps would make of the order as it is; changes nothing."""
        return plan_buckets(self._specs, self._order, caps_bytes)

    def replan(self, caps_bytes: Sequence[int]) -> None:
        """Build the buckets anew with other caps, between steps. Collective: every rank, with the same caps. Blocks."""
        self._caps_bytes = tuple(caps_bytes)
        self._install(self._order)
        for bucket in self.buckets:
            bucket.adopt()

    def scratch(self) -> list[Bucket]:
        """Return buckets like these that hold zeros; this rank may be the only one to ask."""
        return [self._make(bucket.spec, None) for bucket in self.buckets]

    def _install(self, order: Sequence[int]) -> None:
        self._order = tuple(order)
        self.buckets = [self._make(spec, self._group) for spec in self.plan(self._caps_bytes)]
        self.position_of = [0] * len(self.parameters)
        for position, bucket in enumerate(self.buckets):
            for index in bucket.spec.parameters:
                self.position_of[index] = position
        for callback in self.on_rebuilt if self._group is not None else ():
            callback(self.buckets)

    def _make(self, spec: BucketSpec, group: Group | None) -> Bucket:
        if spec.sparse:
            return SparseBucket(spec, self.parameters, self.names)
        return DenseBucket(
            spec,
            self.parameters,
            self.names,
            keep_held_gradients=self._keep_held_gradients,
            ballot=self._ballot,
            group=group,
        )
