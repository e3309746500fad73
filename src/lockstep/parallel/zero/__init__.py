"""An optimizer with its state sharded over the ranks. Design: docs/design/ddp.md."""
