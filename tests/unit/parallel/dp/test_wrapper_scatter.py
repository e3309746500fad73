"""Split inputs over devices and join outputs: shapes, containers, gradients and errors."""

import warnings
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigurationError
from lockstep.parallel.dp.wrapper import as_device, gather, scatter, scatter_kwargs
from tests.unit.parallel.test_module_io import KINDS, assert_alike, value_in

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


Point = namedtuple("Point", ["x", "label"])


@dataclass(frozen=True, slots=True)
class Batch:
    x: torch.Tensor
    names: list
    count: int = 3


@dataclass
class Checked:
    x: torch.Tensor
    made: list = field(default_factory=list)

    def __post_init__(self):
        self.made.append(len(self.x))


@dataclass
class Config:
    layers: list


def cpus(n):
    return ["cpu"] * n


def sizes(parts):
    return [part.shape[0] for part in parts]


@pytest.mark.parametrize(
    ("samples", "devices", "expected"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (5, 4, [2, 2, 1]), (1, 3, [1]), (7, 3, [3, 3, 1]), (0, 2, [0, 0])],
)
def test_a_tensor_is_cut_like_chunk(samples, devices, expected):
    x = torch.arange(samples * 2.0).view(samples, 2)
    parts = scatter(x, cpus(devices))
    assert isinstance(parts, tuple)
    assert sizes(parts) == expected
    assert torch.equal(torch.cat(parts), x)


def test_another_dimension_is_cut():
    parts = scatter(torch.zeros(3, 5), cpus(2), dim=1)
    assert [tuple(part.shape) for part in parts] == [(3, 3), (3, 2)]


def test_containers_are_rebuilt():
    x = torch.arange(3.0)
    value = {
        "pair": Pair(x, x + 1),
        "point": Point(x, "same"),
        "list": [x, {"deep": (x, None)}],
        "empty": [],
        "nothing": None,
    }
    first, second = scatter(value, cpus(2))
    assert type(first["pair"]) is Pair and first["pair"].right.tolist() == [1.0, 2.0]
    assert type(second["point"]) is Point and second["point"].label == "same"
    assert second["list"][1]["deep"][0].tolist() == [2.0] and second["list"][1]["deep"][1] is None
    assert first["empty"] is value["empty"] and first["nothing"] is None
    assert first["list"] is not second["list"]


@pytest.mark.parametrize("make", [dict, OrderedDict, lambda items: defaultdict(list, items)])
def test_kinds_of_dicts_are_kept(make):
    value = make({"x": torch.arange(4.0)})
    parts = scatter(value, cpus(2))
    assert [type(part) for part in parts] == [type(value)] * 2
    assert parts[1]["x"].tolist() == [2.0, 3.0]
    assert type(gather(parts, "cpu")) is type(value)
    assert gather(parts, "cpu")["x"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_dataclass_is_split_without_its_constructor():
    whole = Batch(torch.arange(5.0), ["a"])
    first, second = scatter(whole, cpus(2))
    assert type(first) is Batch and first.x.tolist() == [0.0, 1.0, 2.0] and second.x.tolist() == [3.0, 4.0]
    assert second.names == ["a"] and second.count == 3
    assert whole.x.shape == (5,)

    checked = Checked(torch.zeros(4))
    parts = scatter(checked, cpus(2))
    assert sizes([part.x for part in parts]) == [2, 2]
    assert checked.made == [4]


def test_what_holds_no_tensor_is_shared():
    config, other = Config([1]), object()
    parts = scatter((config, other, torch.zeros(2)), cpus(2))
    assert parts[0][0] is parts[1][0] is config
    assert parts[0][1] is parts[1][1] is other
    assert scatter(Config, cpus(2)) == [Config, Config]


def test_without_tensors_every_device_gets_the_object():
    assert scatter(3, cpus(3)) == [3, 3, 3]
    assert scatter_kwargs((3,), {"flag": True}, cpus(2)) == (((3,), (3,)), ({"flag": True}, {"flag": True}))


def test_a_tensor_without_dimension_goes_to_every_chunk():
    parts = scatter((torch.arange(3.0), torch.tensor(7.0)), cpus(4))
    assert [part[1].item() for part in parts] == [7.0, 7.0, 7.0]


def test_arguments_and_keywords_are_split_alike():
    inputs, kwargs = scatter_kwargs((torch.arange(5.0), "x"), {"y": torch.arange(5.0)}, cpus(4))
    assert [len(part[0]) for part in inputs] == [2, 2, 1]
    assert [part[1] for part in inputs] == ["x"] * 3
    assert [len(part["y"]) for part in kwargs] == [2, 2, 1]
    assert scatter_kwargs((torch.zeros(3),), None, cpus(2))[1] == ({}, {})
    assert scatter_kwargs((), {"y": torch.zeros(3)}, cpus(2))[0] == ((), ())
    assert scatter_kwargs((), {}, cpus(2)) == ((), ())
    # an argument that holds no tensor does not make more parts than the keywords have
    inputs, kwargs = scatter_kwargs((3,), {"y": torch.zeros(1)}, cpus(4))
    assert inputs == ((3,),) and len(kwargs) == 1


def test_tensors_of_different_batches_are_refused():
    with pytest.raises(ConfigurationError) as caught:
        scatter_kwargs((torch.zeros(4, 2),), {"mask": torch.zeros(1, 7)}, cpus(2))
    assert str(caught.value) == (
        "Cannot split the inputs along dimension 0 over 2 devices: one tensor has 1 entries there (1, 7), another has "
        "4 (4, 2).\n"
        "Give every tensor one entry for each sample. A tensor that all replicas need whole can be a buffer of the "
        "module, or be expanded along that dimension."
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_container_is_split_and_joined(kind):
    value = KINDS[kind](torch.arange(4.0))
    parts = scatter(value, cpus(2))
    for part, expected in zip(parts, ([0, 1], [2, 3]), strict=True):
        assert_alike(part, value)
        assert value_in(part).tolist() == expected
    assert value_in(value).tolist() == [0, 1, 2, 3]
    outputs = [KINDS[kind](x) for x in (torch.zeros(1), torch.ones(2))]
    if "text" not in str(outputs[0]) and kind != "dataclass with fields outside of its constructor":
        joined = gather(outputs, "cpu")
        assert_alike(joined, outputs[0])
        assert value_in(joined).tolist() == [0, 1, 1]


def test_packed_sequences_are_refused():
    packed = nn.utils.rnn.pack_padded_sequence(torch.zeros(3, 2, 1), torch.tensor([3, 2]))
    with pytest.raises(ConfigurationError) as caught:
        scatter((packed,), cpus(2))
    assert str(caught.value).splitlines()[0] == "A PackedSequence cannot be split along the batch."


def test_gradients_pass_through_scatter_and_gather():
    x = torch.randn(5, 3, dtype=torch.double, requires_grad=True)

    def there_and_back(y):
        parts = scatter(y, cpus(2))
        return gather([parts[0] * 2, parts[1] ** 2], "cpu")

    assert torch.autograd.gradcheck(there_and_back, (x,))
    assert torch.autograd.gradgradcheck(there_and_back, (x,))


def test_scalars_are_gathered_to_a_vector():
    scalars = [torch.tensor(1.0, requires_grad=True), torch.tensor(2.0)]
    with pytest.warns(UserWarning, match="all input tensors were scalars") as caught:
        joined = gather(scalars, -1)
    assert str(caught[0].message) == (
        "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze and return "
        "a vector."
    )
    assert joined.tolist() == [1.0, 2.0]
    joined.sum().backward()
    assert scalars[0].grad.item() == 1.0


def test_outputs_keep_their_structure():
    def output(n):
        x = torch.full((n,), float(n))
        return [x, Pair(x, x + 1), {"a": (x, None)}, Batch(x, [x]), torch.return_types.max((x, x))]

    with pytest.raises(ConfigurationError) as caught:
        gather([output(1), output(2)], "cpu")
    assert str(caught.value).splitlines()[0] == "DataParallel cannot gather an output of type int."

    joined = gather([output(1)[:3], output(2)[:3]], "cpu")
    assert joined[0].tolist() == [1.0, 2.0, 2.0]
    assert type(joined[1]) is Pair and joined[1].right.tolist() == [2.0, 3.0, 3.0]
    assert joined[2]["a"][1] is None
    assert gather([output(1)[4], output(2)[4]], "cpu").values.tolist() == [1.0, 2.0, 2.0]
    dataclasses = [Checked(torch.zeros(1), []), Checked(torch.ones(2), [])]
    for part in dataclasses:
        part.made = [part.x]
    assert gather(dataclasses, "cpu").made[0].tolist() == [0.0, 1.0, 1.0]


def test_a_single_output_is_kept():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gather([torch.ones(2)], "cpu").tolist() == [1.0, 1.0]
    assert gather([None, None], "cpu") is None


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([{"a": None}, {"b": None}], "All dicts must have the same keys, but the replicas returned ['a'], ['b']"),
        ([(None,), (None, None)], "The replicas returned tuples of different lengths: [1, 2]"),
        ([torch.ones(1), None], "The replicas returned different outputs: replica 0 a Tensor, replica 1 a NoneType."),
        ([None, [None]], "The replicas returned different outputs: replica 0 a NoneType, replica 1 a list."),
        (
            [torch.ones(2, 3), torch.ones(2, 4)],
            "Gather got an input of invalid size: got [2, 4], but expected [2, 3] (replica 1)",
        ),
        (
            [torch.ones(2), torch.tensor(1.0)],
            "Gather got an input of invalid size: got [], but expected [2] (replica 1)",
        ),
        (["a", "a"], "DataParallel cannot gather an output of type str."),
    ],
)
def test_outputs_that_disagree_are_refused(outputs, message):
    with pytest.raises(ConfigurationError) as caught:
        gather(outputs, "cpu")
    assert str(caught.value).splitlines()[0] == message


def test_device_names():
    assert as_device(-1) == as_device("cpu") == as_device("cpu:0") == as_device(torch.device("cpu")) == CPU
    assert as_device(1) == as_device("cuda:1") == torch.device("cuda", 1)
