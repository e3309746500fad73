"""torch's ``Join`` protocol, for the engines: uneven inputs over the ranks of a hand-written loop."""

from torch.distributed.algorithms.join import Join, Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable"]
