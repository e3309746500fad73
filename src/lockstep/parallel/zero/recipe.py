"""How to make another optimizer like a given one, and whether it may work on flat slices."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.errors import ConfigurationError

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.ASGD,
        torch.optim.Rprop,
    }
)
"""Those whose new value of an element depends on that element alone, its gradient, its state, and numbers that are
the same for the whole parameter. Subclasses may do more, so they are not meant."""

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""Names of numbers for the whole parameter; of use only where a parameter is one number itself."""

_REFUSED = {
    torch.optim.LBFGS: "works with all parameters together",
    torch.optim.SparseAdam: "is for sparse gradients",
}


@dataclass(frozen=True)
class Recipe:
    """How to make an optimizer.

    Attributes:
        optimizer_class: Its class.
        defaults: What its constructor gets besides the parameters.
        elementwise: Whether it may work on slices that know no parameters.
    """

    optimizer_class: type[Optimizer]
    defaults: Mapping[str, Any]
    elementwise: bool

    @classmethod
    def make(cls, optimizer_class: type[Optimizer], defaults: Mapping[str, Any], elementwise: bool | None) -> Recipe:
        """Return the recipe for ``optimizer_class(params, **defaults)``.

        Args:
            optimizer_class: Any optimizer that does not look at all parameters together.
            defaults: See above.
            elementwise: None: what is known of the class, or what its attribute ``elementwise`` says.

        Raises:
            ConfigurationError: It is no class of optimizers, or one that cannot be divided.
        """
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise ConfigurationError(
                f"optimizer_class is {optimizer_class!r}, no class of optimizers.\n"
                "Give the class and its arguments: ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-3)."
            )
        for refused, why in _REFUSED.items():
            if issubclass(optimizer_class, refused):
                raise ConfigurationError(
                    f"{optimizer_class.__name__} {why}, so it cannot be divided among ranks.\n"
                    "Use it as it is, without ZeroRedundancyOptimizer."
                )
        if elementwise is None:
            declared = getattr(optimizer_class, "elementwise", None)
            elementwise = optimizer_class in ELEMENTWISE if declared is None else bool(declared)
        return cls(optimizer_class, dict(defaults), elementwise)

    @classmethod
    def of(cls, optimizer: Optimizer) -> Recipe:
        """Return the recipe for an optimizer like this one.

        Raises:
            ConfigurationError: Its constructor wants something else.
        """
        accepted = inspect.signature(type(optimizer)).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
        if next(iter(accepted), "") != "params":
            raise ConfigurationError(
                f"{type(optimizer).__name__} cannot be made anew on each rank's part: its constructor takes no params "
                "first.\nUse strategy ddp, or the optimizer inside it."
            )
        needed = [
            name
            for name, each in list(accepted.items())[1:]
            if each.default is each.empty
            and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
            and name not in optimizer.defaults
        ]
        if needed:
            raise ConfigurationError(
                f"{type(optimizer).__name__} cannot be made anew on each rank's part: its constructor wants "
                f"{', '.join(needed)}, which it does not keep in its defaults.\n"
                "Use strategy ddp, or an optimizer that passes its arguments to Optimizer.__init__ as defaults."
            )
        defaults = {name: value for name, value in optimizer.defaults.items() if takes_any or name in accepted}
        return cls.make(type(optimizer), defaults, None)

    def build(self, parameters: Sequence[Sequence[nn.Parameter]], options: Sequence[Mapping[str, Any]]) -> Optimizer:
        """Return a new optimizer.

        Args:
            parameters: By param group; groups may be empty.
            options: By param group, what differs from the defaults.
        """
        groups = [{**each, "params": list(group)} for group, each in zip(parameters, options, strict=True)]
        return self.optimizer_class(groups, **self.defaults)
