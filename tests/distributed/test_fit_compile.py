"""``compile=True``: the same training, in graphs that are made once, and gradients that leave during backward."""

import contextlib

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.bucket_events import Event
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.models import soak
from tests.training import make_task, relative_error


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
    return make_task(**fields, **changes)


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
    weights = torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])
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
        *soak([("ddp", {"bucket_cap_mb": 1.0, "accumulate": 2, "shares": (1, 1)})]),
        ("ddp-zero1", {}),
        *soak([("local-sgd", {"sync_every": 2}), ("diloco", {"sync_every": 2}), ("torch-ddp", {})]),
    ],
)
def test_ranks_train_as_without(ranks, strategy, settings):
    """The third batch leaves each rank one sample, for which the compiler always compiles once more."""
    for (first, second), _ in ranks(2, warnings="ignore")(train_both, strategy, settings, timeout=110):
        assert first == second > 1


def bucket_times(world):
    with counting() as counter:
        return train(world, "ddp", compile=True, bucket_cap_mb=1.0)[2], counter.frame_count


def test_buckets_leave_while_the_compiled_backward_runs(ranks):
    """Although the loss calls the model."""
    for missing, num_graphs in ranks(2, warnings="ignore")(bucket_times, timeout=110):
        assert num_graphs > 2
        assert missing[0] >= 2
        assert missing == sorted(missing, reverse=True)


def test_replicas_in_threads_are_refused():
    with pytest.raises(ConfigurationError) as caught:
        lockstep.fit(deep_task(), strategy="dp", compile=True, steps=1)
    assert str(caught.value) == (
        "compile is for strategy single, ddp, ddp-zero1, local-sgd, diloco, torch-ddp, but the strategy is dp.\n"
        "Omit compile."
    )
