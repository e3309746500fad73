"""Steps that differ from those before: gradients stay those of one process, whatever comes after some usual steps."""

import re
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ConfigurationError, LockstepError
from tests.models import assert_gradients_equal

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


def inputs(world, step):
    whole = torch.randn(4 * world.world_size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return whole, whole.chunk(world.world_size)[world.rank]


def usual_steps(world, cap_mb=CAP_MB):
    """Return our model and one that is not trained in parallel, after some steps; no weights are changed."""
    model, oracle = lockstep.DistributedDataParallel(Branches(), bucket_cap_mb=cap_mb), Branches()
    for step in range(2):
        one_step(world, model, oracle, step)
    return model, oracle


def one_step(world, model, oracle, step, path="abcd", zero=True):
    if zero:
        model.zero_grad()
        oracle.zero_grad()
    whole, mine = inputs(world, step)
    model(mine, path).square().mean().backward()
    oracle(whole, path).square().mean().backward()
    assert_gradients_equal(model.module, oracle)


def zeroed_in_place(world):
    model, oracle = usual_steps(world)
    for step in range(2):
        model.zero_grad(set_to_none=False)
        oracle.zero_grad()
        one_step(world, model, oracle, step, zero=False)


def several_backwards(world):
    model, oracle = usual_steps(world)
    one_step(world, model, oracle, 0)
    one_step(world, model, oracle, 50, zero=False)
    model.zero_grad()
    oracle.zero_grad()
    whole, mine = inputs(world, 9)
    loss, expected = model(mine).square().mean(), oracle(whole).square().mean()
    for _ in range(2):
        loss.backward(retain_graph=True)
        expected.backward(retain_graph=True)
    assert_gradients_equal(model.module, oracle)


def other_paths(world):
    """Layers that are unused, used twice, or in another order than in the first step."""
    model, oracle = usual_steps(world, 2 * CAP_MB)
    for step, path in enumerate(["abc", "d", "badc", "abab", "aabbccdd", "ddca", "abcd"]):
        one_step(world, model, oracle, step, path)


def double(parameter):
    parameter.grad.mul_(2.0)


def hooks_of_the_script(world):
    """They stay, and run before ours, so that what they leave is reduced."""
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


def ranks_differ(world):
    """Ranks use different layers: the gradient of the mean of their losses."""
    model, oracle = usual_steps(world)
    for step, paths in enumerate([("ab", "cd"), ("abcd", "d"), ("dcba", "abcd")]):
        model.zero_grad()
        oracle.zero_grad()
        whole, mine = inputs(world, step)
        model(mine, paths[world.rank]).square().mean().backward()
        losses = [oracle(part, path).square().mean() for part, path in zip(whole.chunk(2), paths, strict=True)]
        (sum(losses) / 2).backward()
        assert_gradients_equal(model.module, oracle)


def first_weights(world):
    model, oracle = usual_steps(world)
    for step in range(2):
        model.zero_grad()
        oracle.zero_grad()
        whole, _ = inputs(world, step)
        parts = whole.split([3, 5])
        model.mean_over(len(parts[world.rank]))
        model(parts[world.rank]).square().mean().backward()
        oracle(whole).square().mean().backward()
        assert_gradients_equal(model.module, oracle)


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
        for name in "abc":
            actual, expected = model.module.layers[name].weight.grad, oracle.layers[name].weight.grad
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


def bare_module(world):
    """What the bare module has accumulated is sent with the next step, also where that does not touch it."""
    for path, zero in [("abcd", True), ("abcd", False), ("cd", True)]:
        model, oracle = usual_steps(world)
        whole, mine = inputs(world, 1)
        if zero:
            model.zero_grad()
            oracle.zero_grad()
        model.module(mine, path).square().mean().backward()
        oracle(whole, path).square().mean().backward()
        one_step(world, model, oracle, 2, "ab", zero=False)


def changed_gradient_of_nobody(world):
    """The gradient of a parameter that no rank uses stays as the script has made it."""
    model, _ = usual_steps(world)
    _, mine = inputs(world, 0)
    for parameter in model.module.layers["d"].parameters():
        parameter.grad.fill_(0.1 + world.rank)
    model(mine, "abc").sum().backward()
    assert model.module.layers["d"].bias.grad.tolist() == [0.1 + world.rank] * 6


def frozen_for_a_while(world):
    model, oracle = usual_steps(world)
    for step, requires_grad in enumerate([False, False, True]):
        for each in (model.module, oracle):
            each.layers["b"].requires_grad_(requires_grad)
        one_step(world, model, oracle, step)


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


def gradients_of_inputs(world):
    """`autograd.grad` exchanges nothing, whatever it asks for, and a penalty of its result is averaged."""
    model, oracle = usual_steps(world)
    for step in range(3):
        whole, mine = inputs(world, step)
        for _ in range(1 + (world.rank + step) % 2):
            x = mine.clone().requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
            torch.autograd.grad(model(x).sum(), list(model.parameters()))
            model(x).sum().backward(inputs=[x])
        for each, x in ((model, mine), (oracle, whole)):
            each.zero_grad()
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
            (slope.square().mean() if step == 1 else slope.square().mean() + each(x).mean()).backward()
        assert_gradients_equal(model.module, oracle)


def a_loss_that_is_a_leaf(world):
    """As in `fit`, where the wrapped module returns the loss: such a loss counts, with no gradient."""
    layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    layer.forward = lambda x: x.sum().detach().requires_grad_() if world.rank else (x * layer.weight).sum()
    model = lockstep.DistributedDataParallel(layer)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(3, 2, dtype=torch.float64)).backward()
        assert layer.weight.grad.tolist() == [[1.5, 1.5]]


@pytest.mark.parametrize(
    "scenario",
    [
        gradients_of_inputs,
        a_loss_that_is_a_leaf,
        zeroed_in_place,
        several_backwards,
        other_paths,
        hooks_of_the_script,
        ranks_differ,
        first_weights,
        hidden_outputs,
        bare_module,
        changed_gradient_of_nobody,
        frozen_for_a_while,
        failed_backward,
    ],
)
def test_gradients_are_those_of_one_process(ranks, scenario):
    ranks(2)(scenario)


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


@pytest.mark.filterwarnings("ignore")
def test_a_graph_of_the_backward(ranks):
    ranks(2, warnings="ignore")(made_into_a_graph)


def two_wrappers(world):
    """One backward through two wrappers: what each holds back must be launched in the same order on all ranks."""
    first, second = usual_steps(world), usual_steps(world)
    for step in range(4):
        whole, mine = inputs(world, step)
        for model, oracle in (first, second):
            model.zero_grad()
            oracle.zero_grad()
        second[0](first[0](mine)).square().mean().backward()
        second[1](first[1](whole)).square().mean().backward()
        for model, oracle in (first, second):
            assert_gradients_equal(model.module, oracle)


def test_two_wrappers_in_one_backward(ranks):
    ranks(2)(two_wrappers)


def set_data(gradient):
    gradient.data = gradient.data.flip(0)


def set_data_and_keep_it(gradient, kept=[]):  # noqa: B006
    kept[:] = [gradient.data]
    gradient.data = kept[0].flip(0)


EDITS = {
    "data": set_data,
    "data, the old one held": set_data_and_keep_it,
    "set_": lambda gradient: gradient.set_(gradient.flip(0)),
    "t_": lambda gradient: gradient.t_() if gradient.dim() == 2 else gradient.neg_(),
    "transposed data": lambda gradient: setattr(
        gradient, "data", gradient.data.t() if gradient.dim() == 2 else -gradient
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_gradients_that_a_script_edited_count_and_later_ones_are_right(ranks, edit):
    """Weights follow the edited gradients; the next step has new gradients, also if these were zeroed in place."""

    def train(model, batch, none, num_micro_steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad(set_to_none=none)
            for micro in range(num_micro_steps):
                with nullcontext() if micro == num_micro_steps - 1 else getattr(model, "no_sync", nullcontext)():
                    model(batch(step)).square().mean().backward()
                for parameter in model.parameters():
                    EDITS[edit](parameter.grad)
            optimizer.step()

    def run(world):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
            compare(world)

    def compare(world):
        for as_view, none, count in ((False, True, 1), (False, False, 1), (True, True, 1), (False, True, 2)):
            oracle, module = Branches(), Branches()
            model = lockstep.DistributedDataParallel(module, bucket_cap_mb=CAP_MB, gradient_as_bucket_view=as_view)
            train(oracle, lambda step: inputs(world, step)[0], none, count)
            train(model, lambda step: inputs(world, step)[1], none, count)
            for mine, theirs in zip(module.parameters(), oracle.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)

    ranks(2)(run)


def test_strides_may_change_after_wrapping_and_one_rank_may_hold_gradients_then(ranks):
    def run(world):
        def build():
            torch.manual_seed(0)
            return nn.Sequential(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Conv2d(4, 2, 2)).double()

        oracle, module = build(), build()
        model, held = lockstep.DistributedDataParallel(module), []
        whole = torch.randn(2 * world.world_size, 3, 4, 4, generator=torch.Generator().manual_seed(1)).double()
        for step in range(5):
            if step == 2:
                model.to(memory_format=torch.channels_last)
            model.zero_grad()
            oracle.zero_grad()
            model(whole.chunk(world.world_size)[world.rank]).square().mean().backward()
            oracle(whole).square().mean().backward()
            assert_gradients_equal(module, oracle)
            if world.rank == 0:
                held += [parameter.grad for parameter in module.parameters()]

    ranks(2)(run)


def swap(model):
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))


CONVERSIONS = {
    "double": (
        lambda model: model.float(),
        "Parameter layers.d.bias was (6,), torch.float64 on cpu when it was wrapped, and is now (6,), torch.float32 on "
        "cpu: the bucket cannot hold its gradient.\n",
    ),
    "swap": (
        swap,
        "The tensor of parameter layers.d.bias was swapped after the model was wrapped, by a conversion, "
        "load_state_dict or swap_tensors: its gradient would not be averaged over the ranks.\n",
    ),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_model_that_was_converted_after_wrapping_is_an_error_on_every_rank(ranks, conversion, num_steps):
    convert, message = CONVERSIONS[conversion]

    def run(world):
        model, oracle = lockstep.DistributedDataParallel(Branches()), Branches()
        for step in range(num_steps):
            one_step(world, model, oracle, step)
        convert(model)
        with pytest.raises(LockstepError) as caught:
            model(inputs(world, 0)[1].to(next(model.parameters()).dtype)).sum().backward()
        assert str(caught.value) == message + (
            "Convert, move or load the model before wrapping, or wrap again: "
            "model = DistributedDataParallel(model.module)."
        )

    ranks(2)(run)


def refused_steps(world):
    model, _ = usual_steps(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, mine = inputs(world, 0)
    with model.no_sync():
        model(mine).sum().backward()
    model(mine).sum().backward()
    optimizer.step()  # the last of this window was averaged, that of the next is not
    with model.no_sync():
        model(mine).sum().backward()
    with pytest.raises(lockstep.errors.ConfigurationError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        f"Rank {world.rank}: SGD.step() uses gradients that were not averaged over the ranks, first that of parameter "
        "layers.a.weight.\nRun the last forward and backward before a step outside of no_sync(), not through "
        ".module, and with a loss of tensors that forward returns."
    )
    torch.distributed.all_reduce(torch.zeros(1))
    with pytest.warns(UserWarning, match="not averaged over the ranks"):  # the script may have averaged them
        optimizer.step()
    model.zero_grad()
    model.module.layers["d"].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(lockstep.errors.ConfigurationError, match="leave it to model"):
        model(mine).sum().backward()


def steps_with_closure(world):
    """The gradients that an update uses are those after its closure."""
    model, _ = usual_steps(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, mine = inputs(world, 0)

    def compute():
        loss = model(mine).sum()
        loss.backward()
        return loss

    for step in (optimizer.step, lambda closure: optimizer.step(closure=closure)):
        for _ in range(2):
            optimizer.zero_grad()
            with model.no_sync():
                compute()
            assert step(compute).requires_grad  # the closure's loss
        with model.no_sync(), pytest.raises(lockstep.errors.ConfigurationError, match="not averaged over the ranks"):
            step(compute)


def own_averages(world):
    """A script that averages gradients or parameters itself may step with its own gradients."""
    model, _ = usual_steps(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, mine = inputs(world, 0)
    for _ in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            model(mine).sum().backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        optimizer.step()


def a_step_apart(world):
    """One rank runs a backward more, or none before its optimizer steps."""
    for kind in ("no backward", "two backwards"):
        model, _ = usual_steps(world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, mine = inputs(world, 0)
        with pytest.raises(lockstep.errors.ConfigurationError, match="The ranks are not in the same step"):
            for step in range(4):
                is_odd = step == 2 and world.rank == 0
                for _ in range(1 + (is_odd and kind == "two backwards")):
                    loss = model(mine).sum()
                    if not is_odd or kind != "no backward":
                        loss.backward()
                optimizer.step()


class Nested(torch.optim.SGD):
    """Steps as many subclasses do: torch calls hooks of ``super().step()``, too, once plain SGD was created."""

    def step(self, closure=None):
        return super().step(closure)


def hooks_called_unequally(world):
    """It is no difference between ranks which optimizers they have created before, or that hooks are not called."""
    model, oracle = usual_steps(world)
    if world.rank == 0:
        torch.optim.SGD(oracle.parameters(), lr=0.1)
    optimizers = [Nested(each.parameters(), lr=0.1) for each in (model, oracle)]
    if world.rank == 1:
        optimizers[0].step = partial(type(optimizers[0]).step.__wrapped__, optimizers[0])  # as without torch's wrapper
    for step in range(3):
        one_step(world, model, oracle, step)
        for optimizer in optimizers:
            optimizer.step()


def calls_in_join(world):
    """A rank without data takes part in a step, however often the others call the model in it."""
    model = lockstep.DistributedDataParallel(nn.Sequential(Branches(), nn.BatchNorm1d(6, dtype=torch.float64)))
    _, mine = inputs(world, 0)
    with model.join():
        for _ in range(2 + 2 * world.rank):
            model.zero_grad()
            outputs = [model(mine) for _call in range(1 + world.rank)]
            sum(output.square().mean() for output in outputs).backward()
    assert model.module[1].num_batches_tracked == 8  # of the last rank that had data


@pytest.mark.parametrize(
    "scenario", [own_averages, calls_in_join, refused_steps, steps_with_closure, a_step_apart, hooks_called_unequally]
)
def test_steps_of_optimizers_and_ranks_without_data(ranks, scenario):
    ranks(2)(scenario)


@pytest.mark.parametrize("is_averaged", [False, True])
def test_a_line_search_needs_the_loss_of_all_ranks(ranks, is_averaged):
    def run(world):
        model, oracle = lockstep.DistributedDataParallel(Branches()), Branches()
        whole, own = inputs(world, 0)

        def train(model, x, average):
            optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

            def closure():
                optimizer.zero_grad()
                loss = (model(x) - x.roll(1, 1)).square().mean()
                loss.backward()
                return average(loss.detach())

            for _ in range(2):
                optimizer.step(closure)

        def average(loss):
            if is_averaged:
                torch.distributed.all_reduce(loss)
                loss /= world.world_size
            return loss

        try:
            train(model, own, average)
        except ConfigurationError as error:
            return str(error)
        train(oracle, whole, lambda loss: loss)
        pairs = zip(model.parameters(), oracle.parameters(), strict=True)
        return max((one - other).abs().max().item() for one, other in pairs)

    found = ranks(2)(run)
    if is_averaged:
        assert max(found) < 1e-6
        return
    for rank, message in enumerate(found):
        assert re.fullmatch(
            rf"Rank {rank}: LBFGS\.step\(\) searches along a line by the loss that its closure returns, which is \S+ "
            r"on rank 0, and \S+ on another rank: the ranks would take different steps\.\n"
            r"Return the mean over the ranks from the closure, after backward: .*",
            message,
        )
