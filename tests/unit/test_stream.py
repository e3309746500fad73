"""Data that comes as a stream: the same samples in the same steps, however it is read."""

import random
from itertools import islice

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from lockstep.data.loader import LoadOptions
from lockstep.data.order import BatchSplit
from lockstep.data.stream import StreamOrder
from lockstep.errors import ConfigurationError, DataError


class Stream(IterableDataset):
    """Numbers, each with something random."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        for index in range(self.size):
            yield index, random.random()


def rows(num_steps, *, rank=0, num_ranks=1, accumulate=1, first_step=0, workers=0, size=10, drop_last=False):
    split = BatchSplit(num_ranks, range(rank, rank + 1), accumulate)
    order, options = (
        StreamOrder(batch_size=4, seed=0, drop_last=drop_last),
        LoadOptions(None, workers, pin_memory=False),
    )
    loaded = order.load(Stream(size), split, options, first_step, None)
    table = {}
    for micro in islice(loaded, num_steps * accumulate):
        assert micro.num_global == (2 if micro.step % 3 == 2 and not drop_last else 4)
        for batch in micro.batches:
            table.setdefault(micro.step, []).extend(zip(*(column.tolist() for column in batch), strict=True))
    return table


def test_global_batches_are_the_stream_in_its_order_epoch_after_epoch():
    assert {step: [index for index, _ in samples] for step, samples in rows(5).items()} == {
        0: [0, 1, 2, 3],
        1: [4, 5, 6, 7],
        2: [8, 9],
        3: [0, 1, 2, 3],
        4: [4, 5, 6, 7],
    }


def test_a_last_batch_that_is_not_full_can_be_left_out():
    assert [samples[0][0] for samples in rows(4, drop_last=True).values()] == [0, 4, 0, 4]


@pytest.mark.parametrize(("num_ranks", "accumulate"), [(2, 1), (2, 2), (3, 1)])
def test_a_step_has_the_same_samples_and_randomness_however_it_is_divided(num_ranks, accumulate):
    divided = {}
    for rank in range(num_ranks):
        for step, samples in rows(5, rank=rank, num_ranks=num_ranks, accumulate=accumulate).items():
            divided.setdefault(step, []).extend(samples)
    assert divided == rows(5)


@pytest.mark.parametrize("workers", [1, 2])
def test_loader_processes_and_resuming_change_nothing(workers):
    whole = rows(6)
    assert rows(6, workers=workers) == whole
    assert rows(3, workers=workers, first_step=3, accumulate=2) == {step: whole[step] for step in (3, 4, 5)}


class Split(IterableDataset):
    """Leaves out what it thinks other loader processes read, as torch's documentation shows."""

    def __iter__(self):
        worker = get_worker_info()
        index, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(index, 12, num_workers))


def test_a_stream_that_divides_itself_over_loader_processes_is_read_whole():
    order, split = StreamOrder(batch_size=4, seed=0), BatchSplit(1, range(1), 1)
    loaded = order.load(Split(), split, LoadOptions(None, 2, pin_memory=False), 0, None)
    assert [micro.batches[0].tolist() for micro in islice(loaded, 3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


class ShuffledAtOnce(IterableDataset):
    """Draws its order before it gives the first sample, with Python's generator, and from its epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        samples = [100 * self.epoch + number for number in range(8)]
        random.shuffle(samples)
        return iter(samples)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_epoch_is_set_and_the_order_drawn_alike_in_every_process(workers):
    random.seed()
    order, split = StreamOrder(batch_size=4, seed=0), BatchSplit(1, range(1), 1)
    options = LoadOptions(None, workers, pin_memory=False)
    loaded = order.load(ShuffledAtOnce(), split, options, 0, None)
    batches = [micro.batches[0].tolist() for micro in islice(loaded, 6)]
    for epoch in range(3):
        assert sorted(batches[2 * epoch] + batches[2 * epoch + 1]) == [100 * epoch + number for number in range(8)]
    assert batches[:2] == [[0, 2, 3, 7], [4, 5, 6, 1]]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_stream_is_an_error(workers):
    with pytest.raises(ConfigurationError) as error:
        rows(1, size=0, workers=workers)
    assert str(error.value) == (
        "The stream of Task.dataset ended before the first global batch.\nCheck where it reads its samples from."
    )


class Torn(IterableDataset):
    """Cannot be read behind its seventh sample."""

    def __init__(self, error):
        self.error = error

    def __iter__(self):
        yield from range(7)
        raise self.error


def error_of_torn(error, workers):
    order, split = StreamOrder(batch_size=2, seed=0), BatchSplit(1, range(1), 1)
    options = LoadOptions(None, workers, pin_memory=False)
    loaded = order.load(Torn(error), split, options, 0, None)
    assert [next(loaded).batches[0].tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(DataError) as caught:
        next(loaded)
    return caught.value


ADVICE = (
    "Repair or remove what cannot be read. A stream ends where it raises an error, whatever bad_samples says; what has "
    "a length and an index can go on without such samples."
)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_a_stream_raises_is_told_in_the_same_words_from_loader_processes(workers):
    where = "The stream of Task.dataset cannot be read (epoch 0, step 3, sample 1 of it)."
    error = error_of_torn(DataError("It is torn.\nMend it.", file="torn", offset=6, sample=6), workers)
    assert str(error) == f"{where}\nIt is torn.\nMend it.\n{ADVICE}"
    assert (error.file, error.offset, error.sample) == ("torn", 6, 6)
    error = error_of_torn(ValueError("no number"), workers)
    head, cause, advice = str(error).split("\n")
    assert (head, advice) == (where, ADVICE)
    assert cause.startswith("ValueError: no number (")
    assert cause.endswith(" in __iter__)")
    assert "raise self.error" in error.__notes__[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_other_errors_of_ours_are_left_as_they_are(workers):
    order, split = StreamOrder(batch_size=2, seed=0), BatchSplit(1, range(1), 1)
    options = LoadOptions(None, workers, pin_memory=False)
    stream = Torn(ConfigurationError("It is not set up."))
    loaded = order.load(stream, split, options, 0, None)
    with pytest.raises(ConfigurationError) as error:
        list(loaded)
    assert str(error.value) == "It is not set up."
