"""Saving, loading, copying and pickling a DataParallel module."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from lockstep.parallel.dp.wrapper import DataParallel
from tests.models import build, global_batch


def used():
    model = DataParallel(build("mlp"), ["cpu", "cpu"])
    model(global_batch("mlp", 4, 0)[0]).sum().backward()
    return model


def test_names_of_the_state():
    module = build("mlp")
    assert list(DataParallel(module, ["cpu", "cpu"]).state_dict()) == [f"module.{name}" for name in module.state_dict()]


def by_torch(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_torch, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_independent_and_works(copied):
    model = used()
    threads = threading.active_count()
    other = copied(model)
    assert threading.active_count() == threads  # it has none of its own until it is called
    assert other.device_ids == model.device_ids and other.output_device == model.output_device
    x = global_batch("mlp", 5, 1)[0]
    torch.testing.assert_close(other(x), model(x), rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        other.module[0].weight.zero_()
    assert model.module[0].weight.abs().sum() > 0
    assert not torch.allclose(other(x), model(x))


def test_repr():
    assert repr(DataParallel(nn.Linear(2, 3), ["cpu", "cpu"])) == (
        "DataParallel(\n"
        "  device_ids=['cpu', 'cpu'], output_device='cpu', dim=0\n"
        "  (module): Linear(in_features=2, out_features=3, bias=True)\n"
        ")"
    )


def test_attributes_are_those_of_torch():
    model = DataParallel(build("mlp"), ["cpu", torch.device("cpu")], dim=1)
    cpu = torch.device("cpu")
    assert (model.device_ids, model.output_device, model.dim, model.src_device_obj) == ([cpu, cpu], cpu, 1, cpu)
    assert model.devices == (cpu, cpu)
    assert DataParallel(build("mlp"), ["cpu"], output_device=-1).output_device == cpu
    assert list(model.parameters()) == list(model.module.parameters())
    assert set(dict(model.named_children())) == {"module"}
