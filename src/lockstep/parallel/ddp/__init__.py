"""What `DistributedDataParallel` is made of; docs/design/ddp.md draws the parts."""
