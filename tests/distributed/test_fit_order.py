"""The same samples in the same steps with the same random numbers, on any ranks and workers, stopped and resumed."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.training import make_task, relative_error, samples


class Noisy(Dataset):
    """Samples with their number and with what Python, numpy and torch draw when they are loaded."""

    def __init__(self, size):
        self.samples = samples(size)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        inputs, targets, _ = self.samples[index]
        noise = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)
        inputs = inputs + torch.cat([noise, noise])
        return inputs, targets, torch.cat([torch.tensor([float(index)], dtype=torch.float64), noise])


class NoisySGD(torch.optim.SGD):
    """An optimizer that draws random numbers, from all three."""

    def step(self):
        """Update with noise on the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += 0.01 * torch.randn_like(parameter) * random.random() * np.random.rand()
        super().step()


def train(world, strategy, state, num_steps, settings, size):
    """Train from a state on; return what was seen in each step, in the order of its shares, and the state behind."""
    seen = []

    def loss(model, batch):
        inputs, targets, label = batch
        seen.append(label.clone())
        return (model(inputs) - targets).square().mean()

    task = make_task(
        dataset=lambda: Noisy(size), loss=loss, optimizer=lambda params: NoisySGD(params, lr=0.05, momentum=0.9)
    )
    loop = Trainer(task, Settings(**settings), world, strategy=strategy, devices=[torch.device("cpu")])
    if state is not None:
        loop.load_state_dict(state)
    steps = []
    for _ in range(num_steps):
        seen.clear()
        loop.step()
        steps.append(torch.cat(seen) if seen else torch.zeros(0, 4, dtype=torch.float64))
    loop.close()
    return steps, loop.state_dict()


class Curriculum(Dataset):
    """A data set with other samples in each epoch."""

    def __init__(self, sizes):
        self.sizes, self.epoch = sizes, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.sizes[self.epoch]

    def __getitem__(self, index):
        assert index < len(self)
        return torch.full((6,), float(index), dtype=torch.float64)


@pytest.mark.parametrize("sizes", [[8, 16], [16, 8]])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_changes_its_size_ends_the_run(sizes, workers):
    steps = []

    def loss(model, batch):
        steps.append(len(batch))
        return model(batch).square().mean()

    task = make_task(dataset=lambda: Curriculum(sizes), loss=loss, eval_dataset=None, metrics=None, global_batch_size=4)
    with pytest.raises(ConfigurationError) as error:
        lockstep.fit(task, epochs=2, workers=workers, quiet=True)
    assert str(error.value) == (
        f"Task.dataset has {sizes[1]} samples after set_epoch(1), but had {sizes[0]} when the run began, which "
        "determines its steps.\nGive it the same number in each epoch, or make it an IterableDataset."
    )
    assert steps == [4] * (sizes[0] // 4)


def weights(state):
    return torch.cat([value.flatten() for value in state["model"].values()])


@pytest.mark.parametrize(
    ("case", "size", "accumulate"),
    [(1, 61, 2), pytest.param(0, 50, 1, marks=pytest.mark.soak), pytest.param(2, 70, 1, marks=pytest.mark.soak)],
)
def test_a_run_that_was_stopped_at_random_goes_on_with_the_next_sample(ranks, case, size, accumulate):
    """Uneven sizes: the last global batches of an epoch hold 2, 13 and 22 samples."""
    choose = random.Random(case)
    num_steps = 3 * 3 + 2
    whole, expected = train(None, "single", None, num_steps, {}, size)
    seen, state = [], None
    while len(seen) < num_steps:
        num_ranks, workers = choose.choice([1, 2, 3, 4]), choose.choice([0, 0, 1, 2])
        part = min(choose.randint(1, 4), num_steps - len(seen))
        settings = {"accumulate": accumulate, "workers": workers}
        results = ranks(num_ranks)(train, "ddp", state, part, settings, size)
        for step in range(part):
            seen.append(torch.cat([steps[step] for steps, _ in results]))
        state = results[0][1]
        assert all(torch.equal(weights(state), weights(other)) for _, other in results)
    for step, (found, rows) in enumerate(zip(seen, whole, strict=True)):
        assert torch.equal(found, rows), f"step {step}: other samples, or other random numbers"
    for epoch in range(3):
        together = torch.cat(seen[3 * epoch : 3 * epoch + 3])[:, 0]
        assert torch.equal(together.sort().values, torch.arange(size, dtype=torch.float64))
    drawn = torch.cat(seen)[:, 1:].flatten()
    assert len(drawn.unique()) == len(drawn), "no two samples or epochs share random numbers"
    assert relative_error(weights(state), weights(expected)) < 1e-12


def test_dropout_differs_between_shares_and_is_the_same_again(ranks):
    def run(world):
        drawn = []

        def loss(model, batch):
            drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
            return (model(batch[0]) - batch[1]).square().mean()

        loop = Trainer(make_task(loss=loss), Settings(), world, strategy="ddp", devices=[world.device])
        loop.step(), loop.step()
        loop.close()
        return drawn

    once, again = ranks(2)(run), ranks(2)(run)
    assert once == again
    assert len({number for rank in once for step in rank for number in step}) == 2 * 2 * 3
