"""The parts of `DataParallel`; docs/design/dp.md shows how they fit together."""
