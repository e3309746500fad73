"""The device and the backend of a rank, with pretended GPUs."""

import pytest
import torch

from lockstep.comm.world import choose_backend, choose_device
from lockstep.env import Launcher, RankEnv
from lockstep.errors import ConfigurationError


def rank_env(local_rank, launcher=Launcher.TORCHRUN):
    return RankEnv(local_rank, local_rank, 8, 8, 0, "127.0.0.1", 1, launcher)


@pytest.fixture
def gpus(monkeypatch):
    chosen = []

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return pretend


def test_the_gpu_of_the_local_rank_is_made_current(gpus):
    chosen = gpus(4)
    assert choose_device(rank_env(2), None) == torch.device("cuda", 2)
    assert choose_device(rank_env(2), "cuda") == torch.device("cuda", 2)
    assert choose_device(rank_env(2), "cuda:0") == torch.device("cuda", 0)
    assert chosen == [torch.device("cuda", 2), torch.device("cuda", 2), torch.device("cuda", 0)]


def test_the_cpu_is_taken_without_gpus_or_when_asked_for(gpus):
    chosen = gpus(4)
    assert choose_device(rank_env(2), "cpu") == torch.device("cpu")
    gpus(0)
    assert choose_device(rank_env(2), None) == torch.device("cpu")
    assert chosen == []


def test_a_scheduler_that_shows_each_rank_only_its_gpu(gpus):
    gpus(1)
    assert choose_device(rank_env(3, Launcher.SLURM), None) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("count", "wanted", "message"),
    [
        (
            2,
            None,
            "Local rank 3 has no GPU of its own: this process sees 2 (cuda:0 to cuda:1).\n"
            "Start at most 2 ranks on this machine, or pass device='cpu'.",
        ),
        (
            2,
            "cuda:5",
            "device='cuda:5' has no GPU of its own: this process sees 2 (cuda:0 to cuda:1).\n"
            "Start at most 2 ranks on this machine, or pass device='cpu'.",
        ),
        (
            0,
            "cuda",
            "device='cuda' was asked for, but this machine has no usable CUDA GPU.\n"
            "Pass device='cpu', or check `nvidia-smi` and that this torch was built for CUDA "
            f"(torch.version.cuda is {torch.version.cuda}).",
        ),
        (0, "gpu0", "device='gpu0' is no device.\nPass 'cpu', 'cuda', 'cuda:<index>' or a torch.device."),
    ],
)
def test_devices_that_are_not_there(gpus, count, wanted, message):
    gpus(count)
    with pytest.raises(ConfigurationError) as raised:
        choose_device(rank_env(3), wanted)
    assert str(raised.value) == message


def test_backend_follows_the_device():
    assert choose_backend(torch.device("cpu"), None) == "shm"
    assert choose_backend(torch.device("cpu"), "GLOO") == "gloo"


def test_unknown_backend_lists_those_that_are_there():
    with pytest.raises(ConfigurationError) as raised:
        choose_backend(torch.device("cpu"), "carrier-pigeon")
    cause, advice = str(raised.value).splitlines()
    assert cause == "The backend 'carrier-pigeon' is not available in this torch."
    assert advice.startswith("Available: ")
    assert "gloo" in advice


def test_nccl_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    with pytest.raises(ConfigurationError) as raised:
        choose_backend(torch.device("cpu"), "nccl")
    assert str(raised.value) == (
        "The backend 'nccl' moves CUDA tensors only, but the device is 'cpu'.\n"
        "Leave backend out, or pass backend='gloo'."
    )
