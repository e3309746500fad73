"""What `DataParallel` is made of; docs/design/dp.md draws the parts."""
