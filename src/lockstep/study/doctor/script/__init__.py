"""What the syntax tree of a training script tells; the script is never run."""
