"""In a backward on a device the host waits for nothing: not with weights, and not for parameters that nothing uses."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ConfigurationError
from tests.models import relative_error
from tests.simulated.test_engines import HOOKS, assert_gradients_equal, module_on

BUCKET_MIB = 0.0002  # one layer of `Branches` in a bucket


class Branches(nn.Module):
    """Uses the layers that are named in the call, one after the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name in "abcde":
            self.add_module(name, nn.Linear(5, 5, dtype=torch.float64))

    def forward(self, x, names):
        for name in names:
            x = getattr(self, name)(x).tanh()
        return x


def inputs(step, rank, count=3, dtype=torch.float64):
    return torch.randn(count, 5, dtype=dtype, generator=torch.Generator().manual_seed(100 * step + rank))


def waits(loss):
    """Return how often the host waited for the device in this backward, and where."""
    with torch.sim.counting() as counts:
        loss.backward()
    return len(counts.waits), list(map(str, counts.waits))


# --- parameters without a gradient


def follow(world, paths_by_step, hook=None, **options):
    """Each step, rank r takes ``paths[r]``; return the waits of each backward."""
    oracle, found = Branches(), []
    model = lockstep.DistributedDataParallel(module_on(world.device, Branches()), bucket_cap_mb=BUCKET_MIB, **options)
    if hook is not None:
        model.register_comm_hook(*HOOKS[hook](world))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, oracle)]
    for step, paths in enumerate(paths_by_step):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(inputs(step, world.rank).to(world.device), paths[world.rank]).square().mean()
        found.append(waits(loss))
        losses = [oracle(inputs(step, rank), path).square().mean() for rank, path in enumerate(paths)]
        (sum(losses) / len(losses)).backward()
        assert_gradients_equal(model.module, oracle)
        for optimizer in optimizers:
            optimizer.step()
    return found


@pytest.mark.parametrize("hook", [None, "all-reduce"])
def test_layers_that_are_never_used_cost_no_wait(on_sim, hook):
    """From the third step on: the first shows it, the second has all ranks know it."""
    for found in on_sim(2)(follow, [("abe", "abe")] * 6, hook):
        assert [count for count, _ in found[3:]] == [0, 0, 0], found


def test_layers_that_only_another_rank_uses_cost_no_wait(on_sim):
    for found in on_sim(2)(follow, [("abe", "abcde")] * 6):
        assert [count for count, _ in found[3:]] == [0, 0, 0], found


PATHS = [("ab", "ab")] * 5


@pytest.mark.parametrize(
    "paths_by_step",
    [
        pytest.param([*PATHS, ("ab", "abc"), *PATHS], id="one rank uses more"),
        pytest.param([*PATHS, ("abd", "abc"), *PATHS], id="both use more"),
        pytest.param([*PATHS, ("a", "ab"), *PATHS], id="one rank uses less"),
        pytest.param([*PATHS, ("a", "a"), *PATHS], id="both use less"),
        pytest.param([*PATHS, *[("abcde", "abcde")] * 4, ("ab", "abc"), *PATHS], id="all, then not"),
        pytest.param([("abc", "ab"), ("ab", "de"), ("e", "a"), ("abcde", "ab"), ("ab", "abcde")] * 2, id="no pattern"),
    ],
)
def test_a_change_after_many_equal_steps_is_right_at_once(on_sim, paths_by_step):
    """A rank that lacks a gradient must not assume that the other ranks lack it again."""
    on_sim(2)(follow, paths_by_step)


def test_ranks_without_data_take_part_in_the_exchange_of_what_is_used(on_sim):
    on_sim(2)(runs_dry)


def runs_dry(world):
    """Rank 0 has two batches and rank 1 six; nobody uses d and e."""
    model = lockstep.DistributedDataParallel(module_on(world.device, Branches()), bucket_cap_mb=BUCKET_MIB)
    oracle = Branches()
    with model.join():
        for step in range(2 + 4 * world.rank):
            model.zero_grad()
            model(inputs(step, world.rank).to(world.device), "abc").square().mean().backward()
            oracle.zero_grad()
            losses = [oracle(inputs(step, rank), "abc").square().mean() for rank in range(2) if rank or step < 2]
            (sum(losses) / 2).backward()
            assert_gradients_equal(model.module, oracle)


# --- neither missing gradients nor weights


def test_a_plain_loop_waits_for_nothing(on_sim):
    """Not in its forwards either, which read the sums of an earlier step."""
    for found in on_sim(2)(plain_steps):
        assert found[4:] == [[]] * 4, found


def plain_steps(world):
    """Return where the host waited in each step."""
    found = []
    model = lockstep.DistributedDataParallel(module_on(world.device, Branches()), bucket_cap_mb=BUCKET_MIB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [inputs(step, world.rank).to(world.device) for step in range(8)]
    for batch in batches:
        with torch.sim.counting() as counts:
            optimizer.zero_grad()
            model(batch, "abcde").square().mean().backward()
            optimizer.step()
        found.append(list(map(str, counts.waits)))
    return found


# --- weights


def weighted_steps(world, weights_by_step, dtype=torch.float64, hook=None):
    """Each step, rank r has ``weights[r]`` samples; return the waits of each backward, and the last gradients."""
    oracle, found = Branches(), []
    wrapped = module_on(world.device, Branches().to(dtype))
    model = lockstep.DistributedDataParallel(wrapped, bucket_cap_mb=BUCKET_MIB)
    if hook is not None:
        model.register_comm_hook(*HOOKS[hook](world))
    for step, weights in enumerate(weights_by_step):
        model.zero_grad()
        oracle.zero_grad()
        batches = [inputs(step, rank, count, dtype) for rank, count in enumerate(weights)]
        model.mean_over(weights[world.rank])
        loss = model(batches[world.rank].to(world.device), "abcde").square().mean()
        found.append(waits(loss))
        oracle(torch.cat(batches).double(), "abcde").square().mean().backward()
        for mine, expected in zip(wrapped.parameters(), oracle.parameters(), strict=True):
            error = relative_error(mine.grad.cpu().double(), expected.grad)
            assert error < {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype], (step, error)
    return found, [parameter.grad.cpu() for parameter in wrapped.parameters()]


WEIGHTS = [(2, 3), (1, 7), (4, 4), (9, 1), (3, 5), (3, 5)]


@pytest.mark.parametrize(
    ("dtype", "hook"),
    [(torch.float64, None), (torch.float32, None), (torch.bfloat16, None), (torch.float64, "all-reduce")],
)
def test_a_weighted_backward_makes_the_host_wait_for_nothing(on_sim, dtype, hook):
    """Except in the first steps, in which the ranks agree on the order of the buckets, and that there are weights."""
    found = on_sim(2)(weighted_steps, WEIGHTS, dtype, hook)
    for counts, gradients in found:
        assert [count for count, _ in counts[2:]] == [0, 0, 0, 0], counts
        assert all(map(torch.equal, gradients, found[0][1]))


def test_a_factor_is_not_rounded_to_the_dtype_of_narrow_gradients(on_sim):
    on_sim(1)(narrow_factor)


def narrow_factor(world):
    from lockstep.parallel.ddp.buckets import BucketSet

    parameter = nn.Parameter(torch.zeros(2**10, dtype=torch.bfloat16, device=world.device))
    made = BucketSet(
        {"p": parameter}, sparse=set(), caps_bytes=(2**20,), keep_held_gradients=False, message=[0.0, 0.0, 0.0, 1.0]
    )
    (bucket,) = made.buckets
    bucket.gradients.copy_(torch.linspace(1, 2, 2**10))
    expected = (bucket.gradients.cpu().float() * 1.005859375).bfloat16()  # the factor takes 10 bits, bfloat16 has 8
    bucket.scale(torch.tensor([1.005859375], device=world.device))
    assert torch.equal(bucket.gradients.cpu(), expected)


def test_a_missing_weight_is_an_error_of_the_next_forward_on_every_rank(on_sim):
    on_sim(3)(forgets)


def forgets(world):
    model = lockstep.DistributedDataParallel(module_on(world.device, Branches()), bucket_cap_mb=BUCKET_MIB)
    for step in range(4):
        model.zero_grad()
        if step != 3 or world.rank != 1:
            model.mean_over(1 + world.rank)
        model(inputs(step, world.rank).to(world.device), "abc").square().mean().backward()
    with pytest.raises(ConfigurationError) as caught, torch.no_grad():
        model(inputs(4, world.rank).to(world.device), "abc")
    assert str(caught.value) == (
        "A weight is missing in this step: rank 1 ran a backward without one, but other backwards of the step had "
        "theirs.\nCall model.mean_over(n) before each backward, or lockstep.backward(loss, mean_over=n), on all ranks "
        "or on none; n is 0 where a batch holds nothing that counts."
    )


def test_weights_that_begin_late_and_end_early(on_sim):
    """Also in a narrow dtype, where a weight has to be sent separately if there is one."""
    for dtype in (torch.float64, torch.bfloat16):
        on_sim(2)(now_and_then, dtype)


def now_and_then(world, dtype):
    oracle = Branches()
    model = lockstep.DistributedDataParallel(module_on(world.device, Branches().to(dtype)), bucket_cap_mb=BUCKET_MIB)
    for step, is_weighed in enumerate([0, 1, 1, 0, 0, 1, 0, 1]):
        model.zero_grad()
        oracle.zero_grad()
        counts = (1 + step, 3) if is_weighed else (4, 4)
        batches = [inputs(step, rank, count, dtype) for rank, count in enumerate(counts)]
        if is_weighed:
            model.mean_over(counts[world.rank])
        model(batches[world.rank].to(world.device), "abcde").square().mean().backward()
        oracle(torch.cat(batches).double(), "abcde").square().mean().backward()
        for mine, expected in zip(model.module.parameters(), oracle.parameters(), strict=True):
            error = relative_error(mine.grad.cpu().double(), expected.grad)
            assert error < (1e-12 if dtype is torch.float64 else 0.1), (step, error)


# --- what NCCL does not have


def test_sparse_gradients_are_refused_when_the_model_is_wrapped(on_sim):
    on_sim(2)(wraps_sparse)


def wraps_sparse(world):
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)).to(world.device)
    with pytest.raises(ConfigurationError) as caught:
        lockstep.DistributedDataParallel(model)
    assert str(caught.value) == (
        "0 is an embedding with sparse=True, but simccl cannot sum sparse gradients.\n"
        "Build it with sparse=False, or give the model a process_group with the backend gloo."
    )
    model[0].weight.requires_grad_(False)  # then it has none
    lockstep.DistributedDataParallel(model)
