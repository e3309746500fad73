"""Which names ``adopt()`` changes, and that what needs no process group works behind them."""

import gc
import io
import pickle
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

import pytest
import torch
import torch.nn.parallel
import torch.utils.data
from torch import nn

import lockstep
from lockstep.loop.adopt import adopt
from lockstep.parallel.dp.wrapper import data_parallel

# --- adopting for the length of a block, since the processes that run tests outlive a test

TORCHS = {
    "DataParallel": torch.nn.parallel.DataParallel,
    "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
    "DistributedDataParallelCPU": torch.nn.parallel.DistributedDataParallelCPU,
    "DistributedSampler": torch.utils.data.DistributedSampler,
    "SyncBatchNorm": torch.nn.SyncBatchNorm,
    "data_parallel": torch.nn.parallel.data_parallel,
}
OURS = {
    "DataParallel": lockstep.DataParallel,
    "DistributedDataParallel": lockstep.DistributedDataParallel,
    "DistributedSampler": lockstep.DistributedSampler,
    "SyncBatchNorm": lockstep.SyncBatchNorm,
    "data_parallel": data_parallel,
}


def places_of(objects: dict[str, object]) -> dict[tuple[str, str], str]:
    """Where modules hold one of ``objects``: (module, name there) -> key."""
    keys = {id(value): key for key, value in objects.items()}
    return {
        (module_name, name): keys[id(value)]
        for module_name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if id(value) in keys
    }


@contextmanager
def adopted() -> Iterator[None]:
    """Call ``lockstep.adopt()``, and give all that it changed, or that was imported meanwhile, torch's objects back."""
    before = places_of(OURS)
    gc.collect()  # subclasses of torch's that other tests have made
    try:
        adopt()
        yield
    finally:
        for (module_name, name), key in places_of(OURS).items():
            if (module_name, name) not in before and not module_name.startswith("lockstep"):
                setattr(sys.modules[module_name], name, TORCHS.get(name, TORCHS[key]))


HOMES = {
    ("torch.nn", "DataParallel"),
    ("torch.nn", "SyncBatchNorm"),
    ("torch.nn.modules", "SyncBatchNorm"),
    ("torch.nn.modules.batchnorm", "SyncBatchNorm"),
    ("torch.nn.parallel", "DataParallel"),
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.nn.parallel", "DistributedDataParallelCPU"),
    ("torch.nn.parallel", "data_parallel"),
    ("torch.nn.parallel.data_parallel", "DataParallel"),
    ("torch.nn.parallel.data_parallel", "data_parallel"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.utils.data", "DistributedSampler"),
    ("torch.utils.data.distributed", "DistributedSampler"),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_every_public_home_of_torchs_names_holds_ours():
    before = places_of(OURS)
    with adopted():
        after = places_of(OURS)
    assert {place for place in after if place[0].startswith("torch")} == HOMES
    assert all(after[module, name] == name.removesuffix("CPU") for module, name in HOMES)
    assert places_of(OURS) == before


def test_a_second_call_changes_nothing():
    with adopted():
        once = places_of(OURS), places_of(TORCHS)
        lockstep.adopt()
        assert (places_of(OURS), places_of(TORCHS)) == once


def planted_module(monkeypatch, name):
    """A module that has imported torch's classes by name, under names of its own."""
    module = ModuleType(name)
    module.DDP, module.Sampler = TORCHS["DistributedDataParallel"], TORCHS["DistributedSampler"]
    module.Base = type("Base", (module.DDP,), {"__module__": name})
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_names_that_a_library_has_imported_become_ours_and_its_subclasses_stay(monkeypatch):
    library, stack = planted_module(monkeypatch, "a_library.part"), ExitStack()
    with pytest.warns(match="a_library.part.Base is a subclass of torch's DistributedDataParallel, and stays one"):
        stack.enter_context(adopted())
    with stack:
        assert library.DDP is lockstep.DistributedDataParallel
        assert library.Sampler is lockstep.DistributedSampler
        assert library.Base.__bases__ == (TORCHS["DistributedDataParallel"],)
        assert issubclass(library.DDP, TORCHS["DistributedDataParallel"])


@pytest.mark.parametrize("name", ["torch.internal", "lockstep.internal"])
def test_modules_of_torch_and_of_our_own_keep_torchs_classes(monkeypatch, name):
    internal = planted_module(monkeypatch, name)
    with adopted():
        assert internal.DDP is TORCHS["DistributedDataParallel"]
        assert internal.Sampler is TORCHS["DistributedSampler"]


def test_batch_norms_become_ours_by_torchs_conversion():
    with adopted():
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4), TORCHS["SyncBatchNorm"](4)))
        assert isinstance(model[0], nn.modules.batchnorm.SyncBatchNorm)
    assert [type(layer) for layer in model] == [lockstep.SyncBatchNorm] * 2
    assert type(pickle.loads(pickle.dumps(model))[0]) is lockstep.SyncBatchNorm


def test_samplers_are_subclassed_and_subscripted_as_torchs_are():
    with adopted():

        class Backwards(torch.utils.data.DistributedSampler[int]):
            def __iter__(self):
                return reversed(list(super().__iter__()))

        sampler = Backwards(range(7), num_replicas=2, rank=1, seed=3)
    sampler.set_epoch(2)
    torchs = TORCHS["DistributedSampler"](range(7), num_replicas=2, rank=1, seed=3)
    torchs.set_epoch(2)
    assert list(sampler) == list(torchs)[::-1]
    assert isinstance(sampler, lockstep.DistributedSampler)


def test_data_parallel_without_gpus_just_runs(gpus):
    gpus(0)
    inputs = torch.ones(5, 3)
    with adopted():

        class Transparent(nn.DataParallel):
            def __getattr__(self, name):
                try:
                    return super().__getattr__(name)
                except AttributeError:
                    return getattr(self.module, name)

        model = Transparent(network(), device_ids=[0, 1])
        assert torch.equal(nn.parallel.data_parallel(network(), inputs), network()(inputs))
    assert isinstance(model, lockstep.DataParallel) and model.device_ids == []
    assert torch.equal(model(inputs), network()(inputs))
    assert model.append is not None and not hasattr(model, "nothing")


def test_data_parallel_that_torch_has_pickled_loads(monkeypatch):
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: None)  # as on a machine without GPUs
    file = io.BytesIO()
    torch.save(TORCHS["DataParallel"](network()), file)
    file.seek(0)
    with adopted():
        model = torch.load(file, weights_only=False)
    assert type(model) is lockstep.DataParallel
    assert (model.device_ids, model.output_device, model.dim, model.src_device_obj) == ([], None, 0, None)
    assert torch.equal(model(torch.ones(5, 3)), network()(torch.ones(5, 3)))
    assert torch.equal(pickle.loads(pickle.dumps(model))(torch.ones(5, 3)), network()(torch.ones(5, 3)))
