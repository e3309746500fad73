"""`prepare`: the script's own loader, data set and sampler stay what they are, and all ranks must read the same."""

import math
import random
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

import lockstep
from tests.distributed.scripts import OTHER_DATA_ADVICE, on_ranks, other_data, plain, weights, wrong
from tests.models import soak

# Three do not divide the batches: what happens on two is among it.
NUM_RANKS = [3, *soak([2])]
NUMBERS = TensorDataset(torch.arange(24).double()[:, None])


def rank_and_size(prepare):
    return (0, 1) if prepare is plain else (dist.get_rank(), dist.get_world_size())


def training(make_loader, num_epochs=2, after=lambda loss, loader: None):
    """Return a script that trains on a loader; ``make_loader(rank, world_size)`` is called on each rank."""

    def run(prepare):
        torch.manual_seed(0)
        net = nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        net, optimizer, loader = prepare(net, optimizer, make_loader(*rank_and_size(prepare)))
        for _ in range(num_epochs):
            for batch in loader:
                (x,) = batch if isinstance(batch, list | tuple) else [batch]
                optimizer.zero_grad()
                losses = (net(x) - x).square()
                losses.mean().backward()
                optimizer.step()
                after(losses.detach(), loader)
        return weights(net)

    return run


class Stream(IterableDataset):
    def __init__(self, kind, rank, world_size):
        self.kind, self.rank, self.world_size = kind, rank, world_size

    def __iter__(self):
        order = range(self.rank, 24, self.world_size) if self.kind == "by rank" else range(24)
        if self.kind == "private":
            order = np.random.default_rng().permutation(24).tolist()
        for number in order:
            yield torch.tensor([float(number)], dtype=torch.float64)


class Private(Sampler):
    """Shuffles with a generator of its own."""

    def __init__(self, seed):
        self.generator = random.Random(seed)

    def __len__(self):
        return 24

    def __iter__(self):
        order = list(range(24))
        self.generator.shuffle(order)
        return iter(order)


def weigh_by_losses(losses, loader):
    loader.sampler.weights[int(losses.sum() * 1e4) % 24] += 5  # losses of this rank alone


OF_STREAM = r"batch 0 of epoch 0 of DataLoader of Stream \(argument 3 of prepare\)"
OF_TENSORS = r"batch \d of epoch \d of DataLoader of TensorDataset \(argument 3 of prepare\)"
REFUSED = {
    "stream by rank": (OF_STREAM, training(lambda *place: DataLoader(Stream("by rank", *place), 4))),
    "stream by rank, worker": (
        OF_STREAM,
        training(lambda *place: DataLoader(Stream("by rank", *place), 4, num_workers=1)),
    ),
    "stream, private": (OF_STREAM, training(lambda *place: DataLoader(Stream("private", *place), 4))),
    "sampler, unseeded": (OF_TENSORS, training(lambda *_: DataLoader(NUMBERS, 6, sampler=Private(None)))),
    "sampler by rank": (OF_TENSORS, training(lambda rank, _: DataLoader(NUMBERS, 6, sampler=Private(rank)))),
    "weights from losses of a rank": (
        OF_TENSORS,
        training(
            lambda *_: DataLoader(NUMBERS, 6, sampler=WeightedRandomSampler(torch.ones(24), 24)),
            num_epochs=6,
            after=weigh_by_losses,
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_ranks_that_read_other_data(ranks, num_ranks, name):
    batch, script = REFUSED[name]
    of_ranks = "rank 1" if num_ranks == 2 else "(rank 1|rank 2|ranks 1, 2)"
    pattern = other_data(of_ranks) + f"; here it was {batch}\\." + re.escape(OTHER_DATA_ADVICE)
    for text in on_ranks(ranks, num_ranks, {name: script})[name]:
        assert isinstance(text, str) and re.fullmatch(pattern, text), text


class Doubling(DataLoader):
    """Changes each batch in an ``__iter__`` of its own."""

    def __iter__(self):
        for (x,) in super().__iter__():
            yield (x * 2,)


class Repeat:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class MultiEpochs(DataLoader):
    """Keeps its iterator over epochs, as timm's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class ReadsAtOnceOnly(Dataset):
    def __len__(self):
        return 24

    def __getitems__(self, indices):
        return [torch.tensor([float(index)], dtype=torch.float64) for index in indices]


class ReadsAtOnce(ReadsAtOnceOnly):
    def __getitem__(self, index):
        raise RuntimeError("one query for each sample is refused")


def first(number):
    return TensorDataset(NUMBERS.tensors[0][:number])


SOUND = {
    **{
        f"{kind.__name__} of {size}": training(lambda *_, kind=kind, size=size: kind(first(size), 4))
        for kind in (Doubling, MultiEpochs)
        for size in (1, 2, 3, 9)
    },
    "stream": training(lambda *place: DataLoader(Stream("whole", *place), 5)),
    "sampler with a seed": training(lambda *_: DataLoader(NUMBERS, 5, sampler=Private(7))),
    "changes batches": training(lambda *_: Doubling(NUMBERS, 5, shuffle=True)),
    "keeps its iterator": training(lambda *_: MultiEpochs(NUMBERS, 5, shuffle=True)),
    "keeps its iterator, multiples": training(lambda *_: MultiEpochs(NUMBERS, 6, shuffle=True)),
    "reads batches only": training(lambda *_: DataLoader(ReadsAtOnceOnly(), 5, shuffle=True)),
    "reads batches": training(lambda *_: DataLoader(ReadsAtOnce(), 5, shuffle=True)),
}


@pytest.mark.parametrize("num_ranks", [1, *NUM_RANKS])
def test_loaders_that_train_as_on_one_device(ranks, num_ranks):
    assert wrong(ranks, num_ranks, SOUND) == {}


def read(make_loader, read_all):
    """Return a script that returns what the ranks read together, each epoch sorted."""

    def run(prepare):
        torch.manual_seed(0)
        loader = prepare(make_loader())
        epochs = read_all(loader)
        if prepare is plain:
            return [sorted(each) for each in epochs]
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, epochs)
        return [sorted(number for part in parts for number in part) for parts in zip(*everyones, strict=True)]

    return run


def numbers(batches):
    return [number for batch in batches for x in [batch] for number in torch.as_tensor(flat(x)).tolist()]


def flat(batch):
    return (batch[0] if isinstance(batch, list | tuple) else batch).flatten()


class Range(IterableDataset):
    """As in torch's documentation: `worker_init_fn` gives each process its part."""

    start, end = 0, 24

    def __iter__(self):
        return iter(torch.arange(self.start, self.end).double()[:, None])


def divide(worker_id):
    info = get_worker_info()
    share = math.ceil(24 / info.num_workers)
    info.dataset.start = worker_id * share
    info.dataset.end = min(info.dataset.start + share, 24)


class Scaled(Dataset):
    scale = 1.0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([self.scale * index], dtype=torch.float64)


def set_scale(worker_id):
    get_worker_info().dataset.scale = 2.0


def two_epochs(loader):
    return [numbers(loader) for _ in range(2)]


def steps_of_next_iter(loader):
    """A batch a step, with a training step, so that no pass is only looked at."""
    net = lockstep.prepare(nn.Linear(1, 1).double()) if dist.is_initialized() else nn.Linear(1, 1).double()
    found = []
    for _ in range(6):
        (x,) = next(iter(loader))
        net(x).mean().backward()
        found.append(x.flatten().tolist())
    return found


def changed_later(loader):
    found = []
    for collate in (None, add_1000, default_collate):
        if collate is not None:
            loader.collate_fn = collate
        found.append(numbers(loader))
    return found


def add_1000(samples):
    return [default_collate(samples)[0] + 1000]


def add_500(samples):
    return [default_collate(samples)[0] + 500]


READS = {
    "worker_init_fn divides a stream": read(
        lambda: DataLoader(Range(), 4, num_workers=2, worker_init_fn=divide), two_epochs
    ),
    "worker_init_fn sets an attribute": read(
        lambda: DataLoader(Scaled(), 4, num_workers=2, worker_init_fn=set_scale), two_epochs
    ),
    "next(iter(loader))": read(lambda: DataLoader(NUMBERS, 4, shuffle=True), steps_of_next_iter),
    "collate_fn that is changed": read(lambda: DataLoader(NUMBERS, 4, collate_fn=add_500), changed_later),
    "collate_fn that is changed, workers": read(
        lambda: DataLoader(NUMBERS, 4, collate_fn=add_500, num_workers=2), changed_later
    ),
}


@pytest.mark.parametrize("num_ranks", [1, *NUM_RANKS])
def test_what_the_ranks_read_together(ranks, num_ranks):
    for name, found in on_ranks(ranks, num_ranks, READS).items():
        assert found == [READS[name](plain)] * num_ranks, name


def evaluating(size, batch_size, make_output, *, shuffle=False):
    """Return a script that returns all outputs, gathered."""

    def run(prepare):
        torch.manual_seed(0)
        data = TensorDataset(torch.arange(size).double()[:, None])
        net, loader = prepare(nn.Linear(1, 1).double(), DataLoader(data, batch_size, shuffle=shuffle))
        net.eval()
        with torch.no_grad():
            outputs = [make_output(x, net(x)) for (x,) in loader]
        if prepare is plain:
            return joined(outputs)
        return as_plain(loader.gather(outputs))

    return run


def as_plain(value):
    if isinstance(value, dict):
        return {name: as_plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(as_plain, value))
    return value.tolist() if isinstance(value, torch.Tensor) else value


def joined(outputs):
    first = outputs[0]
    if isinstance(first, dict):
        return {name: joined([each[name] for each in outputs]) for name in first}
    if isinstance(first, tuple):
        return tuple(joined(list(column)) for column in zip(*outputs, strict=True))
    return [item for each in outputs for item in (each if isinstance(each, list) else each.tolist())]


OUTPUTS = {
    "tensor": lambda x, _: x,
    "array": lambda x, _: x.numpy(),
    "texts": lambda x, _: [f"number {number:.0f}" for number in x.flatten().tolist()],
    "pair": lambda x, y: (x, y[:, 0]),
    "dict": lambda x, y: {"of": x[:, 0].long(), "texts": [str(n) for n in x.flatten().tolist()], "pair": (y, y > 0)},
}


@pytest.mark.parametrize("num_ranks", [1, *NUM_RANKS])
def test_outputs_are_gathered_in_the_order_of_one_process(ranks, num_ranks):
    scripts = {
        f"{name} {size} {batch_size} {shuffle}": evaluating(size, batch_size, make, shuffle=shuffle)
        for name, make in OUTPUTS.items()
        for size, batch_size in [(11, 5), (1, 4), (2, 1)]
        for shuffle in ([False, True] if name == "pair" else [False])
    }
    for name, found in on_ranks(ranks, num_ranks, scripts).items():
        assert equal(found, [scripts[name](plain)] * num_ranks), (name, found)


def equal(found, expected):
    """Whether the values are the same, apart from rounding."""
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(equal(found[name], expected[name]) for name in found)
    if isinstance(found, list | tuple):
        same = isinstance(expected, type(found)) and len(found) == len(expected)
        return same and all(map(equal, found, expected))
    return abs(found - expected) < 1e-12 if isinstance(found, float) else found == expected


def test_outputs_that_do_not_fit_the_batches(ranks):
    def run(prepare, change):
        loader = prepare(DataLoader(NUMBERS, 5))
        loader.gather(change([x for (x,) in loader]))

    changes = {
        "too few": lambda outputs: outputs[:-1],
        "means": lambda outputs: [each.mean() for each in outputs],
        "too long": lambda outputs: [torch.cat([each, each[:1]]) for each in outputs],
        "on rank 1": lambda outputs: outputs[: 5 - dist.get_rank()],
    }
    scripts = {name: lambda prepare, change=change: run(prepare, change) for name, change in changes.items()}
    name = "DataLoader of TensorDataset (argument 1 of prepare)"
    advice = "\nGive a list with one output for each batch, which has an item for each sample."
    assert on_ranks(ranks, 2, scripts) == {
        "too few": [f"Rank 0: gather() got 4 outputs, but {name} has returned 5 batches.{advice}"] * 2,
        "means": [f"Rank 0: an output has 0 items, but batch 0 has 3 samples on this rank.{advice}"] * 2,
        "too long": [f"Rank 0: an output has 4 items, but batch 0 has 3 samples on this rank.{advice}"] * 2,
        "on rank 1": [f"Rank 1: gather() got 4 outputs, but {name} has returned 5 batches.{advice}"] * 2,
    }
