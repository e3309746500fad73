"""`prepare`: a script for one device computes the same run on any number of ranks."""

import contextlib
import copy
import io
import random
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

import lockstep
from lockstep.errors import ConfigurationError


class Noisy(Dataset):
    """Adds noise to each sample, from all generators of the CPU."""

    def __init__(self, inputs):
        self.inputs = inputs

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        x = self.inputs[index] + torch.randn(6, dtype=torch.float64) + random.random() + np.random.rand()
        return x, x.sum(dim=0, keepdim=True)


class Seldom(Noisy):
    """Adds noise to few samples, each from one generator; so the first batches may draw nothing."""

    def __getitem__(self, index):
        noise = {5: random.random, 11: np.random.rand, 13: lambda: torch.rand(()).item()}.get(index, float)()
        x = self.inputs[index] + noise
        return x, x.sum(dim=0, keepdim=True)


class Stream(IterableDataset):
    """With several loader processes, each has its own part, as torch's documentation recommends."""

    def __init__(self, inputs):
        self.inputs = inputs

    def __iter__(self):
        info = get_worker_info()
        for x in self.inputs[info.id :: info.num_workers] if info else self.inputs:
            yield x, x.sum(dim=0, keepdim=True)


class Buckets:
    """A custom batch sampler, with batches of several sizes."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return 4

    def __iter__(self):
        order = torch.randperm(self.size).tolist()
        yield from (order[:5], order[5:6], order[6:13], order[13:15])


@dataclass
class Script:
    """A training script: without a world as it is for one device, else with `prepare`."""

    num_samples: int = 23
    batch_size: int = 5
    shuffle: bool = True
    epochs: int = 3
    accumulate: int = 1
    no_sync: bool = False
    data: Any = None
    loader: dict[str, Any] = field(default_factory=dict)
    tokens: bool = False
    sharded: bool = False

    def __call__(self, world=None):
        torch.manual_seed(11)
        random.seed(11)
        np.random.seed(11)
        inputs = torch.randn(self.num_samples, 6, dtype=torch.float64)
        dataset = self.data(inputs) if self.data else TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        make = torch.optim.SGD
        if self.sharded and world is not None:
            model = lockstep.prepare(model)
            make = partial(lockstep.ZeroRedundancyOptimizer, optimizer_class=make, shard_gradients=True)
        optimizer = make(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        settings = {"batch_size": self.batch_size, "shuffle": self.shuffle} | self.loader
        loader = DataLoader(dataset, **settings)
        if world is not None:
            model, optimizer, scheduler, loader = lockstep.prepare(model, optimizer, scheduler, loader)
        step = 0
        for _ in range(self.epochs):
            for x, y in loader:
                step += 1
                is_last = step % self.accumulate == 0
                with model.no_sync() if world and self.no_sync and not is_last else contextlib.nullcontext():
                    loss = F.mse_loss(model(x), y) / self.accumulate
                    if self.tokens and world:
                        lockstep.backward(loss, mean_over=len(x))
                    else:
                        loss.backward()
                if is_last:
                    if self.sharded and world:
                        optimizer.clip_grad_norm_(0.5)
                    elif self.sharded:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def weighted(size):
    return WeightedRandomSampler(torch.linspace(1, 2, size), size)


SCRIPTS = {
    "uneven": Script(),
    "last batch smaller than the ranks": Script(num_samples=21),
    "batches of one": Script(num_samples=4, batch_size=1),
    "drop_last": Script(loader={"drop_last": True}),
    "in order": Script(shuffle=False),
    "a generator of its own": Script(loader={"generator": torch.Generator().manual_seed(3)}),
    "weighted sampler": Script(shuffle=None, loader={"sampler": weighted(23)}),
    "custom batch sampler": Script(loader={"batch_sampler": Buckets(23), "batch_size": 1, "shuffle": None}),
    "two workers": Script(epochs=2, loader={"num_workers": 2}),
    "persistent workers": Script(epochs=2, loader={"num_workers": 2, "persistent_workers": True}),
    "accumulation": Script(num_samples=21, accumulate=2),
    "accumulation of four without no_sync": Script(num_samples=21, accumulate=4, epochs=4),
    "accumulation in no_sync": Script(num_samples=21, accumulate=2, no_sync=True, epochs=4),
    "accumulation of four in no_sync": Script(num_samples=21, accumulate=4, no_sync=True, epochs=4),
    "own weights": Script(num_samples=21, tokens=True),
    "sharded gradients, clipped": Script(num_samples=21, sharded=True),
    "sharded gradients, accumulation": Script(num_samples=21, sharded=True, accumulate=2, no_sync=True),
    "stream": Script(shuffle=None, data=Stream),
    "stream, drop_last": Script(shuffle=None, data=Stream, loader={"drop_last": True}),
    "stream, two workers": Script(epochs=2, shuffle=None, data=Stream, loader={"num_workers": 2}),
    "subset": Script(data=lambda inputs: random_split(TensorDataset(inputs, inputs[:, :1]), [19, 4])[0]),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_weights_are_those_of_the_script_without_it(ranks, name):
    script = SCRIPTS[name]
    expected = copy.deepcopy(script)()
    for num_ranks in (1, 3) if "num_workers" in script.loader else (1, 2, 3):  # each process takes long to start
        for weights in ranks(num_ranks)(script):
            assert (weights - expected).abs().max() < 1e-12, num_ranks


@pytest.mark.parametrize("dataset", [Noisy, Seldom])
def test_each_sample_has_its_random_numbers(ranks, dataset):
    def run(world, num_workers):
        return Script(epochs=2, data=dataset, loader={"num_workers": num_workers})(world)

    found = [weights for num_workers, num_ranks in ((0, 3), (2, 2)) for weights in ranks(num_ranks)(run, num_workers)]
    for weights in found:
        assert (weights - found[0]).abs().max() < 1e-12
    script = Script(epochs=2, data=dataset)  # a single rank draws what the script draws without it
    assert (ranks(1)(script)[0] - script()).abs().max() < 1e-12


def test_dropout_changes_no_order_and_differs_between_ranks(ranks):
    def run(world, drops=True):
        torch.manual_seed(3)
        dropout = nn.Dropout(0.5) if drops else nn.Identity()
        model = nn.Sequential(nn.Linear(1, 50), dropout, nn.Linear(50, 1))
        loader = DataLoader(TensorDataset(torch.arange(22.0)), 6, shuffle=True)
        if world:
            model, loader = lockstep.prepare(model, loader)
        seen = []
        for _ in range(3):
            for (x,) in loader:
                model(x[:, None]).sum().backward()
                seen.append(x.tolist())
        return seen, torch.rand(4).tolist()

    assert ranks(1)(run) == [run(None)]
    expected, _ = run(None, drops=False)
    for num_ranks in (2, 3):
        outcomes = ranks(num_ranks)(run)
        parts = zip(*(seen for seen, _ in outcomes), strict=True)
        assert [[each for part in step for each in part] for step in parts] == expected
        assert len({str(numbers) for _, numbers in outcomes}) == num_ranks


class Drawn(Sampler):
    """Draws from `random` and numpy."""

    def __len__(self):
        return 12

    def __iter__(self):
        for _ in range(12):
            yield (random.randrange(12) + int(np.random.randint(12))) % 12


class Draws(Dataset):
    def __init__(self, every):
        self.every = every

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index % self.every:
            return torch.tensor([float(index), 0.0, 0.0, 0.0])
        return torch.tensor([float(index), torch.rand(()), random.random(), np.random.rand()])


@pytest.mark.parametrize("every", [1, 7])
def test_samplers_and_samples_leave_the_generators_of_training(ranks, every):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    def run(world):
        torch.manual_seed(world.rank)
        random.seed(world.rank)
        np.random.seed(world.rank)
        loader = lockstep.prepare(DataLoader(Draws(every), batch_size=4, sampler=Drawn()))
        seen = []
        for _ in range(2):
            iterator = iter(loader)
            before = states()
            seen.append([each.tolist() for each in iterator])
            assert states() == before
        assert seen[0] != seen[1]
        return seen, before

    def indices(seen):
        return [[int(row[0]) for row in batch] for each in seen for batch in each]

    random.seed(0)
    np.random.seed(0)
    expected = [list(Drawn()) for _ in range(2)]
    for num_ranks in (2, 3):
        outcomes = ranks(num_ranks)(run)
        parts = zip(*(indices(seen) for seen, _ in outcomes), strict=True)
        assert [each for step in parts for part in step for each in part] == expected[0] + expected[1]
        # Afterwards `random` and numpy are equal on all ranks, torch's generator is not.
        assert len({str(before[1:]) for _, before in outcomes}) == 1
        assert len({str(before[0]) for _, before in outcomes}) == num_ranks


class Generative:
    """Two models, two optimizers, three backwards a batch; the discriminator's gradients of two backwards add up."""

    def __call__(self, world=None):
        torch.manual_seed(5)
        make, judge = nn.Linear(3, 4).double(), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).double()
        makes, judges = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (make, judge))
        dataset = TensorDataset(torch.randn(13, 4).double(), torch.randn(13, 3).double())
        loader = DataLoader(dataset, batch_size=5, shuffle=True)
        if world:
            loader, judge, judges, make, makes = lockstep.prepare(loader, judge, judges, make, makes)
        for _ in range(3):
            for real, noise in loader:
                judges.zero_grad()
                F.softplus(-judge(real)).mean().backward()
                F.softplus(judge(make(noise).detach())).mean().backward()
                penalised = real.clone().requires_grad_()
                (slope,) = torch.autograd.grad(judge(penalised).sum(), penalised, create_graph=True)
                (slope.norm(dim=1) - 1).square().mean().backward()
                judges.step()
                makes.zero_grad()
                F.softplus(-judge(make(noise))).mean().backward()
                makes.step()
        return torch.cat([each.detach().flatten() for model in (make, judge) for each in model.parameters()])


def test_several_models_and_backwards(ranks):
    expected = Generative()()
    for num_ranks in (2, 3):
        for weights in ranks(num_ranks)(Generative()):
            assert (weights - expected).abs().max() < 1e-12


def test_batch_statistics_of_all_ranks(ranks):
    def run(world=None):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        inputs = torch.randn(19, 3).double()
        loader = DataLoader(TensorDataset(inputs), batch_size=5, shuffle=True)
        if world:
            norm, seen = model[1], []
            norm.register_forward_hook(lambda layer, inputs, output: seen.append(len(output)))
            model, loader = lockstep.prepare(model, loader)
            assert model.module[1] is norm
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        return torch.cat([each.detach().flatten() for each in (*model.parameters(), *model.buffers())])

    expected = run()
    for num_ranks in (2, 3):
        for weights in ranks(num_ranks)(run):
            assert (weights - expected).abs().max() < 1e-12


@pytest.mark.parametrize("sync_batchnorm", [True, False])
def test_one_line_says_over_what_batch_norms_normalise(ranks, sync_batchnorm):
    def run(world):
        class Own(nn.BatchNorm1d):
            """Its forward may be anything."""

        model, printed = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), Own(4)), io.StringIO()
        with contextlib.redirect_stderr(printed):
            model = lockstep.prepare(model, sync_batchnorm=sync_batchnorm)
        return [isinstance(layer, lockstep.SyncBatchNorm) for layer in model.module], printed.getvalue()

    line = "lockstep: batch norm: 3 layers, each over the samples of its device\n"
    if sync_batchnorm:
        line = "lockstep: batch norm: 2 layers over all ranks, as on one device (sync_batchnorm=False: each alone)\n"
    layers = [False, sync_batchnorm, sync_batchnorm, False]
    assert ranks(2)(run) == [(layers, line), (layers, "")]


@pytest.mark.parametrize("gradients", [True, False])
def test_an_evaluation_has_each_sample_once(ranks, gradients):
    def run(world):
        model = nn.Linear(1, 1)
        model, train, held = lockstep.prepare(
            model, DataLoader(TensorDataset(torch.ones(4, 1)), 4), DataLoader(TensorDataset(torch.arange(7.0)), 3)
        )
        for (x,) in train:
            model(x).sum().backward()
        model.train(not gradients)
        with contextlib.nullcontext() if gradients else torch.no_grad():
            return [each for (x,) in held for each in x.tolist()]

    for num_ranks in (1, 2, 3):
        found = ranks(num_ranks)(run)
        assert sorted(each for part in found for each in part) == list(range(7))


def test_a_look_on_one_rank_changes_nothing(ranks):
    def run(world, looks):
        torch.manual_seed(1)
        loader = lockstep.prepare(DataLoader(TensorDataset(torch.arange(20.0)), 4, shuffle=True))
        seen = []
        for _ in range(2):
            if looks and world.rank == 0:
                next(iter(loader))
                for _ in loader:
                    break
            seen += [x.tolist() for (x,) in loader]
        assert loader.epoch == 2
        return seen

    assert ranks(2)(run, True) == ranks(2)(run, False)


def test_the_rest_of_an_epoch_on_another_number_of_ranks(ranks):
    def run(world, state, stops, workers, stream):
        torch.manual_seed(4 if state is None else 5)
        inputs = torch.arange(48.0)
        dataset = Stream(inputs[:, None]) if stream else TensorDataset(inputs)
        loader = DataLoader(dataset, 5, shuffle=None if stream else True, num_workers=workers)
        other = DataLoader(TensorDataset(inputs), 30, shuffle=True)
        loader, other = lockstep.prepare(loader, other)
        if state is not None:
            loader.load_state_dict(state[0])
            other.load_state_dict(state[1])
        seen = []
        while loader.epoch < 3:
            for x, *_ in loader:
                seen.append(x.flatten().tolist())
                if stops and loader.epoch == 1 and len(seen) == 14:
                    return seen, [loader.state_dict(), other.state_dict()]
            seen += [x.tolist() for (x,) in other]
        return seen, None

    def joined(outcomes):
        parts = zip(*(seen for seen, _ in outcomes), strict=True)
        return [[each for part in step for each in part] for step in parts]

    for stream in (False, True):
        whole = joined(ranks(2)(run, None, False, 0, stream))
        for before, after, workers in [(2, 3, 0), (3, 1, 2)]:
            started = ranks(before)(run, None, True, 0, stream)
            state = started[0][1]
            assert (state[0]["epoch"], state[0]["batch"]) == (1, 2)
            resumed = ranks(after)(run, state, False, 0 if stream else workers, stream)
            assert joined(started) + joined(resumed) == whole


def test_a_resumed_epoch_loads_no_sample_again(ranks):
    def run(world):
        read = []

        class Counting(Dataset):
            def __len__(self):
                return 12

            def __getitem__(self, index):
                read.append(index)
                return index

        loader = lockstep.prepare(DataLoader(Counting(), batch_size=4))
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
        loader.load_state_dict(state)
        read.clear()
        return [batch.tolist() for batch in loader], read

    assert ranks(1)(run) == [([[8, 9, 10, 11]], [8, 9, 10, 11])]


def raised(ranks, num_ranks, run):
    outcomes = ranks(num_ranks).each(run)
    assert all(type(outcome.error) is ConfigurationError for outcome in outcomes)
    (text,) = {re.sub("\nRaised by.*", "", str(outcome.error)) for outcome in outcomes}
    return text


def test_data_that_differ_between_ranks(ranks):
    def lengths(world):
        lockstep.prepare(DataLoader(TensorDataset(torch.arange(4 + world.rank)), batch_size=2))

    assert raised(ranks, 2, lengths) == (
        "prepare() was called with (DataLoader of 3 batches of 2, 5 samples) on rank 1, "
        "but with (DataLoader of 2 batches of 2, 4 samples) on rank 0.\n"
        "Create the same objects on every rank: prepare() divides the data."
    )

    def samples(world):
        torch.manual_seed(world.rank)
        lockstep.prepare(DataLoader(TensorDataset(torch.rand(9)), batch_size=2))

    text = raised(ranks, 3, samples)
    assert text.startswith("The data set of a DataLoader gave different samples on ranks 1, 2 than on rank 0, in step")


def test_an_error_of_one_rank_is_raised_on_all(ranks):
    def run(world):
        lockstep.prepare(nn.Linear(1, 1) if world.rank else 3)

    assert raised(ranks, 2, run) == (
        "prepare() cannot prepare a int.\n"
        "It accepts models (torch.nn.Module), optimizers, learning-rate schedulers and DataLoaders."
    )


def test_an_optimizer_of_what_was_not_prepared(ranks):
    def run(world):
        model, other = nn.Linear(2, 2), nn.Linear(3, 3)
        lockstep.prepare(model, torch.optim.SGD([{"params": model.parameters()}, {"params": other.parameters()}]))

    assert raised(ranks, 2, run) == (
        "SGD updates a parameter of shape [3, 3], in group 1, that is in no prepared model: its gradients would not be "
        "averaged over the ranks.\nPass each trained model to prepare(), together with its optimizer or before."
    )


def train_with_evaluation_within(world=None):
    """Evaluate after each forward, in a pass of its own and without no_grad."""
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(10, 6, dtype=torch.float64))
    model = nn.Linear(6, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, evaluated = DataLoader(data, 5), DataLoader(data, 4)
    if world is not None:
        model, optimizer, loader, evaluated = lockstep.prepare(model, optimizer, loader, evaluated)
    for (x,) in loader:
        for (_,) in evaluated:
            pass
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return next(model.parameters()).detach().clone()


def test_an_evaluation_within_a_pass_leaves_the_share_of_its_batch(ranks):
    expected = train_with_evaluation_within()
    for found in ranks(2)(lambda world: train_with_evaluation_within(world)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
