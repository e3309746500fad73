"""Sums in one fixed order, whoever computes their parts. Design: docs/design/reproducible.md."""
