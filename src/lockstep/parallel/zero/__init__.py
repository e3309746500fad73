"""An optimizer whose state is divided among ranks. Design: docs/design/ddp.md."""
