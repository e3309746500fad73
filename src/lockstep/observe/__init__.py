"""Watches the training loop of a script from outside, and records it as ``fit`` records its own."""
