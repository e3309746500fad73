"""Tensors are found in, and anchored through, whatever a module returns."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lockstep.parallel.module_io import anchor_tensors, find_tensors, move_to


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
