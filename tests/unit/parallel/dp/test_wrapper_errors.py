"""An exception in a replica arrives with its type, the replica, its device and its traceback."""

import gc
import re
import weakref

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigurationError, LockstepError
from lockstep.parallel.dp.wrapper import DataParallel


class TwoArguments(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")


class Failing(nn.Module):
    def __init__(self, failures):
        super().__init__()
        self.failures = failures

    def forward(self, x):
        error = self.failures.get(int(x[0]))
        if error is not None:
            raise error
        return x


def caught_from(error):
    with pytest.raises(BaseException) as caught:
        DataParallel(Failing({1: error}), ["cpu", "cpu"])(torch.arange(2.0))
    return caught.value


@pytest.mark.parametrize(
    ("error", "last_line"),
    [
        (ValueError("wrong"), "ValueError: wrong"),
        (KeyError("wonderful"), "KeyError: 'wonderful'"),
        (FileNotFoundError(2, "No such file", "f.txt"), "FileNotFoundError: [Errno 2] No such file: 'f.txt'"),
        (torch.OutOfMemoryError("no room"), "torch.OutOfMemoryError: no room"),
        (StopIteration(3), "StopIteration: 3"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_the_type_and_the_place_are_kept(error, last_line):
    arrived = caught_from(error)
    assert type(arrived) is type(error)
    text = str(arrived)
    name = type(error).__name__
    assert text.startswith(f"Caught {name} in replica 1 on device cpu.\nOriginal Traceback (most recent call last):\n")
    assert "in forward\n    raise error\n" in text
    assert last_line in text.splitlines()[-1]


def test_what_is_not_made_of_one_text_arrives_as_a_runtime_error():
    """As with torch's class."""
    arrived = caught_from(TwoArguments(7, "why"))
    assert type(arrived) is RuntimeError
    assert str(arrived).startswith("Caught TwoArguments in replica 1 on device cpu.\nOriginal Traceback")
    assert str(arrived).rstrip().endswith("TwoArguments: 7: why")


def test_the_lowest_failing_replica_is_named():
    model = DataParallel(Failing({1: ValueError("one"), 2: KeyError("two")}), ["cpu"] * 4)
    for _ in range(5):
        with pytest.raises(ValueError, match="in replica 1 on device cpu"):
            model(torch.arange(4.0))
    assert model(torch.zeros(4)).tolist() == [0.0] * 4  # and the next call works


def test_a_failure_in_the_only_replica_is_told_alike():
    with pytest.raises(
        ValueError, match=re.escape("Caught ValueError in replica 0 on device cpu.\nOriginal Traceback")
    ):
        DataParallel(Failing({1: ValueError("x")}), ["cpu", "cpu"])(torch.ones(1))


def test_a_failure_holds_no_frames():
    """Through them it would hold the activations of the failed step."""
    held = []

    class Net(nn.Module):
        def forward(self, x):
            activations = nn.Identity()
            held.append(weakref.ref(activations))
            raise ValueError("x")

    with pytest.raises(ValueError) as caught:
        DataParallel(Net(), ["cpu", "cpu"])(torch.ones(2))
    gc.collect()
    assert caught.value is not None and [each() for each in held] == [None, None]


def test_devices_that_cannot_be_used(gpus):
    gpus(2)
    module = nn.Linear(1, 1)
    for devices, first_line in [
        (["cpu", "cuda:0"], "DataParallel cannot use the devices ['cpu', 'cuda'] together."),
        (["meta", "meta"], "DataParallel cannot use the devices ['meta'] together."),
        ([0, 1, 2], "device_ids names GPU 2, but this process sees 2 (numbered from 0)."),
        (["cuda:5", "cuda:0"], "device_ids names GPU 5, but this process sees 2 (numbered from 0)."),
        ([-1], "device_ids names GPU -1, but this process sees 2 (numbered from 0)."),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            DataParallel(module, devices)
        assert str(caught.value).splitlines()[0] == first_line
    with pytest.raises(ConfigurationError) as caught:
        DataParallel(module, ["cpu"], output_device=7)
    assert str(caught.value).splitlines()[0] == "output_device names GPU 7, but this process sees 2 (numbered from 0)."


def test_without_gpus_the_module_just_runs(gpus):
    gpus(0)
    module = nn.Linear(2, 1)
    for devices in (None, [], [0, 1], ["cuda"]):
        model = DataParallel(module, devices)
        assert model.device_ids == [] and model.output_device is None and model.src_device_obj is None
        x = torch.randn(3, 2)
        assert torch.equal(model(x), module(x))
        model.zero_grad()
        model.backward(lambda network, part: network(part).sum(), [x], [2.0])
        torch.testing.assert_close(module.weight.grad, 2 * x.sum(0, keepdim=True))


def test_overridden_methods_that_disagree():
    class Odd(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return ((inputs[0],), (inputs[0],)), ({},)

    with pytest.raises(ValueError, match="shorter"):
        Odd(nn.Identity(), ["cpu", "cpu"])(torch.zeros(1))


def test_a_call_from_inside_is_refused():
    class Recursive(nn.Module):
        def forward(self, x):
            return model(x)

    model = DataParallel(Recursive(), ["cpu", "cpu"])
    with pytest.raises(LockstepError) as caught:
        model(torch.zeros(2))
    assert "A DataParallel module was called from inside one of its own replicas." in str(caught.value)


def test_one_wrapper_inside_another():
    inner = DataParallel(nn.Linear(2, 2).double(), ["cpu", "cpu"])
    outer = DataParallel(nn.Sequential(inner, nn.Tanh()), ["cpu", "cpu"])
    x = torch.randn(5, 2, dtype=torch.double)
    inner(x)
    for _ in range(3):
        torch.testing.assert_close(outer(x), torch.tanh(inner.module(x)), rtol=1e-12, atol=1e-14)
