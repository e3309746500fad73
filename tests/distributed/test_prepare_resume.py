"""`prepare`: where a loader is in its order of samples, saved in the middle of a pass and resumed, or refused."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

import lockstep
from lockstep.errors import ConfigurationError
from tests.distributed.scripts import on_ranks

NUMBERS = TensorDataset(torch.arange(23))


class Own(Sampler):
    """Shuffles with a generator that it holds, and that goes on over epochs."""

    def __init__(self, generator):
        self.generator = generator

    def __len__(self):
        return 23

    def __iter__(self):
        if isinstance(self.generator, torch.Generator):
            return iter(torch.randperm(23, generator=self.generator).tolist())
        order = list(range(23))
        self.generator.shuffle(order)
        return iter(order)


class DrawsEach(Own):
    """Draws each index when it is read."""

    def __iter__(self):
        for _ in range(23):
            yield int(self.generator.integers(23))


class Hidden(Own):
    """Holds its generator where nobody finds it."""

    def __init__(self, seed):
        self.held = {"generator": random.Random(seed)}

    def __iter__(self):
        order = list(range(23))
        self.held["generator"].shuffle(order)
        return iter(order)


class HiddenWithState(Hidden):
    def state_dict(self):
        version, words, gauss = self.held["generator"].getstate()
        return {"version": version, "words": list(words), "gauss": gauss}

    def load_state_dict(self, state):
        self.held["generator"].setstate((state["version"], tuple(state["words"]), state["gauss"]))


class ByEpoch(Own):
    """Counts its passes, and seeds each with the number."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        order = list(range(23))
        random.Random(self.epoch).shuffle(order)
        self.epoch += 1
        return iter(order)


class Sizes(Own):
    """A batch sampler, with batches of other sizes."""

    def __len__(self):
        return 6

    def __iter__(self):
        order = iter(super().__iter__())
        for size in itertools.cycle((5, 2)):
            if not (batch := list(itertools.islice(order, size))):
                return
            yield batch


def of_sampler(make_sampler):
    return lambda: DataLoader(NUMBERS, 5, sampler=make_sampler())


LOADERS = {
    "shuffle": lambda: DataLoader(NUMBERS, 5, shuffle=True),
    "torch's generator, held": lambda: DataLoader(NUMBERS, 5, shuffle=True, generator=torch.Generator().manual_seed(2)),
    "random.Random": of_sampler(lambda: Own(random.Random(2))),
    "np.random.Generator": of_sampler(lambda: Own(np.random.default_rng(2))),
    "np.random.RandomState": of_sampler(lambda: Own(np.random.RandomState(2))),
    "torch.Generator": of_sampler(lambda: Own(torch.Generator().manual_seed(2))),
    "draws each": of_sampler(lambda: DrawsEach(np.random.default_rng(2))),
    "batch sampler": lambda: DataLoader(NUMBERS, batch_sampler=Sizes(random.Random(2))),
    "within a batch sampler": lambda: DataLoader(
        NUMBERS, batch_sampler=BatchSampler(Own(np.random.default_rng(2)), 5, drop_last=False)
    ),
    "state_dict": of_sampler(lambda: HiddenWithState(2)),
}


def read(world, make_loader, state=None, stop=None, seed=3):
    """Return this rank's batches of three epochs, with their numbers, and the state after the batch ``stop``."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    loader, seen = lockstep.prepare(make_loader()), []
    if state is not None:
        loader.load_state_dict(state)
    while loader.epoch < 3:
        for (x,) in loader:
            seen.append([(loader.epoch, loader.batch), x.tolist()])
            if stop == (loader.epoch, loader.batch):
                return seen, loader.state_dict()
    return seen, None


def read_plain(make_loader):
    torch.manual_seed(3)
    loader = make_loader()
    return [[(epoch, number), x.tolist()] for epoch in range(3) for number, (x,) in enumerate(loader)]


def joined(everyones):
    """Return the global batches of all ranks; some have no part of a batch."""
    found = {}
    for place, samples in (each for seen in everyones for each in seen):
        found.setdefault(place, []).extend(samples)
    return [[place, found[place]] for place in sorted(found)]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1), (1, 2)])
def test_a_resumed_pass_goes_on_in_the_order_of_the_plain_script(ranks, before, after):
    def start(world):
        return {name: read(world, make, stop=(1, 2)) for name, make in LOADERS.items()}

    def resume(world, states):
        return {name: read(world, make, state=states[name], seed=99) for name, make in LOADERS.items()}

    started = ranks(before)(start)
    resumed = ranks(after)(resume, {name: state for name, (_, state) in started[0].items()})
    for name, make in LOADERS.items():
        first, second = (joined([found[name][0] for found in everyones]) for everyones in (started, resumed))
        assert first + second == read_plain(make), name


OF_TENSORS = "DataLoader of TensorDataset (argument 1 of prepare)"


@pytest.mark.parametrize("make", [lambda: Hidden(2), ByEpoch], ids=["hidden", "counts epochs"])
def test_a_sampler_that_cannot_be_replayed(ranks, make):
    def run(prepare):
        torch.manual_seed(3)
        loader = prepare(DataLoader(NUMBERS, 5, sampler=make()))
        list(loader)
        iterator = iter(loader)
        next(iterator), next(iterator)
        state = loader.state_dict()
        resumed = prepare(DataLoader(NUMBERS, 5, sampler=make()))
        resumed.load_state_dict(state)
        return [x.tolist() for (x,) in resumed]

    expected = (
        f"{OF_TENSORS} cannot go on at batch 2: its sampler gives other samples than before it was saved, so some "
        "would be left out and others would be read twice.\nLet it draw from torch's generator, random or "
        "numpy.random, or from a generator that is an attribute of the sampler; or give the sampler state_dict() and "
        "load_state_dict(); or save between epochs."
    )
    for num_ranks in (1, 2, 3):
        assert on_ranks(ranks, num_ranks, {"": run}) == {"": [expected] * num_ranks}


def test_a_loader_with_other_settings(ranks):
    def run(prepare, make_other):
        loader = prepare(DataLoader(NUMBERS, 8))
        iterator = iter(loader)
        next(iterator), next(iterator)
        state = loader.state_dict()
        prepare(make_other()).load_state_dict(state)

    others = {
        "batch size": (lambda: DataLoader(NUMBERS, 4), "4, not 8"),
        "number of samples": (lambda: DataLoader(TensorDataset(torch.arange(20)), 8), "20, not 23"),
        "sampler": (lambda: DataLoader(NUMBERS, 8, shuffle=True), "RandomSampler, not SequentialSampler"),
    }
    scripts = {name: lambda prepare, make=make: run(prepare, make) for name, (make, _) in others.items()}
    for num_ranks in (1, 2, 3):
        assert on_ranks(ranks, num_ranks, scripts) == {
            name: [
                f"{OF_TENSORS} has another {name} than the one that was saved: {what}.\nThe position in its order "
                "would be another sample. Load it into a loader with the same data and settings, on any number of "
                "ranks."
            ]
            * num_ranks
            for name, (_, what) in others.items()
        }


SEVERAL_LOOPS = (
    f"Several loops read {OF_TENSORS} now, each at another batch, so it has no position.\n"
    "Save outside of the inner loop, delete iterators that are not read any more, or give each loop a loader of its "
    "own."
)


def test_a_position_if_several_loops_read_the_loader(ranks):
    def run(prepare):
        loader = prepare(DataLoader(NUMBERS, 5))
        for _ in loader:
            for _ in loader:
                loader.state_dict()

    for num_ranks in (1, 2, 3):
        assert on_ranks(ranks, num_ranks, {"": run}) == {"": [SEVERAL_LOOPS] * num_ranks}


def evaluate(loader):
    with torch.no_grad():
        list(loader)


INNER = {
    "a whole pass": list,
    "an evaluation": evaluate,
    "a look": lambda loader: next(iter(loader)),
    "a part": lambda loader: list(zip(loader, range(2), strict=False)),
}


@pytest.mark.parametrize("name", INNER)
def test_a_position_after_an_inner_loop_is_that_of_the_outer_one_or_refused(ranks, name):
    def run(world):
        torch.manual_seed(3)
        loader = lockstep.prepare(DataLoader(NUMBERS, 5, shuffle=True))
        seen, state = [], None
        for number, (x,) in enumerate(loader):
            if number < 2:
                continue
            if number == 2:
                INNER[name](loader)
                try:
                    state = loader.state_dict()
                except ConfigurationError as error:
                    return str(error)
            else:
                seen.append(x.tolist())
        loader.load_state_dict(state)
        return seen == [x.tolist() for (x,) in loader]

    for num_ranks in (1, 2):
        assert set(ranks(num_ranks)(run)) <= {True, SEVERAL_LOOPS}


def test_an_iterator_that_is_held_hides_the_position_until_it_is_deleted(ranks):
    """As in torch's tutorials: ``iterator = iter(loader); images, labels = next(iterator)``, and later the training."""

    def run(world):
        torch.manual_seed(3)
        loader = lockstep.prepare(DataLoader(NUMBERS, 5, shuffle=True))
        iterator = iter(loader)
        next(iterator)
        batches = iter(loader)
        next(batches), next(batches)
        with pytest.raises(ConfigurationError) as caught:
            loader.state_dict()
        del iterator
        state = loader.state_dict()
        rest = [x.tolist() for (x,) in batches]
        loader.load_state_dict(state)
        return str(caught.value), state["batch"], rest == [x.tolist() for (x,) in loader]

    for num_ranks in (1, 2):
        assert ranks(num_ranks)(run) == [(SEVERAL_LOOPS, 2, True)] * num_ranks


def test_the_number_of_the_batch(ranks):
    def run(world):
        torch.manual_seed(3)
        loader = lockstep.prepare(DataLoader(NUMBERS, 5, shuffle=True))
        found = [loader.batch]
        for _ in loader:
            found.append((loader.epoch, loader.batch))
            if loader.batch == 2:
                break
        state = loader.state_dict()
        resumed = lockstep.prepare(DataLoader(NUMBERS, 5, shuffle=True))
        resumed.load_state_dict(state)
        for _ in range(2):
            for _ in resumed:
                found.append((resumed.epoch, resumed.batch))
        return found

    expected = [-1, (0, 0), (0, 1), (0, 2), (0, 3), (0, 4), *((1, number) for number in range(5))]
    for num_ranks in (1, 2, 3):
        assert ranks(num_ranks)(run) == [expected] * num_ranks


def test_a_saved_position_is_loaded_from_a_file(ranks, tmp_path):
    def run(world, path):
        torch.manual_seed(3)
        loader = lockstep.prepare(DataLoader(NUMBERS, 5, sampler=Own(np.random.default_rng(2))))
        list(loader)
        iterator = iter(loader)
        next(iterator), next(iterator)
        lockstep.save(path, loader=loader)
        rest = [x.tolist() for (x,) in iterator], [x.tolist() for (x,) in loader]
        other = lockstep.prepare(DataLoader(NUMBERS, 5, sampler=Own(np.random.default_rng(7))))
        lockstep.load(path, loader=other)
        assert ([x.tolist() for (x,) in other], [x.tolist() for (x,) in other]) == rest
        return len(rest[0])

    for num_ranks in (1, 2):
        assert ranks(num_ranks)(run, str(tmp_path / str(num_ranks))) == [3] * num_ranks
