"""Strategies local-sgd and diloco in `fit`: equal to DDP where they should be, and resumed by any number of ranks."""

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.train.run import Run
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.distributed.test_hierarchy import MACHINES, on_machines
from tests.training import make_task, mean_loss, read_state, relative_error, samples, token_loss, whole_batch

SGD = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
PLAIN = {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}


def trainer_of(world, task, strategy, **settings):
    return Trainer(task, Settings(**settings), world, strategy=strategy, devices=[torch.device("cpu")])


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def train(world, strategy, num_steps, loss, **settings):
    loop = trainer_of(world, make_task(loss=loss, **SGD), strategy, **settings)
    seen = []
    for _ in range(num_steps):
        loop.step()
        seen.append(flat(loop.model))
    loop.close()
    return seen


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "settings", "loss"),
    [
        (2, "local-sgd", {"sync_every": 1, "clip": 1e6}, mean_loss),
        (2, "diloco", {**PLAIN, "accumulate": 2}, token_loss),
        # 50 samples in global batches of 24: the third holds 2, so that one rank has none.
        (3, "diloco", {**PLAIN, "fragments": 3}, mean_loss),
        (3, "local-sgd", {"sync_every": 1}, token_loss),
    ],
)
def test_with_an_exchange_in_every_step_it_is_one_device(ranks, num_ranks, strategy, settings, loss):
    def run(world):
        return train(world, strategy, 6, loss, **settings)

    expected = whole_batch(make_task(loss=loss, **SGD), 6)["weights"]
    for seen in ranks(num_ranks)(run):
        assert relative_error(seen[-1], expected) < 1e-12


@pytest.mark.parametrize("backend", ["gloo", "shm+gloo"])
def test_machines_sum_gradients_inside_and_exchange_between(ranks, backend):
    """Two machines of two ranks: the ranks of one hold the same bits always, all after an exchange."""

    def on_backend(world):
        whole = nullcontext(world.group) if backend == "gloo" else on_machines(world, MACHINES["blocks"])
        with whole as group:
            inner = lockstep.World.from_group(group, device="cpu")
            inner.node_rank = world.rank // 2
            return run(inner)

    def run(world):
        assert world.backend == backend
        equal = train(world, "local-sgd", 6, token_loss, sync_every=1, across="machines")[-1]
        loop = trainer_of(world, make_task(**SGD), "diloco", sync_every=3, across="machines")
        local = []
        for _ in range(3):
            loop.step()
            local.append(torch.cat([each.detach().flatten() for each in loop.optimizer.param_groups[0]["params"]]))
        loop.close()
        return equal, local, loop.strategy.num_replicas

    expected = whole_batch(make_task(loss=token_loss, **SGD), 6)["weights"]
    results = ranks(4)(on_backend)
    for equal, local, num_replicas in results:
        assert relative_error(equal, expected) < 1e-12
        assert num_replicas == 2
        assert torch.equal(local[2], results[0][1][2])
    (_, first, _), (_, same, _), (_, other, _), _ = results
    assert torch.equal(first[1], same[1])
    assert not torch.equal(first[1], other[1])


def test_between_exchanges_nothing_is_sent(ranks):
    """What a lost link costs then: nothing. The ranks agree, compare, and exchange in step 4 and 8 alone."""

    def run(world):
        loop = trainer_of(world, make_task(**SGD), "diloco", steps=10, sync_every=4, check_replicas=2)
        calls = []
        for _ in range(8):
            calls.append(count_collectives(loop.step))
        loop.close()
        return calls

    for calls in ranks(2)(run):
        assert [bool(number) for number in calls] == [False, False, False, True] * 2


def count_collectives(act):
    """Return how many collectives ``act`` has started."""
    started = []
    names = ("allreduce", "broadcast", "allgather", "_allgather_base")
    originals = {name: getattr(dist.ProcessGroup, name) for name in names}

    def spy(name):
        def call(group, *args, **kwargs):
            started.append(name)
            return originals[name](group, *args, **kwargs)

        return call

    with patch.multiple(dist.ProcessGroup, **{name: spy(name) for name in names}):
        act()
    return started


# --- checkpoints ---


def network():
    """Return a network with every kind of state, and one parameter under two names."""
    torch.manual_seed(3)
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, nn.BatchNorm1d(6), nn.Dropout(0.2), second, nn.Linear(6, 4)).double()


TASK = make_task(
    model=network,
    loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
    eval_dataset=samples,
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    global_batch_size=10,
)
SLOW = {"sync_every": 4, "fragments": 2, "sync_delay": 2, "compression": "int8"}


def fit(folder, steps, strategy="diloco", **settings):
    kept = {}
    task = make_task(**{**vars(TASK), "after": lambda model: kept.update(model.state_dict())})
    result = lockstep.fit(task, strategy=strategy, steps=steps, checkpoint=folder, quiet=True, **settings)
    return result, kept, read_state(result.checkpoint)


def interrupted(folder, after, **settings):
    """Train until ``after`` steps, the last of which is in no checkpoint; then go on to the end."""

    class Break(Exception):
        """Stands for a kill."""

    step, calls = Run.step, []

    def break_after(run):
        if len(calls) == after:
            raise Break
        calls.append(run)
        step(run)

    Run.step = break_after
    try:
        with pytest.raises(Break):
            fit(folder, **settings)
    finally:
        Run.step = step


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


def test_resumed_in_the_same_bits(ranks, tmp_path):
    """The checkpoint is of step 5: fragment 2 was sent after step 4, and is applied after step 6."""
    how = {**SLOW, "steps": 11, "checkpoint_every": 5, "eval_every": 5}

    def run(world):
        whole = fit(tmp_path / "whole", **how)
        interrupted(tmp_path / "broken", 7, **how)
        world.barrier()  # rank 0 has written
        state = read_state(tmp_path / "broken" / "step-0000000005")
        return whole, fit(tmp_path / "broken", **how), state

    results = ranks(2)(run)
    for (whole, kept, state), (resumed, resumed_kept, resumed_state), between in results:
        assert [each["number"] for each in between["replicas"]["under_way"]] == [1]
        assert (whole.first_step, resumed.first_step) == (0, 5)
        assert resumed.losses == whole.losses[5:]
        assert resumed.evaluations == whole.evaluations[1:]
        assert same(resumed_kept, kept)
        assert same(resumed_state, state)
        # What ranks have of their own differs; the model of the checkpoint is the outer one.
        first, second = between["replicas"]["own"]
        assert not torch.equal(first["model"]["4.weight"], second["model"]["4.weight"])
        assert torch.equal(between["model"]["3.weight"], between["replicas"]["outer"]["0.weight"])
        assert torch.equal(between["model"]["0.weight"], between["replicas"]["outer"]["0.weight"])


def test_resumed_by_other_numbers_of_ranks_and_strategies(ranks, tmp_path):
    folder = str(tmp_path / "run")

    def begin(world):
        interrupted(folder, 6, steps=20, sync_every=4, checkpoint_every=3)
        world.barrier()  # rank 0 has written
        return read_state(Path(folder) / "step-0000000006")

    def look(world, strategy):
        from lockstep.checkpoints.checkpoint import Checkpoints

        loop = trainer_of(world, TASK, strategy, steps=20, **({"sync_every": 4} if strategy == "diloco" else {}))
        with Checkpoints(Path(folder), world) as checkpoints:
            loop.load_state_dict(checkpoints.load(required=True))
        moments = [each["exp_avg"].clone() for each in loop.optimizer.state.values()]
        parameters = flat(nn.ParameterList(loop.optimizer.param_groups[0]["params"]))
        outer = loop.strategy.replica(loop.model, loop.optimizer)
        outer = {name: value.clone() for name, value in outer.items()}
        loop.step()
        loop.close()
        return parameters, moments, outer

    state = ranks(2)(begin)[0]
    own = state["replicas"]["own"]
    momentum = state["replicas"]["outer_optimizer"]["state"][0]["momentum_buffer"]
    outer = torch.cat([state["replicas"]["outer"][name].flatten() for name, _ in network().named_parameters()])
    assert float(momentum.abs().max()) > 0
    for rank, (parameters, moments, replica) in enumerate(ranks(3)(look, "diloco")):
        assert torch.equal(parameters, outer)
        assert torch.equal(replica["momentum_buffer of the optimizer's parameter 0"], momentum)
        known = own[1]["optimizer"][0]["exp_avg"] if rank == 1 else state["optimizer"]["state"][0]["exp_avg"]
        assert torch.equal(moments[0], known)
    assert not torch.equal(own[1]["optimizer"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
    for parameters, moments, _ in ranks(2)(look, "ddp"):
        assert torch.equal(parameters, outer)
        assert torch.equal(moments[0], state["optimizer"]["state"][0]["exp_avg"])


def test_after_another_strategy_it_begins_with_what_that_has_left(ranks, tmp_path):
    def run(world):
        _, _, first = fit(tmp_path / "run", 3, "ddp")
        result, _, second = fit(tmp_path / "run", 7, "diloco", sync_every=2)
        return result.first_step, first, second

    for first_step, first, second in ranks(2)(run):
        assert first_step == 3
        assert "replicas" not in first
        assert second["replicas"]["num_steps"] == 7
        assert not torch.equal(first["model"]["0.weight"], second["model"]["0.weight"])


# --- what is refused; and verify ---


@pytest.mark.parametrize(
    ("strategy", "settings", "text"),
    [
        (
            "diloco",
            {"reproducible": 4},
            "reproducible is for strategy single, dp, ddp, but the strategy is diloco.\nOmit reproducible.",
        ),
        (
            "ddp",
            {"sync_every": 4},
            "sync_every is for strategy local-sgd, diloco, but the strategy is ddp.\nOmit sync_every.",
        ),
        (
            "local-sgd",
            {"outer_lr": 0.5},
            "outer_lr is for strategy diloco, but the strategy is local-sgd.\nOmit outer_lr.",
        ),
        (
            "diloco",
            {"overlap_optimizer": True},
            "overlap_optimizer is for strategy ddp, but the strategy is diloco.\nOmit overlap_optimizer.",
        ),
        (
            "diloco",
            {"across": "machines"},
            "across=machines needs several machines, but all ranks are on one.\nOmit across, or use strategy ddp.",
        ),
    ],
)
def test_settings_that_do_not_go_together(ranks, strategy, settings, text):
    def run(world):
        world.node_rank = 0
        trainer_of(world, make_task(), strategy, **settings)

    for outcome in ranks(2).each(run):
        assert isinstance(outcome.error, ConfigurationError)
        assert str(outcome.error) == text


def test_synchronised_layers_are_refused(ranks):
    def run(world):
        model = lambda: lockstep.SyncBatchNorm.convert_sync_batchnorm(network())  # noqa: E731
        trainer_of(world, make_task(**{**vars(TASK), "model": model}), "local-sgd")

    for outcome in ranks(2).each(run):
        assert str(outcome.error).startswith(
            "SyncBatchNorm exchanges statistics in every step, but strategy local-sgd does not communicate in "
            "every step."
        )
