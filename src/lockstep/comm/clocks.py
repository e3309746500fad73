"""Measure how far apart the clocks of the ranks' machines are, with an error bound."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from lockstep.accelerator import synchronize
from lockstep.comm.collectives import Group, all_gather_object, all_reduce

NUM_ROUNDS = 10

# When a rank entered and when it left, on its own clock.
Round = tuple[float, float]


class ClockOffset(NamedTuple):
    """How far a rank's clock is ahead of rank zero's, within ``error_s`` either way; in seconds."""

    offset_s: float
    error_s: float


def measure_clock_offsets(group: Group, device: torch.device) -> list[ClockOffset]:
    """Return, for each rank, how far its clock is ahead of rank zero's.

    Collective: every rank. Blocks until complete: a dozen small all-reduces.

    Args:
        group: The ranks.
        device: A device whose tensors the group can send.
    """
    token = torch.zeros(1, device=device)
    rounds: list[Round] = []
    # The first round is not used: it also waits for ranks that are late.
    for _ in range(NUM_ROUNDS + 1):
        synchronize(device)
        entered = time.time()
        all_reduce(token, group=group)
        token.tolist()  # on a GPU the collective is complete only now
        rounds.append((entered, time.time()))
    mine = {"machine": machine_name(), "rounds": rounds[1:]}
    ranks = all_gather_object(mine, group=group, device=device)
    zero, same = ranks[0], ClockOffset(0.0, 0.0)
    return [
        same if each["machine"] == zero["machine"] else bound_offset(zero["rounds"], each["rounds"]) for each in ranks
    ]


def bound_offset(zero: Sequence[Round], other: Sequence[Round]) -> ClockOffset:
    """Return how far ``other``'s clock is ahead of ``zero``'s. A pure function.

    [Note: bounds]
    No rank leaves an all-reduce before every rank has entered it. So rank r leaves after rank zero has entered, and
    rank zero leaves after rank r has entered, whatever the network does. Rank r's clock is ahead by ``offset``, so
    ``left_r - offset >= entered_0`` and ``entered_r - offset <= left_0``. The middle of these bounds is the estimate,
    and half their distance bounds the error. Ranks of one machine share a clock: their offset is exactly zero.
    """
    # Every round bounds the offset from both sides; the tightest bounds count.
    low = max(entered - left_zero for (entered, _), (_, left_zero) in zip(other, zero, strict=True))
    high = min(left - entered_zero for (_, left), (entered_zero, _) in zip(other, zero, strict=True))
    return ClockOffset((low + high) / 2, abs(high - low) / 2)


def machine_name() -> str:
    """Return the kernel's boot id: processes with the same id share a clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
