"""Data that comes as a stream: the same samples in the same steps, however it is read."""

import pickle
import random
import warnings
import weakref
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from lockstep.data.comparison import is_compared
from lockstep.data.loader import BatchIterator, LoadOptions, MicroBatch
from lockstep.data.order import BatchSplit
from lockstep.data.stream import StreamOrder, StreamReader, first_not_serializable
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


# Streams that know where they are: resumed at once, exactly, and not believed if their state leads elsewhere.


class Counting(IterableDataset):
    """Ten numbers an epoch, from its state on, each with something random; counts what it gave."""

    size = 10

    def __init__(self):
        self.position, self.start, self.num_given = 0, 0, 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]

    def __iter__(self):
        start, self.start = self.start, 0
        for number in range(start, self.size):
            self.position = number + 1
            self.num_given += 1
            yield number, random.random()


class Buffered(Counting):
    """Shuffles in a buffer that is not part of its state."""

    def __iter__(self):
        buffer = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 3:
                yield buffer.pop(random.randrange(3))
        yield from buffer


class NumpyState(Counting):
    def state_dict(self):
        return {"position": np.int64(self.position)}


class NoState(Counting):
    def state_dict(self):
        return {"position": self.position, "open": lambda: None}


class Connected(Counting):
    """Cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("a connection")


class Touchy(Counting):
    """Cannot go on from its state."""

    def load_state_dict(self, state):
        raise KeyError("position")


class LiveState(Counting):
    """Hands out what it goes on changing."""

    def __init__(self):
        super().__init__()
        self.state = {"position": 0}

    def state_dict(self):
        self.state["position"] = self.position
        return self.state


def read(stream, num_steps, *position, drop_last=False):
    """Return for each step its samples and the state behind it."""
    reader = StreamReader(stream, StreamOrder(4, seed=0, drop_last=drop_last), *position)
    return [(samples, reader.state(), reader.problem) for _, samples in islice(reader, num_steps)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", [Counting, Connected, LiveState])
def test_a_state_leads_to_the_next_batch_wherever_it_was_kept(kind, drop_last):
    whole = read(kind(), 12, drop_last=drop_last)
    assert [state is None for _, state, _ in whole] == [True] + [False] * 11, "the first has yet to be tried out"
    assert {problem for *_, problem in whole} == {None}
    for step in range(1, 9):
        stream = kind()
        resumed = read(stream, 3, step + 1, pickle.loads(whole[step][1]), drop_last=drop_last)
        assert resumed == whole[step + 1 : step + 4]
        assert stream.num_given <= (16 if drop_last else 12), "of what came before, nothing is read and dropped"


def test_without_a_state_what_came_before_is_read_and_dropped():
    whole, stream = read(Counting(), 8), Counting()
    assert [samples for samples, *_ in read(stream, 3, 5)] == [samples for samples, *_ in whole[5:]]
    assert stream.num_given == 28


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Buffered, "does not restore the same samples, as with a shuffle buffer"),
        (Touchy, "does not restore the same samples, as with a shuffle buffer"),
        (NumpyState, "holds a numpy.int64, which a checkpoint cannot"),
    ],
)
def test_a_state_that_is_of_no_use_is_found_out_and_not_kept(kind, problem):
    batches = read(kind(), 6)
    assert [state for _, state, _ in batches] == [None] * 6
    assert [found for *_, found in batches] == [None] + [problem] * 5
    assert batches[0][0] == read(kind(), 1)[0][0]


def test_a_state_that_cannot_be_pickled_is_of_no_use():
    batches = read(NoState(), 3)
    assert [state for _, state, _ in batches] == [None] * 3
    assert batches[2][2] == "holds a builtins.function, which a checkpoint cannot"


def test_trying_a_state_out_changes_nothing():
    class Plain(IterableDataset):
        def __iter__(self):
            return Counting.__iter__(Counting())

    assert [samples for samples, *_ in read(Counting(), 6)] == [samples for samples, *_ in read(Plain(), 6)]


def feed(stream, workers=0, accumulate=1):
    options = LoadOptions(None, workers, pin_memory=False)
    split = BatchSplit(1, range(1), accumulate)
    return BatchIterator(partial(StreamOrder(4, seed=0).load, stream, split, options), {0: torch.device("cpu")})


def numbers(feed, num_steps, accumulate=1):
    return [feed.next().batches[0][0].tolist() for _ in range(num_steps * accumulate)]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_state_travels_with_the_batches_and_fits_any_number_of_loader_processes(workers, accumulate):
    whole = numbers(feed(Counting()), 12)
    first = feed(Counting(), workers, accumulate)
    numbers(first, 5, accumulate)  # the loader processes are ahead
    state = first.state()
    first.close()
    assert state == {"epoch": 1, "stream": {"position": 8}}
    for again in (0, 2):
        second = feed(Counting(), again)
        second.seek(5, state)
        assert numbers(second, 7) == whole[5:]
        second.close()


def test_the_micro_batches_of_a_step_are_kept_only_for_rewind():
    def load(step, _state):
        return (MicroBatch(step, 1, [0], [np.arange(1)], [torch.ones(1)]) for _ in range(3))

    for can_rewind in (False, True):
        batches = BatchIterator(load, {0: torch.device("cpu")})
        batches.can_rewind = can_rewind
        first = weakref.ref(batches.next().batches[0])
        batches.next()
        assert (first() is not None) == can_rewind
    batches.rewind(0)
    assert batches.next().batches[0] is first()


def test_what_was_resumed_from_is_the_state_until_there_is_another():
    resumed = feed(Counting())
    resumed.seek(5, state := {"epoch": 1, "stream": {"position": 8}})
    assert resumed.state() == state
    numbers(resumed, 1)
    assert resumed.state() == {"epoch": 1, "stream": {"position": 10}}
    resumed.seek(0)
    assert resumed.state() is None


def test_a_state_that_is_of_no_use_is_told_and_the_resumed_run_is_exact_all_the_same():
    whole = numbers(feed(Buffered()), 8)
    first = feed(Buffered())
    numbers(first, 4)
    text = (
        "A resumed run will read and discard the earlier samples: state_dict() of Buffered does not restore "
        "the same samples, as with a shuffle buffer.\nReturn all that its position and order depend on as numbers, "
        "strings, lists, dicts and tensors, to resume at once."
    )
    with pytest.warns(UserWarning, match="A resumed run") as caught:
        assert first.state() is None
    assert [str(warning.message) for warning in caught] == [text]
    second = feed(Buffered())
    second.seek(4, None)
    assert numbers(second, 4) == whole[4:]


def test_a_stream_without_a_state_says_nothing():
    class Plain(IterableDataset):
        def __iter__(self):
            return iter((number, 0) for number in range(10))

    plain = feed(Plain())
    assert plain.state() is None
    numbers(plain, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plain.state() is None


def test_whole_batches_are_compared_ever_more_rarely_and_the_last_samples_always():
    assert [step for step in range(3, 600) if is_compared(step)] == [4, 8, 16, 32, 64, 128, 256, 512]
    assert [step for step in range(1000, 1600) if is_compared(step)] == [1024, 1280, 1536]

    class Other(Counting):
        def __iter__(self):
            return (sample if position % 4 else (-1, 0) for position, sample in enumerate(super().__iter__()))

    mine, others = (islice(feed(each())._open_at(0, None), 10) for each in (Counting, Other))
    differ = [one.step for one, other in zip(mine, others, strict=True) if one.note.checksum != other.note.checksum]
    assert differ == [0, 1, 2, 4, 8]


def test_what_a_checkpoint_can_hold():
    plain = {"a": [1, 2.5, None, True, "x", b"y", (torch.ones(2), {1: 2j})]}
    assert first_not_serializable(plain) is None
    assert first_not_serializable({"a": [1, {"b": np.float64(1)}]}) is np.float64
    assert first_not_serializable({(1, np.str_("x")): 1}) is np.str_
    assert first_not_serializable({1}) is set
