"""Tensors are found in, and anchored through, whatever a module returns."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lockstep.base.containers import find_tensors, hook_tensors
from lockstep.parallel.module_io import anchor_tensors, move_to

# --- containers that the walk through batches, arguments and outputs must know, each with one tensor in it

Labelled = namedtuple("Labelled", "value text")


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
    "named tuple": lambda x: Labelled(x, "text"),
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


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


@dataclass
class Record:
    value: torch.Tensor
    rest: object = None


def nested(tensors):
    a, b, c, d = tensors
    return [a, {"x": (b, "text")}, Pair(c, 3), Record(d, None)]


def test_tensors_are_found_in_containers_and_dataclasses():
    tensors = [torch.tensor(float(value)) for value in range(4)]
    assert [tensor.item() for tensor in find_tensors(nested(tensors))] == [0, 1, 2, 3]
    assert list(find_tensors("nothing")) == []
    assert [tensor.item() for tensor in find_tensors(OrderedDict(a=tensors[1], b={tensors[2]}))] == [1, 2]


def test_anchored_outputs_can_be_differentiated_and_keep_their_shape():
    integers = torch.tensor(5)
    value = anchor_tensors([*nested([torch.ones(2), torch.ones(2), torch.ones(2), integers]), "text"])
    assert isinstance(value[2], Pair)
    assert isinstance(value[3], Record)
    assert value[3].value is integers
    assert value[-1] == "text"
    tensors = [tensor for tensor in find_tensors(value) if tensor.is_floating_point()]
    assert len(tensors) == 3
    sum(tensor.sum() for tensor in tensors).backward()
    assert tensors[0].tolist() == [1, 1]


def test_inputs_move():
    moved = move_to(nested([torch.ones(2)] * 4), torch.device("meta"))
    assert {tensor.device.type for tensor in find_tensors(moved)} == {"meta"}
    assert moved[1]["x"][1] == "text"
    assert moved[2].right == 3


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_container_moves_is_hooked_and_anchored(kind):
    x = torch.ones(3)
    value = KINDS[kind](x)
    moved = move_to([value], torch.device("meta"))[0]
    assert_alike(moved, value)
    assert value_in(moved).is_meta and value_in(value) is x
    anchored = anchor_tensors(value)
    assert_alike(anchored, value)
    hooked = []
    hook_tensors(anchored, lambda _, gradient: hooked.append(gradient))
    value_in(anchored).sum().backward()
    assert hooked[0].tolist() == [1, 1, 1]


def test_packed_sequences_move_and_are_anchored_with_their_lengths():
    words = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    moved = move_to({"words": words}, torch.device("meta"))["words"]
    assert moved.data.is_meta and moved.sorted_indices.is_meta and not moved.batch_sizes.is_meta
    anchored = anchor_tensors(words)
    assert type(anchored) is type(words) and anchored.data.requires_grad
    assert all(each is other for each, other in zip(anchored[1:], words[1:], strict=True))
    assert [each.requires_grad for each in find_tensors(anchored)] == [True, False, False, False]


def test_what_holds_no_tensor_stays_the_same_object():
    config, names = KINDS["frozen dataclass"](None), frozenset(["a"])
    moved = move_to((config, names, torch.Size([2])), torch.device("meta"))
    assert moved[0] is config and moved[1] is names
    assert type(moved[2]) is torch.Size
