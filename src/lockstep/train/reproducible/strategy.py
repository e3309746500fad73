"""Train so that the bits do not depend on the number of devices; see docs/design/reproducible.md."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import final

import torch
from torch import nn
from typing_extensions import override

from lockstep.comm.collectives import Group
from lockstep.data.loader import MicroBatch
from lockstep.errors import ConfigurationError
from lockstep.parallel.tree.exchange import Exchange, LocalExchange, Placement, RankExchange
from lockstep.parallel.tree.ladder import Ladder
from lockstep.parallel.tree.layout import Layout, Row
from lockstep.train.own_work import tell_waits_apart
from lockstep.train.reproducible.buffers import ShardBuffers
from lockstep.train.reproducible.replicas import LocalReplicas, Shard, check_gradients
from lockstep.train.reproducible.tables import Table, own_entries, share_table
from lockstep.train.strategy import Pass, Strategy


@final
class Reproducible(Strategy):
    """Runs the virtual shards of this process, and sums what comes of all of them in one tree.

    Args:
        model: The bare model.
        replicas: Where shards are computed.
        placement: Of the shards over the replicas of this process, if there is no group.
        devices: Of the replicas.
        group: The ranks, with ``placement`` over them and one replica each; or None.

    Raises:
        ConfigurationError: The model has layers or buffers that this cannot sum.
    """

    sums_losses = True

    def __init__(
        self,
        model: nn.Module,
        replicas: LocalReplicas,
        placement: Placement,
        devices: Sequence[torch.device],
        group: Group | None,
    ) -> None:
        check_layers(model)
        self.group = group
        self._replicas, self._placement, self._device = replicas, placement, devices[0]
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._trained = [index for index, parameter in enumerate(model.parameters()) if parameter.requires_grad]
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        layout = Layout(self._parameters, multiple_of=1 if group is None else group.size())
        tree = placement.tree
        self._ladders = [Ladder(tree, layout, device) for device in devices]
        self._exchange: Exchange = LocalExchange(tree) if group is None else RankExchange(placement, group)
        self._mine = placement.ranges if group is None else placement.ranges[group.rank() : group.rank() + 1]
        self._over_ranks = placement if group is not None else Placement((tree.root,))
        self._buffers = ShardBuffers(model, range(self._mine[0].start, self._mine[-1].stop))
        self._given_away: list[Row] = []

    @override
    def run(self, micro: MicroBatch, how: Pass) -> None:
        """Run forward and backward of this process's virtual shards; leave the sum of all shards' gradients.

        Collective if there is a group and ``how.sync``: every rank, with or without samples.
        """
        shards = {
            leaf: Shard(leaf, batch, size)
            for leaf, batch, size in zip(micro.numbers, micro.batches, micro.sizes, strict=True)
        }
        for parameter in self._parameters:
            parameter.grad = None  # also of those that the optimizer does not have
        self._ladders[0].give_back(self._given_away)
        self._given_away = []
        table = self._compute(shards, how)
        how.watch.begins("communication")
        if not how.sync:
            for ladder in self._ladders:
                ladder.give_back(list(ladder.take().values()))
            how.after_forward([table.loss(self._placement)])
            return
        tell_waits_apart(how.watch)
        if self.group is not None:
            table = share_table(table, self._placement, self.group, self._device)
        how.after_forward([table.loss(self._placement)])
        self._buffers.finish(table.changed, table.sizes, self._over_ranks, self._exchange, self.group)
        self._deliver(table.used)
        how.watch.lap("communication_s")
        how.watch.begins("data_wait")

    def _compute(self, shards: dict[int, Shard], how: Pass) -> Table:
        """Run the shards, round after round: one on each replica at a time."""
        parts = {}
        used = [False] * len(self._parameters)
        nothing = [None] * len(self._parameters)
        self._buffers.begin()
        for leaves in zip_longest(*self._mine):
            current = {replica: shards[leaf] for replica, leaf in enumerate(leaves) if leaf in shards}
            results = self._replicas.compute(current, how, self._buffers) if current else {}
            for replica, leaf in enumerate(leaves):
                if leaf is None:
                    continue
                if replica not in results:
                    self._ladders[replica].push(leaf, nothing)
                    continue
                result = results[replica]
                gradients = [result.gradients[index] for index in self._trained]
                check_gradients(self._names, gradients)
                used = [was or gradient is not None for was, gradient in zip(used, gradients, strict=True)]
                self._ladders[replica].push(leaf, gradients)
                parts[leaf] = result.part
            how.watch.lap("backward_s")
        entries = own_entries({leaf: shard.num_samples for leaf, shard in shards.items()}, parts, self._device)
        return Table(entries, used, self._buffers.changed())

    def _deliver(self, used: Sequence[bool]) -> None:
        """Sum the gradients over replicas and ranks for the parameters. Collective if there is a group."""
        taken = [ladder.take() for ladder in self._ladders]
        total = self._exchange.sum(taken)
        for parameter, view, is_used in zip(self._parameters, total.views, used, strict=True):
            parameter.grad = view if is_used else None
        for ladder, rows in zip(self._ladders, taken, strict=True):
            ladder.give_back([row for row in rows.values() if row is not total])
        self._given_away = [total]


def check_layers(model: nn.Module) -> None:
    """Check that no layer looks beyond its own virtual shard.

    Raises:
        ConfigurationError: One does; names it.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):  # ours is one of these
            raise ConfigurationError(
                f"The layer {name} is a SyncBatchNorm, which needs all samples of a batch at once.\n"
                "With reproducible, virtual shards run one after the other. Use BatchNorm, which then normalises over "
                "a virtual shard on any number of devices, or leave reproducible out."
            )
