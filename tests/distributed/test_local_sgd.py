"""`lockstep.LocalSGD` and `DiLoCo` in a loop of one's own, against the algorithm in one process."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import CollectiveError, ConfigurationError, NonFiniteGradient
from tests.distributed.test_hierarchy import MACHINES, on_machines
from tests.models import soak
from tests.training import mean_loss, network, relative_error

RATE = 0.05


def build():
    torch.manual_seed(7)
    return network()


def batch_of(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x, y = (torch.randn(5, width, generator=generator, dtype=torch.float64) for width in (6, 4))
    return x, y, None


def train_step(model, optimizer, rank, step):
    optimizer.zero_grad()
    mean_loss(model, batch_of(rank, step)).backward()
    optimizer.step()


def flat(parameters):
    return torch.cat([parameter.detach().flatten() for parameter in parameters]).clone()


# --- the oracle: all ranks in one process, each exchange written out ---


def simulate(num_ranks, num_steps, *, every, starts, delay, lr, momentum):
    """Return each rank's parameters after each step, and in the end after a last exchange of everything.

    ``starts`` has, by fragment, its parameters and the remainder of the steps after which it is exchanged.
    """
    models = [build() for _ in range(num_ranks)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9) for model in models]
    local = [list(model.parameters()) for model in models]
    outer = [parameter.detach().clone() for parameter in local[0]]
    velocity = [torch.zeros_like(parameter) for parameter in outer]
    under_way, seen = [], []

    def start(indices, step):
        mean = {i: sum(outer[i] - each[i].detach() for each in local) / num_ranks for i in indices}
        base = [{i: each[i].detach().clone() for i in indices} for each in local]
        under_way.append((step, mean, base))

    def apply(step, after):
        for _, mean, base in [each for each in under_way if step - each[0] >= after]:
            for i, gradient in mean.items():
                velocity[i] = momentum * velocity[i] + gradient
                outer[i] = outer[i] - lr * (gradient + momentum * velocity[i])
                for rank in range(num_ranks):
                    with torch.no_grad():
                        local[rank][i].copy_(outer[i] + local[rank][i] - base[rank][i])
        under_way[:] = [each for each in under_way if step - each[0] < after]

    for step in range(1, num_steps + 1):
        for rank in range(num_ranks):
            train_step(models[rank], optimizers[rank], rank, step)
        apply(step, delay)
        for indices, remainder in starts:
            if step % every == remainder:
                start(indices, step)
        apply(step, delay)
        seen.append([flat(each) for each in local])
    apply(num_steps, 0)
    for indices, remainder in starts:
        if delay or num_steps % every != remainder:
            start(indices, num_steps)
    apply(num_steps, 0)
    return seen, flat(local[0])


@pytest.mark.parametrize(
    ("num_ranks", "arguments", "starts", "num_steps"),
    [
        (2, {"sync_every": 4}, [(range(6), 0)], 10),
        (3, {"sync_every": 6, "fragments": 2, "sync_delay": 2}, [(range(2), 3), (range(2, 6), 0)], 14),
    ],
)
def test_diloco_is_the_algorithm(ranks, num_ranks, arguments, starts, num_steps):
    every, delay = arguments["sync_every"], arguments.get("sync_delay", 0)

    def run(world):
        model = build() if world.rank == 0 else network()  # all get what rank 0 has
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        seen = []
        with lockstep.DiLoCo(model, optimizer, **arguments):
            for step in range(1, num_steps + 1):
                train_step(model, optimizer, world.rank, step)
                seen.append(flat(model.parameters()))
        end = flat(model.parameters())
        for step in range(every):
            train_step(model, optimizer, world.rank, step)  # no longer counted
        return seen, end, flat(model.parameters())

    expected, end = simulate(num_ranks, num_steps, every=every, starts=starts, delay=delay, lr=0.7, momentum=0.9)
    found = ranks(num_ranks)(run)
    for rank, (seen, last, _) in enumerate(found):
        assert relative_error(last, end) < 1e-12
        for step in range(num_steps):
            assert relative_error(seen[step], expected[step][rank]) < 1e-12, step
    # An exchange makes the ranks alike to the bit, and between exchanges they drift apart.
    if not delay:
        assert all(torch.equal(seen[every - 1], found[0][0][every - 1]) for seen, _, _ in found)
    assert not torch.equal(found[0][0][0], found[1][0][0])
    assert not torch.equal(found[0][2], found[1][2])


def test_the_end_of_the_block_makes_all_ranks_alike(ranks):
    def run(world, delay):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        with lockstep.DiLoCo(model, optimizer, 6, fragments=3, sync_delay=delay) as sync:
            for step in range(8):
                train_step(model, optimizer, world.rank, step)
            sync.sync()
            first = flat(model.parameters())
            sync.sync()  # without a step in between momentum moves nothing
            assert torch.equal(first, flat(model.parameters()))
        return first

    first, second = ranks(2)(run, 3)
    assert torch.equal(first, second)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_local_sgd_in_every_step_is_ddp(ranks, num_ranks):
    def run(world):
        errors = []
        for arguments in ({}, {"fragments": 3}):
            model, other = build(), build()
            wrapped = lockstep.DistributedDataParallel(other)
            optimizers = [torch.optim.SGD(each.parameters(), lr=RATE) for each in (model, wrapped)]
            with lockstep.LocalSGD(model, optimizers[0], 1, **arguments):
                for step in range(5):
                    train_step(model, optimizers[0], world.rank, step)
                    train_step(wrapped, optimizers[1], world.rank, step)
                    errors.append(relative_error(flat(model.parameters()), flat(other.parameters())))
        return errors, flat(model.parameters())

    results = ranks(num_ranks)(run)
    assert max(error for errors, _ in results for error in errors) < 1e-12
    assert all(torch.equal(end, results[0][1]) for _, end in results)


@pytest.mark.parametrize(("method", "error"), [*soak([("bf16", 5e-3)]), ("int8", 0.02), ("powersgd:2", 0.1)])
def test_compressed_differences(ranks, method, error):
    """On two ranks, and on two machines of two ranks, where int8 travels between machines only."""

    def run(world, group=None):
        def train(compression):
            model = build()
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            arguments = {"fragments": 2, "compression": compression, "process_group": group}
            with lockstep.DiLoCo(model, optimizer, 2, **arguments):
                for step in range(8):
                    train_step(model, optimizer, world.rank, step)
            return flat(model.parameters())

        exact, found = train(None), train(method)
        assert not torch.equal(found, exact)
        return relative_error(found - flat(build().parameters()), exact - flat(build().parameters())), found

    def on_two_machines(world):
        with on_machines(world, MACHINES["blocks"]) as group:
            return run(world, group)

    for results in (ranks(2)(run), ranks(4)(on_two_machines)):
        assert max(found for found, _ in results) < error
        assert all(torch.equal(end, results[0][1]) for _, end in results)


def test_another_outer_optimizer(ranks):
    def run(world):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        outer = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731
        with lockstep.DiLoCo(model, optimizer, 2, outer_optimizer=outer) as sync:
            for step in range(4):
                train_step(model, optimizer, world.rank, step)
            assert {float(each["step"]) for each in sync.outer_optimizer.state.values()} == {2.0}
        return flat(model.parameters())

    first, second = ranks(2)(run)
    assert torch.equal(first, second)


def test_parameters_of_several_dtypes_and_layouts(ranks):
    """Half-precision ones have outer parameters in float32; frozen ones are those of rank 0."""

    def run(world):
        torch.manual_seed(world.rank)
        model = nn.ModuleList([nn.Linear(4, 3).bfloat16(), nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)])
        model.append(nn.Linear(2, 2, dtype=torch.float64).requires_grad_(False))
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)
        with lockstep.LocalSGD(model, optimizer, 2, fragments=2) as sync:
            start = flat(map(torch.Tensor.double, model.parameters()))
            for _ in range(2):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, world.rank + 1.0)
                optimizer.step()
            assert {each.dtype for each in sync.outer_optimizer.param_groups[0]["params"]} == {torch.float32}
        moved = start - flat(map(torch.Tensor.double, model.parameters()))
        return start, moved

    (start, moved), (other_start, other_moved) = ranks(2)(run)
    assert torch.equal(start, other_start)
    assert torch.equal(moved, other_moved)
    assert torch.all(moved[-6:] == 0)
    assert torch.allclose(moved[:-6], torch.full_like(moved[:-6], 3.0), atol=0.03)  # (1 + 2) / 2 in each of two steps


def test_buffers_that_changed_are_averaged(ranks):
    def run(world):
        model = nn.Sequential(nn.BatchNorm1d(3, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float64))
        model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        model.register_buffer("third", torch.full((5,), 1 / 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        generator = torch.Generator().manual_seed(world.rank)
        with lockstep.LocalSGD(model, optimizer, 2):
            for step in range(2):
                x = torch.randn(6, 3, generator=generator, dtype=torch.float64) + world.rank
                if step == 1:
                    before = model[0].running_mean.clone()
                optimizer.zero_grad()
                model(x).sum().backward()
                own = model[0].running_mean.clone()
                optimizer.step()
        assert not torch.equal(before, own)
        return own, {name: value.clone() for name, value in model.named_buffers()}

    results = ranks(3)(run)
    mean = sum(own for own, _ in results) / 3
    for _, buffers in results:
        assert relative_error(buffers["0.running_mean"], mean) < 1e-12
        assert buffers["0.num_batches_tracked"] == 2
        assert torch.equal(buffers["mask"], torch.full((2, 2), -torch.inf).triu(1))
        assert torch.equal(buffers["third"], torch.full((5,), 1 / 3))
        assert all(torch.equal(buffers[name], other) for name, other in results[0][1].items())


# --- state ---


@pytest.mark.parametrize("compression", [None, "int4", "powersgd:1"])
def test_a_loop_goes_on_in_the_same_bits(ranks, compression):
    """Saved between the start of an exchange and its application."""
    arguments = {"fragments": 2, "sync_delay": 2, "compression": compression}

    def run(world):
        def begin():
            model = build()
            optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
            return model, optimizer, lockstep.DiLoCo(model, optimizer, 4, **arguments)

        def go_on(model, optimizer, sync, steps):
            for step in steps:
                train_step(model, optimizer, world.rank, step)

        first = begin()
        go_on(*first, range(5))
        state = [each.state_dict() for each in first]
        assert [each["number"] for each in state[2]["under_way"]] == [1]
        kept = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, state)
        go_on(*first, range(5, 12))
        again = begin()
        for each, known in zip(again, kept, strict=True):
            each.load_state_dict(known)
        go_on(*again, range(5, 12))
        ends = [flat(model.parameters()) for model, _, _ in (first, again)]
        for _, _, sync in (first, again):
            sync.close()
        return ends, flat(first[0].parameters()), flat(again[0].parameters())

    for (first, again), end, other_end in ranks(2)(run):
        assert torch.equal(first, again)
        assert torch.equal(end, other_end)


def test_a_new_rank_takes_the_outer_parameters(ranks):
    """Two ranks save in the midst of an exchange; three go on, with what rank 0 has saved."""
    arguments = {"sync_every": 4, "sync_delay": 2}

    def save(world):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        sync = lockstep.DiLoCo(model, optimizer, **arguments)
        for step in range(1, 6):
            train_step(model, optimizer, world.rank, step)
        return sync.state_dict()

    def load(world, state):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        sync = lockstep.DiLoCo(model, optimizer, **arguments)
        sync.load_state_dict(state)
        loaded = flat(model.parameters())
        for step in range(6, 9):
            train_step(model, optimizer, world.rank, step)
        sync.close()
        return loaded, flat(model.parameters()), sync.num_steps

    state = ranks(2)(save)[0]
    results = ranks(3)(load, state)
    # What was under way was applied: one step of the outer optimizer.
    mean = next(iter(state["under_way"]))["gradients"]
    outer = torch.cat([(state["outer"][name] - 0.7 * 1.9 * mean[name]).flatten() for name in mean])
    for loaded, end, num_steps in results:
        assert relative_error(loaded, outer) < 1e-12
        assert torch.equal(end, results[0][1])
        assert num_steps == 8


# --- what goes wrong ---


def errors_of(ranks, run, *args, num_ranks=2):
    outcomes = ranks(num_ranks).each(run, *args)
    assert {type(outcome.error) for outcome in outcomes} == {ConfigurationError}
    (text,) = {str(outcome.error) for outcome in outcomes}
    return text


@pytest.mark.parametrize(
    ("mine", "others", "text"),
    [
        ({"sync_every": 0}, {"sync_every": 0}, "sync_every=0 is not allowed.\nGive a whole number of at least 1."),
        ({}, {"sync_every": 2.0}, "Rank 1: sync_every=2.0 is not allowed.\nGive a whole number of at least 1."),
        ({"fragments": 7}, {}, "fragments=7 is more than the model's 6 parameters.\nGive fewer."),
        ({"compression": "int5"}, {}, "compression='int5' is not a compression method."),
        ({"outer_lr": 0}, {}, "outer_lr=0 is not allowed.\nGive a number above 0."),
        ({}, {"outer_momentum": 1}, "Rank 1: outer_momentum=1 is not allowed.\nGive a number from 0 to below 1."),
        (
            {"sync_every": 4, "sync_delay": 4},
            {},
            "sync_delay=4 is not below sync_every=4: a fragment would be exchanged again before it has arrived.\n"
            "Give a smaller sync_delay, or a larger sync_every.",
        ),
        (
            {"sync_every": 4},
            {"sync_every": 5},
            "The arguments differ between ranks: rank 0 has sync_every=4, fragments=1, sync_delay=0, "
            "compression=None, outer_lr=0.7, outer_momentum=0.9; rank 1 has sync_every=5, fragments=1, sync_delay=0, "
            "compression=None, outer_lr=0.7, outer_momentum=0.9.\nGive the same arguments on every rank.",
        ),
    ],
)
def test_bad_arguments_are_an_error_on_every_rank(ranks, mine, others, text):
    def run(world):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        lockstep.DiLoCo(model, optimizer, **(others if world.rank else mine))

    assert errors_of(ranks, run).startswith(text)


def test_models_and_optimizers_that_cannot_be_exchanged(ranks):
    def run(world, case):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        if case == "other":
            optimizer = torch.optim.SGD(build().parameters(), lr=RATE)
        elif case == "zero":
            optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=RATE)
        elif case == "ddp":
            model = lockstep.DistributedDataParallel(model)
        elif case == "frozen":
            model.requires_grad_(False)
        lockstep.LocalSGD(model, optimizer)

    expected = {
        "other": "Parameter 0 of the optimizer, of shape [8, 6], is not in the model: the optimizer was made for "
        "another one.",
        "zero": "ZeroRedundancyOptimizer updates each parameter on one rank, but here each rank trains by itself.",
        "ddp": "The model's gradients are averaged over all ranks in every step, so there is nothing to exchange.",
        "frozen": "The model has no parameter that requires a gradient.",
    }
    assert {case: errors_of(ranks, run, case).partition("\n")[0] for case in expected} == expected


def test_ranks_after_different_numbers_of_steps(ranks):
    """As where a gradient scaler leaves out a step: the others find out at the end, and none hangs."""

    def run(world):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with lockstep.LocalSGD(model, optimizer, 4):
            for step in range(4 - world.rank):
                train_step(model, optimizer, world.rank, step)

    texts = [str(outcome.error) for outcome in ranks(3).each(run)]
    assert texts == [
        f"The ranks have made different numbers of steps: this one {4 - rank}, the mean is 3.\nStep the optimizer "
        "equally often on every rank. torch's GradScaler leaves out steps on single ranks: pass no optimizer, and call "
        "step() of this after scaler.step()."
        for rank in range(3)
    ]


def test_steps_that_a_rank_leaves_out_are_counted_by_hand(ranks):
    def run(world):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with lockstep.LocalSGD(model, None, 4) as sync:
            for step in range(6):
                if world.rank == 0 or step != 2:
                    train_step(model, optimizer, world.rank, step)
                sync.step()
        return flat(model.parameters())

    first, second = ranks(2)(run)
    assert torch.equal(first, second)


def test_nan_on_one_rank_is_found_before_it_reaches_the_others(ranks):
    def run(world):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        sync = lockstep.LocalSGD(model, optimizer, 2)
        train_step(model, optimizer, world.rank, 0)
        if world.rank == 1:
            with torch.no_grad():
                next(model.parameters())[0, 0] = torch.nan
        try:
            train_step(model, optimizer, world.rank, 1)
        except NonFiniteGradient as error:
            return str(error), bool(torch.isfinite(sync.state_dict()["outer"]["0.weight"]).all())

    (text, is_finite), other = ranks(2)(run)
    assert text.startswith("After step 2 parameters of 1 of 2 ranks are NaN or infinite.\n")
    assert (text, is_finite) == other
    assert is_finite


def test_a_peer_that_is_gone_costs_nothing_until_the_next_exchange(ranks):
    def run(world):
        group = dist.new_group(timeout=timedelta(seconds=2))
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        lockstep.LocalSGD(model, optimizer, 4, process_group=group)
        if world.rank == 1:
            train_step(model, optimizer, world.rank, 0)
            return None
        for step in range(3):
            train_step(model, optimizer, world.rank, step)
        began = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            train_step(model, optimizer, world.rank, 3)
        return str(caught.value), time.monotonic() - began

    (text, took_s), _ = ranks(2)(run)
    assert text.startswith("Rank 0: exchange after step 4 failed: ")
    assert text.endswith("\nAnother rank ended, or did not take part in time: look at its output.")
    assert took_s < 10
