"""How many ranks to start on this machine, and how many threads each of them may use."""

from __future__ import annotations

import operator

import psutil
import torch

from lockstep.cgroups import usable_cores
from lockstep.errors import ConfigurationError

RANK_BYTES = 250 * 2**20
"""Memory of a process that has imported torch, before it has a model."""


def choose_num_ranks(wanted: str | int | None) -> int | str:
    """Return the number of ranks for this machine: what was asked for, else one a GPU, else one a CPU core.

    Words such as ``gpu`` are returned as they are, for torchrun's own code to interpret.

    Raises:
        ConfigurationError: It is no positive number, there are fewer GPUs, or memory for fewer processes.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted is None:
        return num_gpus or ("auto" if torch.accelerator.is_available() else num_cores())
    if wanted == "cpu":
        return num_cores()
    try:
        count = int(wanted) if isinstance(wanted, str) else operator.index(wanted)
    except (TypeError, ValueError):
        return str(wanted)
    if count < 1:
        raise ConfigurationError(f"{count} devices cannot run anything.\nAsk for at least one.")
    if 0 < num_gpus < count:
        raise ConfigurationError(
            f"{count} devices were asked for, but this machine has {num_gpus} GPU{'s' if num_gpus > 1 else ''}.\n"
            f"Ask for at most {num_gpus}, or hide the GPUs to use the CPU: CUDA_VISIBLE_DEVICES= lockstep run ..."
        )
    if num_gpus == 0:
        _check_memory(count)
    return count


def _check_memory(num_ranks: int) -> None:
    """Refuse CPU ranks that would be killed before they begin; more ranks than cores are slow, but work."""
    free_bytes = psutil.virtual_memory().available
    if num_ranks * RANK_BYTES > free_bytes:
        most = max(1, free_bytes // RANK_BYTES)
        raise ConfigurationError(
            f"{num_ranks} devices were asked for, but this machine has no GPU, {num_cores()} CPU cores and free memory "
            f"for about {most} processes.\nAsk for at most {most}; more than {num_cores()} gain no speed."
        )


def num_cores() -> int:
    """Return the number of physical CPU cores that this process may use."""
    usable = usable_cores()
    return min(usable, psutil.cpu_count(logical=False) or usable)


def threads_for(num_ranks: int) -> int:
    """Return how many threads each of ``num_ranks`` ranks may use, so that together they use every core once."""
    return max(1, num_cores() // num_ranks)
