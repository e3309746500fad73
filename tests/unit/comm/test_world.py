"""The device and the backend of a rank, with pretended GPUs."""

from datetime import timedelta

import pytest
import torch

from lockstep.base import accelerator
from lockstep.base.env import Launcher, RankEnv
from lockstep.comm import world
from lockstep.comm.rendezvous import Rendezvous
from lockstep.comm.world import choose_backend, choose_device
from lockstep.errors import ConfigurationError

ADVICE = (
    f"Pass device='cpu', or check the driver, and that torch {torch.__version__} was built for it or that the package "
    "which adds it to torch is imported before."
)


def rank_env(local_rank, launcher=Launcher.TORCHRUN):
    return RankEnv(local_rank, local_rank, 8, 8, 0, "127.0.0.1", 1, launcher)


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


@pytest.mark.parametrize(
    ("backend", "device", "bound", "limit_s"),
    [
        ("nccl", "cuda:2", "cuda:2", 60),
        ("cpu:gloo,cuda:nccl", "cuda:2", "cuda:2", 12),  # Gloo's, which waits five times as long
        ("cpu:gloo,cuda:nccl", "cpu", None, 12),
        ("gloo", "cuda:2", None, 12),
        ("simccl", "sim:2", None, 1800),
    ],
)
def test_nccl_connects_on_the_device_of_the_rank_at_the_start(monkeypatch, backend, device, bound, limit_s):
    """Otherwise its first collective does, and what is wrong with a connection is an error of that."""
    given = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **more: given.append((args, more)))
    chosen = type("Device", (), {"type": "sim"}) if device.startswith("sim") else torch.device(device)
    met = Rendezvous(torch.distributed.HashStore(), is_host=False, prefix="lockstep")
    world._connect(rank_env(2), met, backend, chosen, 60.0)
    (((name,), more),) = given
    assert (name, more["rank"], more["world_size"], more["timeout"]) == (backend, 2, 8, timedelta(seconds=limit_s))
    assert more["device_id"] == (bound and torch.device(bound))


def test_the_host_sleeps_while_it_waits_for_an_event_of_cuda(monkeypatch):
    """torch.Event takes ``blocking`` and ignores it on CUDA; CUDA's own class takes only CUDA's own streams."""
    made = []

    class Event:
        def __init__(self, **given):
            made.append(given)

        def record(self, stream):
            made.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    assert isinstance(accelerator.recorded_event(torch.device("cuda", 1)), Event)
    assert made == [{"blocking": True}, "stream of cuda:1"]


@pytest.mark.parametrize("launcher", [Launcher.SLURM, Launcher.ENV])
def test_a_scheduler_that_shows_each_rank_only_its_gpu(gpus, launcher):
    gpus(1)
    assert choose_device(rank_env(3, launcher), None) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("count", "wanted", "message"),
    [
        (
            2,
            None,
            "Local rank 3 has no device of its own: this process sees 2 (cuda:0 to cuda:1).\n"
            "Start at most 2 ranks on this machine, or pass device='cpu'.",
        ),
        (
            2,
            "cuda:5",
            "device='cuda:5' has no device of its own: this process sees 2 (cuda:0 to cuda:1).\n"
            "Start at most 2 ranks on this machine, or pass device='cpu'.",
        ),
        (
            0,
            "cuda",
            f"device='cuda' was requested, but this machine has no usable CUDA device.\n{ADVICE}",
        ),
        (
            2,
            "xpu:0",
            f"device='xpu:0' was requested, but this machine has no usable XPU device.\n{ADVICE}",
        ),
        (0, "gpu0", "device='gpu0' is not a device.\nPass 'cpu', 'cuda', 'cuda:<index>' or a torch.device."),
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
    assert choose_backend(torch.device("xpu", 0), "gloo,xpu:gloo") == "gloo,xpu:gloo"


def test_a_device_without_a_backend_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed.Backend, "default_device_backend_map", {"cpu": "gloo"})
    with pytest.raises(ConfigurationError, match=r"^The backend .default for xpu. is not"):
        choose_backend(torch.device("xpu", 0), None)


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
        "The backend 'nccl' moves cuda tensors only, but the device is 'cpu'.\n"
        "Leave backend out: torch's default for the device is then used."
    )


@pytest.mark.parametrize(("has_captured", "cause"), [(False, "another rank may be stuck"), (True, "a CUDA graph with")])
def test_a_group_that_does_not_close_says_why(monkeypatch, capsys, has_captured, cause):
    def too_long(*_):
        raise TimeoutError

    monkeypatch.setattr(world.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(world.activity, "in_time", too_long)
    monkeypatch.setattr(world.activity.now, "has_captured", has_captured)
    world.destroy_default_group(abort=False, at_exit=False)
    assert f"could not be closed within 10 s, as {cause}" in capsys.readouterr().err
    assert not world.activity.now.has_captured
