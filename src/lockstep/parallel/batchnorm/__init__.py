"""Batch normalisation over the samples of all ranks. Design: docs/design/batchnorm.md."""

from lockstep.parallel.batchnorm.layer import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
