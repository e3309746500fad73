"""A script that stops in the middle of an epoch goes on at the next sample, on any number of ranks and workers."""

from functools import partial
from itertools import chain, zip_longest

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

import lockstep
from lockstep.errors import CheckpointError

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.timeout(300)

SIZE, BATCH = 41, 3


@pytest.fixture
def ranks(ranks):
    """Without errors for warnings: torchdata calls what torch 2.13 deprecates."""
    return partial(ranks, warnings="ignore")


class Numbers(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index


def make(kind, workers, pad, **how):
    """A loader over a sampler, and the sampler; of the kind "batches", with a batch sampler of the script."""
    loader_of = DataLoader if kind == "plain" else torchdata.StatefulDataLoader
    sampler = lockstep.DistributedSampler(Numbers(), seed=3, pad=pad)
    if kind == "batches":
        return torchdata.StatefulDataLoader(
            Numbers(), batch_sampler=BatchSampler(sampler, BATCH, False), num_workers=workers, **how
        ), sampler
    return loader_of(Numbers(), batch_size=BATCH, sampler=sampler, num_workers=workers, **how), sampler


def train(world, path, kind, workers, pad, num_steps, sets_epoch):
    """Read ``num_steps`` batches on each rank, or fewer if it runs dry; save in the step after which to stop."""
    loader, sampler = make(kind, workers, pad)
    if sets_epoch:
        sampler.set_epoch(0)
    seen, batches = [], iter(loader)
    for _ in range(num_steps):
        seen += next(batches, torch.empty(0, dtype=torch.int64)).tolist()
    lockstep.save(path, loader=loader, step=num_steps)
    return seen


def resume(world, path, kind, workers, pad, sets_epoch):
    """Go on: return the samples of the rest of the epoch and of the next one."""
    loader, sampler = make(kind, workers, pad)
    assert lockstep.load(path, loader=loader).keys() == {"step"}
    passes = []
    for epoch in range(2):
        if sets_epoch:
            sampler.set_epoch(epoch)
        passes.append([index for batch in loader for index in batch.tolist()])
    return passes


def in_order(parts):
    """The samples of all ranks in the order of the epoch, in which they take turns."""
    return [index for row in zip_longest(*parts) for index in row if index is not None]


def orders(pad):
    """The whole order of the first two epochs."""
    sampler = lockstep.DistributedSampler(Numbers(), 1, 0, seed=3, pad=pad)
    return list(sampler), list(sampler)


# On two ranks: 21 and 20 samples, so after the 7th step one rank was dry. Each pair of values is there once.
@pytest.mark.parametrize("num_after", [1, 2, 3])
@pytest.mark.parametrize("num_before", [1, 2, 3])
def test_the_rest_of_an_epoch_is_seen_once_and_in_order(ranks, tmp_path, num_before, num_after):
    first, second = orders(pad=False)
    num_steps = (1, 4, 6)[(num_before + num_after) % 3]
    kinds = [("plain", 0, 2), ("plain", 2, 0), ("stateful", 2, 2), ("stateful", 0, 2), ("batches", 2, 0)]
    kind, before, after = kinds[(3 * num_before + num_after) % len(kinds)]
    path, sets_epoch = str(tmp_path / "c"), bool(num_steps % 2)
    num_steps = min(num_steps, -(-SIZE // (BATCH * num_before)) - 1)
    seen = in_order(ranks(num_before)(train, path, kind, before, False, num_steps, sets_epoch))
    assert seen == first[: num_steps * BATCH * num_before]
    rest, following = zip(*ranks(num_after)(resume, path, kind, after, False, sets_epoch), strict=True)
    assert seen + in_order(rest) == first
    assert in_order(following) == second


@pytest.mark.parametrize("kind", ["plain", "stateful", "batches"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_kind_of_loader_goes_on_on_another_number_of_ranks(ranks, tmp_path, kind, workers):
    first, second = orders(pad=False)
    path = str(tmp_path / "c")
    seen = in_order(ranks(2)(train, path, kind, workers, False, 4, False))
    assert seen == first[: 4 * 2 * BATCH]
    rest, following = zip(*ranks(3)(resume, path, kind, 2 - workers, False, False), strict=True)
    assert seen + in_order(rest) == first
    assert in_order(following) == second


@pytest.mark.parametrize("kind", ["plain", "stateful"])
@pytest.mark.parametrize("workers", [0, 2])
def test_after_the_last_step_when_a_rank_was_dry_all_begin_the_next_epoch(ranks, tmp_path, kind, workers):
    first, second = orders(pad=False)
    path, num_steps = str(tmp_path / "c"), 7
    parts = ranks(2)(train, path, kind, workers, False, num_steps, False)
    assert [len(part) for part in parts] == [21, 20]
    assert in_order(parts) == first
    assert in_order(each[0] for each in ranks(3)(resume, path, kind, workers, False, False)) == second
    # A script that sets the epoch is at its end.
    assert ranks(1)(resume, path, kind, workers, False, True)[0][0] == []


@pytest.mark.parametrize("num_after", [1, 2, 3])
def test_padding_only_repeats_samples_at_the_end(ranks, tmp_path, num_after):
    first, _ = orders(pad=True)
    path = str(tmp_path / "c")
    seen = in_order(ranks(2)(train, path, "plain", 2, True, 3, False))
    parts = [each[0] for each in ranks(num_after)(resume, path, "plain", 2, True, False)]
    assert len({len(part) for part in parts}) == 1
    assert (seen + in_order(parts))[:SIZE] == first
    assert len(list(chain(*parts))) - (SIZE - len(seen)) < num_after


def save_random(world, path):
    torch.manual_seed(world.rank)
    loader = torchdata.StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(2)]
    lockstep.save(path, loader=loader)
    return seen, [batch.tolist() for batch in batches]


def load_random(world, path):
    loader = torchdata.StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True)
    lockstep.load(path, loader=loader)
    return [batch.tolist() for batch in loader]


def test_a_loader_without_our_sampler_loads_the_state_of_each_rank_and_only_on_as_many(ranks, tmp_path):
    path = str(tmp_path / "c")
    saved = ranks(2)(save_random, path)
    assert saved[0][0] != saved[1][0]
    assert ranks(2)(load_random, path) == [rest for _, rest in saved]
    for num_after in (1, 3):
        outcomes = ranks(num_after).each(load_random, path)
        assert [type(outcome.error) for outcome in outcomes] == [CheckpointError] * num_after
        assert str(outcomes[-1].error) == (
            f"The checkpoint {path} does not fit: loader has positions for 2 ranks, not {num_after}: use a "
            "DistributedSampler\nLoad the same model, optimizer and objects."
        )


def objects():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3]),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.amp.GradScaler("cpu", init_scale=4.0),
    ]
    return model, optimizer, dict(zip(("steps", "cosine", "plateau", "scaler"), schedulers, strict=True))


def save_objects(world, path):
    model, optimizer, parts = objects()
    model(torch.ones(1, 2)).sum().backward()
    for _ in range(2):
        optimizer.step()
        parts["steps"].step()
        parts["cosine"].step()
        parts["plateau"].step(0.5)
    lockstep.save(path, model=model, optimizer=optimizer, note="plain", **parts)
    states = {name: part.state_dict() for name, part in parts.items()}
    model, optimizer, parts = objects()
    assert lockstep.load(path, model=model, optimizer=optimizer, **parts) == {"note": "plain"}
    assert {name: part.state_dict() for name, part in parts.items()} == states
    assert lockstep.load(path)["cosine"] == states["cosine"]


def test_schedulers_and_a_scaler_are_saved_and_loaded(ranks, tmp_path):
    ranks(2)(save_objects, str(tmp_path / "c"))


def load_wrong(world, path):
    loader, sampler = make("plain", 0, pad=False)
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    lockstep.save(path, model=model, sampler=loader, counter=[1])
    texts = []
    nn.init.zeros_(model.weight)
    for wrong in (
        {"loader": loader},
        {"sampler": DataLoader(Numbers())},
        {"sampler": torchdata.StatefulDataLoader(Numbers())},
    ):
        with pytest.raises(CheckpointError) as caught:
            lockstep.load(path, model=model, **wrong)
        texts.append(str(caught.value).split("does not fit: ")[1])
    for bad in (DataLoader(Numbers()), {1, 2}, Holds(set())):
        with pytest.raises(CheckpointError) as caught:
            lockstep.save(path, bad=bad)
        texts.append(str(caught.value).splitlines()[0].split("cannot contain ")[1])
    assert not model.weight.any()
    assert lockstep.load(path, model=model, sampler=sampler) == {"counter": [1]}
    assert model.weight.item() == 1.0
    return texts


class Holds:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_what_cannot_be_loaded_or_saved_is_an_error_on_every_rank_and_changes_nothing(ranks, tmp_path):
    path = str(tmp_path / "c")
    assert (
        ranks(2)(load_wrong, path)
        == [
            [
                "it was saved without loader\nLoad the same model, optimizer and objects.",
                "'DataLoader' object has no attribute 'load_state_dict'\nLoad the same model, optimizer and objects.",
                "sampler has positions for 0 ranks, not 2: use a DistributedSampler\n"
                "Load the same model, optimizer and objects.",
                "torch.utils.data.dataloader.DataLoader at state.bad.",
                "builtins.set at state.bad.",
                "builtins.set at state.bad.value.",
            ]
        ]
        * 2
    )


class Grouped(BatchSampler):
    """Batches of indices that leave the same remainder: reads ahead."""

    def __iter__(self):
        groups = {}
        for index in self.sampler:
            group = groups.setdefault(index % 3, [])
            group.append(index)
            if len(group) == self.batch_size:
                yield groups.pop(index % 3)
        yield from groups.values()


class Sorted(BatchSampler):
    """Batches of all indices, sorted."""

    def __iter__(self):
        indices = sorted(self.sampler, key=lambda index: index * 7 % 11)
        yield from (indices[start : start + BATCH] for start in range(0, len(indices), BATCH))


class Outer(Sampler):
    """A sampler of a sampler: reads two indices and swaps them."""

    def __init__(self, sampler):
        self.inner = sampler

    def __iter__(self):
        indices = iter(self.inner)
        for index in indices:
            yield from [*(other for other in [next(indices, None)] if other is not None), index]


class Own(lockstep.DistributedSampler):
    """Another order, in which it does not begin at the position."""

    def __iter__(self):
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[self.rank :: self.num_replicas])


class OwnState(Own):
    """With the position to it."""

    start = number = 0

    def __iter__(self):
        start, self.start = self.start, 0
        for self.number, index in enumerate(list(super().__iter__())[start:], start + 1):
            yield index

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.start = state["number"]


class Ahead(DataLoader):
    def __iter__(self):
        batches = super().__iter__()
        batch = next(batches)
        for following in batches:
            yield batch
            batch = following
        yield batch


class AheadStateful(torchdata.StatefulDataLoader, Ahead):
    __iter__ = Ahead.__iter__


class Counting(DataLoader):
    """With the position to its own ``__iter__``."""

    start = number = 0

    def __iter__(self):
        start, self.start = self.start, 0
        for self.number, batch in enumerate(super().__iter__(), 1):
            if self.number > start:
                yield batch

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.start = state["number"]


def make_odd(kind, is_stateful, workers):
    loader_of = torchdata.StatefulDataLoader if is_stateful else DataLoader
    how = {"num_workers": workers, "in_order": kind != "unordered"}
    if kind in ("Own", "OwnState"):
        sampler = {"Own": Own, "OwnState": OwnState}[kind](Numbers(), pad=False)
    else:
        sampler = lockstep.DistributedSampler(Numbers(), seed=3, pad=False)
    if kind in ("Grouped", "Sorted"):
        batch_sampler = {"Grouped": Grouped, "Sorted": Sorted}[kind](sampler, BATCH, False)
        return loader_of(Numbers(), batch_sampler=batch_sampler, **how), sampler
    if kind == "Counting":
        return Counting(Numbers(), BATCH, sampler=sampler, **how), sampler
    if kind == "Ahead":
        return (AheadStateful if is_stateful else Ahead)(Numbers(), BATCH, sampler=sampler, **how), sampler
    return loader_of(Numbers(), BATCH, sampler=Outer(sampler) if kind == "Outer" else sampler, **how), sampler


def stop_and_go_on(world, path, kind, is_stateful, workers, num_steps, sets_epoch=True):
    """Return what is read in the second epoch before the save and after the load, and the next epoch."""

    def read(loader, sampler, epoch):
        if sets_epoch:
            sampler.set_epoch(epoch)
        return iter(loader)

    loader, sampler = make_odd(kind, is_stateful, workers)
    list(read(loader, sampler, 0))
    batches = read(loader, sampler, 1)
    seen = [index for _ in range(num_steps) for index in next(batches).tolist()]
    lockstep.save(path, loader=loader)
    loader, sampler = make_odd(kind, is_stateful, workers)
    lockstep.load(path, loader=loader)
    rest, following = [[i for batch in read(loader, sampler, epoch) for i in batch.tolist()] for epoch in (1, 2)]
    return seen + rest, following


@pytest.mark.parametrize(
    ("kind", "workers", "num_steps"),
    [
        *(("Grouped", 0, 1), ("Grouped", 2, 4), ("Sorted", 0, 4), ("Sorted", 2, 1), ("Outer", 0, 1), ("Outer", 2, 4)),
        *(("OwnState", 0, 4), ("OwnState", 2, 1), ("Counting", 0, 1), ("Counting", 2, 4)),
    ],
)
def test_what_reads_ahead_goes_on_by_a_state_that_counts_what_was_returned(ranks, tmp_path, kind, workers, num_steps):
    for parts in zip(*ranks(2)(stop_and_go_on, str(tmp_path / "c"), kind, True, workers, num_steps), strict=True):
        assert sorted(chain(*parts)) == list(range(SIZE))


UNKNOWN = "The position of loader within an epoch is not known: "
BETWEEN = "Save between epochs, with the number of the next epoch in place of loader, for set_epoch; or "
OWN_ITER = " has an __iter__ of its own, which may read ahead or change the samples.\n" + BETWEEN
OWN_STATE = OWN_ITER + "give that class a state_dict and load_state_dict of its own."
STATEFUL = OWN_ITER + "use torchdata's StatefulDataLoader, and set_epoch in every epoch."
UNORDERED = f"its workers return batches in any order.\n{BETWEEN}leave in_order=False out."
NO_EPOCH = f"StatefulDataLoader does not save the epoch.\n{BETWEEN}call set_epoch in every epoch."


@pytest.mark.parametrize(
    ("kind", "is_stateful", "workers", "sets_epoch", "text"),
    [
        ("Grouped", False, 0, True, f"its batch sampler Grouped{STATEFUL}"),
        ("Sorted", False, 2, True, f"its batch sampler Sorted{STATEFUL}"),
        ("Outer", False, 0, True, f"its sampler Outer{STATEFUL}"),
        ("OwnState", False, 2, True, f"its sampler OwnState{STATEFUL}"),
        ("Own", False, 0, True, f"its sampler Own{OWN_STATE}"),
        ("Own", True, 2, True, f"its sampler Own{OWN_STATE}"),
        ("Ahead", False, 0, True, f"its class Ahead{OWN_STATE}"),
        ("Ahead", True, 2, True, f"its class AheadStateful{OWN_STATE}"),
        ("unordered", False, 2, True, UNORDERED),
        ("unordered", True, 2, True, UNORDERED),
        ("Grouped", True, 0, False, NO_EPOCH),
        ("Outer", True, 2, False, NO_EPOCH),
    ],
)
def test_a_position_that_is_not_known_is_refused(ranks, tmp_path, kind, is_stateful, workers, sets_epoch, text):
    path = tmp_path / "c"
    outcomes = ranks(2).each(stop_and_go_on, str(path), kind, is_stateful, workers, 2, sets_epoch)
    assert [(type(outcome.error), str(outcome.error)) for outcome in outcomes] == [
        (CheckpointError, UNKNOWN + text)
    ] * 2
    assert not path.exists()


@pytest.mark.parametrize("kind", ["unordered", "OwnState"])
def test_without_workers_batches_have_an_order_and_a_sampler_is_where_its_loader_is(ranks, tmp_path, kind):
    for parts in zip(*ranks(2)(stop_and_go_on, str(tmp_path / "c"), kind, False, 0, 4), strict=True):
        assert sorted(chain(*parts)) == list(range(SIZE))


def test_a_sampler_whose_state_is_not_that_of_its_iter_is_refused(ranks, tmp_path):
    def run(world):
        sampler = lockstep.DistributedSampler(Numbers())
        lockstep.save(tmp_path / "c", sampler=sampler)
        texts = []
        for call in (lockstep.save, lockstep.load):
            with pytest.raises(CheckpointError) as caught:
                call(tmp_path / "c", sampler=Own(Numbers()))
            texts.append(str(caught.value))
        lockstep.save(tmp_path / "c", sampler=OwnState(Numbers()))
        return texts

    text = f"{UNKNOWN}its class Own{OWN_STATE}".replace("of loader", "of sampler").replace(
        "place of loader", "place of sampler"
    )
    assert list(ranks(2)(run)) == [[text] * 2] * 2


def load_order(world, path, size, num_samples=SIZE, **how):
    sampler = lockstep.DistributedSampler(range(num_samples), **how)
    lockstep.load(path, loader=DataLoader(range(num_samples), size, sampler=sampler))
    return len(list(sampler))


def save_order(world, path, size):
    sampler = lockstep.DistributedSampler(range(SIZE), seed=3)
    loader = DataLoader(range(SIZE), size, sampler=sampler)
    next(iter(loader))
    lockstep.save(path, loader=loader)


@pytest.mark.parametrize(
    ("num_ranks", "size", "how", "text"),
    [
        (2, 6, {"seed": 3}, "global batch 24 (12 on each of 2 ranks), this one has 12 (6 on each of 2 ranks)"),
        (3, 7, {"seed": 3}, "global batch 24 (12 on each of 2 ranks), this one has 21 (7 on each of 3 ranks)"),
        (2, 12, {"seed": 3, "num_samples": 40}, "samples 41, this one has 40"),
        (2, 12, {"seed": 3, "shuffle": False}, "shuffle True, this one has False"),
        (2, 12, {"seed": 4}, "seed 3, this one has 4"),
        (3, 8, {"seed": 3}, None),
        (1, 24, {"seed": 3}, None),
        (3, 12, {"seed": 3}, None),
    ],
)
def test_a_position_in_another_order_is_refused(ranks, tmp_path, num_ranks, size, how, text):
    path = str(tmp_path / "c")
    ranks(2)(save_order, path, 12)
    outcomes = ranks(num_ranks).each(partial(load_order, **how), path, size)
    if text is None:
        assert [outcome.result for outcome in outcomes] == [-(-(SIZE - 24) // num_ranks)] * num_ranks
        return
    advice = "Create the same loader, or load without loader to begin at the first sample."
    text = f"The checkpoint is of a loader with {text}.\n{advice}"
    assert [(type(outcome.error), str(outcome.error)) for outcome in outcomes] == [(CheckpointError, text)] * num_ranks


def test_a_batch_size_that_was_rounded_is_the_same(ranks, tmp_path):
    path = str(tmp_path / "c")
    ranks(3)(save_order, path, 32 // 3)
    assert ranks(2)(partial(load_order, seed=3), path, 32 // 2) == [6, 6]


def test_a_position_of_an_earlier_version_has_no_order_to_compare(ranks, tmp_path):
    path = str(tmp_path / "c")
    lockstep.save(path, loader={"epoch": 0, "position": 24})
    assert ranks(2)(partial(load_order, seed=4), path, 5) == [9, 9]


def fail_on_one_rank(world, path):
    part = Holds(1)
    if world.rank == 1:
        part.state_dict = partial(open, path + "/missing")
    lockstep.save(path, part=part)


def test_a_state_that_one_rank_cannot_give_is_an_error_on_all(ranks, tmp_path):
    errors = [outcome.error for outcome in ranks(2).each(fail_on_one_rank, str(tmp_path / "c"))]
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert str(errors[0]).startswith(
        f"Rank 1: Cannot write the checkpoint {tmp_path / 'c'}: No such file or directory."
    )


def stream(world, path, is_new):
    loader = torchdata.StatefulDataLoader(Stream(world.rank), batch_size=BATCH, num_workers=1)
    if not is_new:
        lockstep.load(path, loader=loader)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(2)]
    lockstep.save(path, loader=loader)
    return seen


class Stream(IterableDataset):
    """The stream of each rank, with a state."""

    def __init__(self, rank):
        self.rank, self.number = rank, 0

    def __iter__(self):
        while True:
            self.number += 1
            yield 1000 * self.rank + self.number - 1

    def state_dict(self):
        return {"rank": self.rank, "number": self.number}

    def load_state_dict(self, state):
        assert state["rank"] == self.rank
        self.number = state["number"]


def test_the_stream_of_each_rank_goes_on(ranks, tmp_path):
    path = str(tmp_path / "c")
    seen = [ranks(2)(stream, path, number == 0) for number in range(2)]
    for rank in range(2):
        numbers = list(chain(*seen[0][rank], *seen[1][rank]))
        assert numbers == list(range(1000 * rank, 1000 * rank + 4 * BATCH))
