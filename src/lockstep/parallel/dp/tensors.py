"""The tensors that replicas have in place of the module's parameters.

[Note: which tensor a replica sees]

A *weight* is a parameter, or a buffer that requires a gradient. Per replica there are two ways to stand in for it:

- *connected*: autograd leads from the replica's weight to the module's, so that ``backward`` of an output fills the
  ``grad`` of the module. On the CPU it is the module's own tensor. On CUDA it is an output of ``_Fan``, which in its
  backward sums the replicas' gradients in one fixed order. Used by ``DataParallel.forward``.
- *leaf*: a tensor with a ``grad`` of its own, so that every replica can run its own backward in its own thread. Used by
  ``DataParallel.backward``, which sums the gradients afterwards. Leaves are made once and then only pointed elsewhere.

The values: on the device of the module (which is the first replica's) every replica's weight lies over the memory of
the module's weight, so there is nothing to copy and nothing that could be out of date. Other devices get coalesced
copies.

Those copies are made anew whenever the replicas are refreshed, unless the caller has promised that the weights do not
change (``hold``). Finding out is no option: a write through ``weight.data``, NumPy or a foreign kernel moves neither
the version counter nor the pointer of a weight, and WGAN clipping and weight averages are usually written just so.
Under ``hold`` the counters and pointers are still looked at, since that is free.
"""

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.parallel.dp.flat import FixedMemory, alias, coalesced_copies, is_plain, is_remote
from lockstep.parallel.dp.gradients import sum_in_tree
from lockstep.parallel.dp.scattered import sum_over_devices
from lockstep.parallel.dp.transport import Transport


class ReplicaTensors:
    """Stand-ins for the weights of a module, for replicas on ``devices``; the weights are on ``devices[0]``.

    Args:
        devices: One a replica.
        transport: Between them.

    Attributes:
        hold: The caller's promise that the weights do not change until it is False again.
        fixed: Whether copies are to lie where they lay the last time.
    """

    def __init__(self, devices: Sequence[torch.device], transport: Transport) -> None:
        self._devices, self._transport = tuple(devices), transport
        self._leaves: list[list[Tensor | None]] = [[] for _ in devices]
        self._held_copies: dict[torch.device, list[Tensor]] = {}
        self._held_stamp: list[tuple[int, int]] = []
        self.hold = False
        self.fixed = False
        self._fixed: dict[torch.device, FixedMemory] = {}

    def connected(self, weights: Sequence[Tensor], num_replicas: int) -> list[Sequence[Tensor]]:
        """Return the connected stand-ins of each of the first ``num_replicas`` replicas, ordered as ``weights``."""
        values = self._values(weights, num_replicas)
        if all(row is weights for row in values) and shares_tensors(self._devices[0]):
            return values
        trainable = [weight.requires_grad and torch.is_grad_enabled() for weight in weights]
        outputs: Iterator[Tensor] = iter(())
        if any(trainable):
            chosen = [list(compress(row, trainable)) for row in values]
            devices = self._devices[:num_replicas]
            outputs = iter(_Fan.apply(devices, self._transport, chosen, *compress(weights, trainable)))  # type: ignore[no-untyped-call]
        return [
            [
                next(outputs) if fans else value if replica == 0 else alias(value)
                for fans, value in zip(trainable, row, strict=True)
            ]
            for replica, row in enumerate(values)
        ]

    def leaves(self, weights: Sequence[Tensor], num_replicas: int) -> list[Sequence[Tensor]]:
        """Return the leaves of each of the first ``num_replicas`` replicas; a frozen weight needs none."""
        rows: list[Sequence[Tensor]] = []
        with torch.inference_mode(False):
            for replica, values in enumerate(self._values(weights, num_replicas)):
                known = self._leaves[replica] if len(self._leaves[replica]) == len(weights) else [None] * len(weights)
                row = [_leaf(*three) for three in zip(known, weights, values, strict=True)]
                self._leaves[replica] = [
                    leaf if weight.requires_grad else None for leaf, weight in zip(row, weights, strict=True)
                ]
                rows.append(row)
        return rows

    def take_gradients(self, replica: int) -> list[Tensor | None]:
        """Return the gradients of the leaves of ``replica``, in the order of the weights, and forget them."""
        gradients: list[Tensor | None] = []
        for leaf in self._leaves[replica]:
            gradients.append(None if leaf is None else leaf.grad)
            if leaf is not None:
                leaf.grad = None
        return gradients

    def _values(self, weights: Sequence[Tensor], num_replicas: int) -> list[Sequence[Tensor]]:
        """Return per replica the tensors that hold the values: the weights themselves, or copies on its device."""
        source = self._devices[0]
        devices = self._devices[:num_replicas]
        remote = list(dict.fromkeys(device for device in devices if is_remote(device, source)))
        copies = self._copies(weights, remote) if remote else {}
        if self.fixed:
            copies = {
                device: self._fixed.setdefault(device, FixedMemory()).renew(row) for device, row in copies.items()
            }
        return [copies[device] if device in remote else weights for device in devices]

    def _copies(self, weights: Sequence[Tensor], devices: list[torch.device]) -> dict[torch.device, list[Tensor]]:
        if not self.hold:
            self._held_copies = {}
            return self._sent(weights, devices)
        stamp = [(weight.data_ptr(), weight._version) for weight in weights]
        if stamp != self._held_stamp or not self._held_copies.keys() >= set(devices):
            self._held_copies = self._sent(weights, devices)
            self._held_stamp = stamp
        return self._held_copies

    def _sent(self, weights: Sequence[Tensor], devices: list[torch.device]) -> dict[torch.device, list[Tensor]]:
        return dict(zip(devices, coalesced_copies(weights, devices, self._transport.broadcast), strict=True))


class _Fan(torch.autograd.Function):
    """From each weight to its stand-in in every replica; backward sums the gradients of the stand-ins.

    Takes the devices of the replicas, the transport between them, ``values`` (per replica the tensors that hold the
    values) and the weights; returns the stand-ins, those of the first replica first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        devices: Sequence[torch.device],
        transport: Transport,
        values: list[list[Tensor]],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.num_weights = len(weights)
        ctx.devices, ctx.transport = devices, transport
        return tuple(alias(value) for row in values for value in row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        count = ctx.num_weights
        rows = [list(gradients[start : start + count]) for start in range(0, len(gradients), count)]
        if torch.is_grad_enabled():  # create_graph: the sum must be differentiable
            return (None, None, None, *(_plain_sum(parts, ctx.devices[0]) for parts in zip(*rows, strict=True)))
        if len(set(ctx.devices)) > 1:
            return (None, None, None, *sum_over_devices(rows, ctx.devices, ctx.transport, owned=False))
        return (None, None, None, *sum_in_tree(rows, ctx.devices, owned=False))


def shares_tensors(device: torch.device) -> bool:
    """Whether replicas on ``device`` may use the very tensors of a module there.

    Not on CUDA, where recurrent layers move their weights to other memory, each replica in its own thread, and where
    the backward of the replicas runs in the threads of their devices, so that the order of sums would vary.
    """
    return device.type == "cpu"


def _leaf(known: Tensor | None, weight: Tensor, value: Tensor) -> Tensor:
    """Return a leaf over the memory of ``value``: ``known`` if there is one, pointed there if it was elsewhere."""
    if not weight.requires_grad:
        return value
    if known is None:
        leaf = nn.Parameter(value.detach()) if isinstance(weight, nn.Parameter) else value.detach().requires_grad_()
    else:
        leaf = known
        if not is_plain(value) or not leaf.is_set_to(value) or leaf.dtype != value.dtype:
            leaf.data = value.detach()
    if attributes := vars(weight):
        vars(leaf).update(attributes)
    return leaf


def _plain_sum(parts: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            moved = part.to(device)
            total = moved if total is None else total + moved
    return total
