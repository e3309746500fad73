"""Strategy ddp-zero1 trains as the others do, and goes on from any of their checkpoints."""

import inspect
from functools import partial

import pytest
import torch

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.shm import shm_group
from tests.training import make_task, mean_loss, read_state, relative_error, token_loss, whole_batch

# 50 samples in global batches of 24: the third holds 2, so that of 3 ranks some have none.
NUM_STEPS = 6
TWICE = {"accumulate": 2, "clip": 0.3}
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "groups": lambda params: torch.optim.Adam([{"params": params[::2]}, {"params": params[1::2], "lr": 0.003}]),
}


def weights_of(loop):
    return torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])


def train(world, task, num_steps=NUM_STEPS, strategy="ddp-zero1", **settings):
    loop = Trainer(task, Settings(**settings), world, strategy=strategy, devices=[torch.device("cpu")])
    records = [loop.step() for _ in range(num_steps)]
    loop.close()
    return weights_of(loop), [float(record.loss) for record in records], records, loop


@pytest.mark.parametrize(
    ("num_ranks", "settings", "loss"),
    [
        (2, TWICE, mean_loss),
        (3, {}, token_loss),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((1, {}, token_loss), (3, TWICE, token_loss))),
    ],
)
def test_steps_are_those_of_the_whole_batch(ranks, num_ranks, settings, loss):
    def run(world):
        return [train(world, make_task(loss=loss, optimizer=each), **settings)[:2] for each in OPTIMIZERS.values()]

    results = ranks(num_ranks)(run)
    for index, make_optimizer in enumerate(OPTIMIZERS.values()):
        expected = whole_batch(make_task(loss=loss, optimizer=make_optimizer), NUM_STEPS, **settings)
        for result in results:
            weights, losses = result[index]
            assert relative_error(weights, expected["weights"]) < 1e-12
            assert losses == pytest.approx(expected["losses"], rel=1e-11)
            assert torch.equal(weights, results[0][index][0])


def test_on_shared_memory_gradients_are_reduced_to_slices(ranks):
    settings, num_ranks, loss = TWICE, 3, token_loss
    task = make_task(loss=loss, optimizer=OPTIMIZERS["groups"])

    def run(world):
        with shm_group() as group:
            inner = lockstep.World.from_group(group, device="cpu")
            weights, losses, _, loop = train(inner, task, **settings)
            assert loop.optimizer._shard_gradients
            assert not loop.optimizer.overlaps
            return weights, losses

    expected = whole_batch(task, NUM_STEPS, **settings)
    for weights, losses in ranks(num_ranks)(run):
        assert relative_error(weights, expected["weights"]) < 1e-12
        assert losses == pytest.approx(expected["losses"], rel=1e-11)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.soak), "fp16"])
def test_low_precision_as_ddp(ranks, precision):
    def run(world):
        settings = {"precision": precision, "clip": 0.3, "schedule": "cosine", "warmup": 2, "steps": NUM_STEPS}
        task = make_task(optimizer=OPTIMIZERS["adamw"])
        ours, _, records, _ = train(world, task, **settings)
        theirs, _, others, _ = train(world, task, strategy="ddp", **settings)
        norms = [[float(record.grad_norm) for record in each] for each in (records, others)]
        return relative_error(ours, theirs), norms, [record.updated for record in records]

    for error, norms, updated in ranks(2)(run):
        assert error < 1e-6
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        assert all(updated)


def test_all_ranks_skip_a_step_that_overflows(ranks):
    """In the first step the gradient of rank 1 is infinite, in a slice that rank 0 updates too."""

    def run(world):
        calls = []

        def loss(model, batch):
            calls.append(1)
            return mean_loss(model, batch) * (1e308 if world.rank == 1 and len(calls) == 1 else 1.0)

        weights, _, records, loop = train(
            world, make_task(optimizer=OPTIMIZERS["adamw"], loss=loss), 3, precision="fp16"
        )
        return weights, [record.updated for record in records], loop.updater.scaler.scale

    (first, *others), (second, *same) = ranks(2)(run)
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
    assert others == same == [[False, True, True], 2.0**15]


@pytest.mark.parametrize(
    ("first", "optimizer"),
    [
        ("ddp-zero1", "groups"),
        ("ddp", "adafactor"),
        *(pytest.param(first, "adamw", marks=pytest.mark.soak) for first in ("ddp", "ddp-zero1")),
    ],
)
def test_resumed_with_another_strategy_and_number_of_ranks(ranks, tmp_path, first, optimizer):
    """Six steps in one go, against three and three: on two ranks, then on three, then in one process."""
    second = "ddp-zero1" if first == "ddp" else "ddp"
    task = make_task(optimizer=OPTIMIZERS[optimizer])
    kept = {}
    named = make_task(optimizer=OPTIMIZERS[optimizer], after=lambda model: kept.update(model.state_dict()))

    def fit(world, strategy, steps):
        where = {"checkpoint": str(tmp_path / "run"), "quiet": True, "steps": steps}
        result = lockstep.fit(named, strategy=strategy, **where)
        return result.first_step, read_state(result.checkpoint)

    assert [first_step for first_step, _ in ranks(2)(fit, first, 2)] == [0, 0]
    assert [first_step for first_step, _ in ranks(3)(fit, second, 4)] == [2, 2, 2]
    ended = ranks(2)(fit, first, 5)
    assert [first_step for first_step, _ in ended] == [4, 4]
    first_step, state = ranks(1)(fit, "single", 6)[0]
    assert first_step == 5
    weights = torch.cat([state["model"][name].flatten() for name in ("0.weight", "0.bias", "2.weight", "2.bias")])
    oracle = whole_batch(task, 6)["weights"][: weights.numel()]
    assert relative_error(weights, oracle) < 1e-12


def test_the_schedule_reaches_the_optimizer_of_the_part(ranks):
    def run(world):
        _, _, _, loop = train(world, make_task(), 3, schedule="linear", warmup=2, steps=10)
        return [group["lr"] for group in loop.optimizer.optim.param_groups], loop.optimizer.param_groups[0]["lr"]

    for inner, outer in ranks(2)(run):
        assert inner == [outer]
        assert outer == pytest.approx(0.1)


class Halving(torch.optim.SGD):
    """An optimizer whose step depends on attributes, one of its constructor and one that the task sets."""

    elementwise = True

    def __init__(self, params, lr, halves=False):
        super().__init__(params, lr=lr, momentum=0.9)
        self.halves, self.num_resets = halves, [0]

    def step(self, closure=None):
        if self.halves and self.is_flagged:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.5)
        # Once any SGD was made in this process, the hooks would run in super().step(), too.
        with torch.no_grad():
            return inspect.unwrap(torch.optim.SGD.step)(self, closure)

    def zero_grad(self, set_to_none=True):
        self.num_resets[0] += 1
        super().zero_grad(set_to_none=set_to_none)


def attach(seen, params):
    """Return an optimizer with everything that a script can attach to it; the hooks note what they see in ``seen``."""
    optimizer = Halving([{"params": params, "tag": "all"}], lr=0.1, halves=True)
    optimizer.is_flagged, optimizer.defaults["mine"] = True, 3
    for parameter in params:
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.5)

    def clip(given, *_):
        gradients = [parameter.grad.clamp_(-0.01, 0.01) for parameter in given.param_groups[0]["params"]]
        seen["gradient"] = torch.cat([each.flatten() for each in gradients]).clone()

    def note(given, *_):
        weights = [each.detach().flatten() for each in optimizer.param_groups[0]["params"]]
        seen["weights"] = seen.get("weights", 0) + torch.cat(weights)
        seen["others"] = given.is_flagged, given.defaults["mine"], given.param_groups[0]["tag"], optimizer.num_resets[0]

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(note)
    return optimizer


@pytest.mark.parametrize("settings", [{}, {"redundancy": 1}])
def test_what_is_attached_to_the_optimizer_is_kept(ranks, settings):
    def run(world, strategy, settings):
        seen = {}
        task = make_task(optimizer=partial(attach, seen))
        return seen, train(world, task, 3, strategy, clip=0.05, **settings)[0]

    seen, weights = run(None, "single", {})
    for mine, got in ranks(2)(run, "ddp-zero1", settings):
        assert relative_error(got, weights) < 1e-12
        for name in ("gradient", "weights"):
            assert (mine[name] - seen[name]).norm() < 1e-12 * seen[name].norm()
        assert mine["others"] == seen["others"] == (True, 3, "all", 3)


def test_a_hook_on_one_rank_is_kept(ranks):
    def run(world, strategy):
        seen = []

        def make(params):
            optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
            if world is None or world.rank == 1:
                optimizer.register_step_post_hook(lambda *_: seen.append([float(each.grad.norm()) for each in params]))
            return optimizer

        return seen, train(world, make_task(optimizer=make), 3, strategy, clip=0.05)[0]

    seen, weights = run(None, "single")
    (none, first), (got, second) = ranks(2)(run, "ddp-zero1")
    assert none == []
    assert got == [pytest.approx(each, rel=1e-12) for each in seen]
    assert relative_error(first, weights) < 1e-12
    assert relative_error(second, weights) < 1e-12


def test_a_hook_that_the_loss_registers_is_refused(ranks):
    def run(world):
        made = []

        def make(params):
            made.append(torch.optim.SGD(params, lr=0.1))
            return made[0]

        def loss(model, batch):
            made[0].register_step_pre_hook(lambda *_: None)
            return mean_loss(model, batch)

        with pytest.raises(ConfigurationError) as error:
            train(world, make_task(optimizer=make, loss=loss), 1)
        return str(error.value)

    text = (
        "A hook was registered at SGD after the training began, but this rank has a part of the gradients only.\n"
        "Register it in Task.optimizer, or use strategy ddp."
    )
    assert ranks(2)(run) == [text, text]


def replace_step(optimizer):
    optimizer.step = lambda closure=None: None


REFUSED = {
    "has hooks of its state_dict, which no rank has as a whole": lambda it: it.register_state_dict_pre_hook(print),
    "has tensors in its attribute average": lambda it: setattr(it, "average", {"a": torch.ones(2)}),
    "has state that belongs to no parameter": lambda it: it.state.update(all={"step": 1}),
    "has a step of its own, set on the object: define it in the class, or register a hook": replace_step,
}


def test_what_cannot_be_divided_is_refused(ranks):
    def run(world, why):
        def make(params):
            optimizer = torch.optim.SGD(params, lr=0.1)
            REFUSED[why](optimizer)
            return optimizer

        with pytest.raises(ConfigurationError) as error:
            train(world, make_task(optimizer=make), 1)
        return str(error.value)

    for why in REFUSED:
        text = f"SGD {why}; so it cannot be divided among ranks.\nUse strategy ddp."
        assert ranks(2)(run, why) == [text, text]


@pytest.mark.parametrize("strategy", ["single", "ddp-zero1"])
def test_a_param_group_that_is_added_later_is_refused(ranks, strategy):
    def make(params):
        optimizer = torch.optim.SGD(params[:1], lr=0.1)
        optimizer.register_step_post_hook(lambda *_: optimizer.add_param_group({"params": params[1:]}))
        return optimizer

    def run(world):
        train(world, make_task(optimizer=make), 2, strategy)

    for outcome in ranks(1 if strategy == "single" else 2).each(run):
        assert isinstance(outcome.error, ConfigurationError)
        assert str(outcome.error) == (
            "The optimizer has 2 param groups, but had 1 when the training began.\nMake all of them in Task.optimizer."
        )


class Wrapping(torch.optim.SGD):
    """An optimizer made of another."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, lr=0.1)


def test_an_optimizer_that_cannot_be_made_anew_is_refused(ranks):
    def run(world):
        train(world, make_task(optimizer=lambda params: Wrapping(torch.optim.SGD(params, lr=0.1))), 1)

    for outcome in ranks(2).each(run):
        assert isinstance(outcome.error, ConfigurationError)
        assert str(outcome.error) == (
            "Wrapping cannot be created again for each rank's part: its constructor must take params first, and "
            "then require nothing that its defaults lack; they lack nothing.\n"
            "Use strategy ddp, the optimizer inside it, or one that passes its arguments to Optimizer as defaults."
        )


def test_it_is_not_reproducible():
    with pytest.raises(ConfigurationError) as caught:
        train(None, make_task(), 1, reproducible=2)
    assert str(caught.value) == (
        "reproducible is for strategy single, dp, ddp, but the strategy is ddp-zero1.\nOmit reproducible."
    )
