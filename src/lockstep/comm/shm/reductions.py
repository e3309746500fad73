"""The collectives of c10d that compute, on a shared segment, for tensors on the CPU.

Every method returns a work handle at once. What it needs is checked before, so that wrong calls raise here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.shm import kinds
from lockstep.comm.shm.buckets import NOWHERE, Place
from lockstep.comm.shm.calls import Call, Calls
from lockstep.comm.shm.sparse import reduce_sparse
from lockstep.comm.shm.staging import Staged, check_equal_sizes, pointers, rows
from lockstep.comm.shm.work import ENDED, ShmWork
from lockstep.errors import ConfigurationError


class Reductions:
    """What one rank calls on its group to reduce."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._size = calls, calls.member.size

    def all_reduce_at_once(self, tensor: Tensor, opts: Any) -> ShmWork | None:
        """Reduce in this thread, if nothing is queued and the tensor needs no copy; else return ``None``.

        Does the same as `allreduce` with less Python around it: at few bytes that is most of the time.
        """
        dtype = kinds.NUMBERS.get(tensor.dtype)
        if dtype is None or not tensor.is_contiguous() or tensor.is_neg():
            return None
        number = kinds.reduction_of(kinds.operation_of(opts), tensor.dtype)
        calls = self._calls
        if not calls.queue.take_turn():
            return None
        try:
            place = calls.buckets.find(tensor)
            function = calls.member.native.lockstep_all_reduce
            arguments = (tensor.data_ptr(), tensor.numel(), dtype, number, -1, *place)
            calls.member.call("all_reduce", calls.timeout_of(opts), function, *arguments)
        finally:
            calls.queue.end_turn()
        return ENDED

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> ShmWork:
        """Replace each tensor by its reduction over all ranks. Collective: every rank."""
        op = kinds.operation_of(opts)
        if any(tensor.layout != torch.strided for tensor in tensors):
            return self._calls.submit(
                "all_reduce", lambda call: reduce_sparse(self._calls, call, tensors, op), tensors, opts
            )
        numbers = [kinds.reduction_of(op, tensor.dtype) for tensor in tensors]

        def action(call: Call) -> None:
            for tensor, number in zip(tensors, numbers, strict=True):
                self._calls.reduce_now(call, tensor, number, root=-1)

        return self._calls.submit("all_reduce", action, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> ShmWork:
        """Replace rank ``opts.rootRank``'s tensors by the reduction over all ranks. Collective: every rank."""
        op = kinds.operation_of(opts)
        numbers = [kinds.reduction_of(op, tensor.dtype) for tensor in tensors]

        def action(call: Call) -> None:
            for tensor, number in zip(tensors, numbers, strict=True):
                self._calls.reduce_now(call, tensor, number, root=opts.rootRank)

        return self._calls.submit("reduce", action, tensors, opts)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> ShmWork:
        """Fill ``outputs[i]`` with the reduction of every rank's ``inputs[i][this rank]``. Collective: every rank."""
        op = kinds.operation_of(opts)
        numbers = [kinds.reduction_of(op, output.dtype) for output in outputs]
        for output, row in zip(outputs, inputs, strict=True):
            if len(row) != self._size:
                raise ConfigurationError(
                    f"reduce_scatter needs {self._size} input tensors, one for each rank; got {len(row)}."
                )
            own = row[self._calls.member.rank]
            if own.numel() != output.numel() or any(part.dtype != output.dtype for part in row):
                raise ConfigurationError(
                    "reduce_scatter: the output must have the size and dtype of this rank's input."
                )

        def action(call: Call) -> None:
            for output, row, number in zip(outputs, inputs, numbers, strict=True):
                with Staged(row, write_back=False) as staged, Staged([output]) as (target,):
                    self._reduce_scatter_now(call, target, staged, number, NOWHERE)

        return self._calls.submit("reduce_scatter", action, outputs, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> ShmWork:
        """Fill each output with this rank's part of the reduced input. Collective: every rank."""
        op = kinds.operation_of(opts)
        numbers = [kinds.reduction_of(op, output.dtype) for output in outputs]
        for output, tensor in zip(outputs, inputs, strict=True):
            check_equal_sizes("reduce_scatter_tensor", tensor, output, self._size)

        def action(call: Call) -> None:
            for output, tensor, number in zip(outputs, inputs, numbers, strict=True):
                with Staged([tensor], write_back=False) as (whole,), Staged([output]) as (target,):
                    parts = list(rows(whole, [output.numel()] * self._size))
                    place = self._calls.buckets.find_row(whole, parts, target)
                    self._reduce_scatter_now(call, target, parts, number, place)

        return self._calls.submit("reduce_scatter", action, outputs, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> ShmWork:
        """Fill ``output`` with this rank's part of the reduced ``tensor``. Collective: every rank."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def _reduce_scatter_now(
        self, call: Call, output: Tensor, parts: Sequence[Tensor], number: int, place: Place
    ) -> None:
        inputs = [kinds.as_numbers(part) for part in parts]
        target = kinds.as_numbers(output)
        counts = (ctypes.c_uint64 * len(inputs))(*(part.numel() for part in inputs))
        native = self._calls.member.native
        dtype = kinds.dtype_number(target.dtype)
        call(native.lockstep_reduce_scatter, pointers(inputs), counts, target.data_ptr(), dtype, number, *place)
