"""Containers that the walk through batches, arguments and outputs must know, each with one tensor in it."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

Pair = namedtuple("Pair", "value text")


class Named(list):
    """A list with an attribute."""


class Fixed(tuple):
    """A tuple whose constructor takes something else."""

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


class Settings(dict):
    """A dict whose constructor takes something else."""

    def __init__(self, *, value):
        super().__init__(value=value)


@dataclass(frozen=True, slots=True)
class Frozen:
    value: torch.Tensor
    text: str = "text"


@dataclass
class Counted:
    """Its fields are set in part by its constructor, which runs once."""

    value: object
    made: list = field(default_factory=list)
    copy: object = field(init=False)

    def __post_init__(self):
        self.copy = self.value
        self.made.append(1)


@dataclass
class Output(OrderedDict):
    """A mapping whose items are its fields, like the outputs of a model library."""

    value: torch.Tensor
    rest: object = None

    def __post_init__(self):
        self["value"] = self.value

    def __setitem__(self, key, item):
        super().__setitem__(key, item)
        object.__setattr__(self, key, item)

    def __reduce__(self):
        return type(self), (self.value, self.rest)


def named(x):
    made = Named([x, "text"])
    made.name = "name"
    return made


KINDS = {
    "list": lambda x: [x, "text"],
    "tuple": lambda x: (x, "text"),
    "named tuple": lambda x: Pair(x, "text"),
    "subclass of list": named,
    "subclass of tuple": lambda x: Fixed(x, "text"),
    "subclass of dict": lambda x: Settings(value=x),
    "defaultdict": lambda x: defaultdict(list, value=x),
    "OrderedDict": lambda x: OrderedDict(text="text", value=x),
    "UserDict": lambda x: UserDict(value=x),
    "mapping that cannot change": lambda x: MappingProxyType({"value": x}),
    "frozen dataclass": Frozen,
    "dataclass with fields outside of its constructor": Counted,
    "dataclass that is a mapping": Output,
    "torch.return_types": lambda x: torch.return_types.max((x, torch.zeros_like(x))),
}
"""By name: makes a container of a tensor."""


def value_in(container):
    """Return the tensor in a container of `KINDS`."""
    try:
        return container["value"]
    except (TypeError, KeyError):
        return container[0] if isinstance(container, list | tuple) else container.value


def assert_alike(new, old):
    """Check that all but the tensor is as in ``old``."""
    assert type(new) is type(old)
    assert getattr(new, "name", None) == getattr(old, "name", None)
    if isinstance(old, Counted):
        assert new.made == old.made == [1] and new.copy is not old.copy
    if isinstance(old, Output):
        assert new.value is new["value"]
    if isinstance(old, defaultdict):
        assert new.default_factory is list
    if hasattr(old, "keys"):
        assert list(new) == list(old)
    if isinstance(old, tuple | list) and isinstance(old[1], str):
        assert new[1] == old[1]
