"""The parts of `DistributedDataParallel`; docs/design/ddp.md shows how they fit together."""
