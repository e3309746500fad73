"""Where the ranks meet, and what is said when nobody is there."""

import multiprocessing
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import lockstep
from lockstep.base import rank_files
from lockstep.base.env import AGENT_STORE, LAUNCHER_STORE, Launcher, RankEnv
from lockstep.comm import rendezvous
from lockstep.comm.rendezvous import Participant, check_membership, join_rendezvous, meet, meeting_place
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


# The start-up check, with threads for ranks and a store in memory.


# --- how often a store is asked


class CountedStore:
    """A store that counts its requests, without those that only poll for a key."""

    def __init__(self, store):
        self.store, self.num_requests = store, 0
        self._polled = set()

    def __getattr__(self, name):
        function = getattr(self.store, name)

        def call(*args):
            is_poll = name in ("check", "wait") or (name == "add" and args[1] == 0)
            self.num_requests += not (is_poll and (name, str(args[0])) in self._polled)
            self._polled.add((name, str(args[0])))
            return function(*args)

        return call


def participant(rank, *, world_size=3, backend="gloo", pid=None):
    return Participant(rank, world_size, backend, "here", 100 + rank if pid is None else pid)


class Check:
    """Runs `check_membership` once a rank, each in a thread, and keeps how each ended."""

    def __init__(self, timeout_s=0.3):
        self.store = dist.HashStore()
        self.timeout_s = timeout_s
        self.requests = []  # a rank

    def call(self, arrivals, *, objections=None, host=0):
        outcomes = [None] * len(arrivals)
        stores = [CountedStore(self.store) for _ in arrivals]

        def one(index, me):
            try:
                check_membership(
                    stores[index],
                    me,
                    deadline=time.monotonic() + self.timeout_s,
                    timeout_s=self.timeout_s,
                    is_host=index == host,
                    objection=(objections or {}).get(me.rank),
                )
            except Exception as error:
                outcomes[index] = error

        threads = [threading.Thread(target=one, args=pair) for pair in enumerate(arrivals)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        self.requests = [store.num_requests for store in stores]
        return outcomes


def test_complete():
    assert Check(timeout_s=5).call([participant(rank) for rank in range(3)]) == [None, None, None]


def test_every_rank_that_came_learns_who_is_missing():
    outcomes = Check().call([participant(0), participant(2)])
    expected = (
        "2 of 3 ranks came within 0.3 s; missing: rank 1.\n"
        "Came: rank 0 (host here, pid 100), rank 2 (host here, pid 102).\n"
        "Check that 3 processes were started and that none of them died before lockstep.init(); "
        "if some only start slowly, pass a longer timeout_s."
    )
    assert [(type(outcome), str(outcome)) for outcome in outcomes] == [(WorldSizeMismatch, expected)] * 2


def test_a_late_rank_gets_the_failure_at_once():
    check = Check()
    check.call([participant(0), participant(2)])
    check.timeout_s = 60
    start = time.monotonic()
    (outcome,) = check.call([participant(1)], host=None)
    assert str(outcome).startswith("2 of 3 ranks came within 0.3 s; missing: rank 1.")
    assert time.monotonic() - start < 10


def test_two_processes_with_one_rank():
    check = Check(timeout_s=5)
    outcomes = check.call([participant(0), participant(1, pid=7), participant(1, pid=8)])
    first, second = sorted(str(outcome).splitlines()[0] for outcome in outcomes[1:])
    assert first == second == str(outcomes[0]).splitlines()[0]
    assert first in (
        "Two processes have the rank 1: pid 7 on host here and pid 8 on host here.",
        "Two processes have the rank 1: pid 8 on host here and pid 7 on host here.",
    )
    assert str(outcomes[0]).endswith(
        "Give each process a RANK of its own, from 0 to 2; if one belongs to another job, give this "
        "job another MASTER_PORT. `lockstep run` does both."
    )


def test_a_process_too_many_does_not_disturb_a_complete_world():
    check = Check(timeout_s=5)
    assert check.call([participant(rank) for rank in range(3)]) == [None] * 3
    (outcome,) = check.call([participant(2, pid=9)], host=None)
    assert str(outcome).startswith(
        "Two processes have the rank 2: pid 102 on host here and pid 9 on host here."
    )  # fmt: skip
    assert check.store.get("verdict") == b"complete"


@pytest.mark.parametrize(
    ("odd", "name", "values"),
    [
        (participant(1, world_size=2), "WORLD_SIZE", {"2", "3"}),
        (participant(1, backend="nccl"), "backend", {"nccl", "gloo"}),
    ],
)
def test_ranks_with_different_settings(odd, name, values):
    outcomes = Check(timeout_s=5).call([participant(0), odd])
    assert {type(outcome) for outcome in outcomes} == {ConfigurationError}
    for outcome in outcomes:
        cause, advice = str(outcome).splitlines()
        assert cause.startswith(f"The ranks disagree about {name}: ")
        assert all(value in cause for value in values)
        assert advice == f"Start every rank with the same {name}."


def test_a_rank_that_cannot_take_part_says_so_to_all():
    outcomes = Check(timeout_s=5).call(
        [participant(rank) for rank in range(3)], objections={2: "Local rank 2 has no GPU."}
    )  # fmt: skip
    text = "Rank 2 (host here, pid 102) cannot take part: Local rank 2 has no GPU."
    assert [str(outcome) for outcome in outcomes] == [text] * 3


@pytest.mark.parametrize("size", [4, 64])
def test_a_rank_asks_the_store_as_often_in_a_large_job_as_in_a_small_one(size):
    whole = Check(timeout_s=20)
    ranks = [participant(rank, world_size=size) for rank in range(size)]
    assert whole.call(ranks) == [None] * size
    assert max(whole.requests) <= 7
    # Nor if one is missing: the first to find that out asks for the others, in halves, and no other does.
    partial = Check(timeout_s=0.5)
    outcomes = partial.call(ranks[:-1])
    assert {str(outcome).partition("\n")[0] for outcome in outcomes} == {
        f"{size - 1} of {size} ranks came within 0.5 s; missing: rank {size - 1}."
    }
    *others, first = sorted(partial.requests)
    assert max(others) <= 12
    assert first <= 16 + 2 * size.bit_length()


def test_what_takes_long_to_find_is_not_looked_for_by_all_at_once(monkeypatch):
    monkeypatch.setattr(rendezvous, "FAREWELL_S", 0.2)
    shared, calls = dist.HashStore(), []

    def find():
        calls.append(1)
        time.sleep(0.5)
        return "found"

    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda _: rendezvous.find_once(shared, "key", find, 32), range(32)))
    assert found == ["found"] * 32
    assert len(calls) < 12  # one more for each pause
