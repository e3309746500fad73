"""A loader process that is gone: what probably happened, and what to do."""

import os
import signal

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


@pytest.mark.parametrize(
    ("death", "text"),
    [
        (
            out_of_memory,
            ") was killed, most likely because the machine ran out of memory.\n"
            "Each loader process has its own copy of what the data set keeps in memory: use fewer of them (workers, "
            "--workers), or keep less. The kernel's log (dmesg) tells whether it was that.",
        ),
        (
            exit_at_once,
            ") ended itself with exit status 3.\n"
            "Something that the data set calls ends the process: find it with workers=0 (--workers 0).",
        ),
    ],
)
def test_a_run_whose_loader_dies_says_why(death, text):
    with pytest.raises(LoaderDied) as error:
        lockstep.fit(make_task(dataset=lambda: Deadly(death)), strategy="single", workers=2, epochs=1, quiet=True)
    assert str(error.value).startswith("A loader process of rank 0 (pid ")
    assert str(error.value).endswith(text)
    assert error.value.__suppress_context__


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            "DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that ...",
            "A loader process of rank 3 (pid 12) died of a bus error, most likely because shared memory (/dev/shm) is "
            "full.\nMake it larger (docker run --shm-size=8g, or --ipc=host), or use fewer loader processes (workers, "
            "--workers). If it is not full, a memory-mapped file was cut short while it was read.",
        ),
        (
            "DataLoader worker (pid 12) is killed by signal: Segmentation fault. ",
            "A loader process of rank 3 (pid 12) crashed in a library that is not written in Python.\n"
            "Find the line with workers=0 (--workers 0) and `python -X faulthandler`.",
        ),
        (
            "DataLoader worker (pid 12) is killed by signal: Hangup. ",
            "A loader process of rank 3 (pid 12) was ended by a signal: Hangup.\n"
            "Find out what sent it; nothing in the run did.",
        ),
        (
            "DataLoader worker (pid(s) 12, 13) exited unexpectedly",
            "A loader process of rank 3 (pid 12, 13) is gone.\n"
            "Find out why with workers=0 (--workers 0), which loads in the process that trains.",
        ),
    ],
)
def test_other_deaths_have_other_meanings(said, text):
    with pytest.raises(LoaderDied) as caught, explaining_worker_failures(3):
        raise RuntimeError(said)
    assert str(caught.value) == text


def test_other_errors_are_left_alone():
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"), explaining_worker_failures(0):
        raise RuntimeError("CUDA error: out of memory")
