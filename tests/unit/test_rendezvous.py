"""Where the ranks meet, and what is said when nobody is there."""

import os
import socket

import pytest
import torch.distributed as dist

import lockstep
from lockstep.comm.rendezvous import join_rendezvous
from lockstep.env import Launcher, RankEnv
from lockstep.errors import ConfigurationError, WorldSizeMismatch


def rank_env(rank, host, port, world_size=2):
    return RankEnv(rank, rank, world_size, world_size, 0, host, port, Launcher.TORCHRUN)


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_world_of_one_meets_in_memory():
    meeting = join_rendezvous(RankEnv.from_environ({}), 1.0)
    assert isinstance(meeting.store, dist.HashStore)


def test_port_in_use_is_named(listener):
    port = listener.getsockname()[1]
    with pytest.raises(ConfigurationError) as raised:
        join_rendezvous(rank_env(0, "127.0.0.1", port), 0.5)
    cause, advice = str(raised.value).splitlines()
    assert cause.startswith(f"Rank 0 cannot listen on port {port}: Address already in use")
    assert advice.startswith("Set MASTER_PORT to a free port above 1023, the same on every rank")


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("127.0.0.1", "Connection refused"),
        ("no-such-host.invalid", ""),  # the resolver's words, which differ
    ],
)
def test_unreachable_store_is_named(host, reason):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(WorldSizeMismatch) as raised:
        join_rendezvous(rank_env(1, host, port), 0.3)
    cause, explanation, advice = str(raised.value).splitlines()
    assert cause.startswith(f"Rank 1 of 2 could not reach the store at {host}:{port} within 0.3 s: {reason}")
    assert explanation == (
        "Rank 0 hosts it: that did not start, has given up already, or cannot be reached from "
        f"{socket.gethostname()}; this rank cannot tell which other ranks are missing."
    )
    assert advice == (
        "Check that it was started, that MASTER_ADDR is an address of its machine, that MASTER_ADDR and "
        "MASTER_PORT are the same on every rank, and that no firewall blocks it."
    )


def test_a_world_of_one_comes_and_goes_and_comes_again(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for _ in range(2):
        with lockstep.init() as world:
            assert (world.rank, world.world_size, dist.get_world_size()) == (0, 1, 1)
            world.barrier()
            with world.rank_zero_first():
                pass
        assert not dist.is_initialized()
        world.close()  # again has no effect
        assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_an_error_inside_leaves_the_group():
    with pytest.raises(ValueError, match="boom"), lockstep.init():
        raise ValueError("boom")
    assert not dist.is_initialized()


def test_there_must_be_a_group_to_describe():
    with pytest.raises(ConfigurationError) as raised:
        lockstep.World.from_group()
    assert str(raised.value) == (
        "This process has no process group.\nCall lockstep.init(), which makes one."
    )  # fmt: skip
