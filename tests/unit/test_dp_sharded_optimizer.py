"""An optimizer divided among the replicas of a DataParallel does what the bare one does."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lockstep import DataParallel
from lockstep.errors import ConfigurationError, LockstepError

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adamw amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),  # not element-wise
}


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 3))
    model.register_parameter("unused", nn.Parameter(torch.ones(5)))
    return model.double()


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(12, 7, dtype=torch.float64, generator=generator), torch.randn(12, 3, generator=generator).double())
        for _ in range(count)
    ]


def train_bare(model, optimizer, steps, after=lambda: None):
    for batch in steps:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        after()


def train_sharded(engine, optimizer, steps, after=lambda: None):
    for inputs, targets in steps:
        optimizer.zero_grad()
        count = len(engine.device_ids)
        shards = list(zip(inputs.chunk(count), targets.chunk(count), strict=True))
        engine.backward(loss, shards, [len(shard[0]) / 12 for shard in shards])
        optimizer.step()
        after()


def assert_close(left, right):
    for name, value in left.state_dict().items():
        torch.testing.assert_close(value, right.state_dict()[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_parameters_and_state(name, count):
    bare, sharded = make_model(), make_model()
    engine = DataParallel(sharded, ["cpu"] * count)
    mine, theirs = OPTIMIZERS[name](bare.parameters()), engine.shard_optimizer(OPTIMIZERS[name](sharded.parameters()))
    schedules = [StepLR(optimizer, 2, gamma=0.5) for optimizer in (mine, theirs)]
    train_bare(bare, mine, batches(5), schedules[0].step)
    train_sharded(engine, theirs, batches(5), schedules[1].step)
    assert_close(bare, sharded)
    assert torch.equal(sharded.unused, torch.ones(5).double())  # no weight decay without a gradient
    expected, found = mine.state_dict(), theirs.state_dict()
    assert found["state"].keys() == expected["state"].keys()
    for index, entries in expected["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(found["state"][index][key], value, rtol=1e-12, atol=1e-13)
    assert [group["lr"] for group in found["param_groups"]] == [group["lr"] for group in expected["param_groups"]]


def test_states_pass_between_bare_and_sharded_on_any_number_of_replicas():
    bare, steps = make_model(), batches(6)
    optimizer = OPTIMIZERS["adamw"](bare.parameters())
    train_bare(bare, optimizer, steps)
    model = make_model()
    first = OPTIMIZERS["adamw"](model.parameters())
    train_bare(model, first, steps[:2])
    state = copy.deepcopy(first.state_dict())
    for count, part in ((3, steps[2:4]), (2, steps[4:5])):
        engine = DataParallel(model, ["cpu"] * count)
        sharded = engine.shard_optimizer(OPTIMIZERS["adamw"](model.parameters()))
        sharded.load_state_dict(state)
        train_sharded(engine, sharded, part)
        state = sharded.state_dict()
    last = OPTIMIZERS["adamw"](model.parameters())
    last.load_state_dict(state)
    train_bare(model, last, steps[5:])
    assert_close(bare, model)


def test_each_replica_keeps_an_equal_part():
    model = make_model()
    engine = DataParallel(model, ["cpu"] * 3)
    optimizer = engine.shard_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
    (inputs, targets), *_ = batches(1)
    engine.backward(lambda model, batch: loss(model, batch) + model.unused.sum(), [(inputs, targets)], [1.0])
    optimizer.step()
    sizes = optimizer.state_bytes()
    whole = sum(parameter.numel() for parameter in model.parameters()) * 2 * 8
    assert sum(sizes) == pytest.approx(whole, rel=0.01)
    assert max(sizes) < whole / 3 * 1.05


def test_groups_keep_their_options_and_may_be_added():
    models = [make_model(), make_model()]
    engine = DataParallel(models[1], ["cpu", "cpu"])

    def groups(model):
        return [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters(), "weight_decay": 0.5}]

    bare = torch.optim.AdamW(groups(models[0]), lr=1e-2)
    sharded = engine.shard_optimizer(torch.optim.AdamW(groups(models[1]), lr=1e-2))
    train_bare(models[0], bare, batches(2))
    train_sharded(engine, sharded, batches(2))
    bare.add_param_group({"params": list(models[0][4].parameters()), "lr": 5e-2})
    sharded.add_param_group({"params": list(models[1][4].parameters()), "lr": 5e-2})
    train_bare(models[0], bare, batches(3, seed=2))
    train_sharded(engine, sharded, batches(3, seed=2))
    assert_close(*models)


def test_weights_that_a_script_replaces_or_writes_to_count():
    models = [make_model(), make_model()]
    engine = DataParallel(models[1], ["cpu", "cpu"])
    bare = OPTIMIZERS["sgd"](models[0].parameters())
    sharded = engine.shard_optimizer(OPTIMIZERS["sgd"](models[1].parameters()))
    for train in (lambda: train_bare(models[0], bare, batches(2)), lambda: train_sharded(engine, sharded, batches(2))):
        train()
    for model in models:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
            model[2].weight.data = torch.ones_like(model[2].weight)
    train_bare(models[0], bare, batches(2, seed=3))
    train_sharded(engine, sharded, batches(2, seed=3))
    assert_close(*models)


def test_one_device_or_none_is_the_module_itself():
    for devices in (["cpu"], None):
        bare, model = make_model(), make_model()
        engine = DataParallel(model, devices)
        mine = OPTIMIZERS["adamw"](bare.parameters())
        sharded = engine.shard_optimizer(OPTIMIZERS["adamw"](model.parameters()))
        for batch in batches(3):
            for each, optimizer in ((bare, mine), (model, sharded)):
                optimizer.zero_grad()
                loss(each, batch).backward()
                optimizer.step()
        assert_close(bare, model)


def test_a_closure_is_called_once():
    model = make_model()
    engine = DataParallel(model, ["cpu", "cpu"])
    optimizer, calls = engine.shard_optimizer(OPTIMIZERS["sgd"](model.parameters())), []

    def closure():
        calls.append(torch.is_grad_enabled())
        return 4.5

    assert optimizer.step(closure) == 4.5
    assert calls == [True]


def test_what_cannot_be_divided_is_refused():
    model = make_model()
    engine = DataParallel(model, ["cpu", "cpu"])
    used = OPTIMIZERS["adamw"](model.parameters())
    train_bare(model, used, batches(1))
    with pytest.raises(ConfigurationError) as error:
        engine.shard_optimizer(used)
    assert str(error.value) == (
        "This AdamW has a state already, which would be lost.\n"
        "Divide it before its first step, then load its state_dict() into what shard_optimizer() returns."
    )
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = DataParallel(embedding, ["cpu", "cpu"]).shard_optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(LockstepError) as error:
        optimizer.step()
    assert str(error.value).splitlines()[0] == (
        "Parameter 0 of the optimizer received a sparse gradient, which cannot be divided."
    )


@pytest.mark.parametrize("numbers", [(0, 0, 0), (0, 1, 2)])
def test_divided_gradients_do_what_whole_ones_do(numbers, monkeypatch):
    monkeypatch.setattr("lockstep.parallel.dp.gradients.worth_packing", lambda source, device: True)
    devices = [torch.device("cpu", number) if number else torch.device("cpu") for number in numbers]
    monkeypatch.setattr(DataParallel, "devices", property(lambda self: tuple(devices)))
    bare, sharded = make_model(), make_model()
    engine = DataParallel(sharded, ["cpu"] * 3)
    mine = OPTIMIZERS["adamw"](bare.parameters())
    theirs = engine.shard_optimizer(OPTIMIZERS["adamw"](sharded.parameters()), shard_gradients=True)
    for step, (inputs, targets) in enumerate(batches(5)):
        for optimizer in (mine, theirs):
            optimizer.zero_grad()
        for _ in range(2):  # accumulated
            loss(bare, (inputs, targets)).backward()
            count = 2 if step == 3 else 3  # a replica without a shard owns its slice all the same
            shards = list(zip(inputs.chunk(count), targets.chunk(count), strict=True))
            engine.backward(loss, shards, [1 / count] * count)
        assert all(parameter.grad is None for parameter in sharded.parameters())
        assert all(each.untyped_storage().nbytes() == each.nbytes for each in theirs.slices.tensors())
        norms = [nn.utils.clip_grad_norm_(bare.parameters(), 0.5), theirs.clip_grad_norm_(0.5)]
        assert float(norms[1]) == pytest.approx(float(norms[0]), rel=1e-12)
        mine.step()
        theirs.step()
    assert_close(bare, sharded)
    assert torch.equal(sharded.unused, torch.ones(5).double())
    expected, found = mine.state_dict()["state"], theirs.state_dict()["state"]
    torch.testing.assert_close(found[1]["exp_avg_sq"], expected[1]["exp_avg_sq"], rtol=1e-12, atol=1e-13)
    sharded[0].weight.grad = torch.ones_like(sharded[0].weight)
    with pytest.raises(LockstepError) as error:
        theirs.step()
    assert str(error.value).splitlines()[0] == (
        "Parameter 1 of the optimizer has a gradient in .grad, but with shard_gradients=True gradients come from "
        "DataParallel.backward only."
    )
    del optimizer, theirs, error
    gc.collect()  # and gradients are whole again
    sharded.zero_grad()
    engine.backward(loss, shards, [1 / 3] * 3)
    assert sharded[0].weight.grad is not None


def test_what_divided_gradients_refuse():
    model = make_model()
    engine = DataParallel(model, ["cpu", "cpu"])
    with pytest.raises(ConfigurationError) as error:
        engine.shard_optimizer(OPTIMIZERS["adafactor"](model.parameters()), shard_gradients=True)
    assert str(error.value) == (
        "shard_gradients=True needs an element-wise optimizer, which Adafactor is not known to be.\nLeave it out."
    )
    with pytest.raises(ConfigurationError) as error:
        engine.shard_optimizer(OPTIMIZERS["sgd"](make_model().parameters()), shard_gradients=True)
    assert str(error.value).startswith("shard_gradients=True, but the optimizer has parameters that are not the module")
    optimizer = engine.shard_optimizer(OPTIMIZERS["sgd"](model.parameters()), shard_gradients=True)
    model[0].bias.register_hook(lambda gradient: gradient)
    ((inputs, targets),) = batches(1)
    with pytest.raises(ConfigurationError) as error:
        engine.backward(loss, [(inputs, targets)], [1.0])
    assert str(error.value).splitlines()[0] == (
        "Parameter 2 of the optimizer has a gradient hook, but with shard_gradients=True there is no whole gradient."
    )
    assert optimizer.slices.tensors() == []
