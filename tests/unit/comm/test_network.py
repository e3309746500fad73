"""What the network's errors say, and how many sockets there may be."""

import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.futures import Future

import lockstep
from lockstep.comm import network
from lockstep.comm.network import allow_open_files, cut_links, gloo_cause, listening, note_links
from lockstep.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.79.0.2]:5804: "
            "Connection timed out. This is typically caused by a remote worker hanging. Check the logs",
            "Read error [10.79.0.2]:5804: Connection timed out",
        ),
        (
            "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1",
            "Connection closed by peer [127.0.0.1]:1",
        ),
        ("[10.0.0.1]:80 refused\nmore", "[10.0.0.1]:80 refused"),
        ("", ""),
    ],
)
def test_an_error_of_gloo_names_the_peer_and_not_its_source(text, cause):
    assert gloo_cause(RuntimeError(text)) == cause


def test_the_soft_limit_of_open_files_is_raised_and_a_hard_one_that_is_too_low_is_an_error(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, hard))
        allow_open_files(10, "This")
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == used + 100, "it was enough"
        allow_open_files(500, "This")
        assert used + 500 < resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, hard))
        monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
        with pytest.raises(ConfigurationError) as raised:
            allow_open_files(5000, "A mesh of 5000 ranks")
    finally:
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    cause, advice = str(raised.value).splitlines()
    assert cause.startswith("A mesh of 5000 ranks takes 5") and cause.endswith("but a process may have 4096.")
    assert "ulimit -Hn" in advice


def test_only_the_connections_of_groups_are_cut():
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(2) as pool:
        store, before = dist.HashStore(), listening()
        # Another thread opens these while the group is made: as a client, and as a server at all addresses.
        client = socket.create_connection(other.getsockname())
        with socket.create_server(("", 0)) as server:
            served = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
            pairs = [(client, other.accept()[0]), (served, server.accept()[0])]
            groups = [*pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20)), range(2))]
            [*pool.map(lambda rank: note_links(before, dist.PrefixStore("links", store), rank, 2), range(2))]

        def call(group):
            with pytest.raises(RuntimeError):
                group.barrier(dist.BarrierOptions()).wait()

        groups_work = [*pool.map(lambda group: group.barrier(dist.BarrierOptions()).wait(), groups)]
        assert len(groups_work) == 2
        waits = pool.submit(call, groups[0])  # for the other rank, which never comes
        cut_links()
        waits.result()
        call(groups[1])
        for ours, theirs in pairs:
            ours.sendall(b"x")
            assert theirs.recv(1) == b"x"
        cut_links()  # nothing is left of the group
        for each in (end for pair in pairs for end in pair):
            each.sendall(b"y")
            each.close()


def test_a_call_that_is_over_gets_no_callback(monkeypatch):
    monkeypatch.setattr(network, "may_cut", True)
    called = []
    monkeypatch.setattr(Future, "add_done_callback", lambda *_: called.append(1))
    done = Future()
    done.set_result(3)
    assert network.wait_for_call(done) == 3 and called == []


def test_a_call_that_misses_the_end_of_its_connection_is_left(monkeypatch):
    monkeypatch.setattr(network, "may_cut", True)
    monkeypatch.setattr(network, "_LOOK_S", 0.01)
    done, stuck = Future(), Future()
    done.set_result(3)
    assert network.wait_for_call(done) == 3
    monkeypatch.setattr(network, "cut_at_s", time.monotonic() - network._FAILS_S)
    assert network.wait_for_call(done) == 3
    with pytest.raises(RuntimeError, match=r"^a rank was lost$"):
        network.wait_for_call(stuck)
    # Calls of groups that were made since are in order, also on a backend without links.
    monkeypatch.delenv("RANK", raising=False)
    with lockstep.init(backend="shm"):
        threading.Timer(0.1, stuck.set_result, [4]).start()
        assert network.wait_for_call(stuck) == 4
