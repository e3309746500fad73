"""What users can do with the gradients of a whole bucket at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.accumulation import Accumulation
from lockstep.parallel.ddp.bucket_optimizer import BucketOptimizer
from lockstep.parallel.ddp.bucket_stamps import BucketStamps
from lockstep.parallel.ddp.cap_search import CapSearch
from lockstep.parallel.ddp.flat_gradients import FlatGradients
from lockstep.parallel.ddp.pipeline import in_words
from lockstep.parallel.ddp.wire import NarrowTransport, width_of


class PerBucket(Accumulation):
    """The part of ``DistributedDataParallel`` that works on reduced buckets."""

    wire_dtype: torch.dtype | None = None
    """What gradients are rounded to for the way between the ranks."""

    flat_gradients: FlatGradients
    """For `fit`: the gradients, a tensor for each bucket."""

    _finds_caps: bool = False
    _bucket_caps_bytes: tuple[int, ...]
    _cap_search: CapSearch | None
    _has_remarked = False
    _per_bucket: ClassVar = {"flat_gradients", "_cap_search"}
    """Attributes that belong to the reducer, and neither to a copy nor to a pickle."""

    def _use_buckets(self) -> None:
        """Attach to the reducer, when it is new."""
        self.flat_gradients = FlatGradients(self._reducer, self.module.parameters())
        if self.wire_dtype is not None and self.process_group.size() > 1:
            self._reducer.departures.transport = NarrowTransport(self._reducer.row, self.process_group, self.wire_dtype)
        self._cap_search = None
        if self._finds_caps:
            width = width_of(self.wire_dtype, self._reducer.row.buckets)
            self._cap_search = CapSearch(self._reducer, self.process_group, self._bucket_caps_bytes, width=width)

    def stamp_buckets(self, stamps: BucketStamps | None) -> None:
        """For whoever records steps: have the moments of buckets taken from now on, or not any more."""
        self._reducer.departures.stamps = stamps

    @property
    def bucket_report(self) -> str:
        """What buckets the gradients travel in; with ``bucket_cap_mb="auto"`` also what was gained by that."""
        if self._cap_search is not None:
            return self._cap_search.report
        return f"{in_words([bucket.spec for bucket in self._reducer.row.buckets])}."

    def take_remarks(self) -> list[str]:
        """For `fit`: return what was found since this was called last."""
        search = self._cap_search
        if search is None or not search.is_done or self._has_remarked:
            return []
        self._has_remarked = True
        return [search.report]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients down so that their norm is at most ``max_norm``; return the norm they had.

        As ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``, but a bucket at a time, which takes far fewer
        kernels, and the norm is as accurate for large parameters as for small ones. Not collective: after a
        synchronised backward all ranks hold the same gradients and find the same norm. Does not block.

        Args:
            max_norm: The largest norm allowed.
            norm_type: The p of the p-norm; may be infinite.

        Raises:
            ConfigurationError: This rank has only a slice of the gradients.
        """
        if not self._reducer.departures.transport.leaves_whole:
            raise ConfigurationError(
                "clip_grad_norm_() needs all gradients, but with shard_gradients=True each rank has a slice of them."
                "\nCall clip_grad_norm_() of the optimizer."
            )
        norm_type = float(norm_type)
        if norm_type <= 0:
            return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)
        norm = self.flat_gradients.norm(norm_type)
        self.flat_gradients.multiply_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def overlap_optimizer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Let ``optimizer`` step within backward from now on, each bucket as soon as it is reduced.

        Each synchronised backward then ends with the parameters updated, to the same bits as ``optimizer.step()`` after
        it would, for every optimizer that treats each parameter on its own and draws no random numbers. Gradients
        stay until they are zeroed. Nothing may look at or change gradients in between: no clipping, no loss scaling.
        ``optimizer.step()`` raises as long as this holds; learning-rate schedulers step after backward as ever.

        With weights (`weight`) and with communication hooks all buckets are stepped when backward ends.

        Args:
            optimizer: Of this model's parameters.

        Returns:
            What ends it.

        Raises:
            ConfigurationError: The optimizer cannot step without a closure, or divides its work among the ranks;
                or parameters are reduced with a delay.
        """
        reducer = self._reducer
        if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
            raise ConfigurationError(
                "overlap_optimizer() cannot be had with ZeroRedundancyOptimizer, which divides a step among ranks."
                "\nCall optimizer.step() after backward."
            )
        if reducer.companions:
            raise ConfigurationError(
                "overlap_optimizer() cannot be had with delay_all_reduce_named_params: those gradients come too late.\n"
                "Call optimizer.step() after backward."
            )
        stepping = BucketOptimizer(optimizer, reducer.row.parameters)
        reducer.set_transport(reducer.departures.transport)  # a rank alone begins to watch its gradients
        reducer.on_reduced.append(stepping.on_reduced)
        reducer.on_closed.append(stepping.on_closed)
        reducer.departures.eager = True

        def end() -> None:
            reducer.on_reduced.remove(stepping.on_reduced)
            reducer.on_closed.remove(stepping.on_closed)
            stepping.remove()

        return end
