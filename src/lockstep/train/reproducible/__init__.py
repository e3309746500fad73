"""The same bits on any number of devices. Design: docs/design/reproducible.md."""
