"""The binary tree in which the leaves 0 to n-1 are summed: a pure function of n.

A node is the range of leaves under it. A node of more than one leaf splits after the largest power of two that is
smaller than its size, so that equal parts of a power of two are nodes themselves, whoever computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")


def split(node: range) -> tuple[range, range]:
    """Return the two children of a node of more than one leaf."""
    middle = node.start + (1 << (len(node) - 1).bit_length() - 1)
    return range(node.start, middle), range(middle, node.stop)


@dataclass(frozen=True)
class Tree:
    """The tree over ``num_leaves`` leaves."""

    num_leaves: int

    @property
    def root(self) -> range:
        """The node of all leaves."""
        return range(self.num_leaves)

    def roots(self, leaves: range) -> list[range]:
        """Return the largest nodes that lie within ``leaves``, in order: what can be summed without the others."""
        return _within(self.root, leaves)

    def parent(self, left: range, right: range) -> range | None:
        """Return the node whose children are ``left`` and ``right``, or None if there is none."""
        return _parents(self.num_leaves).get((left, right))

    def combine(self, parts: Mapping[range, T], add: Callable[[T, T], T], *, root: range | None = None) -> T:
        """Return the sum of all leaves, or of those under ``root``, from nodes that together hold each of them once."""
        return _combine(self.root if root is None else root, parts, add)


def _within(node: range, leaves: range) -> list[range]:
    if leaves.start <= node.start and node.stop <= leaves.stop:
        return [node]
    if node.stop <= leaves.start or leaves.stop <= node.start:
        return []
    left, right = split(node)
    return _within(left, leaves) + _within(right, leaves)


def _combine(node: range, parts: Mapping[range, T], add: Callable[[T, T], T]) -> T:
    if node in parts:
        return parts[node]
    left, right = split(node)
    return add(_combine(left, parts, add), _combine(right, parts, add))


@lru_cache(maxsize=8)
def _parents(num_leaves: int) -> dict[tuple[range, range], range]:
    parents: dict[tuple[range, range], range] = {}
    nodes = [range(num_leaves)]
    while nodes:
        node = nodes.pop()
        if len(node) > 1:
            children = split(node)
            parents[children] = node
            nodes += children
    return parents
