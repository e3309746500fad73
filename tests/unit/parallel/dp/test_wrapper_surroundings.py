"""DataParallel.forward among hooks, modes, subclasses and the functional form."""

import threading
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from lockstep.parallel.dp.wrapper import DataParallel, data_parallel
from tests.models import build, global_batch
from tests.unit.parallel.dp.test_wrapper import close


def test_modes_of_the_caller_hold_in_the_replicas():
    seen = []

    class Net(nn.Module):
        def forward(self, x):
            cpu = torch.is_autocast_enabled("cpu")
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cpu, torch.get_default_dtype()))
            return x @ x.T.new_ones(x.shape[1], 1)

    model = DataParallel(Net(), ["cpu", "cpu"])
    x = torch.randn(4, 3)
    model(x)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        assert model(x).is_inference()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype is torch.bfloat16
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.double)
    try:
        model(x)
    finally:
        torch.set_default_dtype(previous)
    single = torch.float32
    expected = [
        (True, False, False, single),
        (False, False, False, single),
        (False, True, False, single),
        (True, False, True, single),
        (True, False, False, torch.double),
    ]
    assert seen == [modes for modes in expected for _ in range(2)]


def test_hooks_are_called_in_every_replica():
    module = build("mlp")
    model = DataParallel(module, ["cpu", "cpu"])
    calls = []
    module.register_forward_pre_hook(lambda layer, args: calls.append(("pre", layer is module, len(args[0]))))
    module[0].register_forward_hook(lambda layer, args, output: calls.append(("post", layer is module[0], len(output))))
    module.register_full_backward_hook(lambda layer, grad_in, grad_out: calls.append(("back", False, len(grad_out[0]))))
    model.register_forward_hook(lambda layer, args, output: calls.append(("whole", layer is model, len(output))))
    model(global_batch("mlp", 5, 0)[0].requires_grad_()).sum().backward()
    expected = [(name, False, size) for name in ("pre", "post", "back") for size in (2, 3)]
    assert sorted(calls) == sorted([*expected, ("whole", True, 5)])


def test_a_hook_on_a_parameter_sees_the_whole_gradient():
    module = build("mlp")
    model = DataParallel(module, ["cpu", "cpu"])
    seen, after = [], []
    module[0].weight.register_hook(seen.append)
    module[0].bias.register_post_accumulate_grad_hook(lambda bias: after.append(bias.grad.clone()))
    x, y = global_batch("mlp", 5, 0)
    F.mse_loss(model(x), y).backward()
    F.mse_loss(model(x), y).backward()
    shards = [(x[:3], y[:3]), (x[3:], y[3:])]
    model.backward(lambda replica, shard: F.mse_loss(replica(shard[0]), shard[1]), shards, [3 / 5, 2 / 5])
    assert len(seen) == len(after) == 3
    assert torch.allclose(seen[0], seen[2], rtol=1e-12) and torch.allclose(3 * after[0], after[2], rtol=1e-12)


def test_methods_of_subclasses_are_used():
    calls = []

    class Detector(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            calls.append(("scatter", device_ids))
            return tuple((part,) for part in inputs[0]), tuple({} for _ in inputs[0])

        def replicate(self, module, device_ids):
            calls.append(("replicate", device_ids))
            return super().replicate(module, device_ids)

        def parallel_apply(self, replicas, inputs, kwargs):
            calls.append(("parallel_apply", len(replicas), len(inputs), len(kwargs)))
            return super().parallel_apply(replicas, inputs, kwargs)

        def gather(self, outputs, output_device):
            calls.append(("gather", output_device))
            return outputs

    cpu = torch.device("cpu")
    module = build("mlp")
    model = Detector(module, ["cpu", "cpu", "cpu"])
    parts = [torch.randn(n, 6, dtype=torch.double) for n in (3, 1)]
    outputs = model(parts)
    assert [len(output) for output in outputs] == [3, 1]
    assert calls == [
        ("scatter", [cpu] * 3),
        ("replicate", [cpu] * 2),
        ("parallel_apply", 2, 2, 2),
        ("gather", cpu),
    ]


def test_other_modules_can_be_replicated():
    model = DataParallel(build("mlp"), ["cpu", "cpu"])
    other = nn.Linear(2, 2)
    replicas = model.replicate(other, ["cpu", "cpu"])
    x = torch.randn(2, 2)
    outputs = model.parallel_apply(replicas, [(x,), (x,)], [{}, {}])
    close(outputs[1], other(x))


def test_functional_form():
    module = build("mlp")
    x, _ = global_batch("mlp", 5, 0)
    close(data_parallel(module, x, ["cpu", "cpu"]), module(x))
    close(data_parallel(module, (), ["cpu", "cpu"], module_kwargs={"input": x}), module(x))
    assert data_parallel(Constant(), None, ["cpu", "cpu"]).tolist() == [1.0]


class Constant(nn.Module):
    def forward(self):
        return torch.ones(1)


def test_with_one_device_the_module_itself_runs():
    module = build("mlp")
    seen = []
    module.register_forward_hook(lambda layer, args, output: seen.append(layer))
    model = DataParallel(module, ["cpu"])
    x, y = global_batch("mlp", 3, 0)
    assert model(x).shape == (3, 3) and seen == [module]
    (loss,) = model.backward(lambda network, shard: F.mse_loss(network(shard), y), [x], [2.0])
    F.mse_loss(module(x), y).backward()
    assert module[0].weight.grad is not None and not loss.requires_grad


def test_modes_and_hooks_of_python_see_the_replicas():
    net = nn.Linear(3, 2)
    model, x, seen = DataParallel(net, ["cpu", "cpu"]), torch.randn(4, 3), []

    class Count(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Count():
        model(x)
    assert seen.count(F.linear) == 2
    for wrapped in (net, model):
        with FlopCounterMode(display=False) as flops:
            wrapped(x)
        assert flops.get_total_flops() == 2 * 4 * 3 * 2
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda each: each):
        model(x)
    assert len(saved) >= 2


def test_the_default_device_and_context_variables_hold_in_the_replicas_threads():
    setting, seen = ContextVar("setting", default=0), []

    class Net(nn.Module):
        def forward(self, x):
            seen.append((torch.empty(0).device.type, setting.get(), threading.current_thread()))
            return x

    model = DataParallel(Net(), ["cpu", "cpu"])
    token = setting.set(3)
    try:
        with torch.device("meta"):
            model(torch.ones(4, 1, device="cpu"))
    finally:
        setting.reset(token)
    assert [each[:2] for each in seen] == [("meta", 3)] * 2
    assert len({each[2] for each in seen} - {threading.current_thread()}) == 2


def test_transforms_of_torch_func():
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    model = DataParallel(net, ["cpu", "cpu"])
    assert torch.equal(torch.func.jacrev(model)(x), torch.func.jacrev(net)(x))
