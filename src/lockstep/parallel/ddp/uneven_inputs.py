"""Uneven inputs: how a rank without more data takes part while others still train. Design: docs/design/ddp.md."""

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lockstep.base.torch_internals import queue_callback
from lockstep.comm.collectives import Group, JoinHook, all_gather
from lockstep.errors import CollectiveError, ConfigurationError, LockstepError
from lockstep.parallel.compile import keep_out_of_graphs
from lockstep.parallel.ddp.weighting import Weights
from lockstep.parallel.sync_batchnorm import Event, LayerPlace, SyncBatchNorm, TorchSyncBatchNorm, register_engine

_CONVERT = "Convert the model: model = lockstep.SyncBatchNorm.convert_sync_batchnorm(model)."


class _Phase(Enum):
    CLOSED = "closed"  # an ordinary step: no announcements
    FORWARD = "forward"
    BACKWARD = "backward"  # its forward has ended


class SyncLayerShadow:
    """The synchronised layers of ``module``, and how ranks without a batch take part in them.

    [Note: shadowing]
    A rank without a batch takes part in the collectives of the others with zeros. A `SyncBatchNorm` layer exchanges
    statistics during forward and backward. A rank without a batch runs neither, and cannot know which layers the others
    run, how often, and when they finish. So in a step in which some rank may be without a batch, the other ranks
    announce each exchange beforehand, and announce the end of forward and of backward: one small all-gather each. The
    rank without a batch takes part in each exchange with zeros, and updates its running statistics as the others do. In
    such a step no bucket is launched before the end of backward, because it could be matched with an exchange on
    another rank. All collectives run in one group, in the same order on every rank. Design: docs/design/ddp.md.

    Args:
        module: The model.
        group: The ranks that train it together.
        device: A device whose tensors can be exchanged.
        weights: Is notified that there are such layers, which use the weights of this rank's micro-batches.

    Attributes:
        is_needed: Whether there are such layers, and other ranks.
        step: The number of the open step; layers keep it from forward to backward.
        counts: Whether the samples of this rank's forward count; else they are those of another rank.
    """

    def __init__(self, module: nn.Module, *, group: Group, device: torch.device, weights: Weights) -> None:
        self._group, self._device, self._weights = group, device, weights
        layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, TorchSyncBatchNorm)]
        self._names = [name for name, _ in layers]
        self._layers: list[nn.Module] = [layer for _, layer in layers]
        self.is_needed = bool(layers) and group.size() > 1
        self.step = 0
        self.counts = True
        self._phase = _Phase.CLOSED
        self._has_batch = True
        for number, (name, layer) in enumerate(layers):
            if isinstance(layer, SyncBatchNorm):
                layer.place, layer.alone = LayerPlace(number, f"SyncBatchNorm {name}"), False
            elif self.is_needed:  # torch's layer does not support weights
                weights.refusal = (
                    f"{name} is a torch.nn.SyncBatchNorm, which mixes the ranks' gradients regardless of weights.\n"
                    f"{_CONVERT}"
                )
        weights.shares_batch = self.is_needed
        register_engine(self, self._layers)

    @property
    def is_open(self) -> bool:
        """Whether exchanges are announced."""
        return self._phase is not _Phase.CLOSED

    @property
    def unit(self) -> float:
        """The factor of this rank's gradients after backward, relative to those of the other ranks."""
        window = self._weights.window
        return 1.0 if window is None else window.unit_of_backward

    def must_delay_buckets(self, *, uneven: bool) -> bool:
        """Return whether buckets must wait for the end of backward, so that they do not mix with layers' exchanges.

        Args:
            uneven: Whether ranks used different parameters in the first step.
        """
        # Also outside an open step: a rank that does not use some parameter completes that bucket late. Then the order
        # of buckets and exchanges differs from other ranks, and this would be detected too late. On the CPU, where
        # overlap gains little, buckets of such a model always wait.
        return self.is_open or (self.is_needed and (uneven or self._device.type == "cpu"))

    def open(self, *, has_batch: bool) -> None:
        """Begin a step in which some rank may be without a batch. Every rank calls it; nothing is sent.

        Raises:
            ConfigurationError: On every rank: a layer is not supported here; names it.
            LockstepError: As `require_closed`.
        """
        if not self.is_needed:
            return
        self.require_closed()
        for name, layer in zip(self._names, self._layers, strict=True):
            if not isinstance(layer, SyncBatchNorm):
                raise ConfigurationError(
                    f"{name} is a torch.nn.SyncBatchNorm, which would wait forever for ranks without a batch.\n"
                    f"{_CONVERT}"
                )
            if layer.group_in_use() not in (self._group, None):
                raise ConfigurationError(
                    f"{name} uses another process group than the gradients, so ranks without a batch cannot "
                    "take part in it.\nGive the layer and the wrapper the same process_group, or leave incomplete "
                    "batches out (drop_last)."
                )
        self._phase, self._has_batch = _Phase.FORWARD, has_batch
        self.step += 1

    def require_closed(self) -> None:
        """Make sure that the last such step is over.

        Raises:
            LockstepError: Its backward was not run.
        """
        if self.is_open:
            self.abandon()
            raise LockstepError(
                f"Rank {self._group.rank()}: a forward began before the backward of the last one was run, while other "
                "ranks have no batch.\nThey can follow the SyncBatchNorm layers of one forward and its backward only: "
                "run backward after each forward, or skip steps on all ranks."
            )

    def abandon(self) -> None:
        """Discard a step that an exception interrupted."""
        self._phase = _Phase.CLOSED

    # --- what ranks with a batch do, and what ranks without one do at the same time ----------------------------------

    def announce(self, event: Event, layer: nn.Module, step: int) -> None:
        """Announce that ``layer`` is about to exchange something. Collective: every rank. Blocks until complete.

        Raises:
            CollectiveError: Not all ranks do the same, or one did not take part in time.
            LockstepError: The step of that layer's forward is over.
        """
        number = self._layers.index(layer)
        if not self.is_open or step != self.step:
            raise LockstepError(
                f"Rank {self._group.rank()}: a second backward through SyncBatchNorm {self._names[number]}, or one "
                "after another forward, while other ranks have no batch.\nThey can follow the SyncBatchNorm layers of "
                "one forward and one backward only."
            )
        self._exchange_events(event, number)

    def end_forward(self, *, backward_follows: bool) -> None:
        """Announce the end of forward; or, without a batch, take part in it until the others announce its end.

        Collective in an open step: every rank. Blocks until complete.
        """
        if self._phase is _Phase.FORWARD:
            # A rank without a batch learns here whether a backward follows, whatever its own argument is.
            end = Event.END_OF_FORWARD if backward_follows else Event.END
            end = self._exchange_events(end, 0)[0] if self._has_batch else self._shadow()
            self._phase = _Phase.CLOSED if end is Event.END else _Phase.BACKWARD

    @keep_out_of_graphs
    def end_backward(self) -> None:
        """Announce the end of backward; or, without a batch, take part in it until the others announce its end.

        Collective in a step that is open after its forward: every rank. Blocks until complete.
        """
        if self._phase is _Phase.BACKWARD:
            if self._has_batch:
                self._exchange_events(Event.END, 0)
            else:
                self._shadow()
            self._phase = _Phase.CLOSED

    @keep_out_of_graphs
    def on_local_backward(self, _functions: Any, _gradient: Tensor) -> None:
        """Make backward end like a synchronised one; a hook of the output of forward."""
        queue_callback(self.end_backward)  # a second time it does nothing

    def _shadow(self) -> Event:
        """Take part in the others' exchanges until they announce an end; return which end it is."""
        while True:
            event, number = self._exchange_events(Event.NOTHING, 0)
            if event in (Event.END, Event.END_OF_FORWARD):
                return event
            if event is Event.NOTHING:  # no rank has a batch
                return Event.END
            layer = self._layers[number]
            assert isinstance(layer, SyncBatchNorm)
            if event is Event.BACKWARD:
                layer.backward_without_input(self._group, self._device)
            else:
                layer.forward_without_input(self._group, self._device, tracked=event is Event.TRACKED_FORWARD)

    def _exchange_events(self, event: Event, number: int) -> tuple[Event, int]:
        """Return the next event of the ranks with a batch. Collective: every rank. Blocks until complete."""
        # Reading the rows makes the host wait for the device, but only in steps where some rank may have no batch.
        own_event = torch.tensor([event, number], device=self._device)
        try:
            rows = all_gather(own_event, group=self._group).tolist()
        except CollectiveError as error:
            raise CollectiveError(
                f"Rank {self._group.rank()}: waiting for what the SyncBatchNorm layers of the other ranks do next "
                f"failed: {error}\nAnother rank ended, or ran no backward after its forward while some ranks have no "
                "batch; look at the first error of the job."
            ) from error
        active = [rank for rank, (event, _) in enumerate(rows) if event != Event.NOTHING]
        first = active[0] if active else 0
        for rank in active:
            if rows[rank] != rows[first]:
                message = (
                    f"The ranks run different code: rank {first} comes to {self._describe(*rows[first])}, "
                    f"rank {rank} to {self._describe(*rows[rank])}.\n"
                    "Every rank with a batch must run the same SyncBatchNorm layers in the same order."
                )
                self.abandon()
                raise CollectiveError(message)
        event, number = rows[first]
        return Event(event), number

    def _describe(self, event: int, number: int) -> str:
        if event == Event.END_OF_FORWARD:
            return "the end of a forward that a backward follows"
        if event == Event.END:
            return "the end of backward" if self._phase is _Phase.BACKWARD else "the end of a forward without gradients"
        return f"the {'backward' if event == Event.BACKWARD else 'forward'} of SyncBatchNorm {self._names[number]}"


class StepJoinHook(JoinHook):
    """Lets a rank without more data take part in the steps of the others; for ``Join``.

    Args:
        step: Mirrors, in order, the collectives of one step of the others.
        finish: Called when no rank has data any more, with whether this rank was among the last that had some.
    """

    def __init__(self, step: Callable[[], object], finish: Callable[[bool], None] | None = None) -> None:
        self._step, self._finish = step, finish

    @override
    def main_hook(self) -> None:
        """Take part in one step. Collective."""
        self._step()

    @override
    def post_hook(self, is_last_joiner: bool) -> None:
        """Take part in the end. Collective."""
        if self._finish is not None:
            self._finish(is_last_joiner)
