"""Replicas persist, and are never out of date: whatever changes in the module, the next call sees it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from lockstep.parallel.dp.wrapper import DataParallel
from tests.models import build, global_batch
from tests.unit.parallel.dp.test_wrapper import KINDS, assert_same_gradients, wrap


def outputs_of(model, batch):
    """Outputs of the replicas as ``backward`` and as ``forward`` see them, with and without gradients."""
    x, _ = batch
    parts = {}

    def loss(replica, shard):
        index, part = shard
        parts[index] = replica(part)
        return parts[index].sum()

    model.backward(loss, [(0, x[:2]), (1, x[2:])], [1.0, 1.0])
    model.module.zero_grad()
    with torch.no_grad():
        return [model(x), torch.cat([parts[0], parts[1]]).detach(), model.forward(x)]


def check(model, batch):
    expected = model.module(batch[0]).detach()
    for output in [*outputs_of(model, batch), model(batch[0]).detach()]:
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-14)


def test_replicas_are_the_same_objects_every_time():
    model = DataParallel(build("mlp"), ["cpu"] * 3)
    replicas = model.replicate(model.module, model.device_ids)
    again = model.replicate(model.module, model.device_ids[:2])
    assert [id(replica) for replica in again] == [id(replica) for replica in replicas[:2]]
    assert replicas[0] is not model.module and replicas[0][0] is not replicas[1][0]
    assert type(replicas[0]) is type(model.module)


def test_on_one_device_nothing_is_copied():
    model = DataParallel(build("mlp"), ["cpu", "cpu"])
    weight = model.module[0].weight
    for replica in model.replicate(model.module, model.device_ids):
        assert replica[0].weight.data_ptr() == weight.data_ptr()
    pointers = []

    def loss(replica, x):
        own = replica[0].weight
        pointers.append(own.data_ptr())
        assert own is not weight and own.is_leaf and isinstance(own, nn.Parameter) and own in set(replica.parameters())
        return replica(x).sum()

    x = global_batch("mlp", 2, 0)[0]
    model.backward(loss, [x, x], [1.0, 1.0])
    assert pointers == [weight.data_ptr()] * 2


def replace_data(p):
    p.data = p.data * 2


def swap_twice(p):
    """The second tensor may get the memory of the first."""
    p.data = p.data.clone()
    p.data = p.data + 1


CHANGES = {
    "in place": lambda p: p.add_(1),
    "through data": lambda p: p.data.add_(1),
    "through numpy": lambda p: p.detach().numpy().__iadd__(1),
    "replaced data": replace_data,
    "replaced data twice": swap_twice,
    "copied": lambda p: p.copy_(torch.ones_like(p)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_a_weight_is_seen(kind, change):
    model = wrap(kind, build("mlp"), 2)
    batch = global_batch("mlp", 5, 0)
    check(model, batch)
    before = model.module(batch[0]).detach()
    for _ in range(2):
        with torch.no_grad():
            CHANGES[change](model.module[0].weight)
        check(model, batch)
    assert not torch.equal(model.module(batch[0]), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_the_tree_is_seen(kind):
    module = build("mlp")
    model = wrap(kind, module, 2)
    batch = global_batch("mlp", 5, 0)
    check(model, batch)
    module[0].weight = nn.Parameter(torch.randn_like(module[0].weight))
    check(model, batch)
    module[2] = nn.Linear(16, 16).double()
    check(model, batch)
    module.insert(3, nn.ReLU())
    check(model, batch)
    del module[3]
    check(model, batch)
    module[1].__class__ = nn.Sigmoid
    check(model, batch)
    module[2].bias = None
    check(model, batch)
    module[4].weight = module[4].weight  # unchanged
    module[2].weight = nn.Parameter(module[2].weight.data.clone().half().double(), requires_grad=False)
    check(model, batch)
    parametrize.register_parametrization(module[0], "weight", Doubled())
    check(model, batch)
    parametrize.remove_parametrizations(module[0], "weight")
    check(model, batch)
    model.module = build("mlp", seed=9)
    check(model, batch)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("kind", KINDS)
def test_freezing_and_thawing(kind):
    module, reference = build("mlp"), build("mlp")
    model = wrap(kind, module, 2)
    x, y = global_batch("mlp", 5, 0)
    for frozen in (False, True, False):
        for network in (module, reference):
            network.zero_grad()
            network[2].requires_grad_(not frozen)
        F.mse_loss(reference(x), y).backward()
        F.mse_loss(model(x), y).backward()
        assert_same_gradients(module, reference)
        module.zero_grad()
        shards = [(x[:2], y[:2]), (x[2:], y[2:])]
        model.backward(lambda replica, shard: F.mse_loss(replica(shard[0]), shard[1]), shards, [0.4, 0.6])
        assert_same_gradients(module, reference)
        assert (module[2].weight.grad is None) == frozen


@pytest.mark.parametrize("kind", KINDS)
def test_moving_to_another_type(kind):
    module = build("mlp")
    model = wrap(kind, module, 2)
    x, y = global_batch("mlp", 5, 0)
    check(model, (x, y))
    model.float()
    assert model(x.float()).dtype is torch.float32
    model.backward(lambda replica, part: replica(part).sum(), [x[:2].float(), x[2:].float()], [1.0, 1.0])
    assert module[0].weight.grad.dtype is torch.float32
    model.zero_grad()
    model.double()
    check(model, (x, y))


def test_the_same_memory_as_another_type():
    module = nn.Linear(2, 2, bias=False).half()
    model = DataParallel(module, ["cpu", "cpu"])
    seen = []

    def loss(replica, x):
        seen.append(replica.weight.detach().clone())
        return (replica.weight * x).sum()

    model.backward(loss, [1.0, 1.0], [1.0, 1.0])
    module.zero_grad()
    module.weight.data = module.weight.data.view(torch.bfloat16)
    model.backward(loss, [1.0, 1.0], [1.0, 1.0])
    assert torch.equal(seen[-1], module.weight) and seen[-1].dtype is torch.bfloat16


def test_a_weight_attribute_is_taken_along():
    module = build("mlp")
    model = DataParallel(module, ["cpu", "cpu"])
    seen = []

    def loss(replica, x):
        seen.append(replica[0].weight.group)
        return replica(x).sum()

    for group in ("decay", "no decay"):
        module[0].weight.group = group
        model.backward(loss, [*global_batch("mlp", 2, 0)[0].split(1)], [1.0, 1.0])
    assert seen == ["decay"] * 2 + ["no decay"] * 2


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.flag = 1.0
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.log = []

    def forward(self, x):
        assert not hasattr(self, "seen")
        self.seen = True
        self.flag += 1.0
        self.count.add_(len(x))
        self.cache = self.cache + 1
        self.log.append(len(x))
        return x * 0 + self.flag


@pytest.mark.parametrize("kind", KINDS)
def test_what_forward_leaves_behind(kind):
    """As with torch's replicas: attributes are gone, buffers written in place stay for the first replica."""
    module = Stateful()
    model = wrap(kind, module, 2)
    x = torch.zeros(5, 1)
    assert model(x).unique().tolist() == [2.0]
    assert model(x).unique().tolist() == [2.0]
    module.flag = 5.0
    assert model(x).unique().tolist() == [6.0]
    assert module.flag == 5.0 and not hasattr(module, "seen")
    assert module.count.item() == 9.0  # three samples of the first replica, three times
    assert module.cache.item() == 0.0
    assert sorted(module.log) == [2, 2, 2, 3, 3, 3]  # a list is shared
    module.register_buffer("late", torch.zeros(1))
    module.count = torch.full((1,), 100.0)
    model(x)
    assert module.count.item() == 103.0


def test_train_and_eval_reach_the_replicas():
    module = build("mlp")
    model = DataParallel(module, ["cpu", "cpu"])
    for mode in (True, False, True):
        model.train(mode)
        replicas = model.replicate(module, model.device_ids)
        assert all(layer.training is mode for replica in replicas for layer in replica.modules())


def test_shared_modules_and_tied_weights_stay_shared():
    module = build("transformer")
    module.twin = module.block
    for replica in DataParallel(module, ["cpu", "cpu"]).replicate(module, ["cpu", "cpu"]):
        assert replica.twin is replica.block and replica.head.weight is replica.embedding.weight


def test_lists_and_dicts_of_parameters_are_those_of_the_replica():
    """As torch's replica shows them (its test_parameter_list_dict_replica): connected to the module by autograd."""
    one, two = nn.Parameter(torch.rand(10)), nn.Parameter(torch.rand(10))
    seen = []

    class Net(nn.Module):
        def __init__(self, weights, keys):
            super().__init__()
            self.weights, self.keys = weights, keys

        def forward(self, x):
            for key, weight in zip(self.keys, (one, two), strict=True):
                own = self.weights[key]
                seen.append((torch.equal(own, weight), own.requires_grad, own.grad_fn is not None))
            return x * sum(self.weights[key].sum() for key in self.keys)

    for weights, keys in ((nn.ParameterList([one, two]), (0, 1)), (nn.ParameterDict({"a": one, "b": two}), ("a", "b"))):
        model = DataParallel(Net(weights, keys), ["cpu", "cpu"])
        model(torch.ones(4, 1)).sum().backward()
    assert seen == [(True, True, True)] * 8
    assert one.grad.tolist() == [8.0] * 10


def test_zero_grad_in_a_replica_warns():
    class Net(nn.Module):
        def forward(self, x):
            with pytest.warns(
                UserWarning, match=r"Calling \.zero_grad\(\) from a module created with nn\.DataParallel"
            ):
                self.zero_grad()
            return x

    replica = DataParallel(Net(), ["cpu", "cpu"]).replicate(Net(), ["cpu"])[0]
    replica(torch.zeros(1))
