"""After the first step most hooks of parameters run no Python code: gradients are noticed all the same."""

import gc

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import LockstepError
from lockstep.parallel.ddp.bucket_events import Event
from lockstep.parallel.ddp.reducer import Reducer
from tests.models import assert_gradients_equal


class Layers(nn.Module):
    """Layers of two parameters, in the order that is given in the call; each is a bucket."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name in "abcd":
            self.add_module(name, nn.Linear(4, 4, dtype=torch.float64))

    def forward(self, x, names="abcd"):
        for name in names:
            x = getattr(self, name)(x).tanh()
        return x


class Hidden:
    """An output in which no tensor can be found."""

    held = None

    def __init__(self, tensor):
        Hidden.held = tensor

    @property
    def tensor(self):
        return Hidden.held


class Hides(Layers):
    hides = False

    def forward(self, x, names="abcd"):
        outputs = super().forward(x, names)
        return Hidden(outputs) if self.hides else outputs


def wrap(module):
    return lockstep.DistributedDataParallel(module, bucket_cap_mb=0.0001)


def inputs(step, rank):
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def add_mean(oracle, world, step, names="abcd", factor=1.0):
    losses = [Layers.forward(oracle, inputs(step, rank), names).square().mean() for rank in range(world.world_size)]
    (factor * sum(losses) / len(losses)).backward()


def num_watched(model):
    functions = [list(p._post_accumulate_grad_hooks.values()) for p in model.module.parameters()]
    return sum(getattr(each[0], "func", None) is Reducer._on_gradient for each in functions)


def test_one_parameter_of_each_bucket_is_watched_after_the_first_step(ranks):
    assert ranks(2)(watched) == [[8, 4, 4]] * 2


def watched(world):
    model, found = wrap(Layers()), []
    for step in range(3):
        model.zero_grad()
        loss = model(inputs(step, world.rank)).square().mean()
        found.append(num_watched(model))
        loss.backward()
    return found


def test_another_order_of_arrivals_is_noticed_and_launches_during_backward_again(ranks):
    ranks(2)(other_order)


def other_order(world):
    """Within a bucket the order changes, too: the weight comes before the bias or after it."""
    model, oracle = lockstep.DistributedDataParallel(Pairs(), bucket_cap_mb=0.0002), Pairs()
    events = []
    model.reducer.observers.append(Recorder(events))
    for step in range(6):
        model.zero_grad()
        oracle.zero_grad()
        events.clear()
        swapped = step >= 2
        model(inputs(step, world.rank), swapped=swapped).square().mean().backward()
        batches = [inputs(step, rank) for rank in range(world.world_size)]
        (sum(oracle(batch, swapped=swapped).square().mean() for batch in batches) / len(batches)).backward()
        assert_gradients_equal(model.module, oracle)
        in_backward = sum(kind is Event.LAUNCHED for kind in events[: events.index(Event.BACKWARD_END)])
        # All but the last. In the first step only the order is observed.
        assert in_backward == (0 if step == 0 else 3), (step, in_backward)
        # A bucket that was complete later than expected was launched with the next one, and is watched from then on.
        assert num_watched(model) == (4 if step < 2 else 7)


class Pairs(nn.Module):
    """Four pairs of parameters; the first of each pair is used before the second, or after it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(4, 4, dtype=torch.float64)) for _ in range(8))

    def forward(self, x, *, swapped):
        for first, second in zip(self.weights[::2], self.weights[1::2], strict=True):
            for weight in (second, first) if swapped else (first, second):
                x = (x @ weight).tanh()
        return x


class Recorder:
    def __init__(self, events):
        self.events = events

    def on_event(self, kind, bucket):
        self.events.append(kind)


def test_gradients_that_only_an_earlier_micro_batch_has_are_averaged(ranks):
    ranks(2)(earlier_micro_batch)


def earlier_micro_batch(world):
    model, oracle = wrap(Layers()), Layers()
    for step, (first, second) in enumerate([("abcd", "abcd"), ("abcd", "c"), ("bd", "ac"), ("ab", "c")]):
        model.zero_grad()
        oracle.zero_grad()
        with model.no_sync():
            model(inputs(2 * step, world.rank), first).square().mean().backward()
        model(inputs(2 * step + 1, world.rank), second).square().mean().backward()
        add_mean(oracle, world, 2 * step, first)
        add_mean(oracle, world, 2 * step + 1, second)
        assert_gradients_equal(model.module, oracle)


def test_a_hidden_output_in_a_later_step_is_synchronised_by_its_gradients(ranks):
    ranks(2)(hides_later)


def hides_later(world):
    model, oracle = wrap(Hides()), Layers()
    for step in range(5):
        model.module.hides = step > 1
        model.zero_grad()
        oracle.zero_grad()
        outputs = model(inputs(step, world.rank))
        (outputs.tensor if step > 1 else outputs).square().mean().backward()
        add_mean(oracle, world, step)
        assert_gradients_equal(model.module, oracle)
    assert num_watched(model) == 8  # gradients may have to open each step now


def test_a_backward_that_nothing_notices_is_an_error_of_the_next_forward(ranks):
    ranks(2)(unnoticed)


def unnoticed(world):
    model = wrap(Hides())
    for step in range(2):
        model.zero_grad()
        model(inputs(step, world.rank)).square().mean().backward()
    model.module.hides = True
    watched = {
        p for p in model.module.parameters() if hasattr(next(iter(p._post_accumulate_grad_hooks.values())), "func")
    }
    for parameter in watched:
        parameter.requires_grad_(False)
    model.zero_grad()
    model(inputs(2, world.rank)).tensor.square().mean().backward()
    with pytest.raises(LockstepError) as caught:
        model(inputs(3, world.rank))
    assert str(caught.value) == (
        f"Rank {world.rank}: the last backward reached no output of the model that can be found, so its gradients were "
        "not averaged.\nReturn all outputs as tensors, or in lists, dicts or dataclasses."
    )


def test_a_wrapper_that_is_gone_leaves_no_hooks(ranks):
    assert ranks(2)(leave_no_hooks) == [0, 0]


def leave_no_hooks(world):
    module = Layers()
    model = wrap(module)
    for step in range(2):
        model(inputs(step, world.rank)).square().mean().backward()
    del model
    gc.collect()
    return sum(len(p._post_accumulate_grad_hooks) for p in module.parameters())
