"""Batch normalisation over the samples of all ranks. Design: docs/design/batchnorm.md."""
