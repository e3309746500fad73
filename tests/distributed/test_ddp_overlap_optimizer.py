"""An optimizer that steps each bucket within backward leaves the same bits as one that steps after it."""

from functools import partial

import pytest
import torch
from torch.futures import Future

import lockstep
from lockstep.comm.collectives import all_reduce
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.comm_hooks import AllReduceMean
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.models import FAMILIES, build, global_batch, share, soak
from tests.training import make_task, token_loss

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


def groups(model, name):
    """Return two groups that go across buckets; the unused layer of "reused" is in one of them."""
    named = list(model.named_parameters())
    decayed = [parameter for key, parameter in named if key.endswith("weight")]
    others = [parameter for key, parameter in named if not key.endswith("weight")]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


class AtOnce(AllReduceMean):
    """Reduces before it returns, so that a bucket is stepped when the next one leaves, however busy the machine is."""

    def start(self, bucket, *, alone):
        all_reduce(bucket.payload, group=self._group)
        future = Future()
        future.set_result(None)
        return future


def side_by_side(world, name, kind, at_once):
    """Train one model each way; return the order in which gradients arrived and parameters were stepped."""
    family = FAMILIES[name]
    models = [lockstep.DistributedDataParallel(build(name), bucket_cap_mb=0.0005) for _ in range(2)]
    optimizers = [OPTIMIZERS[kind](groups(model.module, name)) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    if at_once:
        models[0].reducer.set_reduction(AtOnce(models[0].process_group))
    models[0].overlap_optimizer(optimizers[0])
    events = []
    names = {id(parameter): key for key, parameter in models[0].module.named_parameters()}
    for parameter in models[0].module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: events.append(("arrived", names[id(p)])))
    optimizers[0].register_step_post_hook(
        lambda optimizer, args, kwargs: events.extend(
            ("stepped", names[id(p)]) for group in optimizer.param_groups for p in group["params"]
        )
    )
    for step in range(4):
        events.clear()
        batch = share(global_batch(name, 4 * world.world_size, seed=step), world.rank, world.world_size)
        for index, (model, optimizer, scheduler) in enumerate(zip(models, optimizers, schedulers, strict=True)):
            optimizer.zero_grad()
            family.loss(model, batch).backward()
            if index == 1:
                optimizer.step()
            scheduler.step()
        for (key, ours), theirs in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
            assert torch.equal(ours, theirs), key
    first, second = (optimizer.state_dict() for optimizer in optimizers)
    assert first["param_groups"] == second["param_groups"]
    assert first["state"].keys() == second["state"].keys()
    stepped = [key for what, key in events if what == "stepped"]
    assert sorted(stepped) == sorted(names.values())
    return events


@pytest.mark.parametrize("kind", ["adamw", *soak(kind for kind in OPTIMIZERS if kind != "adamw")])
@pytest.mark.parametrize("name", ["reused", *soak(["mlp"])])
def test_same_bits(ranks, name, kind):
    ranks(2)(side_by_side, name, kind, False)


@pytest.mark.parametrize("name", ["transformer", "reentrant", *soak(["cnn", "lstm", "checkpoint", "channels_last"])])
def test_same_bits_for_all_kinds_of_models(ranks, name):
    ranks(2)(side_by_side, name, "adamw", True)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_same_bits_on_one_and_three_ranks(ranks, num_ranks):
    ranks(num_ranks)(side_by_side, "mlp", "sgd", False)


def test_buckets_are_stepped_while_backward_runs(ranks):
    """The last layer's bias is first to arrive; it is stepped before the first layer's gradients are there."""
    for events in ranks(2)(side_by_side, "mlp", "sgd", True):
        assert events.index(("stepped", "4.weight")) < events.index(("arrived", "0.weight"))


class Counting(torch.optim.SGD):
    """Counts its steps in the group, as some optimizers do, and steps by what it counts."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        for group in self.param_groups:
            group["count"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=1 / group["count"])


def counts_in_groups(world):
    models = [lockstep.DistributedDataParallel(build("mlp"), bucket_cap_mb=0.0005) for _ in range(2)]
    optimizers = [Counting(model.parameters()) for model in models]
    end = models[0].overlap_optimizer(optimizers[0])
    for step in range(4):
        batch = share(global_batch("mlp", 8, seed=step), world.rank, world.world_size)
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            FAMILIES["mlp"].loss(model, batch).backward()
            if index == 1 or step == 3:
                optimizer.step()
        assert [optimizer.param_groups[0]["count"] for optimizer in optimizers] == [step + 1, step + 1]
        for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(ours, theirs)
        if step == 2:
            end()


def test_what_an_optimizer_counts_in_a_group_is_counted_once_a_step_and_it_can_be_ended(ranks):
    ranks(2)(counts_in_groups)


def accumulated(world):
    """``no_sync`` steps nothing; weights are known at the end only, and step everything then."""
    models = [lockstep.DistributedDataParallel(build("mlp"), bucket_cap_mb=0.0005) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models[0].overlap_optimizer(optimizers[0])
    for step in range(3):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            before = [parameter.clone() for parameter in model.parameters()]
            for micro in range(2):
                batch = share(global_batch("mlp", 8, seed=10 * step + micro), world.rank, world.world_size)
                if step == 2:
                    model.mean_over(world.rank + micro + 1)
                if micro == 0:
                    with model.no_sync():
                        FAMILIES["mlp"].loss(model, batch).backward()
                    assert all(map(torch.equal, before, model.parameters()))
                else:
                    FAMILIES["mlp"].loss(model, batch).backward()
            if index == 1:
                optimizer.step()
        for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_accumulation_and_weights(ranks):
    ranks(2)(accumulated)


def a_parameter_outside(world):
    """The optimizer has a parameter that the wrapper does not know; it is stepped once, at the end."""
    model = lockstep.DistributedDataParallel(build("mlp"), bucket_cap_mb=0.0005)
    other = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.5)
    model.overlap_optimizer(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(2, 6, dtype=torch.float64)).sum() + other.sum()).backward()
    return other.tolist()


def test_parameters_of_others_are_stepped_too(ranks):
    assert ranks(2)(a_parameter_outside) == [[0.0, 0.0]] * 2


def stepped_by_hand(world):
    model = lockstep.DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.overlap_optimizer(optimizer)
    optimizer.step()


def test_stepping_by_hand_is_an_error(ranks):
    with pytest.raises(ConfigurationError) as caught:
        ranks(1)(stepped_by_hand)
    assert str(caught.value) == (
        "SGD.step() was called, but overlap_optimizer() makes it step during backward.\nLeave the call out."
    )


def with_closure(world):
    model = lockstep.DistributedDataParallel(build("mlp"))
    model.overlap_optimizer(torch.optim.LBFGS(model.parameters()))


def test_an_optimizer_that_needs_a_closure_is_refused(ranks):
    with pytest.raises(ConfigurationError) as caught:
        ranks(1)(with_closure)
    assert str(caught.value) == (
        "LBFGS computes the loss again in its step, so it cannot step during backward.\n"
        "Call its step(closure) after backward."
    )


def divided(world, what):
    model = lockstep.DistributedDataParallel(build("mlp"))
    optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, shard_gradients=True)
    if what == "overlap":
        model.overlap_optimizer(optimizer)
    model.clip_grad_norm_(1.0)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "overlap",
            "overlap_optimizer() does not work with ZeroRedundancyOptimizer, which divides a step among ranks.\n"
            "Call optimizer.step() after backward.",
        ),
        (
            "clip",
            "clip_grad_norm_() needs all gradients, but with shard_gradients=True each rank has a slice of them.\n"
            "Call clip_grad_norm_() of the optimizer.",
        ),
    ],
)
def test_gradients_in_slices_are_left_to_their_optimizer(ranks, what, text):
    with pytest.raises(ConfigurationError) as caught:
        ranks(2)(divided, what)
    assert str(caught.value) == text


def train(world, strategy, settings, **changes):
    loop = Trainer(make_task(**changes), settings, world, strategy=strategy, devices=[torch.device("cpu")])
    records = [loop.step() for _ in range(4)]
    assert all(record.updated for record in records)
    weights = torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])
    return weights, loop.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("num_ranks", [2, *soak([1])])
def test_fit_leaves_the_same_bits(ranks, num_ranks):
    how = {"schedule": "cosine", "warmup": 2, "steps": 6, "accumulate": 2, "bucket_cap_mb": 0.0003}
    usual = ranks(num_ranks)(train, "ddp", Settings(**how))
    within = ranks(num_ranks)(train, "ddp", Settings(**how, overlap_optimizer=True))
    for (weights, rate), (expected, expected_rate) in zip(within, usual, strict=True):
        assert torch.equal(weights, expected)
        assert rate == expected_rate


def test_fit_refuses_losses_whose_divisor_comes_late(ranks):
    with pytest.raises(ConfigurationError) as caught:
        ranks(2)(partial(train, loss=token_loss), "ddp", Settings(overlap_optimizer=True))
    assert str(caught.value) == (
        "With overlap_optimizer a loss must be a mean over samples, but the task returned a Loss, whose gradient is "
        "divided by the count of all ranks after backward.\nReturn the mean, or omit overlap_optimizer."
    )


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("overlap_optimizer", True, "ddp"),
        ("compression", "bf16", "ddp, local-sgd, diloco"),
        ("bucket_cap_mb", 5.0, "ddp"),
    ],
)
def test_other_engines_refuse_it(ranks, setting, value, allowed):
    with pytest.raises(ConfigurationError) as caught:
        train(None, "single", Settings(**{setting: value}))
    cause = f"{setting} is for strategy {allowed}, but the strategy is single."
    assert str(caught.value) == f"{cause}\nOmit {setting}."
