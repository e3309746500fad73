"""Files and streams in training: each sample once an epoch, in the same steps on any ranks and loader processes."""

import os
import random
import time
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, IterableDataset, Subset, get_worker_info

import lockstep
from lockstep.data import TokenFiles
from lockstep.errors import ConfigurationError, DataError, RankFailed
from tests.training import make_task, samples

NUM_SAMPLES, BATCH_SIZE = 41, 12
STEPS_PER_EPOCH = 4  # the last holds 5: at least one sample for each of up to 4 ranks


def write_tokens(folder):
    """Write 41 windows of 4 tokens, with one token more in each file, over three files."""
    np.arange(0, 4 * 20 + 1, dtype=np.uint16).tofile(folder / "0.bin")
    np.save(folder / "1.npy", np.arange(4 * 20, 4 * 30 + 1, dtype=np.uint16))
    np.arange(4 * 30, 4 * 41 + 1, dtype=np.uint16).tofile(folder / "2.bin")
    return lambda: _Numbered(TokenFiles([folder / "0.bin", folder / "1.npy", folder / "2.bin"], length=4), first_token)


def first_token(window):
    return window[0][0].item() // 4


class _Numbered(torch.utils.data.Dataset):
    """What identifies each sample."""

    def __init__(self, samples, name):
        self.samples, self.name = samples, name

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.name(self.samples[index])


def write_parquet(folder):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"number": list(range(NUM_SAMPLES))}).to_parquet(folder / "0.parquet")
    rows = datasets.Dataset.from_parquet(str(folder / "0.parquet"), cache_dir=str(folder / "cache"))
    return lambda: _Numbered(rows.with_format("torch"), number_column)


def number_column(row):
    return row["number"].item()


def write_parquet_stream(folder):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    for shard, numbers in enumerate((range(7), range(7, 20), range(20, 41))):
        path = folder / f"{shard}.parquet"
        datasets.Dataset.from_dict({"number": list(numbers)}).to_parquet(path, batch_size=5)
    files = [str(folder / f"{shard}.parquet") for shard in range(3)]
    cache = str(folder / "cache")

    def stream():
        datasets.disable_progress_bars()
        rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=cache)
        return rows.map(only_number).with_format("torch")

    return stream


def only_number(row):
    return {"number": row["number"]}


class Shuffled(IterableDataset):
    """Numbers in an order that depends on the epoch, and knows no state."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        numbers = list(range(NUM_SAMPLES))
        random.Random(self.epoch).shuffle(numbers)
        yield from numbers


class Resumable(Shuffled):
    """The same, but knows where it is, and refuses to be read from the beginning when it was told to go on."""

    def __init__(self):
        super().__init__()
        self.position, self.start = 0, 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]

    def __iter__(self):
        start, self.start = self.start, 0
        for position, number in list(enumerate(super().__iter__()))[start:]:
            self.position = position + 1
            yield number


KINDS = {
    "tokens": write_tokens,
    "parquet": write_parquet,
    "parquet-stream": write_parquet_stream,
    "stream": lambda folder: Shuffled,
    "resumable": lambda folder: Resumable,
}


def train(make_dataset, steps, **settings):
    """Train; return the numbers of the samples of each call of the loss."""
    calls = []

    def loss(model, batch):
        numbers = batch["number"] if isinstance(batch, dict) else batch
        calls.append(numbers.tolist())
        return model(numbers.double().unsqueeze(1)).mean()

    task = lockstep.Task(
        model=lambda: nn.Linear(1, 1, dtype=torch.float64),
        dataset=make_dataset,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        global_batch_size=BATCH_SIZE,
    )
    result = lockstep.fit(task, steps=steps, quiet=True, **settings)
    return result.first_step, calls


def joined(results):
    """Return the samples of each step, of all ranks."""
    return [list(chain(*calls)) for calls in zip(*(calls for _, calls in results), strict=True)]


def kinds(*quick):
    return [pytest.param(kind, marks=[] if kind in quick else [pytest.mark.soak]) for kind in KINDS]


@pytest.mark.parametrize("kind", kinds("tokens", "resumable"))
def test_each_sample_is_seen_once_an_epoch_in_the_same_steps_everywhere(ranks, tmp_path, kind):
    make_dataset = KINDS[kind](tmp_path)
    _, whole = train(make_dataset, 2 * STEPS_PER_EPOCH, strategy="single")
    for epoch in (whole[:STEPS_PER_EPOCH], whole[STEPS_PER_EPOCH:]):
        assert [len(numbers) for numbers in epoch] == [12, 12, 12, 5]
        assert sorted(chain(*epoch)) == list(range(NUM_SAMPLES))
    results = ranks(3)(lambda world: train(make_dataset, 2 * STEPS_PER_EPOCH, workers=2))
    assert joined(results) == whole
    _, calls = train(make_dataset, 2 * STEPS_PER_EPOCH, strategy="dp", devices=2)
    assert [sorted(calls[2 * step] + calls[2 * step + 1]) for step in range(8)] == [sorted(step) for step in whole]


@pytest.mark.parametrize("kind", kinds("tokens", "parquet-stream", "resumable"))
def test_a_run_goes_on_with_the_next_sample_wherever_it_stopped_on_whatever_it_goes_on(ranks, tmp_path, kind):
    make_dataset = KINDS[kind](tmp_path)
    num_steps, chance = 3 * STEPS_PER_EPOCH, random.Random(kind)
    _, whole = train(make_dataset, num_steps, strategy="single")
    stops = [*sorted(chance.sample(range(1, num_steps), 2)), num_steps]
    seen = []

    def resume(world, stop, workers, strategy="ddp"):
        return train(make_dataset, stop, workers=workers, checkpoint=tmp_path / "run", strategy=strategy)

    for first, stop in zip([0, *stops], stops, strict=False):
        num_ranks, workers = chance.randint(1, 3), chance.randint(0, 2)
        if kind == "parquet-stream":  # each rank would take a second to import the library
            results = [resume(None, stop, max(1, workers), "single")]
        else:
            results = ranks(num_ranks)(resume, stop, workers)
        assert {first_step for first_step, _ in results} == {first}
        seen += joined(results)
    assert seen == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_is_cut_short_is_named_on_every_rank_or_its_samples_are_counted(ranks, tmp_path, workers):
    write_tokens(tmp_path)

    def run(world, bad_samples):
        def cut_short():
            samples = TokenFiles([tmp_path / "0.bin", tmp_path / "1.npy", tmp_path / "2.bin"], length=4)
            world.barrier()
            os.truncate(tmp_path / "2.bin", 80)  # of its 11 windows, 9 are left: the last two are samples 39 and 40
            return _Numbered(samples, first_token)

        return train(cut_short, STEPS_PER_EPOCH, workers=workers, bad_samples=bad_samples)

    for outcome in ranks(2).each(run, "stop"):
        assert isinstance(outcome.error, DataError)
        assert (outcome.error.file, outcome.error.sample in {39, 40}) == (str(tmp_path / "2.bin"), True)
        first = 8 * (outcome.error.sample - 30)
        assert (
            f"{tmp_path}/2.bin ends at byte 80, but sample {outcome.error.sample} "
            f"lies at bytes {first} to {first + 10}.\n"
        ) in str(outcome.error)
    write_tokens(tmp_path)
    seen = chain(*joined(ranks(2)(run, "skip")))
    assert sorted(seen) == list(range(39))


def test_a_stream_with_a_state_is_not_read_from_the_beginning(tmp_path):
    reads = []

    class Counted(Resumable):
        def __iter__(self):
            for number in super().__iter__():
                reads.append(number)
                yield number

    _, whole = train(Resumable, 12, strategy="single")
    train(Counted, 11, strategy="single", checkpoint=tmp_path)
    reads.clear()
    assert train(Counted, 12, strategy="single", checkpoint=tmp_path) == (11, whole[11:])
    assert reads == whole[11], "an epoch's last five samples"


def test_a_stream_that_differs_between_ranks_is_an_error_on_every_rank(ranks):
    def run(world):
        class Own(IterableDataset):
            def __iter__(self):
                return iter(range(world.rank // 2, 100))

        train(Own, 3)

    text = (
        "Task.dataset gave different samples on ranks 2, 3 than on rank 0, in step 0.\n"
        "Every process creates the same data and takes its part of it: leave out what depends on the rank or the "
        "process, such as the order of a set or of os.listdir, and shuffle or split with a seed of your own, or "
        "with random, numpy.random or torch, whose seeds are set."
    )
    for outcome in ranks(4).each(run):
        assert isinstance(outcome.error, ConfigurationError)
        assert str(outcome.error) == text


def test_a_stream_that_comes_to_differ_later_is_found_too(ranks):
    def run(world):
        class Shorter(IterableDataset):
            def __iter__(self):
                return iter(range(100 - world.rank))

        train(Shorter, 40)

    for outcome in ranks(2).each(run):
        assert str(outcome.error).startswith(
            "Task.dataset gave different samples on rank 1 than on rank 0, in step 8.\n"
        )


@pytest.mark.parametrize(
    ("how", "step"),
    [({}, 20), ({"strategy": "local-sgd", "sync_every": 4}, 23), ({"strategy": "diloco", "checkpoint_every": 22}, 21)],
    ids=["in that step", "at the next exchange", "before the next checkpoint"],
)
def test_a_rank_that_skips_a_sample_of_a_stream_is_found(ranks, how, step, tmp_path):
    def run(world):
        class Skipping(IterableDataset):
            def __iter__(self):
                return (n for n in range(BATCH_SIZE * 30) if world.rank == 0 or n != BATCH_SIZE * 20 + 5)

        task = make_task(
            loss=lambda model, batch: model(batch[:, None].float()).mean(),
            model=lambda: nn.Linear(1, 1),
            dataset=Skipping,
            global_batch_size=BATCH_SIZE,
        )
        folder = {"checkpoint": tmp_path} if "checkpoint_every" in how else {}
        lockstep.fit(task, steps=25, quiet=True, **how, **folder)

    for outcome in ranks(2).each(run):
        assert str(outcome.error).startswith(
            f"Task.dataset gave different samples on rank 1 than on rank 0, in step {step}.\n"
        )


@pytest.mark.parametrize(("field", "workers"), [("dataset", 0), ("dataset", 1), ("eval_dataset", 0)])
def test_data_of_equal_length_that_differ_between_ranks_are_an_error_on_every_rank(ranks, field, workers):
    def run(world):
        def sample(number):  # files that are open when loader processes are forked cannot be shared
            assert (get_worker_info() is None) == (workers == 0)
            return torch.ones(1), number

        same, other = (_Numbered(range(first, first + 20), sample) for first in (0, world.rank))
        data = {"dataset": lambda: same, "eval_dataset": lambda: same} | {field: lambda: other}
        task = make_task(loss=lambda model, batch: model(batch[0]).mean(), model=lambda: nn.Linear(1, 1), **data)
        lockstep.fit(task, steps=1, quiet=True, workers=workers)

    for outcome in ranks(3).each(run):
        text = f"Task.{field} gave different samples on ranks 1, 2 than on rank 0, in step 0.\n"
        assert isinstance(outcome.error, ConfigurationError)
        assert str(outcome.error).startswith(text)


def test_samples_with_random_numbers_of_their_own_are_not_compared(ranks):
    def run(world):
        class Augmented(torch.utils.data.Dataset):
            generator = np.random.default_rng(world.rank)

            def __len__(self):
                return 20

            def __getitem__(self, index):
                return torch.from_numpy(self.generator.random(1, dtype=np.float32))

        task = make_task(
            loss=lambda model, batch: model(batch).mean(), model=lambda: nn.Linear(1, 1), dataset=Augmented
        )
        return lockstep.fit(task, steps=3, quiet=True).num_steps

    assert ranks(2)(run) == [3, 3]


class OfEpoch(torch.utils.data.Dataset):
    """Each sample is the epoch."""

    epoch = -1.0

    def set_epoch(self, epoch):
        self.epoch = float(epoch)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([self.epoch])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_gets_its_epoch_also_in_workers_and_inside_others(ranks, workers):
    def run(world):
        def data():
            one, other = OfEpoch(), OfEpoch()
            return ConcatDataset([Subset(one, range(4)), other])

        task = make_task(
            loss=lambda model, batch: model(batch).sum() * 0 + batch.mean(),
            model=lambda: nn.Linear(1, 1),
            dataset=data,
            eval_dataset=OfEpoch,
            global_batch_size=4,
        )
        return lockstep.fit(task, epochs=3, workers=workers, quiet=True).losses

    assert ranks(2)(run) == [[0.0] * 3 + [1.0] * 3 + [2.0] * 3] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_prepare_is_called_once_before_the_data_are_created(ranks, fails, tmp_path):
    def run(world):
        def prepare():
            (tmp_path / f"by-{world.rank}").touch()
            if fails:
                raise OSError("HTTP Error 503")

        def data():
            assert [path.name for path in tmp_path.iterdir()] == ["by-0"]
            return [torch.ones(1)] * 8

        task = make_task(
            loss=lambda model, batch: model(batch).mean(),
            model=lambda: nn.Linear(1, 1),
            dataset=data,
            prepare=prepare,
        )
        return lockstep.fit(task, steps=1, quiet=True).num_steps

    outcomes = ranks(3).each(run)
    if fails:
        assert [type(outcome.error) for outcome in outcomes] == [OSError, RankFailed, RankFailed]
        assert all("HTTP Error 503" in str(outcome.error) for outcome in outcomes)
    else:
        assert [outcome.result for outcome in outcomes] == [1, 1, 1]


@pytest.mark.parametrize("field", ["dataset", "eval_dataset"])
def test_data_sets_of_other_lengths_are_an_error_on_every_rank(ranks, field):
    def run(world):
        lockstep.fit(make_task(**{field: lambda: samples(30 + world.rank // 2)}), quiet=True)

    for outcome in ranks(3).each(run):
        assert isinstance(outcome.error, ConfigurationError)
        assert str(outcome.error) == (
            f"Task.{field} has 30 samples on rank 0, but 31 on rank 2.\n"
            "Every rank must see the same files, and they must not change."
        )


def test_a_data_set_that_downloads_does_so_once(ranks, tmp_path):
    def run(world):
        def download():
            if not (tmp_path / "data").exists():
                (tmp_path / f"downloaded by {world.rank}").touch()
                time.sleep(0.3)
                (tmp_path / "data").touch()
            return samples(16)

        lockstep.fit(make_task(dataset=download, eval_dataset=download), steps=1, quiet=True)

    ranks(2)(run)
    assert [path.name for path in tmp_path.glob("downloaded*")] == ["downloaded by 0"]
