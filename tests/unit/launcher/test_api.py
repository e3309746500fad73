"""How many ranks, and how many threads each."""

import os

import psutil
import pytest
import torch

from lockstep.errors import ConfigurationError
from lockstep.launcher.api import choose_num_ranks, num_cores, threads_for
from lockstep.launcher.command import run


@pytest.fixture
def cores(monkeypatch):
    def pretend(logical, physical):
        monkeypatch.setattr("lockstep.base.env.cpu_quota", lambda: None)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(logical)), raising=False)
        monkeypatch.setattr(psutil, "cpu_count", lambda logical: physical)

    return pretend


def test_default_is_every_gpu_else_every_core(gpus, cores):
    cores(16, 8)
    gpus(3)
    assert choose_num_ranks(None, "") == 3
    gpus(0)
    assert choose_num_ranks(None, "") == 8


@pytest.mark.parametrize(("wanted", "expected"), [("2", 2), (2, 2), ("auto", os.cpu_count())])
def test_numbers_count_and_words_are_torchruns(gpus, wanted, expected):
    gpus(0)
    assert choose_num_ranks(wanted, "devices") == expected


@pytest.mark.parametrize("wanted", ["2.5", "many"])
def test_words_that_mean_nothing(gpus, wanted):
    gpus(0)
    with pytest.raises(ConfigurationError, match=f"^--devices x: .*{wanted}.\nPass a number, 'gpu', 'cpu' or 'auto'.$"):
        choose_num_ranks(wanted, "--devices x")


def test_cpu_means_cores(gpus, cores):
    gpus(4)
    cores(16, 8)
    assert choose_num_ranks("cpu", "") == 8
    with pytest.raises(ConfigurationError, match="no-such-file"):  # and not that there are fewer GPUs
        run(["--devices", "cpu", "no-such-file.py"])
    with pytest.raises(ConfigurationError, match="5 devices were requested, but this machine has 4 GPUs"):
        run(["--spares", "1", "--max-restarts", "1", "no-such-file.py"])


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("cuda", ", or hide the GPUs to use the CPU, as with CUDA_VISIBLE_DEVICES= "),
        ("xpu", ", or hide the GPUs to use the CPU, as with ZE_AFFINITY_MASK= "),
        ("mps", ""),
    ],
)
def test_more_devices_than_gpus(gpus, monkeypatch, kind, hint):
    gpus(2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    assert choose_num_ranks("2", "") == 2
    with pytest.raises(ConfigurationError) as raised:
        choose_num_ranks("3", "")
    assert str(raised.value) == f"3 devices were requested, but this machine has 2 GPUs.\nRequest at most 2{hint}."


@pytest.mark.parametrize("wanted", ["0", "-1"])
def test_no_devices(gpus, wanted):
    gpus(0)
    with pytest.raises(ConfigurationError) as raised:
        choose_num_ranks(wanted, "")
    assert str(raised.value) == f"{wanted} is not a valid number of devices.\nUse at least one."


def test_cores_are_those_that_this_process_may_use(cores):
    cores(4, 32)
    assert num_cores() == 4
    cores(16, None)
    assert num_cores() == 16


def test_cores_are_those_that_the_container_may_use(cores, monkeypatch):
    cores(16, 16)
    for quota, expected in ((2.5, 2), (0.5, 1), (None, 16)):
        monkeypatch.setattr("lockstep.base.env.cpu_quota", lambda quota=quota: quota)
        assert num_cores() == expected


def test_threads_share_the_cores_once(cores):
    cores(16, 8)
    assert [threads_for(ranks) for ranks in (1, 3, 8, 9)] == [8, 2, 1, 1]
