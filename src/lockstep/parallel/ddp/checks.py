"""What a script can ask of the wrapper: is the gradient finite, and do all ranks still hold the same bits?

[Note: local gradients]
A reduced gradient tells that it is not finite, but not whose fault that is: the part of this rank is gone. So once a
script has asked, each bucket is looked at when it leaves: one pass over it, whose result stays on the device until it
is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.comm.collectives import all_gather
from lockstep.errors import ConfigurationError, NonFiniteGradient
from lockstep.parallel.ddp.bucket import Bucket
from lockstep.parallel.ddp.hookable import Hookable
from lockstep.parallel.flat_math import are_finite, combine_norms, list_norms, total
from lockstep.parallel.replica import Buffers, replica_of
from lockstep.parallel.replica_check import find_difference


class Checks(Hookable):
    """The part of ``DistributedDataParallel`` that looks whether all is well."""

    forward_sync_buffers: bool
    parameters_to_ignore: set[str]
    _looks: LocalLooks | None = None
    _num_good_checks = 0
    _per_bucket = Hookable._per_bucket | {"_looks"}

    def gradients_are_finite(self) -> bool:
        """Return whether no gradient is NaN or infinite: the same verdict on every rank, after the same backward.

        Not collective: NaN and infinity survive the sum over the ranks, all of which hold the same bits of it. So all
        can skip the same step without asking each other. Parameters that are not synchronised are left out. Blocks
        until backward is done.

        Raises:
            ConfigurationError: This rank has only a slice of the gradients.
        """
        if not self._reducer.departures.transport.leaves_whole:
            raise ConfigurationError(
                "gradients_are_finite() needs all gradients, but with shard_gradients=True each rank has a slice of "
                "them.\nCall clip_grad_norm_() of the optimizer with max_norm=math.inf, which returns the norm of all."
            )
        reduced = self.flat_gradients.reduced()
        return are_finite(reduced, combine_norms(list_norms(reduced)))

    def check_gradients(self) -> None:
        """Raise an error that names rank and parameter if a gradient is NaN or infinite.

        Call it between backward and ``optimizer.step()``. From the first call on each bucket is looked at when it
        leaves, so the ranks are known in all steps behind the first. Blocks until backward is done.

        Collective if a gradient is not finite: every rank.

        Raises:
            NonFiniteGradient: On every rank.
            ConfigurationError: This rank has only a slice of the gradients.
        """
        looked = self._looks is not None
        part_is_bad = self.watch_part()
        if self.gradients_are_finite():
            return
        bad = {id(each) for each in self._reducer.row.parameters if each.grad is not None and not _is_finite(each.grad)}
        first = next(name for name, parameter in self.module.named_parameters() if id(parameter) in bad)
        flag = torch.tensor([int(looked and part_is_bad())], device=self.device)
        ranks = [rank for rank, bad in enumerate(all_gather(flag, group=self.process_group)) if int(bad)]
        where = f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
        raise NonFiniteGradient(
            f"The gradient is not finite{where}: first that of parameter {first}.\n"
            "Look at the loss and the samples of this step there. To go on without the step, ask "
            "gradients_are_finite() and call optimizer.step() only if they are.",
            ranks=tuple(ranks),
        )

    def watch_part(self) -> Callable[[], bool]:
        """For `fit`: look at each bucket when it leaves, from now on.

        Returns:
            What tells whether this rank's part of the last backward was not finite. Blocks.
        """
        looks = self._looks
        if looks is None:
            looks = self._looks = LocalLooks()
            self._reducer.departures.on_leaving.append(looks.look)
        return lambda: looks.saw_bad(self._reducer.row.buckets)

    def check_replicas(self, optimizer: Optimizer | None = None) -> None:
        """Raise an error that names the first tensor of which the ranks hold different bits.

        Parameters and buffers are compared, and the state of ``optimizer`` if it is given: by a checksum, so this
        takes about as long as copying them, and one exchange of 8 bytes. Left out are what is not to be synchronised,
        buffers that the next forward overwrites with rank 0's (``broadcast_buffers=True``), else the running
        statistics of BatchNorm layers, and the state of a ``ZeroRedundancyOptimizer``, of which each rank has a part.

        Collective: every rank, between two steps. Blocks.

        Raises:
            ReplicasDiffer: On every rank; names the tensor, the ranks on each side and the elements.
        """
        buffers: Buffers = "healed" if self.forward_sync_buffers else "own"
        replica = replica_of(self.module, optimizer, buffers=buffers, ignore=self.parameters_to_ignore)
        difference = find_difference(replica, group=self.process_group, device=self.device)
        if difference is not None:
            times = f"{self._num_good_checks} check{'s' * (self._num_good_checks > 1)}"
            since = f"{times} before found none." if self._num_good_checks else "This was the first check."
            raise difference.error(now="", since=since)
        self._num_good_checks += 1


class LocalLooks:
    """Whether this rank's own gradients were finite when their buckets left."""

    def __init__(self) -> None:
        self._totals: WeakKeyDictionary[Bucket, Tensor] = WeakKeyDictionary()  # buckets are made anew now and then

    @torch.no_grad()
    def look(self, bucket: Bucket) -> None:
        """Take note of a bucket that leaves. Does not block."""
        if not bucket.spec.sparse:
            self._totals[bucket] = total(bucket.gradients)

    def saw_bad(self, buckets: Iterable[Bucket]) -> bool:
        """Return whether one of ``buckets`` was not finite when it left last. Blocks."""
        return any(not bool(self._totals[bucket].isfinite()) for bucket in buckets if bucket in self._totals)


def _is_finite(gradient: Tensor) -> bool:
    return are_finite([gradient], torch.tensor(math.nan))
