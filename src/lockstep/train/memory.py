"""``micro_batch="auto"``: a rank that runs out of memory has all ranks do the step again, in smaller micro-batches.

[Note: out of memory]
The rank notes the error, lets go of what it had computed, and takes part in the collectives of the step as if nothing
had happened, or else the others would wait for it. How many ranks ran out of memory travels with the sums of the
losses, which so can start only when the last backward is over, and are looked at before the update: on CUDA the host
waits for them in each step. If there was one, all ranks throw the gradients away, put the buffers back, cut their share
of the global batch into smaller pieces, and read the step's samples again. Order, random numbers and the global batch
depend on the position only, so the step, and all that follow, are those of a run that was started with these pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from lockstep.data.order import BatchSplit
from lockstep.errors import ConfigurationError, OutOfMemory
from lockstep.telemetry.resources import says_out_of_memory
from lockstep.train.buffers import BufferSnapshot
from lockstep.train.plan import Plan
from lockstep.train.settings import Settings
from lockstep.train.strategies import Strategy


class MemoryGuard:
    """Takes note of an out-of-memory error on this rank, and helps all ranks to a second try.

    Args:
        strategy: Who computes.
        model: The bare model.
        samples: The data set.
        devices: Of this process.
        gather: Returns every rank's value, see `Loop`. Collective.

    Raises:
        ConfigurationError: The model has layers whose forward exchanges data between the ranks, or the data set is a
            stream.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        samples: Dataset[Any],
        devices: Sequence[torch.device],
        gather: Callable[[Any], list[Any]],
    ) -> None:
        if isinstance(samples, IterableDataset):
            raise ConfigurationError(
                "micro_batch=auto reads the samples of a step again, which a stream cannot give.\n"
                "Set accumulate by hand."
            )
        if strategy.group is not None and any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()):
            raise ConfigurationError(
                "micro_batch=auto cannot be had with SyncBatchNorm, whose layers exchange data in forward: a rank that "
                "runs out of memory there would keep the others waiting.\nUse BatchNorm, or set accumulate by hand."
            )
        self._half_done, self._devices, self._gather = strategy.half_done(), devices, gather
        self._buffers = BufferSnapshot(model)
        self.error: str | None = None

    def begin_step(self) -> None:
        """Begin a step, or begin it again: keep what a forward may change. Does not block."""
        self.error = None
        self._buffers.keep()

    def note(self, error: BaseException) -> bool:
        """Take note of an error of this rank's forward or backward; return whether it is of the kind."""
        if not is_out_of_memory(error):
            return False
        self.error = (str(error).splitlines() or [type(error).__name__])[0]
        return True

    def take_part(self, *, sync: bool) -> None:
        """Let go of memory, and take part in the exchange at the end of a micro-batch that this rank cannot run.

        Collective if ``sync`` and there is a group: every rank.
        """
        if self._devices[0].type == "cuda":
            torch.cuda.empty_cache()
        if sync and self._half_done is not None:
            self._half_done.finish()

    def shrink(self, plan: Plan, step: int, remarks: list[str]) -> BatchSplit:
        """Return into what smaller micro-batches all ranks cut their shares from now on; add a line that says so.

        Collective: every rank.

        Raises:
            OutOfMemory: On every rank: they cannot be smaller; has each rank's memory.
        """
        errors = self._gather(self.error)
        self._buffers.restore()
        self.error = None
        rank = next(rank for rank, error in enumerate(errors) if error is not None)
        accumulate, before = next_accumulate(plan), plan.division.accumulate
        who = f"Rank {rank} ran out of memory in step {step + 1}"
        if accumulate is None:
            memory = self._gather(memory_of(self._devices))
            figures = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(memory))
            raise OutOfMemory(
                f"{who}, though its micro-batches cannot be smaller: {errors[rank]}\n{figures}\n"
                "Use a smaller model, shorter samples, more devices, or a strategy that divides the state (fsdp)."
            )
        remarks.append(f"{who}: from here on {accumulate} micro-batches instead of {before}, at the same global batch")
        return replace(plan.division, accumulate=accumulate)


def guard_memory(
    settings: Settings,
    strategy: Strategy,
    model: nn.Module,
    samples: Dataset[Any],
    devices: Sequence[torch.device],
    gather: Callable[[Any], list[Any]],
) -> MemoryGuard | None:
    """Return a `MemoryGuard` if ``settings`` ask for one."""
    return None if settings.micro_batch is None else MemoryGuard(strategy, model, samples, devices, gather)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there was no memory left, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def next_accumulate(plan: Plan) -> int | None:
    """Return into how many micro-batches to cut shares next: twice as many, or more if it must be; None at the end."""
    smallest = min(_sizes(plan))
    counts = range(2 * plan.division.accumulate, smallest + 1)
    return next((accumulate for accumulate in counts if _can_be_cut(plan, accumulate)), None)


def divided_as(plan: Plan, accumulate: int) -> BatchSplit:
    """Return the division with as many micro-batches as a run before this one came to, if shares can be cut so."""
    if accumulate <= plan.division.accumulate or not _can_be_cut(plan, accumulate):
        return plan.division
    return replace(plan.division, accumulate=accumulate)


def _can_be_cut(plan: Plan, accumulate: int) -> bool:
    if plan.division.proportions is not None:
        return min(_sizes(plan)) >= accumulate
    return all(size % accumulate == 0 for size in _sizes(plan))


def _sizes(plan: Plan) -> list[int]:
    return [len(plan.division.positions(plan.batch_size, share)) for share in range(plan.division.num_shares)]


def memory_of(devices: Sequence[torch.device]) -> str:
    """Return how much memory this process has, on its devices and on the host."""
    host = psutil.virtual_memory()
    rss = psutil.Process().memory_info().rss
    on_host = f"{_gib(rss)} of the host's {_gib(host.total)}, of which {_gib(host.available)} are free"
    parts = []
    for device in devices if devices[0].type == "cuda" else ():
        free, total = torch.cuda.mem_get_info(device)
        mine = torch.cuda.memory_allocated(device)
        parts.append(f"{_gib(mine)} in tensors on {device}, where {_gib(free)} of {_gib(total)} are free")
    return "; ".join([*parts, on_host])


def advise(error: BaseException, accumulate: int, devices: Sequence[torch.device], strategy: Strategy) -> None:
    """Add to an out-of-memory error what this process has, and what helps."""
    if is_out_of_memory(error):
        auto = 'when it is needed (micro_batch="auto", --micro-batch auto)'
        error.add_note(
            f"This rank has {memory_of(devices)}.\n"
            f"Cut its part of a global batch into more micro-batches (accumulate={2 * accumulate})"
            f"{f', or have that done {auto}' * strategy.can_end_early}: the training stays the same."
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
