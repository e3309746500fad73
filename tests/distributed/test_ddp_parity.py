"""DistributedDataParallel trains as one process does on the whole batch, and keeps all ranks equal to the bit."""

import contextlib
import inspect
import random

import pytest
import torch
import torch.distributed as dist

import lockstep
from tests.models import FAMILIES, assert_gradients_equal, build, global_batch, share, soak

NUM_STEPS = 4


def train_beside_oracle(world, name):
    """Train with our engine on a share and, alone, on the whole batch; compare after each step."""
    family = FAMILIES[name]
    oracle = build(name)
    # Wrong weights on other ranks: construction must overwrite them with those of rank 0. Small buckets: many launches.
    model = lockstep.DistributedDataParallel(build(name, seed=world.rank), bucket_cap_mb=0.0005)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, oracle)]
    for step in range(NUM_STEPS):
        batch = global_batch(name, 4 * world.world_size, seed=step)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        family.loss(model, share(batch, world.rank, world.world_size)).backward()
        family.loss(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle)
        for optimizer in optimizers:
            optimizer.step()
        for parameter in model.parameters():
            gathered = [
                torch.empty_like(torch.view_as_real(parameter) if parameter.is_complex() else parameter)
                for _ in range(world.world_size)
            ]
            value = parameter.detach()
            dist.all_gather(gathered, (torch.view_as_real(value) if value.is_complex() else value).contiguous())
            assert all(torch.equal(gathered[0], other) for other in gathered)
    return model._get_ddp_logging_data()["has_rebuilt_buckets"]


SOME = ["transformer", "frozen", "reentrant", "structured", "sparse", "complex"]


@pytest.mark.parametrize("name", [*SOME, *soak(name for name in FAMILIES if name not in SOME)])
@pytest.mark.parametrize("num_ranks", [2, *soak([3])])
def test_gradients_equal_one_process_and_ranks_stay_identical(ranks, name, num_ranks):
    assert ranks(num_ranks)(train_beside_oracle, name) == [1] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 3, *soak([4])])
def test_other_numbers_of_ranks(ranks, num_ranks):
    ranks(num_ranks)(train_beside_oracle, "reused")


def compare_with_torch(world, name, options):
    """Both classes on the same data: the same bits at two ranks, where the order of the sum cannot differ."""
    family = FAMILIES[name]
    ours = lockstep.DistributedDataParallel(build(name), **options)
    theirs = torch.nn.parallel.DistributedDataParallel(build(name), find_unused_parameters=name == "reused", **options)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (ours, theirs)]
    for step in range(NUM_STEPS):
        batch = share(global_batch(name, 4 * world.world_size, seed=step), world.rank, world.world_size)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            family.loss(model, batch).backward()
            optimizer.step()
        for (key, mine), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
            assert torch.equal(mine, other), key
    assert list(ours.state_dict()) == list(theirs.state_dict())


@pytest.mark.parametrize("name", ["transformer", "channels_last", *soak(["mlp", "cnn", "reused"])])
def test_same_bits_as_torch_on_two_ranks(ranks, name):
    ranks(2)(compare_with_torch, name, {})


@pytest.mark.parametrize(
    "options", [{"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001}, {"static_graph": True}]
)
def test_same_bits_as_torch_with_options(ranks, options):
    ranks(2)(compare_with_torch, "mlp", options)


def random_case(seed):
    """Return a family, options that both classes have, micro-batches a step, and whether to train under join()."""
    draw = random.Random(seed)
    options = {
        "gradient_as_bucket_view": draw.random() < 0.5,
        "find_unused_parameters": draw.random() < 0.5,
        "bucket_cap_mb": draw.choice([25, 0.0001, 0.001]),
        "forward_sync_buffers": draw.random() < 0.5,
    }
    joins = draw.random() < 0.3
    name = draw.choice(["mlp", "cnn", "lstm", "transformer", "frozen", "reused", "structured", "channels_last"])
    options["find_unused_parameters"] |= name == "reused"
    # torch 2.11 does not know all of them.
    known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    options = {option: value for option, value in options.items() if option in known}
    return name, options, 1 if joins else draw.choice([1, 2, 3]), joins


def follow_case(world, wrap, name, options, micro_batches, joins):
    """Train; under join() for more steps on the ranks behind. Return all gradients and weights."""
    family, model = FAMILIES[name], wrap(build(name), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    with model.join(enable=joins):
        for step in range(4 + joins * world.rank):
            optimizer.zero_grad(set_to_none=step % 3 > 0)
            for micro in range(micro_batches):
                batch = share(global_batch(name, 12, seed=10 * step + micro), world.rank, world.world_size)
                with contextlib.nullcontext() if micro == micro_batches - 1 else model.no_sync():
                    family.loss(model, batch).backward()
            seen += [None if each.grad is None else each.grad.clone() for each in model.parameters()]
            optimizer.step()
    return seen + [each.clone() for each in model.state_dict().values()]


def beside_torch(world, seed):
    case = random_case(seed)
    ours = follow_case(world, lockstep.DistributedDataParallel, *case)
    theirs = follow_case(world, torch.nn.parallel.DistributedDataParallel, *case)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None), case
        assert mine is None or torch.allclose(mine, other, rtol=1e-12, atol=1e-14), case


@pytest.mark.parametrize("num_ranks", [2, *soak([3])])
@pytest.mark.parametrize("seed", [0, *soak(range(1, 40))])
def test_random_options_give_what_they_give_with_torch(ranks, seed, num_ranks):
    ranks(num_ranks, warnings="ignore")(beside_torch, seed)


def half_precision_gradients(world):
    model = torch.nn.Linear(1, 1, bias=False).half()
    torch.nn.init.ones_(model.weight)
    wrapped = lockstep.DistributedDataParallel(model)
    wrapped(torch.full((1, 1), 40000.0, dtype=torch.float16)).sum().backward()
    return model.weight.grad.item()


def test_fp16_gradients_are_divided_before_they_are_summed(ranks):
    """The sum, 80000, does not exist in fp16; the mean does."""
    assert ranks(2)(half_precision_gradients) == [40000.0, 40000.0]


def mixed_dtypes(world):
    from tests.models import MixedDtypes, global_batch, share, squared_error

    torch.manual_seed(0)
    oracle = MixedDtypes()
    oracle.wide.double()
    torch.manual_seed(0)
    model = MixedDtypes()
    model.wide.double()
    wrapped = lockstep.DistributedDataParallel(model)
    for step in range(3):
        wrapped.zero_grad()
        oracle.zero_grad()
        batch = global_batch("mlp", 4 * world.world_size, seed=step)
        squared_error(wrapped, share(batch, world.rank, world.world_size)).backward()
        squared_error(oracle, batch).backward()
        assert_gradients_equal(model, oracle, tolerance=1e-5)
    return [str(parameter.grad.dtype) for parameter in model.parameters()]


def test_parameters_of_several_dtypes(ranks):
    expected = ["torch.float64", "torch.float64", "torch.float32", "torch.float32"]
    assert ranks(2)(mixed_dtypes) == [expected, expected]
