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


def test_the_state_of_a_bare_or_a_wrapped_module_is_loaded():
    source = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for state in (source.state_dict(), DataParallel(source, ["cpu", "cpu"]).state_dict(), dict(source.state_dict())):
        model = DataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), ["cpu", "cpu"])
        before = list(state)
        result = model.load_state_dict(state)
        assert result.missing_keys == [] and result.unexpected_keys == []
        assert list(state) == before
        assert torch.equal(model.module[0].weight, source[0].weight)
    bare = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    bare.load_state_dict(model.module.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"0.weight": source[0].weight})
    assert model.load_state_dict({"0.weight": source[0].weight}, strict=False).unexpected_keys == []


def test_versions_travel_with_the_state():
    seen = []

    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            seen.append((prefix, local_metadata.get("version")))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    source = nn.Sequential(Versioned(2, 2))
    DataParallel(nn.Sequential(Versioned(2, 2)), ["cpu", "cpu"]).load_state_dict(source.state_dict())
    assert seen == [("module.0.", 3)]


def test_a_module_that_is_itself_called_module():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    source, target = Outer(), DataParallel(Outer(), ["cpu", "cpu"])
    for state in (source.state_dict(), DataParallel(source, ["cpu", "cpu"]).state_dict()):
        nn.init.zeros_(target.module.module.weight)
        target.load_state_dict(state)
        assert torch.equal(target.module.module.weight, source.module.weight)


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
    assert threading.active_count() <= threads  # it has none of its own until it is called
    assert other.device_ids == model.device_ids and other.output_device == model.output_device
    x = global_batch("mlp", 5, 1)[0]
    torch.testing.assert_close(other(x), model(x), rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        other.module[0].weight.zero_()
    assert model.module[0].weight.abs().sum() > 0
    assert not torch.allclose(other(x), model(x))


def test_attributes_are_those_of_torch():
    model = DataParallel(build("mlp"), ["cpu", torch.device("cpu")], dim=1)
    cpu = torch.device("cpu")
    assert (model.device_ids, model.output_device, model.dim, model.src_device_obj) == ([cpu, cpu], cpu, 1, cpu)
    assert model.devices == (cpu, cpu)
    assert DataParallel(build("mlp"), ["cpu"], output_device=-1).output_device == cpu
    assert list(model.parameters()) == list(model.module.parameters())
    assert set(dict(model.named_children())) == {"module"}
