"""SyncBatchNorm yields on any ranks what batch norm yields in one process that has the whole batch."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.comm.collectives import all_reduce
from lockstep.errors import CollectiveError
from tests.batchnorm import WITHOUT_BIAS, errors_of_steps, layers, values

SIZES = {1: [[5]], 2: [[4, 3], [0, 5], [1, 2]], 3: [[3, 1, 2], [3, 0, 0]], 4: [[2, 3, 1, 2], [1, 0, 3, 0]]}
SHAPES = [(4,), (4, 5), (4, 3, 3), (3, 2, 3, 2)]


@pytest.mark.parametrize("num_ranks", [3])
def test_all_that_it_yields_is_that_of_one_process(ranks, num_ranks):
    def run(world):
        return [
            (sizes, shape, errors_of_steps(world, sizes, shape, channels_last=len(shape) > 2))
            for sizes, shape in itertools.product(SIZES[num_ranks], SHAPES)
        ]

    names = {"output", "input", "weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    for result in ranks(num_ranks)(run):
        for sizes, shape, errors in result:
            assert set(errors) == names
            assert max(errors.values()) < 1e-12, (sizes, shape, errors)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"affine": False}, {"output", "input", "running_mean", "running_var", "num_batches_tracked"}),
        ({"track_running_stats": False}, {"output", "input", "weight", "bias"}),
        (
            {"momentum": None},
            {"output", "input", "weight", "bias", "running_mean", "running_var", "num_batches_tracked"},
        ),
        *[
            (options, {"output", "input", "weight", "running_mean", "running_var", "num_batches_tracked"})
            for options in WITHOUT_BIAS
        ],
        ({"affine": False, "track_running_stats": False, "eps": 0.1}, {"output", "input"}),
    ],
)
def test_every_kind_of_layer(ranks, options, names):
    def run(world):
        return errors_of_steps(world, [2, 3], (4, 3, 3), steps=3, **options)

    for errors in ranks(2)(run):
        assert set(errors) == names
        assert max(errors.values()) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)]
)
def test_other_dtypes(ranks, dtype, tolerance):
    def run(world):
        return [errors_of_steps(world, [2, 3], (4, 3, 3), dtype=dtype, channels_last=last) for last in (False, True)]

    for errors in itertools.chain(*ranks(2)(run)):
        assert max(errors.values()) < tolerance
        assert errors["running_var"] < 1e-6  # computed in float32 all the same


def test_a_large_mean_costs_no_digits_of_the_variance(ranks):
    """Sums of squares would lose eight of sixteen digits."""

    def run(world):
        whole = values((6, 2, 4, 4), torch.float64, 0, mean=1e4)
        whole[4:] += 1.0
        _, layer = layers(4, 2, torch.float64, momentum=1.0)
        layer(whole[:4] if world.rank == 0 else whole[4:])
        exact = (whole - 1e4).var((0, 2, 3))
        return float(((layer.running_var - exact) / exact).abs().max())

    assert max(ranks(2)(run)) < 1e-12


def test_autocast_keeps_the_dtype_of_the_input_as_torchs_layer_does(ranks):
    def run(world):
        plain, ours = layers(4, 4, torch.float32)
        x = values((3, 4, 2, 2), torch.bfloat16, world.rank)
        with torch.autocast("cpu", torch.bfloat16):
            return [(layer(x.float()).dtype, layer(x).dtype) for layer in (plain, ours)]

    for plain, ours in ranks(2)(run):
        assert plain == ours == (torch.float32, torch.bfloat16)


def test_without_statistics_of_its_own_a_layer_uses_the_batch_in_evaluation_mode(ranks):
    """Each rank its own, as in torch: evaluation is no collective."""

    def run(world):
        found = []
        for track in (True, False):
            plain, ours = layers(2, 4, torch.float64, track_running_stats=track)
            x = values((3 + world.rank, 4), torch.float64, world.rank)
            found.append(torch.equal(plain.eval()(x), ours.eval()(x)))
        return found

    assert ranks(2)(run) == [[True, True], [True, True]]


class Net(nn.Module):
    """Uses one layer twice, another on an input without gradients, and a third under a checkpoint."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first = nn.BatchNorm2d(2)
        self.conv = nn.Conv2d(2, 3, 3, padding=1, bias=False)  # batch norm takes a bias away again
        self.twice, self.inside = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = torch.tanh(self.twice(self.conv(self.first(x))))
        x = self.twice(checkpoint(lambda h: torch.tanh(self.inside(h)), x, use_reentrant=self.use_reentrant))
        return self.head(x.mean((2, 3)))


def net(use_reentrant=False):
    torch.manual_seed(3)
    return Net(use_reentrant).double()


def samples(size, seed):
    return values((size, 2, 4, 4), torch.float64, seed), values((size, 2), torch.float64, 50 + seed)


@pytest.mark.parametrize("use_reentrant", [pytest.param(False, marks=pytest.mark.soak), True])
@pytest.mark.parametrize(("num_ranks", "accumulate"), [(3, 2)])
def test_through_our_engine_gradients_are_those_of_one_process(ranks, num_ranks, accumulate, use_reentrant):
    """Losses are scaled by hand: each rank's is its part of one mean over the global batch."""
    sizes = [3, 1, 2][:num_ranks]

    def run(world):
        oracle, model = net(use_reentrant), net(use_reentrant)
        model = lockstep.DistributedDataParallel(lockstep.SyncBatchNorm.convert_sync_batchnorm(model))
        own = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
        worst = 0.0
        for step in range(2):
            oracle.zero_grad()
            model.zero_grad()
            for micro in range(accumulate):
                x, y = samples(sum(sizes), 10 * step + micro)
                (oracle(x) - y).square().mean().backward()
                model.require_backward_grad_sync = micro == accumulate - 1
                part = (model(x[own]) - y[own]).square().sum() / y.numel()
                (part * world.world_size).backward()
            for ours, expected in zip(model.parameters(), oracle.parameters(), strict=True):
                worst = max(worst, float((ours.grad - expected.grad).norm() / expected.grad.norm()))
        for ours, expected in zip(model.buffers(), oracle.buffers(), strict=True):
            worst = max(worst, float((ours - expected).abs().max()))
        return worst

    assert max(ranks(num_ranks)(run)) < 1e-12


class Branching(nn.Module):
    """Has a layer that some ranks do not use in some steps."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.branch = nn.Linear(4, 5, bias=False), nn.Linear(5, 2), nn.Linear(5, 2)
        self.norm, self.second = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    def forward(self, x, uses):
        hidden = self.second(torch.tanh(self.norm(self.first(x))))
        return self.last(hidden) + self.branch(hidden) * uses if uses.any() else self.last(hidden)


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_ranks_need_not_use_the_same_parameters(ranks, first):
    """Buckets and the exchanges of layers keep one order, also if the difference shows in a later step only."""

    def run(world):
        torch.manual_seed(2)
        oracle = Branching().double()
        model = lockstep.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(oracle))
        model = lockstep.DistributedDataParallel(model, bucket_cap_mb=1e-5)
        own = slice(0, 3) if world.rank == 0 else slice(3, 7)
        worst = 0.0
        for step in range(4):
            x, uses = values((7, 4), torch.float64, step), torch.ones(7, 1, dtype=torch.float64)
            uses[:3] = step < first
            oracle.zero_grad()
            model.zero_grad()
            oracle(x, uses).square().sum().backward()
            (model(x[own], uses[own]).square().sum() * 2).backward()
            for ours, expected in zip(model.parameters(), oracle.parameters(), strict=True):
                worst = max(worst, float((ours.grad - expected.grad).norm() / expected.grad.norm()))
        return worst

    assert max(ranks(2)(run)) < 1e-12


@pytest.mark.parametrize("accumulate", [2])
def test_weights_of_micro_batches_count_within_the_layers(ranks, accumulate):
    """Each rank's loss is a plain mean over its own samples, and says of how many."""
    sizes = [3, 1, 2]

    def run(world):
        oracle = net()
        model = lockstep.DistributedDataParallel(lockstep.SyncBatchNorm.convert_sync_batchnorm(net()))
        own = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
        worst = 0.0
        for step in range(3):
            oracle.zero_grad()
            model.zero_grad()
            for micro in range(accumulate):
                x, y = samples(sum(sizes), 10 * step + micro)
                ((oracle(x) - y).square().mean() / accumulate).backward()
                model.require_backward_grad_sync = micro == accumulate - 1
                lockstep.backward((model(x[own]) - y[own]).square().mean(), count=sizes[world.rank])
            for ours, expected in zip(model.parameters(), oracle.parameters(), strict=True):
                worst = max(worst, float((ours.grad - expected.grad).norm() / expected.grad.norm()))
        return worst

    assert max(ranks(3)(run)) < 1e-12


@pytest.mark.parametrize("weights", [[(3, 0), (1, 2)], [(0, 0), (2, 0)]])
def test_samples_of_weight_zero_still_count_in_the_statistics(ranks, weights):
    """So other ranks' losses depend on them; their own loss may even be NaN."""

    def run(world):
        oracle = net()
        model = lockstep.DistributedDataParallel(lockstep.SyncBatchNorm.convert_sync_batchnorm(net()))
        own = slice(0, 3) if world.rank == 0 else slice(3, 5)
        worst = 0.0
        for _ in range(2):
            oracle.zero_grad()
            model.zero_grad()
            for micro, pair in enumerate(weights):
                x, y = samples(5, micro)
                errors = (oracle(x) - y).square()
                loss = pair[0] * errors[:3].mean() + pair[1] * errors[3:].mean()
                (loss / sum(map(sum, weights))).backward()
                model.require_backward_grad_sync = micro == len(weights) - 1
                loss = (model(x[own]) - y[own]).square().mean()
                weight = pair[world.rank]
                lockstep.backward(loss if weight else loss * float("nan"), count=weight)
            for ours, expected in zip(model.parameters(), oracle.parameters(), strict=True):
                worst = max(worst, float((ours.grad - expected.grad).norm() / expected.grad.norm()))
        return worst

    assert max(ranks(2)(run)) < 1e-12


def test_parameters_have_this_ranks_part_of_the_gradient(ranks):
    def run(world):
        _, layer = layers(2, 4, torch.float64)
        x = values((2 + world.rank, 4), torch.float64, world.rank)
        layer(x).backward(torch.ones_like(x))
        return layer.bias.grad

    assert [gradient.tolist() for gradient in ranks(2)(run)] == [[2.0] * 4, [3.0] * 4]


def test_a_group_of_some_ranks_shares_its_own_statistics(ranks):
    def run(world):
        groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2])]
        layer = lockstep.SyncBatchNorm(4, process_group=groups[world.rank // 2], momentum=1.0, dtype=torch.float64)
        layer(values((2, 4), torch.float64, world.rank))
        return layer.running_mean

    found = ranks(3)(run)
    batches = [values((2, 4), torch.float64, rank) for rank in range(3)]
    expected = [torch.cat(batches[:2]).mean(0)] * 2 + [batches[2].mean(0)]
    for mean, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mean, exact, rtol=1e-12, atol=0)


@pytest.mark.soak
def test_compiled_code_goes_around_it(ranks):
    def run(world):
        oracle, model = net(), lockstep.SyncBatchNorm.convert_sync_batchnorm(net())
        x, _ = samples(4, 0)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager")
        output = compiled(x[2 * world.rank : 2 * world.rank + 2])
        output.sum().backward()
        expected = oracle(x)
        expected.sum().backward()
        gradient = model.conv.weight.grad
        all_reduce(gradient, group=world.group)
        torch.testing.assert_close(gradient, oracle.conv.weight.grad, rtol=1e-10, atol=1e-13)
        return float((output - expected[2 * world.rank : 2 * world.rank + 2]).abs().max())

    assert max(ranks(2, warnings="ignore")(run)) < 1e-12


def test_one_value_per_channel_on_all_ranks_is_an_error_on_every_rank(ranks):
    def run(world):
        lockstep.SyncBatchNorm(4)(torch.ones(1 - world.rank, 4))

    for outcome in ranks(2).each(run):
        assert type(outcome.error) is ValueError
        assert str(outcome.error) == (
            "Expected more than 1 value per channel when training, got 1 on all ranks together.\n"
            "Leave such a batch out (drop_last), or make it larger."
        )


def test_no_values_at_all_leave_running_statistics_alone(ranks):
    def run(world):
        layer = lockstep.SyncBatchNorm(4)
        x = torch.ones(0, 4, requires_grad=True)
        layer(x).sum().backward()
        return layer.running_var.tolist(), x.grad.shape, layer.weight.grad.tolist()

    assert ranks(2)(run) == [([1.0] * 4, torch.Size([0, 4]), [0.0] * 4)] * 2


def test_a_layer_that_meets_another_one_says_so_on_every_rank(ranks):
    def run(world):
        model = nn.Sequential(lockstep.SyncBatchNorm(4), lockstep.SyncBatchNorm(4))
        lockstep.DistributedDataParallel(model)
        model[world.rank](torch.randn(3, 4))

    for outcome in ranks(2).each(run):
        assert type(outcome.error) is CollectiveError
        assert str(outcome.error) == (
            f"Rank {outcome.rank}: the forward of SyncBatchNorm {outcome.rank} could not be done together with the "
            "other ranks: other ranks run another layer.\n"
            "Every rank must run the same SyncBatchNorm layers in the same order, on as many channels, forward and "
            "backward; if another rank ended or failed, look at the first error of the job."
        )


@pytest.mark.parametrize("case", ["channels", "one rank only", "no backward"])
def test_ranks_that_do_not_take_part_alike_end_in_an_error(ranks, case):
    def run(world):
        layer = lockstep.SyncBatchNorm(8 if case == "channels" and world.rank else 4)
        if case == "one rank only" and world.rank:
            raise RuntimeError("This rank does something else.")
        output = layer(torch.randn(3, layer.num_features, requires_grad=True))
        if case == "no backward" and world.rank:
            raise RuntimeError("This rank does something else.")
        output.sum().backward()

    errors = [outcome.error for outcome in ranks(2).each(run, timeout=10.0)]
    assert all(errors)
    assert any(type(error) is CollectiveError for error in errors)
    phase = "backward" if case == "no backward" else "forward"
    for error in errors:
        if type(error) is CollectiveError:
            assert f"the {phase} of a SyncBatchNorm layer could not be done together with the other ranks" in str(error)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((4,), "expected at least 2D input (got 1D input)"),
        ((2, 0, 3), "SyncBatchNorm number of input channels should be non-zero"),
        ((2, 5, 3), "expected input with 4 channels (got (2, 5, 3))"),
    ],
)
def test_inputs_of_wrong_shape(ranks, shape, text):
    def run(world):
        lockstep.SyncBatchNorm(4)(torch.zeros(shape))

    for outcome in ranks(2).each(run):
        assert type(outcome.error) is ValueError and str(outcome.error) == text


def penalty(model, x):
    x = x.clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.mean() + (gradient.flatten(1).norm(dim=1) - 1).square().mean()


def test_a_gradient_penalty_with_uneven_parts(ranks):
    def run(world):
        def build():
            torch.manual_seed(0)
            layers = nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4), nn.BatchNorm1d(4)
            return nn.Sequential(*layers, nn.Softplus(), nn.Linear(4, 1)).double()

        oracle = build()
        model = lockstep.DistributedDataParallel(lockstep.SyncBatchNorm.convert_sync_batchnorm(build()))
        x = torch.randn(9, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        mine = x[:6] if world.rank == 0 else x[6:]
        for _ in range(2):
            model.zero_grad()
            oracle.zero_grad()
            lockstep.backward(penalty(model, mine), mean_over=len(mine))
            penalty(oracle, x).backward()
            for actual, expected in zip(model.parameters(), oracle.parameters(), strict=True):
                torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-15)

    ranks(2)(run)
