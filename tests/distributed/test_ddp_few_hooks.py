"""In the usual loop one parameter a bucket has a hook; whatever else comes is noticed, and gradients stay right.

Each test trains some usual steps first, sees that hooks are few, and then does what they do not suffice for.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.parallel.ddp.reducer import _Hooked
from tests.models import FAMILIES, assert_gradients_equal, build, global_batch, share, squared_error

NUM_USUAL = 5  # the first, one to compare it with, two that agree, one with few hooks
CAP_MB = 0.0003  # a bucket a layer


class Branches(nn.Module):
    """Uses the layers that are named in the call, in that order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6, dtype=torch.float64) for name in "abcd"})

    def forward(self, x, path="abcd"):
        for name in path:
            x = torch.tanh(self.layers[name](x))
        return x


def hooks(model):
    return model._reducer._arrivals._hooked


def num_hooked(model):
    return sum(bool(parameter._post_accumulate_grad_hooks) for parameter in model.parameters())


def inputs(world, step):
    whole = torch.randn(4 * world.world_size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return whole, whole.chunk(world.world_size)[world.rank]


def usual_steps(world, cap_mb=CAP_MB):
    """Return our model, with few hooks, and one that was not trained in parallel; no weights are changed."""
    model, oracle = lockstep.DistributedDataParallel(Branches(), bucket_cap_mb=cap_mb), Branches()
    for step in range(NUM_USUAL):
        one_step(world, model, oracle, step)
    assert hooks(model) is _Hooked.FEW
    assert num_hooked(model) == len(model._reducer.row.buckets)
    return model, oracle


def one_step(world, model, oracle, step, path="abcd", zero=True):
    if zero:
        model.zero_grad()
        oracle.zero_grad()
    whole, mine = inputs(world, step)
    model(mine, path).square().mean().backward()
    oracle(whole, path).square().mean().backward()
    assert_gradients_equal(model.module, oracle)


def counted(model):
    """Return a list that fills with how many buckets left before each step closed."""
    counts = []
    before = model._reducer._arrivals.end

    def end(num_left):
        counts.append(num_left)
        before(num_left)

    model._reducer._arrivals.end = end
    return counts


def usual(world):
    model, oracle = usual_steps(world)
    counts = counted(model)
    for step in range(3):
        one_step(world, model, oracle, step)
    return counts


def test_buckets_leave_during_backward_all_the_same(ranks):
    assert ranks(2)(usual) == [[3, 3, 3]] * 2  # the last of four is held back


def accumulated(world, set_to_none):
    model, oracle = usual_steps(world)
    for step in range(6):
        model.zero_grad(set_to_none=set_to_none)
        oracle.zero_grad()
        for micro_step in range(2):
            whole, mine = inputs(world, 10 * step + micro_step)
            if micro_step == 0:
                with model.no_sync():
                    model(mine).square().mean().backward()
            else:
                model(mine).square().mean().backward()
            oracle(whole).square().mean().backward()
        assert_gradients_equal(model.module, oracle)
    return num_hooked(model)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation(ranks, set_to_none):
    assert ranks(2)(accumulated, set_to_none) == [8, 8]


def zeroed_in_place(world):
    model, oracle = usual_steps(world)
    counts = counted(model)
    for step in range(3):
        model.zero_grad(set_to_none=False)
        oracle.zero_grad()
        one_step(world, model, oracle, step, zero=False)
    return num_hooked(model), counts


def test_gradients_zeroed_in_place(ranks):
    """The hooks come back before the first of that backward's gradients: no bucket leaves late."""
    assert ranks(2)(zeroed_in_place) == [(8, [3, 3, 3])] * 2


def several_backwards(world):
    model, oracle = usual_steps(world)
    for step in range(3):
        one_step(world, model, oracle, step)
        one_step(world, model, oracle, 50 + step, zero=False)
    model.zero_grad()
    oracle.zero_grad()
    whole, mine = inputs(world, 9)
    loss, expected = model(mine).square().mean(), oracle(whole).square().mean()
    for _ in range(2):
        loss.backward(retain_graph=True)
        expected.backward(retain_graph=True)
    assert_gradients_equal(model.module, oracle)


def unused(world):
    model, oracle = usual_steps(world)
    for step, path in enumerate(["abc", "ab", "d", "bcd", "abcd"]):
        one_step(world, model, oracle, step, path)


def other_order(world):
    """Two layers a bucket, which are complete with another layer than before: late, not wrong, and noticed."""
    model, oracle = usual_steps(world, 2 * CAP_MB)
    counts = counted(model)
    for step in range(5):
        one_step(world, model, oracle, step, "badc")
        assert hooks(model) is (_Hooked.FEW if step < 1 else _Hooked.EVERY)
    assert counts == [1] * 5, "the other bucket's hook makes up for it"
    one_step(world, model, oracle, 9)


def changed_by_listeners(world):
    """Who is told of a bucket during backward may change its gradients: they are no second gradients."""
    model, oracle = usual_steps(world)
    model._reducer.departures.eager = True
    model._reducer.on_reduced.append(lambda bucket: [double(parameter) for parameter in bucket.parameters])
    for parameter in oracle.parameters():
        parameter.register_post_accumulate_grad_hook(double)

    def wait(gradient):
        for _, future in model._reducer.departures._under_way:
            future.wait()

    model.module.layers["b"].weight.register_hook(wait)
    for step in range(3):
        one_step(world, model, oracle, step)
    assert hooks(model) is _Hooked.FEW


def twice_used(world):
    model, oracle = usual_steps(world)
    for step, path in enumerate(["abab", "aabbccdd", "ddca"]):
        one_step(world, model, oracle, step, path)


def double(parameter):
    parameter.grad.mul_(2.0)


def users_hooks(world):
    """Hooks of the script stay, and run before ours, which send what they leave."""
    model, oracle = usual_steps(world)
    for each in (model.module, oracle):
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(double)
    for step in range(3):
        one_step(world, model, oracle, step)
        model.zero_grad(set_to_none=False)
        oracle.zero_grad()
        one_step(world, model, oracle, step, zero=False)
    assert [len(parameter._post_accumulate_grad_hooks) for parameter in model.parameters()] == [2] * 8


@pytest.mark.parametrize(
    "scenario", [several_backwards, unused, other_order, twice_used, users_hooks, changed_by_listeners]
)
def test_steps_of_another_kind(ranks, scenario):
    ranks(2)(scenario)


def different_paths(world):
    """Ranks use different layers once: the gradient of the mean of their losses."""
    model, oracle = usual_steps(world)
    for step, paths in enumerate([("ab", "cd"), ("abcd", "d"), ("dcba", "abcd")]):
        model.zero_grad()
        oracle.zero_grad()
        whole, mine = inputs(world, step)
        model(mine, paths[world.rank]).square().mean().backward()
        losses = [oracle(part, path).square().mean() for part, path in zip(whole.chunk(2), paths, strict=True)]
        (sum(losses) / 2).backward()
        assert_gradients_equal(model.module, oracle)


def test_ranks_that_use_different_layers(ranks):
    ranks(2)(different_paths)


def weighed(world):
    model, oracle = usual_steps(world)
    for step in range(3):
        model.zero_grad()
        oracle.zero_grad()
        whole, _ = inputs(world, step)
        parts = whole.split([3, 5])
        model.weight(len(parts[world.rank]))
        model(parts[world.rank]).square().mean().backward()
        oracle(whole).square().mean().backward()
        assert_gradients_equal(model.module, oracle)
    return num_hooked(model)


def test_weights(ranks):
    assert ranks(2)(weighed) == [8, 8]


def hidden_outputs(world):
    """A backward from a tensor that the wrapper never saw: gradients open the step."""
    model, oracle = usual_steps(world)
    seen = {}
    model.module.layers["c"].register_forward_hook(lambda _module, _inputs, output: seen.update(ours=output))
    oracle.layers["c"].register_forward_hook(lambda _module, _inputs, output: seen.update(theirs=output))
    for step in range(3):
        model.zero_grad(set_to_none=step != 1)
        oracle.zero_grad()
        whole, mine = inputs(world, step)
        model(mine)
        oracle(whole)
        seen["ours"].square().mean().backward()
        seen["theirs"].square().mean().backward()
        assert_gradients_equal(model.module, oracle) if step != 1 else None
        for name in "abc":
            actual, expected = model.module.layers[name].weight.grad, oracle.layers[name].weight.grad
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    return num_hooked(model)


def test_outputs_that_were_not_found(ranks):
    assert ranks(2)(hidden_outputs) == [8, 8]


def bare_module(world, path, zero):
    """What the bare module has accumulated is sent with the next step, also where that does not touch it."""
    model, oracle = usual_steps(world)
    whole, mine = inputs(world, 1)
    if zero:
        model.zero_grad()
        oracle.zero_grad()
    model.module(mine, path).square().mean().backward()
    oracle(whole, path).square().mean().backward()
    one_step(world, model, oracle, 2, "ab", zero=False)
    return num_hooked(model)


@pytest.mark.parametrize(("path", "zero"), [("abcd", True), ("abcd", False), ("cd", True), ("cd", False)])
def test_backwards_through_the_bare_module(ranks, path, zero):
    assert ranks(2)(bare_module, path, zero) == [8, 8]


def kept(world):
    """The gradient of a parameter that no rank uses stays as the script has made it."""
    model, _ = usual_steps(world)
    _, mine = inputs(world, 0)
    for parameter in model.module.layers["d"].parameters():
        parameter.grad.fill_(0.1 + world.rank)
    model(mine, "abc").sum().backward()
    return model.module.layers["d"].bias.grad.tolist()


def test_unused_gradient_that_the_script_changed(ranks):
    assert ranks(2)(kept) == [[0.1] * 6, [1.1] * 6]


def frozen_for_a_while(world):
    model, oracle = usual_steps(world)
    for step, requires_grad in enumerate([False, False, False, True, True]):
        for each in (model.module, oracle):
            each.layers["b"].requires_grad_(requires_grad)
        one_step(world, model, oracle, step)


def made_into_a_graph(world):
    model, oracle = usual_steps(world)
    for step in range(2):
        model.zero_grad()
        oracle.zero_grad()
        whole, mine = inputs(world, step)
        model(mine).square().mean().backward(create_graph=True)
        oracle(whole).square().mean().backward()
        assert_gradients_equal(model.module, oracle)
    model.zero_grad()
    return num_hooked(model)


@pytest.mark.filterwarnings("ignore")
def test_a_graph_of_the_backward(ranks):
    assert ranks(2, warnings="ignore")(made_into_a_graph) == [8, 8]


def failed_backward(world):
    model, oracle = usual_steps(world)

    def fail(_gradient):
        raise ArithmeticError("planted")

    _, mine = inputs(world, 0)
    model.zero_grad()
    handle = model.module.layers["b"].weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model(mine).square().mean().backward()
    handle.remove()
    for step in range(2):
        one_step(world, model, oracle, step)


@pytest.mark.parametrize("scenario", [frozen_for_a_while, failed_backward])
def test_incidents(ranks, scenario):
    ranks(2)(scenario)


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.num_checkpoints = 1

    def forward(self, x):
        x = self.layers[0](x)
        for _ in range(self.num_checkpoints):
            x = checkpoint(self.layers[1], x, use_reentrant=True)
        return self.layers[2](x)


def late_repeat(world):
    model = lockstep.DistributedDataParallel(Repeated(), bucket_cap_mb=0.00001)
    for step in range(NUM_USUAL + 1):
        model.module.num_checkpoints = 1 + (step == NUM_USUAL)
        model.zero_grad()
        assert hooks(model) is (_Hooked.FEW if step >= NUM_USUAL - 1 else _Hooked.EVERY)
        model(torch.ones(1, 6)).sum().backward()


def test_a_second_gradient_is_an_error(ranks):
    with pytest.raises(lockstep.errors.LockstepError) as caught:
        ranks(2)(late_repeat)
    assert str(caught.value).split("\n")[0].split(": ", 1)[1] in (
        "parameter layers.1.weight received a second gradient in one backward, after its bucket had been sent.",
        "parameter layers.1.bias received a second gradient in one backward, after its bucket had been sent.",
    )


def hooks_come_and_go(world):
    """After a failure it takes eight times as long until hooks are taken away again."""
    model, oracle = usual_steps(world)
    model.zero_grad(set_to_none=False)
    oracle.zero_grad()
    one_step(world, model, oracle, 0, zero=False)
    seen = []
    for step in range(20):
        one_step(world, model, oracle, step)
        seen.append(hooks(model) is _Hooked.FEW)
    return seen.index(True)


def test_hooks_are_taken_away_again_after_more_steps(ranks):
    assert ranks(2)(hooks_come_and_go) == [15, 15]


def two_wrappers(world):
    """One backward through two wrappers: what each holds back must leave in the same order on all ranks."""
    first, second = usual_steps(world), usual_steps(world)
    early = []
    counts = counted(second[0])
    for step in range(4):
        whole, mine = inputs(world, step)
        for model, oracle in (first, second):
            model.zero_grad()
            oracle.zero_grad()
        second[0](first[0](mine)).square().mean().backward()
        second[1](first[1](whole)).square().mean().backward()
        for model, oracle in (first, second):
            assert_gradients_equal(model.module, oracle)
        early.append(counts[-1])
    return early


def test_two_wrappers_in_one_backward(ranks):
    assert ranks(2)(two_wrappers) == [[3, 4, 4, 4]] * 2


def sparse(world):
    model, oracle = lockstep.DistributedDataParallel(build("sparse")), build("sparse")
    for step in range(NUM_USUAL + 2):
        batch = global_batch("sparse", 4 * world.world_size, step)
        model.zero_grad()
        oracle.zero_grad()
        FAMILIES["sparse"].loss(model, share(batch, world.rank, world.world_size)).backward()
        FAMILIES["sparse"].loss(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle)
    return hooks(model).name


def test_models_with_sparse_gradients_keep_their_hooks(ranks):
    assert ranks(2)(sparse) == ["EVERY", "EVERY"]


def trained_to_the_bit(world):
    """Few hooks change nothing of the numbers."""
    models = [lockstep.DistributedDataParallel(build("mlp"), bucket_cap_mb=CAP_MB) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    for step in range(10):
        batch = share(global_batch("mlp", 4 * world.world_size, step), world.rank, world.world_size)
        models[1]._reducer._arrivals.listen()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            squared_error(model, batch).backward()
            optimizer.step()
    assert [hooks(model).name for model in models] == ["FEW", "EVERY"]
    return all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_same_bits_with_few_hooks(ranks):
    assert ranks(2)(trained_to_the_bit) == [True, True]
