"""`lockstep run` with ``--rdzv-backend etcd-v2``; needs an etcd server (3.5 or older) and its client."""

import shutil
import socket
import subprocess
import time

import pytest

from tests.distributed import commands

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs an etcd server"),
]
SCRIPT = """
import os, sys, time
import lockstep, torch, torch.distributed as dist
with lockstep.init(backend="gloo") as world:
    open(f"{sys.argv[1]}-{world.rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w").close()
    for _ in range(1000):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
        if world.rank == 1 and os.path.exists(sys.argv[1]):
            raise ValueError("boom")
"""


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def is_open(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(condition):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.timeout(300)
def test_etcd_may_be_away_for_a_while_and_a_failure_is_named_on_all_machines(tmp_path):
    pytest.importorskip("etcd")
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))

    def serve():
        server = [
            *("etcd", "--enable-v2", "--data-dir", str(tmp_path / "data"), "--listen-client-urls", client),
            *("--advertise-client-urls", client, "--listen-peer-urls", peer),
        ]
        return subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def met_again_after(number):
        """How often machines had met when both ranks started, if that is more than ``number``."""
        came = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("mark-*-*")]
        return [each for each in came if each > number and came.count(each) == 2]

    (tmp_path / "train.py").write_text(SCRIPT)
    mark, endpoint = tmp_path / "mark", client.removeprefix("http://")
    job = ["--nnodes", "2", "--rdzv-backend", "etcd-v2", "--rdzv-endpoint", endpoint, "--rdzv-id", "job"]
    job += ["--rdzv-conf", "keep_alive_interval=1", "--local-addr", "127.0.0.1", "--devices", "1"]
    etcd, pipes = serve(), {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    launchers = []
    try:
        until(lambda: is_open(int(endpoint.rpartition(":")[2])))
        launchers = [commands.start("run", *job, str(tmp_path / "train.py"), str(mark), **pipes) for _ in range(2)]
        until(lambda: met_again_after(-1))
        before = met_again_after(-1)[0]
        etcd.terminate()
        etcd.wait()
        time.sleep(5.0)  # longer than keepalives may be late
        etcd = serve()
        until(lambda: met_again_after(before))  # and no restart is spent
        mark.touch()
        told = [launcher.communicate(timeout=60) for launcher in launchers]
    finally:
        etcd.kill()
        etcd.wait()
        for launcher in launchers:
            launcher.kill()
            launcher.communicate()
    assert [launcher.returncode for launcher in launchers] == [1, 1], told
    for _, err in told:
        assert "machines joined or left; the ranks start again" in err
        assert "lockstep: Rank 1 failed: ValueError: boom" in err
