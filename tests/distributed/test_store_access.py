"""On one machine, the store of a job is closed to other users."""

import os
import socket
import struct
import sys
import threading
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist

from lockstep.base.env import Launcher, RankEnv
from lockstep.comm import store as store_module
from lockstep.comm.rendezvous import join_rendezvous
from lockstep.comm.store import start_store_server
from tests.distributed.commands import lockstep

NOBODY = 65534
SCRIPT = """
import os, sys, time
import torch.distributed as dist
import lockstep
with lockstep.init():
    if dist.get_rank() == 0:
        with open(sys.argv[1] + ".tmp", "w") as file:
            file.write(os.environ["MASTER_PORT"])
        os.rename(sys.argv[1] + ".tmp", sys.argv[1])
        deadline = time.monotonic() + 30
        while not os.path.exists(sys.argv[1] + "-asked") and time.monotonic() < deadline:
            time.sleep(0.05)
    dist.barrier()
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def keys_seen_by(uid, port):
    """Ask a store how many keys it has, as ``uid`` in a process of its own, in the protocol of c10d's client."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = b"refused"
        try:
            os.setgid(uid)
            os.setuid(uid)
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\7")
                answer = connection.recv(8) or answer
        except OSError:
            pass
        finally:
            os.write(writer, answer)
            os._exit(0)
    os.waitpid(pid, 0)
    answer = os.read(reader, 8)
    os.close(reader), os.close(writer)
    return None if answer == b"refused" else struct.unpack("<q", answer)[0]


pytestmark = pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs root, to be somebody else")


def test_another_user_can_neither_read_nor_write_a_store_of_this_machine():
    launchers, port = start_store_server("127.0.0.1", 5.0)
    place = "127.0.0.1", free_port()
    of_rank_zero = join_rendezvous(RankEnv(0, 0, 2, 2, 0, *place, Launcher.NONE), 5.0).store
    for store, own_port in ((launchers, port), (of_rank_zero, place[1])):
        store.set("key", "value")
        assert keys_seen_by(NOBODY, own_port) is None
        assert keys_seen_by(0, own_port) == store.num_keys() >= 2


def test_a_store_that_other_machines_know_by_a_name_is_not_for_one_user():
    # What serves one user refuses whoever is not on this machine.
    with patch.object(store_module, "StoreServer", side_effect=AssertionError):
        store, port = start_store_server("host0.cluster", 5.0)
    store.set("key", "value")
    assert dist.TCPStore("127.0.0.1", port).get("key") == b"value"


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["lockstep run", "by hand"])
def test_another_user_can_neither_read_nor_write_the_store_of_a_job(tmp_path, launcher):
    (tmp_path / "train.py").write_text(SCRIPT)
    file = tmp_path / "port"
    pid = os.fork()
    if pid == 0:  # asks as soon as the ranks have met
        deadline = time.monotonic() + 60
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        port = int(file.read_text())
        found = f"{keys_seen_by(NOBODY, port)} {(keys_seen_by(0, port) or 0) > 0}"
        (tmp_path / "found").write_text(found)
        (tmp_path / "port-asked").touch()
        os._exit(0)
    try:
        if launcher == "lockstep run":
            done = lockstep("run", "--devices", "2", str(tmp_path / "train.py"), str(file))
            assert done.code == 0, done.err
        else:
            environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            command = [sys.executable, str(tmp_path / "train.py"), str(file)]
            ranks = [
                os.spawnve(os.P_NOWAIT, command[0], command, {**os.environ, **environment, "RANK": str(rank)})
                for rank in range(2)
            ]
            assert [os.waitpid(rank, 0)[1] for rank in ranks] == [0, 0]
    finally:
        os.waitpid(pid, 0)
    assert (tmp_path / "found").read_text() == "None True"


def test_the_store_does_what_that_of_c10d_does():
    served, _ = start_store_server("127.0.0.1", 5.0)
    own = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=timedelta(seconds=5))
    for store in (served, own):
        prefixed = dist.PrefixStore("job", store.clone())
        prefixed.set("a", "1")
        assert prefixed.get("a") == b"1"
        assert (prefixed.add("n", 2), prefixed.add("n", -5), prefixed.get("n")) == (2, -3, b"-3")
        assert prefixed.compare_set("c", "", "x") == b"x"
        assert (prefixed.compare_set("c", "y", "z"), prefixed.compare_set("d", "y", "z")) == (b"x", b"y")
        assert (prefixed.check(["a", "c"]), prefixed.check(["a", "d"])) == (True, False)
        prefixed.append("a", "2")
        prefixed.multi_set(["p", "q"], ["", "long" * 50_000])
        assert prefixed.multi_get(["a", "p", "q"]) == [b"12", b"", b"long" * 50_000]
        assert (prefixed.delete_key("p"), prefixed.delete_key("p")) == (True, False)
        with pytest.raises(dist.DistStoreError, match="timeout"):
            prefixed.wait(["never"], timedelta(seconds=0.1))
        assert prefixed.get("a") == b"12", "the connection is of use after a wait that was given up"
        before = store.num_keys()
        other = dist.PrefixStore("job", store.clone())
        late = threading.Timer(0.2, other.set, ("late", "came"))
        late.start()
        assert prefixed.get("late") == b"came"
        late.join()
        assert store.num_keys() == before + 1
