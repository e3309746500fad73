"""Let the C library keep the memory that a step frees, for the next step.

glibc gives memory back to the system as soon as some more than it expects to need is free, and has it zeroed, page by
page, when a step asks for it again. How much it expects goes by what the program has freed so far: twice the largest
block, if that is below 32 MiB. A model of moderate size teaches it to give back nearly all activations of a step: 9,000
page faults a step of an MLP with 7 million parameters, a fifth of its processor time. Replicas in threads pay twice,
since faults and returns of one process wait for each other.

So one block of nearly 32 MiB is allocated and freed, untouched: the limits are then where a larger model would have put
them by itself. What is kept in that way is what a step has used; the peak does not rise. Other C libraries do not mind.
"""

import torch

_ALMOST_32_MIB = 31 * 2**20
"""The largest block that glibc learns from is 32 MiB, its own bookkeeping included."""


def keep_freed_memory() -> None:
    """Do so from now on, in this process."""
    block = torch.empty(_ALMOST_32_MIB, dtype=torch.uint8, device="cpu")
    del block
