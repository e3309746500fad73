"""A loader process that is gone: what probably happened, and what to do."""

import multiprocessing.queues
import os
import pickle
import signal
from types import SimpleNamespace

import pytest
from torch.utils.data import Dataset

import lockstep
from lockstep.data.loader import explaining_worker_failures
from lockstep.errors import LoaderDied
from tests.training import make_task, samples


class Deadly(Dataset):
    """Ends the process that loads the sample 7."""

    def __init__(self, death):
        self.death, self.samples = death, samples()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index == 7:
            self.death()
        return self.samples[index]


def out_of_memory():
    """Die as the kernel makes a process die that takes too much."""
    os.kill(os.getpid(), signal.SIGKILL)


def exit_at_once():
    """Die of what the code of a data set does."""
    os._exit(3)


def no_shared_memory():
    """Have the batch fail on its way to the process that trains, in a thread of multiprocessing's."""

    def dumps(_):
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
        )

    multiprocessing.queues._ForkingPickler = SimpleNamespace(dumps=dumps, loads=pickle.loads)


@pytest.mark.parametrize(
    ("death", "how", "advice"),
    [
        (no_shared_memory, "exited unexpectedly with exit code 74.", "Most likely shared memory (/dev/shm) is full."),
        (out_of_memory, "is killed by signal: Killed.", "Most likely the machine ran out of memory."),
        (exit_at_once, "exited unexpectedly with exit code 3.", "Find out why with workers=0 (--workers 0)"),
    ],
)
def test_a_run_whose_loader_dies_says_why(death, how, advice):
    with pytest.raises(LoaderDied) as error:
        lockstep.fit(make_task(dataset=lambda: Deadly(death)), strategy="single", workers=2, epochs=1, quiet=True)
    head, _, tail = str(error.value).partition("\n")
    assert head.startswith("A loader process of rank 0 died: DataLoader worker (pid ")
    assert how in head
    assert tail.startswith(advice)
    assert error.value.__suppress_context__


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("DataLoader worker (pid 12) is killed by signal: Bus error. It is possible", "Most likely shared memory"),
        ("DataLoader worker (pid 12) is killed by signal: Segmentation fault.", "A native library"),
        ("DataLoader worker (pid(s) 12, 13) exited unexpectedly", "Find out why with workers=0 (--workers 0)"),
    ],
)
def test_other_deaths_have_other_advice(said, advice):
    with pytest.raises(LoaderDied) as caught, explaining_worker_failures(3):
        raise RuntimeError(said)
    assert str(caught.value).startswith(f"A loader process of rank 3 died: {said}\n{advice}")


def test_other_errors_are_left_alone():
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"), explaining_worker_failures(0):
        raise RuntimeError("CUDA error: out of memory")
