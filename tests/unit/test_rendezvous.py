"""Where the ranks meet, and what is said when nobody is there."""

import multiprocessing
import os
import socket
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import lockstep
from lockstep import rank_files
from lockstep.comm import rendezvous
from lockstep.comm.rendezvous import join_rendezvous, meet, meeting_place
from lockstep.env import AGENT_STORE, LAUNCHER_STORE, Launcher, RankEnv
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


@pytest.fixture
def served():
    """The port of the launcher's store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


@pytest.fixture
def launched(monkeypatch, served):
    """The environment of rank 1 of 2 under our launcher."""
    numbers = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(served), LAUNCHER_STORE: f"127.0.0.1:{served}"}
    for name, value in (numbers | place | {AGENT_STORE: "True"}).items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "url", "sent", "is_launchers"),
    [
        ({}, "env://", "env://", "True"),
        ({"MASTER_PORT": "12355", "MASTER_ADDR": "localhost"}, "env://", "env://", "False"),
        ({"MASTER_ADDR": "other-name"}, "env://", "env://", "True"),
        ({}, "tcp://localhost:23456", "tcp://localhost:23456", "False"),
        ({}, "tcp://other-name:{port}?rank=1&world_size=2", "env://?rank=1&world_size=2", "True"),
    ],
)
def test_ranks_meet_where_the_script_says_and_the_launcher_serves_only_its_own_port(
    launched, served, variables, url, sent, is_launchers
):
    for name, value in variables.items():
        launched.setenv(name, value)
    url = url.format(port=served)
    assert meet(lambda *given: (given, os.environ[AGENT_STORE]), url, 1, 2) == ((sent, 1, 2), is_launchers)
    assert is_launchers == "False" or os.environ["MASTER_ADDR"] == "127.0.0.1"


def test_an_address_of_one_machine_is_refused_where_ranks_are_on_several(launched, served):
    launched.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        ConfigurationError, match=rf"from 127.0.0.1:{served} to localhost:12355, where the ranks of the other"
    ):
        meeting_place("localhost", 12355, 1, 4)
    assert meeting_place("localhost", served, 1, 4) == ("127.0.0.1", served)


def test_ranks_that_choose_different_ports_are_refused(launched, served):
    for rank in ("0", "1"):
        launched.setenv("RANK", rank)
        launched.setattr(rendezvous, "_num_meetings", count())
        assert meeting_place("localhost", served, int(rank), 2) == ("127.0.0.1", served)
        assert meeting_place("localhost", 12355, int(rank), 2) == ("localhost", 12355)
        with pytest.raises(ConfigurationError) if rank == "1" else nullcontext() as caught:
            meeting_place("localhost", 12355 + int(rank), int(rank), 2)
    assert str(caught.value) == (
        "Rank 1 meets the other ranks at port 12356, but rank 0 at port 12355.\n"
        "Set the same MASTER_PORT or init_method on every rank; or remove the lines that set them, as the "
        "launcher has set MASTER_ADDR and MASTER_PORT."
    )


def test_a_process_that_a_rank_started_joins_as_that_rank_or_alone_only(launched, served, tmp_path):
    ended = []
    launched.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=77))
    launched.setattr(os, "kill", lambda pid, _number: ended.append(pid))
    launched.setattr(rank_files, "_own_name", "1")
    launched.setenv(rank_files.RUN_DIR, str(tmp_path))
    assert meeting_place("127.0.0.1", served, 1, 2) == ("127.0.0.1", served)
    for port, rank in ((12355, 1), (served, 0)):
        with pytest.raises(ConfigurationError, match="Run such a script with `python`, or with --devices 1"):
            meeting_place("127.0.0.1", port, rank, 2)
    assert ended == [77, 77]
    assert "starts its own processes" in rank_files.FailureRecord.read_all(tmp_path)[1].message
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        launched.setenv(name, "1")
    assert meeting_place("localhost", 12355, 1, 2) == ("localhost", 12355)
    assert os.environ[AGENT_STORE] == "False"
