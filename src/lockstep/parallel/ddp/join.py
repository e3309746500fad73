"""``join()``: what a rank that has run out of data does while others still train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable
from typing_extensions import override

from lockstep.comm.collectives import Group, all_reduce
from lockstep.comm.join import Join, JoinHook
from lockstep.parallel.ddp.dynamo import keep_out_of_graphs
from lockstep.parallel.ddp.outputs import find_tensors
from lockstep.parallel.ddp.torch_names import TorchNames
from lockstep.parallel.follow import Follow


class UnevenInputs(TorchNames):
    """The part of ``DistributedDataParallel`` that lets ranks have different numbers of batches."""

    _divide_by_initial_world_size: bool
    _follow: Follow
    _authoritative_rank: int
    """After ``join()``: whose model all ranks hold (torch's name)."""

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Return a context in which ranks may have different numbers of batches.

        A rank that leaves its loop early takes part in the other ranks' steps with zero gradients, and takes over
        the final model. Collective: every rank enters it; each ``forward`` inside costs one small all-reduce more.
        `SyncBatchNorm` layers go on over the ranks that have data. With them each forward must be followed by one
        backward, unless it is under ``no_grad``.

        Args:
            divide_by_initial_world_size: Divide gradients by the number of all ranks, else by those with data.
            enable: False: do nothing.
            throw_on_early_termination: Raise RuntimeError on every rank when the first one runs out of data.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """Return what a rank without data does in each step; for ``Join`` with several participants."""
        self._joins_uneven_inputs = True
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return DDPJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the tensors that ``Join`` sends."""
        return self.device

    @property
    def join_process_group(self) -> Group:
        """The group that ``Join`` uses."""
        return self.process_group

    def _notify_joined_ranks(self) -> None:
        """Tell ranks without data that another step begins. Collective inside ``join()``, else nothing."""
        if not self._join_config.enable:
            return
        self._follow.require_closed()  # or else they still wait for that step's end
        work = Join.notify_join_context(self)
        if work is None:  # the first of several participants knows who is left, this one does not
            self._follow.open(has_batch=True)
            return
        work.wait()
        num_active = float(work.result()[0].item())
        num_ranks = float(self.process_group.size())
        self._reducer.departures.divisor = num_ranks if self._divide_by_initial_world_size else num_active
        if num_active < self.process_group.size():
            self._follow.open(has_batch=True)

    @contextmanager
    def some_without_batch(self, *, has_batch: bool) -> Iterator[None]:
        """Run one forward and its backward inside, in which some rank may be without a batch.

        A rank without one runs a forward that uses no layer of the module, and its backward only if that
        synchronises gradients. It takes part in the other ranks' `SyncBatchNorm` layers.

        Collective: every rank, if the module has such layers. Blocks until complete.

        Args:
            has_batch: Whether this rank has a batch.

        Raises:
            ConfigurationError: On every rank: a layer of torch's class, or over another group than the gradients.
        """
        self._follow.open(has_batch=has_batch)
        try:
            yield
            self._follow.end_backward()
        finally:
            self._follow.abandon()

    def _end_forward(self, output: Any) -> None:
        """End forward towards ranks without a batch; see that the end of its backward reaches them too."""
        self._follow.end_forward(backward_follows=torch.is_grad_enabled())
        holds = self._follow.must_hold_buckets(uneven=self._reducer.row.is_uneven)
        self._reducer.at_end = self._follow.end_backward if holds else None
        if self._follow.is_open and not self.require_backward_grad_sync:
            for tensor in find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_local_backward)

    @keep_out_of_graphs
    def _on_local_backward(self, _gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._follow.end_backward)  # a second time it does nothing


class DDPJoinHook(JoinHook):
    """Mirrors, in order, the collectives of the other ranks' forward and backward."""

    def __init__(self, ddp: UnevenInputs) -> None:
        self._ddp = ddp

    @override
    def main_hook(self) -> None:
        """Take part in one step with zero gradients. Collective."""
        ddp = self._ddp
        ddp._follow.open(has_batch=False)
        if ddp.will_sync_module_buffers():
            ddp._sync_buffers(after_forward=False, src=common_rank(ddp, candidate=False))
        ddp.require_forward_param_sync = announce_backward(ddp, will_sync=False)
        ddp._follow.end_forward(backward_follows=False)
        ddp._follow.end_backward()
        if ddp.require_forward_param_sync:
            ddp._reducer.shadow_step()

    @override
    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of a rank that trained to the end. Collective."""
        src = common_rank(self._ddp, candidate=is_last_joiner)
        self._ddp._authoritative_rank = src
        self._ddp._model_sync.broadcast(src=src, with_buffers=self._ddp.forward_sync_buffers)


def common_rank(ddp: UnevenInputs, *, candidate: bool) -> int:
    """Return the highest rank that calls this as a candidate. Collective: every rank. Blocks until complete."""
    rank = torch.tensor([ddp.process_group.rank() if candidate else -1], device=ddp.device)
    all_reduce(rank, group=ddp.process_group, op="max")
    assert rank.item() >= 0, "no rank is a candidate"
    return int(rank.item())


def announce_backward(ddp: UnevenInputs, *, will_sync: bool) -> bool:
    """Tell the ranks that have joined whether this step's backward synchronises; return whether any rank's does.

    Collective: every rank. Blocks until complete.
    """
    flag = torch.tensor([float(will_sync)], device=ddp.device)
    all_reduce(flag, group=ddp.process_group)
    return bool(flag.item() != 0)
