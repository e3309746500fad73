"""Compressed gradients: the same bits on all ranks, and over many steps nothing is lost.

The oracle is one process on the concatenated batch. In each step what the ranks get differs from it; but the sum over
all steps differs by no more than the residuals that the ranks still hold, and these are all of the difference.
"""

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.checkpoints.checkpoint import Checkpoints
from lockstep.comm import hierarchy
from lockstep.errors import CollectiveError, ConfigurationError
from lockstep.parallel import compression
from lockstep.parallel.compression import CompressedSum
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.models import FAMILIES, build, global_batch, share, soak
from tests.shm import shm_group
from tests.training import make_task, read_state

METHODS = ["int8", "int4", "powersgd:1", "powersgd:4"]
SIZES = [1, 129, 1000, 4097]


# --- the sum of a flat tensor ---


def flat_sums(world, method, sizes, num_steps, on_shm=False):
    """Return by size: the sums of all steps, what this rank gave, and its residual at the end."""
    if on_shm:
        with shm_group() as group:
            return _flat_sums(group, world.rank, method, sizes, num_steps)
    return _flat_sums(world.group, world.rank, method, sizes, num_steps)


def _flat_sums(group, rank, method, sizes, num_steps):
    generator = torch.Generator().manual_seed(rank)
    flats = [torch.empty(size) for size in sizes]
    shapes = [[torch.Size([size // 8, 8]), torch.Size([size % 8])] for size in sizes]
    compressed = [CompressedSum(flat, each, method, group) for flat, each in zip(flats, shapes, strict=True)]
    sums = [[] for _ in sizes]
    given = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    for _ in range(num_steps):
        for total, flat in zip(given, flats, strict=True):
            total += flat.copy_(torch.randn(len(flat), generator=generator) + 0.3)
        waits = [each.start() for each in compressed]
        for wait, flat, all_sums in zip(waits, flats, sums, strict=True):
            wait("sum")
            all_sums.append(flat.clone())
    return [torch.stack(each) for each in sums], given, [each.residual for each in compressed]


@pytest.mark.parametrize(
    ("method", "num_ranks", "on_shm"),
    [
        ("int8", 2, False),
        ("int4", 3, False),
        ("powersgd:2", 3, False),
        ("int4", 2, True),
        *soak([("int8", 3, True), ("int8", 4, False), ("int4", 4, False), ("powersgd:2", 2, True)]),
    ],
)
def test_the_sum_over_the_steps_is_exact_but_for_the_residuals(ranks, method, num_ranks, on_shm):
    num_steps = 20
    results = ranks(num_ranks)(flat_sums, method, SIZES, num_steps, on_shm)
    for place, size in enumerate(SIZES):
        sums = results[0][0][place]
        for others, _, _ in results:
            assert torch.equal(others[place], sums)
        exact = sum(given[place] for _, given, _ in results)
        left = sum(residuals[place].double() for _, _, residuals in results)
        assert torch.allclose(sums.double().sum(0) + left, exact, rtol=0, atol=3e-4)
        if size > 1 and method.startswith("int"):
            # What is left is the rounding of one step, not of twenty.
            assert 0 < left.abs().max() < num_ranks * {"int8": 0.05, "int4": 0.8}[method]


@pytest.mark.parametrize(("method", "bound"), [("bf16", 2**-7), ("fp16", 2**-10)])
def test_narrow_numbers_are_rounded_twice(ranks, method, bound):
    first, second, third = ranks(3)(flat_sums, method, SIZES, 1)
    for place in range(len(SIZES)):
        assert torch.equal(first[0][place], second[0][place])
        assert torch.equal(first[0][place], third[0][place])
        exact = first[1][place] + second[1][place] + third[1][place]
        assert 0 < (first[0][place][0].double() - exact).abs().max() < bound * 12


def start_early(world):
    """Rank 1 starts only when rank 0 has: if the start waited for the other rank, both would wait for ever."""
    compressed = [CompressedSum(torch.ones(1000), [torch.Size([1000])], "int8", world.group) for _ in range(3)]
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 1:
        store.wait(["started"])
    waits = [each.start() for each in compressed]
    if world.rank == 0:
        store.set("started", "")
    waits[-1]("sum")


def test_an_exchange_does_not_block_who_starts_it(ranks):
    ranks(2)(start_early)


# --- gradients ---


def beside_oracle(world, name, method, num_steps, num_micro=1, group=None):
    """Return by parameter the sum of what came, the exact one, and the residual; and all that came, for its bits."""
    family, oracle = FAMILIES[name], build(name)
    how = {"bucket_cap_mb": 0.0005, "compression": method, "process_group": group}
    model = lockstep.DistributedDataParallel(build(name), **how)
    sums = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    exact = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    bits = []
    for step in range(num_steps):
        model.zero_grad()
        oracle.zero_grad()
        for micro in range(num_micro):
            batch = global_batch(name, 4 * world.world_size, seed=step * num_micro + micro)
            mine = share(batch, world.rank, world.world_size)
            if micro < num_micro - 1:
                with model.no_sync():
                    family.loss(model, mine).backward()
            else:
                family.loss(model, mine).backward()
            family.loss(oracle, batch).backward()
        for parameter, expected in zip(model.parameters(), oracle.parameters(), strict=True):
            assert (parameter.grad is None) == (expected.grad is None)
            if parameter.grad is not None:
                sums[parameter] += parameter.grad
                exact[parameter] += expected.grad
                bits.append(parameter.grad.to_dense().flatten().clone())
    residuals = model.compression_state_dict()["residuals"]
    return (
        {name: (sums[each], exact[each], residuals.get(name)) for name, each in model.module.named_parameters()},
        torch.cat([torch.view_as_real(each).flatten() if each.is_complex() else each for each in bits]),
    )


@pytest.mark.parametrize(
    ("name", "method", "num_ranks", "num_micro"),
    [
        ("transformer", "int8", 2, 1),
        ("reused", "int4", 3, 2),
        ("mlp", "powersgd:2", 3, 1),
        ("sparse", "int4", 2, 1),
        ("complex", "int8", 2, 1),
        *soak([("channels_last", "powersgd:1", 2, 2)]),
        *soak([(name, method, 2, 1) for name in ("cnn", "lstm", "checkpoint", "reentrant") for method in METHODS]),
    ],
)
def test_gradients_add_up_to_those_of_one_process(ranks, name, method, num_ranks, num_micro):
    results = ranks(num_ranks)(beside_oracle, name, method, 12, num_micro)
    lossy = False
    for key, (sums, exact, residual) in results[0][0].items():
        left = 0 if residual is None else sum(found[key][2].double() for found, _ in results)
        lossy = lossy or bool(torch.as_tensor(left).any())
        assert torch.allclose(sums.to_dense() + left, exact.to_dense(), rtol=1e-5, atol=1e-5)
    # Complex gradients are sent as they are, and so are matrices so narrow that four columns would save nothing.
    assert lossy or name == "complex" or method == "powersgd:4"
    for _, bits in results:
        assert torch.equal(bits, results[0][1])


def on_two_machines(world, name, method):
    with mock.patch.object(hierarchy, "machine_id", return_value=str(world.rank // 2)), shm_group() as group:
        assert isinstance(group, hierarchy.HierarchicalProcessGroup)
        sent = []

        def start(group, tensors, *others):
            sent.extend(each.nbytes for each in tensors.values())
            return hierarchy.start_exchange(group, tensors, *others)

        with mock.patch.object(compression, "start_exchange", start):
            found = beside_oracle(world, name, method, 12, group=group)
        return *found, sum(sent)


@pytest.mark.parametrize(
    ("name", "method"), [("reused", "int4"), ("mlp", "powersgd:2"), ("mlp", "bf16"), *soak([("transformer", "int8")])]
)
def test_only_what_travels_between_machines_is_compressed(ranks, name, method):
    results = ranks(4)(on_two_machines, name, method)
    for key, (sums, exact, residual) in results[0][0].items():
        left = 0 if residual is None else sum(found[key][2].double() for found, _, _ in results)
        close = {"rtol": 1e-5, "atol": 1e-5} if method != "bf16" else {"rtol": 2**-6, "atol": 1e-3}
        assert torch.allclose(sums + left, exact, **close)
    for _, bits, _ in results:
        assert torch.equal(bits, results[0][1])
    if method == "bf16":  # a machine of two ranks sends as many bytes as one rank of two: numbers and tails
        numel = sum(each.numel() for each in build(name).parameters())
        num_bytes = results[0][2] + results[1][2]
        assert 2 * 12 * numel <= num_bytes < 2 * 12 * numel + 12 * 12 * 200


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(40, 40, bias=False) for _ in range(3)])

    def forward(self, x, head):
        return self.heads[head](x)


def turns(world, method):
    """Head 0 is used by rank 0 only, head 1 by rank 1 in every second step, head 2 by nobody."""
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(Heads(), compression=method)
    sums = torch.zeros(2, 40, 40)
    found, exact = [], torch.zeros(2, 40, 40)
    for step in range(10):
        model.zero_grad()
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(2, 5, 40, generator=generator)
        head = world.rank if step % 2 else 0
        model(inputs[world.rank] * (world.rank == head), head).square().sum().backward()
        for each in range(2):
            gradient = model.module.heads[each].weight.grad
            assert (gradient is None) == (each == 1 and step % 2 == 0)
            if gradient is not None:
                sums[each] += gradient
                weight = model.module.heads[each].weight.detach()
                exact[each] += (inputs[each] @ weight.T).T @ inputs[each]  # the mean over two ranks of twice that
        assert model.module.heads[2].weight.grad is None
        found.append(sums.clone())
    residuals = model.compression_state_dict()["residuals"]
    return found, exact, [residuals[f"heads.{each}.weight"].clone() for each in range(3)]


@pytest.mark.parametrize("method", ["int4", "powersgd:3"])
def test_unused_parameters_stay_without_gradient_and_lose_nothing(ranks, method):
    first, second = ranks(2)(turns, method)
    assert torch.equal(torch.stack(first[0]), torch.stack(second[0]))
    for head in range(2):
        left = first[2][head] + second[2][head]
        assert left.any()
        assert torch.allclose(first[0][-1][head] + left, first[1][head], rtol=1e-4, atol=1e-3)
    assert not first[2][2].any()


def weighted(world, method):
    model = lockstep.DistributedDataParallel(nn.Linear(1, 1, bias=False), compression=method)
    found = []
    for weights in [(1, 1), (1, 1.003), (5, 0)]:
        model.zero_grad()
        model.mean_over(weights[world.rank])
        model(torch.full((1, 1), [1.0, 0.0][world.rank])).sum().backward()
        found.append(model.module.weight.grad.item())
    return found


@pytest.mark.parametrize("method", ["int8", "powersgd:1"])
def test_weights_are_exact(ranks, method):
    """A block of one number is rounded only in its scale, to 8 digits; the sums of weights are not."""
    for found in ranks(2)(weighted, method):
        assert found == pytest.approx([1 / 2, 1 / 2.003, 1.0], rel=2**-7)


def overflow(world, method):
    """In the second step rank 1 has an infinite gradient."""
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(nn.Linear(300, 4), compression=method)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finite, before = [], []
    for step in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(2, 300, generator=torch.Generator().manual_seed(10 * step + world.rank))
        if step == 1 and world.rank == 1:
            inputs[0, 17] = torch.inf
        scaler.scale(model(inputs).sum()).backward()
        finite.append(model.gradients_are_finite())
        if finite[-1]:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(1.0)
        before.append(model.module.weight.detach().clone())
        scaler.step(optimizer)
        scaler.update()
    residuals = model.compression_state_dict()["residuals"].values()
    kept = torch.equal(before[1], before[2])
    return finite, kept, all(bool(each.isfinite().all()) for each in residuals), model.module.weight.detach()


@pytest.mark.parametrize("method", ["int8", *soak(["int4", "powersgd:1"]), "powersgd:4"])
def test_an_infinite_gradient_reaches_all_ranks_and_spoils_no_later_step(ranks, method):
    first, second = ranks(2)(overflow, method)
    for finite, kept, residuals_are_finite, _ in (first, second):
        assert finite == [True, False, True, True]
        assert kept
        assert residuals_are_finite
    assert torch.equal(first[3], second[3])
    assert first[3].isfinite().all()


def without_data(world, method):
    """Rank 1 has two batches less."""
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(nn.Linear(300, 4), compression=method)
    with model.join():
        for step in range(4 - 2 * world.rank):
            model.zero_grad()
            model(torch.randn(2, 300, generator=torch.Generator().manual_seed(step))).sum().backward()
    return model.compression_state_dict()["residuals"]["weight"].isfinite().all()


@pytest.mark.parametrize("method", ["int8", "powersgd:1"])
def test_a_rank_without_data_takes_part(ranks, method):
    assert all(ranks(2)(without_data, method))


def stepped(world, method, overlaps):
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(build("transformer"), bucket_cap_mb=0.0005, compression=method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if overlaps:
        model.overlap_optimizer(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        mine = share(global_batch("transformer", 8, seed=step), world.rank, 2)
        FAMILIES["transformer"].loss(model, mine).backward()
        if not overlaps:
            optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def test_parameters_can_be_stepped_in_backward(ranks):
    assert torch.equal(ranks(2)(stepped, "int4", False)[0], ranks(2)(stepped, "int4", True)[1])


def slices(world):
    model = lockstep.DistributedDataParallel(nn.Linear(3, 3), compression="int8")
    with pytest.raises(ConfigurationError, match="the wrapper has compression, a communication hook, or another"):
        lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, shard_gradients=True)
    optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_slices_of_gradients_cannot_be_compressed(ranks):
    ranks(2)(slices)


def lose_a_peer(world):
    model = lockstep.DistributedDataParallel(nn.Linear(200, 2), compression="int8")
    for _ in range(2):
        model(torch.ones(1, 200)).sum().backward()
    if world.rank == 1:
        raise KeyError("planted")
    model(torch.ones(1, 200)).sum().backward()


def test_a_rank_that_ends_is_an_error_on_the_others(ranks):
    first, second = ranks(2).each(lose_a_peer)
    assert isinstance(second.error, KeyError)
    assert isinstance(first.error, CollectiveError)
    assert "the gradient reduction of bucket 0 (weight ... bias) failed" in str(first.error)


# --- the state ---


def fit(world, folder, steps, method, **settings):
    """Return the weights and what the last checkpoint holds of the residuals."""
    how = {"clip": 1.0, "checkpoint": folder, "quiet": True, "compression": method, **settings}
    state = read_state(lockstep.fit(make_task(), steps=steps, **how).checkpoint)
    return torch.cat([each.flatten() for each in state["model"].values()]), state["compression"]["residuals"]


@pytest.mark.parametrize("method", [*soak(["int8"]), "powersgd:2"])
def test_a_resumed_run_has_the_same_bits(ranks, tmp_path, method):
    (whole, _), _ = ranks(2)(fit, tmp_path / "whole", 7, method)
    ranks(2)(fit, tmp_path / "parts", 3, method)
    (first, _), (second, _) = ranks(2)(fit, tmp_path / "parts", 7, method)
    assert torch.equal(first, whole)
    assert torch.equal(second, whole)


def scaled(world):
    """After the third step the scale of the loss doubles, or stays."""
    found = []
    for interval in (100, 3):
        settings = Settings(compression="int8", precision="fp16")
        loop = Trainer(make_task(), settings, world, strategy="ddp", devices=[torch.device("cpu")])
        loop.updater.scaler.growth_interval = interval
        for _ in range(3):
            loop.step()
        residuals = loop.strategy.compressed.compression_state_dict()["residuals"]
        found.append({name: each.clone() for name, each in residuals.items()})
    return found


def test_residuals_follow_the_scale_of_fp16(ranks):
    for before, after in ranks(2)(scaled):
        assert any(each.any() for each in before.values())
        for name, each in before.items():
            assert torch.equal(after[name], 2 * each)


def moved(world, folder):
    """Return the residuals of this rank as they are resumed, by parameter."""
    settings = Settings(compression="int4")
    loop = Trainer(make_task(), settings, world, strategy="ddp", devices=[torch.device("cpu")])
    with Checkpoints(folder, world) as checkpoints:
        loop.load_state_dict(checkpoints.load(required=True))
    residuals = loop.strategy.compressed.compression_state_dict()["residuals"]
    return {name: each.clone() for name, each in residuals.items()}


def test_residuals_move_to_another_number_of_ranks(ranks, tmp_path):
    (_, residuals), _ = ranks(2)(fit, tmp_path, 3, "int8")
    assert {len(each) for each in residuals.values()} == {2}
    total = {name: each.double().sum(0) for name, each in residuals.items()}
    assert any(each.any() for each in total.values())
    for num_ranks in (1, 3):
        found = ranks(num_ranks)(moved, tmp_path)
        for name, each in total.items():
            assert torch.allclose(sum(residuals[name].double() for residuals in found), each, rtol=0, atol=1e-7)


def own_loop(world, folder):
    """Save and load with a loop of one's own; then begin anew."""

    def step(model, seed):
        model.zero_grad()
        model(torch.randn(2, 300, generator=torch.Generator().manual_seed(seed + world.rank))).sum().backward()
        return model.module.weight.grad.clone()

    def wrap():
        torch.manual_seed(0)
        return lockstep.DistributedDataParallel(nn.Linear(300, 4), compression="int4")

    model = wrap()
    step(model, 0)
    lockstep.save(folder, model=model)
    kept = {name: each.clone() for name, each in model.compression_state_dict()["residuals"].items()}
    expected = step(model, 10)
    resumed, given, fresh = wrap(), wrap(), wrap()
    lockstep.load(folder, model=resumed)
    given.load_compression_state_dict({"residuals": kept, "bases": {}})
    assert torch.equal(step(resumed, 10), expected)
    assert torch.equal(step(given, 10), expected)
    given.load_compression_state_dict()
    again = step(given, 20)
    assert torch.equal(again, step(fresh, 20))
    with pytest.raises(ConfigurationError, match=r"a residual of other, \[3\], which the model lacks"):
        given.load_compression_state_dict({"residuals": {"other": torch.ones(3)}, "bases": {}})


def test_a_loop_of_ones_own_can_keep_and_reset_residuals(ranks, tmp_path):
    ranks(2)(own_loop, tmp_path)


def test_a_rank_may_be_as_late_as_the_group_allows_by_now(ranks):
    """`init` makes the group with a short time-out, for connecting, and raises it afterwards."""

    def body(world):
        group = dist.new_group(timeout=timedelta(seconds=1))
        group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=30))
        time.sleep(2.0 * world.rank)
        flat = torch.ones(1000)
        CompressedSum(flat, [flat.shape], "int8", group).start()("sum")
        return (flat - 2).abs().max().item()

    assert max(ranks(2)(body)) < 0.01
