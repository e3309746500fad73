"""Streams that know where they are: resumed at once, exactly, and not believed if their state leads elsewhere."""

import pickle
import random
import warnings
import weakref
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from lockstep.data.comparison import is_compared
from lockstep.data.loader import BatchIterator, LoadOptions, MicroBatch
from lockstep.data.order import BatchSplit
from lockstep.data.stream import StreamOrder, StreamReader, first_not_serializable


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
