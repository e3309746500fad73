"""``compile=True``: the same training, in graphs that are made once, and gradients that leave during backward."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.bucket_events import Event
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.models import soak
from tests.reproducing import Alone
from tests.reproducing import train as reproduce
from tests.training import make_task, relative_error, samples


class Deep(nn.Sequential):
    """Layers of more than a MiB, in a class of torch's own, which ``module.compile()`` leaves uncompiled."""

    def __init__(self):
        super().__init__(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 400), nn.Linear(400, 400), nn.Linear(400, 4))
        self.double()


def sliced_loss(model, batch):
    """Call the model on what is not the batch itself, as a language model's loss does."""
    inputs, targets, _ = batch
    return (model(inputs[:, :]) - targets).square().mean()


def deep_task(**changes):
    # 50 samples in batches of 24: the third has 2.
    fields = {"model": Deep, "loss": sliced_loss, "optimizer": lambda params: torch.optim.SGD(params, lr=0.01)}
    return make_task(**{**fields, **changes})


@contextlib.contextmanager
def counting():
    """Have a backend that counts what it compiles, and nothing that was compiled before."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds to import

    from lockstep.parallel import compile

    torch.compiler.reset()
    compile._compiled_for.cache_clear()
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.set_default_backend(counter)
    try:
        yield counter
    finally:
        torch.compiler.set_default_backend(None)
        compile._compiled_for.cache_clear()


class Launches:
    """Notes how many gradients were missing when each bucket was launched."""

    def __init__(self, model):
        self.model, self.missing = model, []

    def on_event(self, kind, bucket):
        if kind is Event.READY:
            self.missing.append(sum(parameter.grad is None for parameter in self.model.parameters()))


def train(world, strategy, num_steps=6, **settings):
    """Return the losses, the weights, and what was missing in the last step when each bucket was launched."""
    loop = Trainer(deep_task(), Settings(**settings), world, strategy=strategy, devices=[torch.device("cpu")])
    launches = Launches(loop.model)
    if loop.strategy.ours is not None:
        loop.strategy.ours.reducer.observers.append(launches)
    losses = []
    for _ in range(num_steps):
        launches.missing.clear()
        losses.append(loop.step().loss)
    loop.close()
    names = list(loop.model.state_dict())
    weights = torch.cat([value.flatten() for value in loop.model.state_dict().values()])
    return torch.stack(losses), weights, launches.missing, names


def train_both(world, strategy, settings):
    losses, weights, _, names = train(world, strategy, **settings)
    num_graphs = []
    with counting() as counter:
        for _ in range(2):  # the second as a resume in the same process: another model, with the same graphs
            compiled = train(world, strategy, compile=True, **settings)
            assert relative_error(compiled[0], losses) < 1e-12
            assert relative_error(compiled[1], weights) < 1e-12
            assert compiled[3] == names
            num_graphs.append(counter.frame_count)
    return num_graphs, compiled[2]


def test_one_device_compiles_once():
    """Also with the smaller last batch of each epoch, and for the model of a second run."""
    assert train_both(None, "single", {}) == ([1, 1], [])


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("ddp", {"bucket_cap_mb": 1.0}),
        *soak([("ddp", {"bucket_cap_mb": 1.0, "accumulate": 2, "shares": (1, 1)}), ("ddp-zero1", {})]),
        *soak([("local-sgd", {"sync_every": 2}), ("diloco", {"sync_every": 2}), ("torch-ddp", {}), ("fsdp", {})]),
    ],
)
def test_ranks_train_as_without(ranks, strategy, settings):
    """The third batch leaves each rank one sample, for which the compiler always compiles once more.

    Of DDP, buckets leave while the compiled backward runs, although the loss calls the model.
    """
    for (first, second), missing in ranks(2, warnings="ignore")(train_both, strategy, settings, timeout=110):
        assert first == second > 1
        if settings == {"bucket_cap_mb": 1.0}:
            assert first > 2
            assert missing[0] >= 2
            assert missing == sorted(missing, reverse=True)


def lose_a_rank(world):
    """Train as `train` does, but leave the groups in the middle, as after the loss of a rank."""
    settings = Settings(compile=True, bucket_cap_mb=1.0)
    with counting() as counter:
        loop = Trainer(deep_task(), settings, world, strategy="ddp", devices=[torch.device("cpu")])
        launches = Launches(loop.model)
        for step in range(6):
            if step == 4:
                num_graphs = counter.frame_count
                loop.keep()
                loop.restore()
                loop.reconnect(world)
                loop.strategy.ours.reducer.observers.append(launches)
            launches.missing.clear()
            loss = loop.step().loss
        loop.close()
        weights = torch.cat([value.flatten() for value in loop.model.state_dict().values()])
        same_graphs = num_graphs == counter.frame_count
    expected = train(world, "ddp", bucket_cap_mb=1.0)
    return same_graphs, launches.missing[0], float(loss - expected[0][-1]), relative_error(weights, expected[1])


def test_nothing_is_compiled_again_after_a_rank_was_lost(ranks):
    for same_graphs, num_missing, difference, error in ranks(2, warnings="ignore")(lose_a_rank, timeout=110):
        assert same_graphs
        assert num_missing >= 2
        assert abs(difference) < 1e-12
        assert error < 1e-12


def reproducing(world, task):
    with counting():
        return reproduce(world, task, "single" if world is Alone else "ddp", 1, reproducible=4, compile=True)


@pytest.mark.parametrize("task", ["language", *soak(["half precision"])])
def test_a_reproducible_run_has_the_same_bits_on_two_devices(ranks, task):
    expected = reproducing(Alone, task)
    assert ranks(2, warnings="ignore")(reproducing, task, timeout=110) == [expected, expected]


def test_reproducible_does_not_go_on_uncompiled():
    """Which shapes are compiled would depend on the order in which a rank meets them."""

    class Scale(nn.Linear):
        def forward(self, inputs):
            return inputs * self.weight

    def loss(model, batch):
        sizes.append(None)
        return model(batch[0][:, :1].expand(-1, len(sizes))).square().mean()

    sizes = []
    # Of all code together, it makes 256 graphs otherwise, and 64 of one model.
    few = torch._dynamo.config.patch(accumulated_recompile_limit=6)
    with counting(), few, pytest.raises(ConfigurationError) as caught:
        task = make_task(model=lambda: Scale(1, 1).double(), loss=loss)
        lockstep.fit(task, strategy="single", compile=True, reproducible=1, steps=80)
    assert len(sizes) < 20
    assert str(caught.value) == (
        "reproducible: the inputs of the model have more shapes than torch.compile makes graphs for, so others would "
        "have other bits.\nPad inputs to fewer shapes, or omit compile."
    )


def test_an_evaluation_compiles_once_more(tmp_path):
    """A resume in the same process does not, and copies of the model know nothing of the compiler."""
    averaged = []

    def loss(model, batch):
        averaged.append(copy.deepcopy(model) if not averaged else None)
        return sliced_loss(model, batch)

    task = deep_task(loss=loss, eval_dataset=lambda: samples(30))
    how = {"strategy": "single", "compile": True, "checkpoint": tmp_path, "view": "none"}
    with counting() as counter:
        first = lockstep.fit(task, steps=3, **how)
        num_graphs = counter.frame_count
        resumed = lockstep.fit(task, steps=6, **how)
        assert (num_graphs, counter.frame_count) == (2, 2)
    assert (first.num_steps, resumed.first_step, resumed.num_steps) == (3, 3, 6)
    expected = lockstep.fit(task, steps=6, strategy="single", view="none")
    assert relative_error(torch.tensor(resumed.losses), torch.tensor(expected.losses[3:])) < 1e-12
    assert averaged[0](torch.zeros(1, 6, dtype=torch.float64)).shape == (1, 4)
    assert counter.frame_count == 2


def test_replicas_in_threads_are_refused():
    with pytest.raises(ConfigurationError) as caught:
        lockstep.fit(deep_task(), strategy="dp", compile=True, steps=1)
    assert str(caught.value) == (
        "compile is for strategy single, ddp, ddp-zero1, fsdp, local-sgd, diloco, torch-ddp, but the strategy is dp.\n"
        "Omit compile."
    )
