"""What the network's errors say, and how many sockets there may be."""

import os
import resource
import socket

import pytest

from lockstep.comm.network import allow_open_files, cut_links, gloo_cause, noting_links
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
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = socket.create_connection(listener.getsockname())
        with noting_links(), socket.create_server(("127.0.0.1", 0)) as noted:
            link = socket.create_connection(listener.getsockname())
        ends = [listener.accept()[0] for _ in range(2)]
        cut_links()
        for each in (*ends, before, link):
            each.settimeout(10)
        assert link.recv(1) == b"" and ends[1].recv(1) == b"", "both ends notice it"
        before.sendall(b"x")
        assert ends[0].recv(1) == b"x"
        # The next groups have other connections, whose files may have the same numbers.
        cut_links()
        ends[0].sendall(b"y")
        assert before.recv(1) == b"y"
        for each in (before, link, noted, *ends):
            each.close()
