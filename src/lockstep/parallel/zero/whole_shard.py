"""An optimizer of the parameters that one rank owns, whole, for optimizers that are not element-wise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lockstep.parallel.zero.recipe import Recipe
from lockstep.parallel.zero.spans import Span


def assign_greedily(sizes: Sequence[int], num_owners: int) -> list[int]:
    """Return an owner for each size: the largest first, to who has least so far; a pure function."""
    loads = [0] * num_owners
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


class WholeShard:
    """An optimizer of whole parameters; otherwise like `FlatShard`.

    Args:
        recipe: Of any optimizer.
        parameters: Those that this rank owns.
        spans: Which they are.
        options: By param group, its options without "params".
    """

    def __init__(
        self,
        recipe: Recipe,
        parameters: Sequence[nn.Parameter],
        spans: Sequence[Span],
        options: Sequence[Mapping[str, Any]],
    ) -> None:
        self._parameters, self._spans = list(parameters), list(spans)
        groups: list[list[nn.Parameter]] = [[] for _ in options]
        for parameter, span in zip(self._parameters, self._spans, strict=True):
            groups[span.group].append(parameter)
        self.optimizer = recipe.build(groups, options)

    def gradients(self) -> list[Tensor]:
        """Return the gradients that the optimizer has now."""
        return [each.grad for each in self._parameters if each.grad is not None]

    def state(self) -> Iterator[tuple[Span, dict[str, Any]]]:
        """Return what the optimizer keeps, by parameter."""
        for parameter, span in zip(self._parameters, self._spans, strict=True):
            if parameter in self.optimizer.state:
                yield span, dict(self.optimizer.state[parameter])

    def load(self, read: Callable[[Span], Mapping[str, Any] | None], options: Sequence[Mapping[str, Any]]) -> None:
        """Take over the state that ``read`` returns.

        Args:
            read: What was kept of this parameter; None: nothing.
            options: By param group, its options without "params".
        """
        saved = self.optimizer.state_dict()
        state = {}
        places: dict[int, int] = {}
        for group, option in zip(saved["param_groups"], options, strict=True):
            group.update(option)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                places[id(parameter)] = len(places)
        for parameter, span in zip(self._parameters, self._spans, strict=True):
            place = places[id(parameter)]
            entries = read(span)
            if entries is not None:
                state[place] = dict(entries)
            elif place in saved["state"] and parameter not in self.optimizer.state:
                state[place] = saved["state"][place]
        self.optimizer.load_state_dict({**saved, "state": state})
