"""``SyncBatchNorm``: batch normalisation over the samples of all ranks. Design: docs/design/batchnorm.md."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lockstep.comm.collectives import Group, default_group, is_initialized
from lockstep.parallel.batchnorm.conversion import convert
from lockstep.parallel.batchnorm.engine import Event
from lockstep.parallel.batchnorm.exchange import Exchange, Place
from lockstep.parallel.batchnorm.function import Normalise
from lockstep.parallel.batchnorm.kernels import dense
from lockstep.parallel.batchnorm.statistics import Statistics, measure, merge, move_towards, nothing, num_values
from lockstep.parallel.ddp.dynamo import keep_out_of_graphs

TorchSyncBatchNorm = nn.SyncBatchNorm
"""torch's own class, also after ``adopt()`` has put ours in its place."""


class SyncBatchNorm(TorchSyncBatchNorm):
    """Batch normalisation in which all ranks normalise with the statistics of the whole global batch.

    A drop-in for ``torch.nn.SyncBatchNorm``, of which it is a subclass: same arguments, attributes and ``state_dict``
    keys. It runs on the CPU too, and is exact for ranks with different numbers of samples, or none: outputs,
    gradients of the input, and running statistics are those of one process that has the whole batch. So must be
    the losses: each rank's is its part of one sum over the batch, or all are means and weighted by their counts.

    The gradients of weight and bias are this rank's part; their sum over the ranks, which `DistributedDataParallel`
    makes, is the whole. Differentiable once.

    Collective: ``forward`` in training mode, and its backward if the input requires a gradient: every rank. Both block
    until complete, at most as long as the group's time-out. In evaluation mode, and in a process without others, it
    is ``torch.nn.BatchNorm*d``.

    Args:
        num_features: C of inputs of shape (N, C, ...), which have 2 to 5 dimensions and any floating dtype.
        eps: Added to the variance.
        momentum: How much of the running statistics a batch replaces; None: their plain mean over the batches.
        affine: Whether there are weight and bias.
        track_running_stats: Whether there are running statistics; else batches are used in evaluation mode too.
        process_group: The ranks that take part. Default: all.
        device, dtype: Of parameters and buffers.
        bias: Whether there is a bias, if there is a weight; in torch versions whose layer has this argument.

    Raises:
        ValueError: The input's shape is wrong, or each channel has only one value on all ranks together.
        CollectiveError: Another rank ended, did not take part in time, or runs another layer.
    """

    place = Place()
    """Where this layer is in its model, the same on every rank; see `Exchange`."""

    alone = False
    """Whether this process normalises on its own although it is in a process group: others do not train its model."""

    @override
    @keep_out_of_graphs
    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``, of shape (N, C, ...). Collective in training mode: every rank."""
        group = self.group_in_use()
        if group is None or not self.training:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        if input.size(1) != self.num_features:
            raise ValueError(f"expected input with {self.num_features} channels (got {tuple(input.shape)})")
        input = dense(input)
        exchange = Exchange(self, self.place, group)
        exchange.announce(Event.TRACKED_FORWARD if self._tracks else Event.FORWARD)
        with torch.no_grad():
            batch = self._take_part(exchange, measure(input), num_values(input), tracked=self._tracks)
        output: Tensor = Normalise.apply(input, self.weight, self.bias, batch, self.eps, exchange)  # type: ignore[no-untyped-call]
        return output

    def group_in_use(self) -> Group | None:
        """Return the ranks that take part, or None if there are no others."""
        if self.alone or not is_initialized():
            return None
        group: Group = default_group() if self.process_group is None else self.process_group
        return group if group.size() > 1 else None

    @torch.no_grad()
    def forward_without_input(self, group: Group, device: torch.device, *, tracked: bool) -> None:
        """Take part in the other ranks' forward, without a batch of its own. Collective: every rank.

        Args:
            group: The ranks that take part.
            device: Where tensors can be exchanged.
            tracked: Whether the others move their running statistics.
        """
        self._take_part(Exchange(self, self.place, group), nothing(self.num_features, device), 0, tracked=tracked)

    @torch.no_grad()
    def backward_without_input(self, group: Group, device: torch.device) -> None:
        """Take part in the other ranks' backward. Collective: every rank."""
        zeros = torch.zeros(2 * self.num_features, dtype=torch.float64, device=device)
        Exchange(self, self.place, group).sum(zeros)

    @property
    def _tracks(self) -> bool:
        return self.track_running_stats and self.running_mean is not None

    def _take_part(self, exchange: Exchange, mine: Tensor, num_here: int, *, tracked: bool) -> Statistics:
        """Return the statistics of the whole batch, after moving the running ones. Collective: every rank."""
        exchange.compare_channels(self.num_features, mine.device)
        batch = merge(exchange.gather(mine))
        if num_here <= 1:  # only then can there be so few: reading the number makes the processor wait for a GPU
            num_in_all = int(batch.total)
            if num_in_all == 1:
                raise ValueError(
                    "Expected more than 1 value per channel when training, got 1 on all ranks together.\n"
                    "Leave such a batch out (drop_last), or make it larger."
                )
            tracked = tracked and num_in_all > 0
        if tracked:
            assert self.running_mean is not None and self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            factor = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            move_towards(self.running_mean, batch.mean, factor)
            move_towards(self.running_var, batch.unbiased_var, factor)
        return batch

    @override
    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Group | None = None) -> nn.Module:
        """Replace every batch norm in ``module`` by a layer of this class, which takes over its tensors.

        That is ``BatchNorm1d`` to ``3d``, their lazy variants once they have seen a batch, and torch's
        ``SyncBatchNorm``. Convert before the optimizer is made, and before the model is wrapped.

        Args:
            module: A model, which is changed, or a batch norm, in whose place a new layer is returned.
            process_group: The ranks that take part. Default: all.

        Returns:
            The model, or the new layer.

        Raises:
            ConfigurationError: A lazy layer has not seen its first batch.
        """
        return convert(module, cls, process_group)
