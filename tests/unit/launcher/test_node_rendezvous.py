"""Each round of a rendezvous has a store of its own, and one number of restarts for all of its machines."""

import contextlib
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.launcher.api import LaunchConfig

from lockstep.base import rank_files
from lockstep.comm.store import USE_LIBUV
from lockstep.errors import ConfigurationError, LockstepError
from lockstep.launcher import node_rendezvous
from lockstep.launcher.command import parse_arguments
from lockstep.launcher.node_rendezvous import LOCAL_BACKEND, RendezvousPerRestart, choose_rendezvous, rendezvous_of

CONFIG = LaunchConfig(2, 2, 1, run_id="job", rdzv_backend="c10d")


class Meeting(RendezvousHandler):
    """One of two machines, which meet without ado."""

    def __init__(self, store, rank):
        self.store, self.rank, self.num_rounds, self.calls = store, rank, 0, []

    def next_rendezvous(self):
        self.num_rounds += 1
        store = PrefixStore(str(self.num_rounds), self.store)
        return RendezvousInfo(store, self.rank, 2, RendezvousStoreInfo("127.0.0.1", 1))

    def get_backend(self):
        return "c10d"

    def is_closed(self):
        return False

    def set_closed(self):
        self.calls.append("closed")

    def num_nodes_waiting(self):
        return 1

    def get_run_id(self):
        return "job"

    def shutdown(self):
        self.calls.append("shut down")
        return True


@pytest.fixture
def together():
    with ThreadPoolExecutor(2) as pool:
        yield lambda act, *sides: list(pool.map(act, *sides))


def test_each_round_has_a_store_of_its_own_and_one_number(together):
    shared = HashStore()
    sides = [RendezvousPerRestart(CONFIG, Meeting(shared, rank), lambda: False) for rank in range(2)]
    places = []
    for known in ((0, 0), (3, 0)):  # the second one is new in the second round
        for side, number in zip(sides, known, strict=True):
            side.num_restarts = number - 1
        found = together(lambda side: side.next_rendezvous().bootstrap_store_info, sides)
        assert found[0] == found[1]
        places.append(found[0])
        assert [side.num_restarts for side in sides] == [max(known)] * 2
        store = TCPStore(found[0].master_addr, found[0].master_port, use_libuv=USE_LIBUV)
        assert not store.check(["address"]), "of the round before"
        store.set("address", "here")
    assert places[0].master_port != places[1].master_port


def test_a_machine_that_was_told_to_end_takes_up_no_other_and_does_not_end_the_job(tmp_path):
    inner = Meeting(HashStore(), 0)
    side = RendezvousPerRestart(CONFIG, inner, lambda: rank_files.is_stopped_by_signal(tmp_path))
    rank_files.request_stop(tmp_path, rank_files.ANOTHER_MACHINE)
    assert side.num_nodes_waiting() == 1
    rank_files.request_stop(tmp_path, "SIGTERM")
    assert side.num_nodes_waiting() == 0
    assert side.shutdown()
    assert inner.calls == []
    rank_files.announce_graceful_stop(tmp_path, 0)
    rank_files.report_stopped(tmp_path, 0, "saved")
    rank_files.forget_ranks(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["stop"]  # for the ranks to come
    rank_files.request_stop(tmp_path, rank_files.ANOTHER_MACHINE)
    rank_files.forget_ranks(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert side.shutdown()
    assert inner.calls == ["shut down"]


def test_only_rendezvous_in_which_machines_come_and_go_are_changed():
    place = {"run_id": "job", "rdzv_backend": "static", "rdzv_endpoint": "127.0.0.1:1", "rdzv_configs": {"rank": 0}}
    static = rendezvous_of(LaunchConfig(2, 2, 1, **place), lambda: False)
    assert (type(static).__name__, static.get_backend()) == ("StaticTCPRendezvous", "static")
    alone = rendezvous_of(LaunchConfig(1, 1, 1, run_id="job", rdzv_backend=LOCAL_BACKEND), lambda: False)
    assert (type(alone), alone.get_run_id(), alone.num_nodes_waiting()) == (RendezvousPerRestart, "job", 0)


@pytest.fixture
def slurm(monkeypatch):
    """Set the variables of the second task of a step of so many tasks on two machines."""

    def step(num_tasks, layout):
        variables = {"PROCID": 1, "LOCALID": 0, "NODEID": 1, "JOB_ID": 77, "STEP_ID": 3, "NODELIST": "gpu[1-2]"}
        variables |= {"STEP_NUM_TASKS": num_tasks, "STEP_TASKS_PER_NODE": layout, "STEP_NUM_NODES": 2}
        for name, value in variables.items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # in place of gpu1, whose address no name server has

    return step


def test_srun_starts_a_launcher_on_each_machine(slurm):
    slurm(2, "1(x2)")
    args = parse_arguments(["train.py"])
    choose_rendezvous(args)
    host, _, port = args.rdzv_endpoint.partition(":")
    assert (args.nnodes, args.rdzv_backend, args.rdzv_id, host) == ("2", "c10d", "slurm-77-3", "127.0.0.1")
    assert 20000 <= int(port) < 32000


@pytest.mark.parametrize("flags", [["--standalone"], ["--nnodes", "1"], ["--rdzv-endpoint", "localhost:0"]])
def test_flags_count_before_the_step_of_srun(slurm, flags):
    slurm(2, "1(x2)")
    args = parse_arguments([*flags, "train.py"])
    nnodes = args.nnodes
    choose_rendezvous(args)
    assert args.nnodes == nnodes
    assert not args.rdzv_id.startswith("slurm")


def test_srun_starts_several_launchers_on_a_machine(slurm):
    slurm(3, "2,1")
    with pytest.raises(ConfigurationError) as raised:
        choose_rendezvous(parse_arguments(["train.py"]))
    assert str(raised.value) == (
        "srun has started 3 launchers on 2 machines, and each would start a rank on every device.\n"
        "Start one on each: srun --ntasks-per-node=1 lockstep run ... With --standalone each is a separate job."
    )


@pytest.mark.parametrize(
    ("flags", "is_ours", "conf"),
    [
        (["--master-addr", "10.0.0.1"], True, ""),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.0.0.1:29641"], False, "is_host=0"),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.0.0.1:29641"], True, "is_host=1"),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29641"], True, ""),
    ],
)
def test_the_name_of_a_machine_need_not_resolve(monkeypatch, flags, is_ours, conf):
    resolve = socket.getaddrinfo

    def resolve_others(host, *args, **kwargs):
        if host == socket.gethostname():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_others)
    monkeypatch.setattr(node_rendezvous, "is_local", lambda host: is_ours)
    monkeypatch.setattr(node_rendezvous, "_why_not_bindable", lambda port: None)  # whoever has these ports here
    args = parse_arguments(["--nnodes", "2", *flags, "train.py"])
    choose_rendezvous(args)
    assert args.rdzv_conf == conf


@pytest.fixture
def port():
    """A port at which only sockets that share it may listen, so no other program gets it in between."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]


@contextlib.contextmanager
def store_of_its_own(port):
    """Serve the store of a rendezvous from another process, and kill that at the end."""
    reader, writer = os.pipe()
    pid = os.fork()  # a new interpreter would import torch first
    if pid == 0:
        listener = socket.create_server(("127.0.0.1", port), reuse_port=True)
        store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        os.write(writer, str(store.port).encode())
        time.sleep(110)
        os._exit(0)
    try:
        assert int(os.read(reader, 10)) == port
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader), os.close(writer)


def until(condition):
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_store_that_is_lost_is_awaited_and_the_machines_meet_in_the_next_one(port, capfd, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")  # is set, and taken back with the test
    monkeypatch.setattr(node_rendezvous, "_TRY_PERIOD_S", 0.1)
    conf = {"is_host": False, "last_call_timeout": 1, "join_timeout": 100, "read_timeout": 50}
    with store_of_its_own(port):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=2,
            nproc_per_node=1,
            run_id="job",
            rdzv_endpoint=f"127.0.0.1:{port}",
            rdzv_backend="c10d",
            rdzv_configs=conf,
            local_addr="127.0.0.1",
        )
        side = rendezvous_of(config, lambda: False)
        first = side.next_rendezvous().bootstrap_store_info
        assert side.num_nodes_waiting() == 0
    ranks = TCPStore(first.master_addr, first.master_port)
    until(lambda: side.num_nodes_waiting() == 0 and "does not respond" in capfd.readouterr().err)
    ranks.set("the ranks", "go on")
    with store_of_its_own(port):
        until(lambda: side.num_nodes_waiting() == 1)
        second = side.next_rendezvous().bootstrap_store_info
        assert side.num_nodes_waiting() == 0
        assert second.master_port != first.master_port
        # To be lost while the machines meet is no different; one that does not come back is an error.
    config.rdzv_configs["join_timeout"] = 1
    with pytest.raises(LockstepError, match=f"could not reach the first machine at 127.0.0.1:{port} within 1 s"):
        side.next_rendezvous()
