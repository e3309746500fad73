"""Private names of torch stand in one module, do what it says, and can be missing. Run it first on a new torch."""

import ast
import json
import os
import pkgutil
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.base import torch_internals as internals
from tests.contract.layers import module_of
from tests.contract.tree import PACKAGE, sources

OTHERS = {
    "data/loader.py": {"_on_queue_feeder_error"},  # of CPython: what a loader process does with an error
    # Of CPython: as ``python -m``; what the interpreter does at its end, of a rank that has failed.
    "launcher/bootstrap.py": {"_run_module_as_main", "_run_exitfuncs", "_shutdown"},
    "health/heartbeat.py": {"_current_frames"},  # documented
}
"""Private names of CPython; torch's are in one module."""


@pytest.mark.parametrize("path", sorted(internals.INSTEAD))
def test_this_torch_has_the_name(path):
    assert pkgutil.resolve_name(path) is not None


def test_private_names_stand_in_one_module():
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sources()}
    own = {"_exit", "_replace", "_asdict", "_fields", "_make"}  # documented
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                own.add(name)
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                own.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
    trees.pop("base/torch_internals.py")
    found = {name: _foreign(tree) - own - OTHERS.get(name, set()) for name, tree in trees.items()}
    assert {
        name: names - OTHERS.get(name, set()) for name, names in found.items() if names - OTHERS.get(name, set())
    } == {}


def _foreign(tree):
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.module.startswith("lockstep"):
            names |= {*node.module.split("."), *(alias.name for alias in node.names)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


# --- what each does ---------------------------------------------------------------------------------------------------


def test_backward_has_a_number_and_calls_back_at_its_end():
    seen = []
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda _: seen.append(internals.current_graph_task_id()))
    weight.register_hook(lambda _: internals.queue_callback(lambda: seen.append("end")))
    assert internals.has_hooks(weight) and not internals.has_hooks(torch.ones(1))
    weight.sum().backward()
    assert seen[0] >= 0 and seen[1:] == ["end"]
    assert internals.current_graph_task_id() == -1


def test_a_backward_tells_which_nodes_it_calls():
    weight, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen = []
    output = weight * x
    nodes = [node for node, _ in output.grad_fn.next_functions]
    output.register_hook(lambda _: seen.append([internals.will_execute(node) for node in nodes]))
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    output.sum().backward(inputs=[x], retain_graph=True)
    output.sum().backward()
    assert seen == [[False, False], [False, True], [True, True]]
    assert internals.will_execute(nodes[0])  # outside of a backward


def test_versions_of_tensors():
    tensor = torch.ones(2)
    before = internals.version_of(tensor)
    tensor.add_(1)
    assert internals.version_of(tensor) == before + 1
    with internals.unsafe_preserve_version_counter((tensor,)):
        tensor.add_(1)
    assert internals.version_of(tensor) == before + 1


def test_lists_of_tensors():
    a, b = [torch.ones(2), torch.ones(3)], [torch.full((2,), 2.0), torch.full((3,), 3.0)]
    names = ("copy_", "add_", "add_", "mul_", "zero_")
    others = (b, b, 1, torch.tensor(2.0), None)
    for name, other in zip(names, others, strict=True):
        function = getattr(internals, f"foreach_{name}")
        function(a, *(() if other is None else (other,)))
        if name == "mul_":
            assert [each[0].item() for each in a] == [10, 14]
    assert [each.sum().item() for each in a] == [0, 0]


@pytest.mark.filterwarnings("ignore:Sparse invariant")  # of torch 2.11
def test_storages_and_sparse_tensors():
    tensor = torch.ones(3)
    address = internals.storage_address(tensor)
    before = internals.storage_use_count(address)
    other = tensor[1:]
    assert internals.storage_use_count(address) == before + 1 and other.numel() == 2
    empty = internals.empty_sparse((4, 2), dtype=torch.float64, device="cpu")
    assert empty.shape == (4, 2) and empty.dtype == torch.float64 and internals.nnz(empty) == 0
    twice = torch.sparse_coo_tensor([[1, 1]], [[1.0], [2.0]], (3, 1), check_invariants=True)
    assert internals.nnz(twice) == 2 and internals.indices_of(twice).tolist() == [[1, 1]]
    assert internals.values_of(twice).tolist() == [[1.0], [2.0]]
    assert internals.has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0))


def test_layers_and_modules():
    norm, instance, lazy = nn.BatchNorm1d(2), nn.InstanceNorm2d(2), nn.LazyBatchNorm3d()
    assert [isinstance(each, internals.BatchNorm) for each in (norm, instance, lazy)] == [True, False, True]
    assert isinstance(instance, internals.NormBase) and isinstance(lazy, internals.LazyNorm)
    assert isinstance(nn.Dropout3d(), internals.Dropout)
    with pytest.raises(ValueError, match="at least 2D"):
        internals.check_batch_norm_input(nn.SyncBatchNorm(2), torch.ones(2))
    assert not internals.has_kernel("aten::batch_norm_elemt", "cpu") and internals.has_kernel("aten::add.Tensor", "cpu")
    assert list(internals.submodules(nn.Sequential(norm))) == ["0"]
    assert list(internals.own_parameters(norm)) == ["weight", "bias"]
    assert list(internals.own_buffers(norm)) == ["running_mean", "running_var", "num_batches_tracked"]
    internals.apply_to_tensors(norm, lambda each: each + 1)
    assert norm.weight.tolist() == [2, 2]
    assert list(internals.flat_weights(nn.GRU(1, 1))) == ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
    with internals.reparametrize_module(norm, {"weight": torch.zeros(2)}):
        assert norm.weight.tolist() == [0, 0]


def test_copies_for_data_parallel():
    class Own(nn.Module):
        def _replicate_for_data_parallel(self):
            return "own"

    plain = nn.Linear(1, 1)
    traced = torch.fx.symbolic_trace(plain)
    assert internals.replicate_for_data_parallel(plain) is plain
    assert internals.replicate_for_data_parallel(traced) is traced
    assert internals.replicate_for_data_parallel(Own()) == "own"


def test_attributes_of_modules():
    module = nn.Linear(1, 1)
    module.compile(backend="eager")
    assert callable(getattr(module, internals.COMPILED_CALL))
    assert getattr(torch.compile(nn.Linear(1, 1), backend="eager"), internals.ORIGINAL).weight.shape == (1, 1)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["weight"])
    assert getattr(module, internals.DDP_IGNORED) == ["weight"]
    assert internals.active_ddp_module() is None
    internals.set_active_ddp_module("this")
    assert nn.parallel.DistributedDataParallel._get_active_ddp_module() == "this"
    internals.set_active_ddp_module(None)


def test_an_error_of_a_thread():
    try:
        raise KeyError("lost")
    except KeyError:
        wrapped = internals.ExceptionWrapper(where="in replica 1")
    with pytest.raises(KeyError, match="Caught KeyError in replica 1"):
        wrapped.reraise()


def test_frames_are_left_as_they_are():
    def function():
        return torch.compiler.is_compiling()

    internals.leave_frames(function, and_callees=True)
    internals.end_graph_at(function)
    assert torch.compile(function, backend="eager")() is False


def test_devices_loaders_and_the_profiler():
    with suppress(RuntimeError):  # torch's error without an accelerator
        assert internals.is_allocator_initialized() is False
    assert internals.privateuse1_name() == "privateuseone" and not internals.is_in_bad_fork("cpu")
    loaders = [iter(torch.utils.data.DataLoader([1, 2], num_workers=number)) for number in (0, 1)]
    assert tuple(map(type, loaders)) == tuple(internals.LoaderIters)
    assert all(isinstance(each, internals.BaseDataLoaderIter) for each in loaders)
    assert type(internals.profile_all_threads()).__name__ == "_ExperimentalConfig"

    class Seen(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.name = internals.schema_of(func).name
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        torch.ones(1).add(1)
    assert seen.name == "aten::add"


def test_groups():
    with pytest.raises(ValueError, match="not been initialized"):
        internals.default_store()
    assert internals.process_groups() == []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (group,) = internals.process_groups()
        cpu = torch.device("cpu")
        assert internals.default_store().set("key", "value") is None
        internals.set_timeout(timedelta(seconds=7))
        gloo = internals.backend_of(group, cpu)
        assert internals.timeout_of(gloo) == timedelta(seconds=7)
        internals.set_default_timeout(gloo, timedelta(seconds=8))
        before = internals.sequence_number(group)
        dist.all_reduce(torch.ones(1))
        assert internals.sequence_number(group) == before + 1 and internals.sequence_number(object()) == 0
        made = internals.group_of(dist.ProcessGroupGloo(dist.HashStore(), 0, 1), dist.HashStore(), 0, 1, cpu)
        tensor = torch.ones(2)
        made.allreduce([tensor]).wait()
        whole, part = torch.zeros(2), torch.zeros(2)
        options = dist.distributed_c10d.AllgatherOptions()
        internals.all_gather_single(made, whole, tensor, options).wait()
        internals.reduce_scatter_single(made, part, tensor, dist.ReduceScatterOptions()).wait()
        assert whole.tolist() == part.tolist() == [1, 1]
        mesh = dist.init_device_mesh("cpu", (1,))
        assert internals.root_mesh(mesh) is mesh
        assert all(isinstance(json.loads(text), dict) for text in internals.flight_records())
    finally:
        internals.abort_process_group()
    assert internals.default_timeout(dist.Backend("gloo")) == timedelta(minutes=30)


# --- and without them -------------------------------------------------------------------------------------------------

WITHOUT_ANY = """
import importlib, pkgutil, sys
import torch

def find(path):
    raise AttributeError(path)

pkgutil.resolve_name = find
for name in sys.argv[1].split():
    importlib.import_module(name)
from lockstep.base import torch_internals as internals
for name in internals.INSTEAD:
    print(name)
internals.queue_callback(None)
"""

WITHOUT_MOST = """
import pkgutil, sys
import torch
from torch import nn

real = pkgutil.resolve_name

def find(path):
    from lockstep.base.torch_internals import _refuse
    if path in sys.argv[1].split():
        return real(path)
    raise AttributeError(path)

pkgutil.resolve_name = find
import lockstep

def train(data):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    model.eval()  # of the parts' statistics: another model than on the whole
    with lockstep.init() as world:
        wrapped = lockstep.DistributedDataParallel(model)
        for _ in range(3):
            with wrapped.no_sync():
                wrapped(data[world.rank]).mean().backward()
            torch.utils.checkpoint.checkpoint(wrapped, data[world.rank], use_reentrant=False).mean().backward()
            torch.optim.SGD(wrapped.parameters(), lr=0.1).step()
            wrapped.zero_grad()
    return [each.detach() for each in model.parameters()]

if __name__ == "__main__":
    data = torch.arange(16.0, dtype=torch.float64).view(2, 2, 4) / 16
    distributed = lockstep.launch(train, data, devices=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double().eval()
    parallel = lockstep.DataParallel(model, device_ids=["cpu", "cpu"])
    for _ in range(3):
        for _ in range(2):
            parallel(data.flatten(0, 1)).mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
    for own, other in zip(model.parameters(), distributed[0] if isinstance(distributed, list) else distributed):
        torch.testing.assert_close(own.detach(), other, rtol=1e-12, atol=1e-14)
    print("the same")
"""


def test_without_any_of_them_everything_can_be_imported(tmp_path):
    left_out = ("lockstep.__main__", "lockstep.ray")  # which runs the command; which needs Ray
    names = {module_of(path, PACKAGE) for path in sources()}
    result = run(WITHOUT_ANY, " ".join(sorted(names.difference(left_out))), tmp_path)
    missing = result.stdout.split()
    assert set(missing) == set(internals.INSTEAD), result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("lockstep: torch ")]
    late = {name for name in missing if not any(f" has no {name}: " in line for line in said)}
    parts = ("tensor.parallel", "profiler._Exp", "elastic.rendezvous")
    assert all(any(part in name for part in parts) for name in late), late
    assert len(said) == len(missing) - len(late)
    assert "ConfigurationError: This cannot work with torch" in result.stderr


def test_without_those_that_can_be_done_without_gradients_are_right(tmp_path):
    needed = [name for name, instead in internals.INSTEAD.items() if instead is internals._refuse]
    result = run(WITHOUT_MOST, " ".join(needed), tmp_path)
    assert result.stdout.splitlines()[-1:] == ["the same"], result.stderr


def run(code, argument, tmp_path):
    (tmp_path / "program.py").write_text(code)
    new = os.environ | {"PYTHONHASHSEED": "0"}  # a new interpreter, in which torch is not imported yet
    words = [sys.executable, "program.py", argument]
    return subprocess.run(words, cwd=tmp_path, env=new, capture_output=True, text=True, timeout=100, check=False)
