"""Batches of any structure, tensor by tensor."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lockstep.containers import map_tensors
from lockstep.data.loader import MicroBatch, to_device
from tests.unit.test_outputs import KINDS, assert_alike, value_in

Pair = namedtuple("Pair", "first second")


@dataclass
class Item:
    tensor: torch.Tensor
    text: str


def test_tensors_are_found_in_every_structure_and_the_rest_is_kept():
    one = torch.ones(())
    value = {
        "list": [one, (one, "text")],
        "pair": Pair(one, 3),
        "item": Item(one, "text"),
        "ordered": OrderedDict(a=one),
        "none": None,
        "class": Item,
    }
    assert map_tensors(value, lambda tensor: tensor + 1) == {
        "list": [2, (2, "text")],
        "pair": Pair(2, 3),
        "item": Item(torch.tensor(2.0), "text"),
        "ordered": OrderedDict(a=2),
        "none": None,
        "class": Item,
    }
    mapped = map_tensors(value, lambda tensor: tensor + 1)
    assert type(mapped["pair"]) is Pair
    assert type(mapped["ordered"]) is OrderedDict
    assert one == 1


def test_each_share_goes_to_the_device_of_its_number():
    batch = MicroBatch(0, 3, [4, 6], [np.arange(2), np.arange(1)], [[torch.ones(2)], [torch.ones(1)]])
    moved = to_device(batch, {4: torch.device("cpu"), 5: torch.device("cpu"), 6: torch.device("meta")})
    assert [share[0].device.type for share in moved.batches] == ["cpu", "meta"]
    assert moved.sizes == [2, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_container_goes_to_the_device(kind):
    share = KINDS[kind](torch.ones(2))
    batch = MicroBatch(0, 2, [0], [np.arange(2)], [share])
    (moved,) = to_device(batch, {0: torch.device("meta")}).batches
    assert_alike(moved, share)
    assert value_in(moved).is_meta and not value_in(share).is_meta


class Graph:
    """An object that moves itself, as graph libraries have them."""

    def __init__(self, device="cpu"):
        self.device = device

    def to(self, device):
        """Return it there."""
        return Graph(device.type)


def test_objects_that_move_themselves_do():
    words = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch = MicroBatch(0, 1, [0], [np.arange(1)], [{"graph": Graph(), "words": words, "class": Graph, "text": "text"}])
    (moved,) = to_device(batch, {0: torch.device("meta")}).batches
    assert moved["graph"].device == "meta"
    assert moved["words"].data.is_meta
    assert not moved["words"].batch_sizes.is_meta
    assert (moved["class"], moved["text"]) == (Graph, "text")
