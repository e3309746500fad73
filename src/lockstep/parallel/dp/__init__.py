"""What `DataParallel` is made of; docs/design/data_parallel.md draws the parts."""
