"""`tune`: settings that train a task faster on this machine, found by trying them, without changing the training."""

from lockstep.study.tune.organise import tune

__all__ = ["tune"]
