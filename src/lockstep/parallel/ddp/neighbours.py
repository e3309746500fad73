"""Several wrappers in one backward.

[Note: the last bucket]
When it is complete, backward is over but for inputs. So it stays until the step closes, where its reduction need not be
handed to another thread; where one backward runs through several wrappers, only until that is known, on all ranks.

[Note: shared parameters]
A wrapper may lie within another, and two may share a layer. Then both average the same gradients, and who gathers
second must not find a bucket of the first that is on its way. So what is complete stays until backward is over, and
they close one after the other: the mean of means that are equal on all ranks is that mean.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.parallel.ddp.reducer import Reducer

live_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
"""Those of all wrappers in this process."""


class Neighbours:
    """What one reducer knows of the others.

    Attributes:
        are_absent: Whether no backward so far has run through another wrapper as well; see [Note: the last bucket].
        sharers: Reducers that average some of the same parameters.
    """

    def __init__(self) -> None:
        self.are_absent = True
        self.sharers: weakref.WeakSet[Reducer] = weakref.WeakSet()

    def share_this_backward(self) -> bool:
        """Tell whether a reducer with some of the same parameters collects them too."""
        return any(sharer.is_collecting for sharer in self.sharers)


def introduce(reducer: Reducer) -> None:
    """Let a new reducer and those that live know of each other."""
    mine = {id(parameter) for parameter in reducer.row.parameters}
    for other in live_reducers:
        if any(id(parameter) in mine for parameter in other.row.parameters):
            other.neighbours.sharers.add(reducer)
            reducer.neighbours.sharers.add(other)
    live_reducers.add(reducer)


def look_for_others(reducer: Reducer) -> None:
    """Take notice, for all of them, of others that collect in the backward that now ends."""
    others = [each for each in live_reducers if each is not reducer and each.is_collecting]
    for each in [reducer, *others] if others else ():
        each.neighbours.are_absent = False
