"""The collectives of c10d that only move data, on a shared segment, for tensors on the CPU.

Every method returns a work handle at once. What it needs is checked before, so that wrong calls raise here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lockstep.comm.shm import kinds
from lockstep.comm.shm.calls import Call, Calls
from lockstep.comm.shm.staging import Staged, check_equal_sizes, rows
from lockstep.comm.shm.work import ShmWork
from lockstep.errors import ConfigurationError


class Movements:
    """What one rank calls on its group to exchange tensors."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._size, self._rank = calls, calls.member.size, calls.member.rank

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> ShmWork:
        """Overwrite the tensors with those of rank ``opts.rootRank``. Collective: every rank."""
        root, me = opts.rootRank, self._rank

        def action(call: Call) -> None:
            for tensor in tensors:
                with Staged([tensor], write_back=me != root) as (staged,):
                    sends = [staged if me == root and rank != root else None for rank in range(self._size)]
                    receives = [staged if me != root and rank == root else None for rank in range(self._size)]
                    self._calls.exchange_now(call, kinds.BROADCAST, sends, receives, root=root, same=True)

        return self._calls.submit("broadcast", action, tensors, opts)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> ShmWork:
        """Fill ``outputs[i]`` with every rank's ``inputs[i]``. Collective: every rank."""
        size = self._size
        for row in outputs:
            if len(row) != size:
                raise ConfigurationError(f"all_gather needs {size} output tensors, one for each rank; got {len(row)}.")

        def action(call: Call) -> None:
            for row, tensor in zip(outputs, inputs, strict=True):
                with Staged([tensor], write_back=False) as (source,), Staged(row) as staged:
                    self._calls.exchange_now(call, kinds.ALL_GATHER, [source] * size, staged, same=True)

        return self._calls.submit("all_gather", action, [tensor for row in outputs for tensor in row], opts)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> ShmWork:
        """Do as `allgather` does: here ``outputs`` has a row for each input, too."""
        return self.allgather(outputs, inputs, opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> ShmWork:
        """Fill each output with every rank's input, one after the other. Collective: every rank."""
        size = self._size
        for output, tensor in zip(outputs, inputs, strict=True):
            check_equal_sizes("all_gather_into_tensor", output, tensor, size)

        def action(call: Call) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                with Staged([tensor], write_back=False) as (source,), Staged([output]) as (whole,):
                    parts = list(rows(whole, [tensor.numel()] * size))
                    place = self._calls.buckets.find_row(whole, parts, source)
                    self._calls.exchange_now(call, kinds.ALL_GATHER, [source] * size, parts, same=True, place=place)

        return self._calls.submit("all_gather", action, outputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> ShmWork:
        """Fill ``output`` with every rank's ``tensor``. Collective: every rank."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> ShmWork:
        """Send ``inputs[r]`` to rank r and fill ``outputs[r]`` from it. Collective: every rank."""

        def action(call: Call) -> None:
            with Staged(inputs, write_back=False) as sends, Staged(outputs) as receives:
                self._calls.exchange_now(call, kinds.ALL_TO_ALL, sends, receives)

        return self._calls.submit("all_to_all", action, outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> ShmWork:
        """Send parts of ``tensor``, cut along its first dimension, and fill ``output``. Collective: every rank."""
        counts = [
            self._split("all_to_all_single", whole, splits)
            for whole, splits in ((tensor, input_splits), (output, output_splits))
        ]

        def action(call: Call) -> None:
            with Staged([tensor], write_back=False) as (source,), Staged([output]) as (target,):
                sends, receives = (list(rows(*pair)) for pair in zip((source, target), counts, strict=True))
                self._calls.exchange_now(call, kinds.ALL_TO_ALL, sends, receives)

        return self._calls.submit("all_to_all", action, [output], opts)

    def _split(self, name: str, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        size, length = self._size, tensor.shape[0] if tensor.dim() else 1
        if not splits and length % size == 0:
            return [tensor.numel() // size] * size
        if len(splits) != size or sum(splits) != length:
            raise ConfigurationError(
                f"{name}: the splits {list(splits)} do not cut {length} rows into {size} parts.\n"
                "Without splits, the number of rows must be a multiple of the number of ranks."
            )
        row = tensor.numel() // length if length else 0
        return [split * row for split in splits]

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> ShmWork:
        """Fill rank ``opts.rootRank``'s ``outputs[0]`` with every rank's input. Collective: every rank."""
        size, root, is_root = self._size, opts.rootRank, self._rank == opts.rootRank
        targets = list(outputs[0]) if is_root and outputs else []
        if is_root and len(targets) != size:
            raise ConfigurationError(f"gather needs {size} output tensors, one for each rank; got {len(targets)}.")

        def action(call: Call) -> None:
            with Staged(inputs, write_back=False) as (source,), Staged(targets) as staged:
                sends = [source if rank == root else None for rank in range(size)]
                self._calls.exchange_now(call, kinds.GATHER, sends, staged or [None] * size, root=root, same=True)

        return self._calls.submit("gather", action, targets, opts)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> ShmWork:
        """Fill ``outputs[0]`` with rank ``opts.rootRank``'s ``inputs[0][this rank]``. Collective: every rank."""
        size, root, is_root = self._size, opts.rootRank, self._rank == opts.rootRank
        sources = list(inputs[0]) if is_root and inputs else []
        if is_root and len(sources) != size:
            raise ConfigurationError(f"scatter needs {size} input tensors, one for each rank; got {len(sources)}.")

        def action(call: Call) -> None:
            with Staged(sources, write_back=False) as staged, Staged(outputs) as (target,):
                receives = [target if rank == root else None for rank in range(size)]
                self._calls.exchange_now(call, kinds.SCATTER, staged or [None] * size, receives, root=root)

        return self._calls.submit("scatter", action, outputs, opts)

    def barrier(self, opts: Any = None) -> ShmWork:
        """Wait for all ranks. Collective: every rank."""
        nobody: list[Tensor | None] = [None] * self._size
        return self._calls.submit(
            "barrier", lambda call: self._calls.exchange_now(call, kinds.BARRIER, nobody, nobody), [], opts
        )
