"""What it takes to start, watch, restart and end hundreds of ranks, without training: 64, 256 and 1,000 of them.

Each machine of eight ranks is a process, forked from one that has imported everything; its ranks and its launcher are
threads. Each rank has a connection of its own to a real store of c10d, which a process of its own serves as the first
machine's launcher does. They run Lockstep's own code:

    connect      ranks open their connections to the store
    meet         they sign in, learn that all have come, and on which machines; then a barrier
    heartbeat    each rank writes its heartbeat, and each launcher's watchdog judges those of its machine
    status       every rank posts its figures, and rank zero makes a snapshot of those of all
    leave        all ranks leave
    missing      one rank does not come: all others raise an error that names it, from the end of their patience on
    hang         launchers exchange what they see of ranks that stand still, and one judges for all
    failure      launchers agree on the cause of the end
    restart      launchers agree on the number of restarts
    elastic      torch elastic's own rendezvous of the launchers, with the store that ranks get then

By number of ranks: seconds until the last is done; and for each rank: processor time of all machines and of the store;
requests to the store (and polls, which depend on how long one waits); what the memory of the machines and of the store
grew by. Then how processor time, requests and seconds grow: with the power of the number of ranks that leads from the
smallest size to the largest one; 1 is linear. All ranks share the cores of one machine, so seconds are above those of a
cluster: what counts is how they grow.

Two things of torch are kept out, as 125 machines on one would measure nothing else. c10d asks DNS for the name of each
address that it connects to: where Linux lets it, all this runs in a network of its own, which has no DNS. And torch
elastic finds the name of its own function by `inspect.stack` whenever it tries to join, 20 ms of processor time or more
each: it is not asked for.

Usage: python -m bench.control_plane [--quick] [--rounds N] [--ranks N [N ...]] [--json FILE]
"""

import math
import multiprocessing as mp
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from bench.harness import parser, positive, progress, record
from lockstep.base.env import Launcher, RankEnv
from lockstep.comm import hierarchy, rendezvous, store, world
from lockstep.comm.store import InterNodeStore, StatusKeys
from lockstep.errors import WorldSizeMismatch
from lockstep.health.heartbeat import Heartbeat
from lockstep.health.rank_state import RankState
from lockstep.health.watchdog import Verdict, Watchdog
from lockstep.launcher.failure_report import NodeFailure, find_cause
from lockstep.launcher.node_rendezvous import RendezvousPerRestart
from lockstep.telemetry.figures import Snapshot
from lockstep.telemetry.record import Event
from lockstep.telemetry.recorder import Place, Recorder
from lockstep.telemetry.resources import Resources
from lockstep.telemetry.sinks import Subscriber

SIZES, QUICK_SIZES = (64, 256, 1000), (16, 64)
RANKS_A_MACHINE = 8
TIMEOUT_S = 60.0
PATIENCE_S = 5.0
"""Of ranks that wait for one that does not come; all others must have signed in by then."""
LIMIT_S = 120.0
"""No phase takes this long; one that does ends the benchmark, by its name."""
NUM_REPEATS = 5
"""Of phases that a job goes through again and again."""
SERVER = """
import socket, sys
from torch.distributed import TCPStore
listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
port = listener.getsockname()[1]
store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
print(port, flush=True)
sys.stdin.read()  # until all who could write there have ended
"""


# --- counting ---------------------------------------------------------------------------------------------------------


class Counted:
    """A ``PrefixStore`` that counts its requests; waiting for a key, and looking at a counter, are polls."""

    requests: ClassVar[Counter[str]] = Counter()

    def __init__(self, prefix: str, inner: Any) -> None:
        self.inner = dist.PrefixStore(prefix, inner.inner if isinstance(inner, Counted) else inner)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.inner, name)

        def call(*args: Any) -> Any:
            is_poll = (name == "check" and len(args[0]) == 1) or (name == "add" and args[1] == 0)
            Counted.requests["polls" if is_poll else "requests"] += 1
            return function(*args)

        return call


def taken() -> Counter[str]:
    """Return what this process has taken so far."""
    kib = psutil.Process().memory_info().rss // 1024
    return Counter(cpu_s=time.process_time(), kib=kib, **Counted.requests)


# --- a machine --------------------------------------------------------------------------------------------------------


class SimulatedGroup:
    """What a `World` asks a process group for."""

    group_name = "world"

    def name(self) -> str:
        """Return the backend's name."""
        return "simulated"


class LastSnapshot(Subscriber):
    """Keeps how many ranks were in the last snapshot."""

    num_ranks = 0

    def event(self, event: Event) -> None:
        """Do nothing."""

    def update(self, snapshot: Snapshot) -> None:
        """Take ``snapshot``."""
        self.num_ranks = len(snapshot.ranks)

    def close(self) -> None:
        """Do nothing."""


class Met:
    """What has brought launchers together, in the place of torch elastic's handler."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        shared = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
        self.found = RendezvousInfo(
            store.PrefixStore("elastic", shared), rank, size, RendezvousStoreInfo("127.0.0.1", 1)
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once."""
        return self.found


GROUP = SimulatedGroup()
LOCAL = threading.local()
FRAMES = [(f"/opt/python/site-packages/torch/nn/modules/module{line}.py", line, "_call_impl") for line in range(30)]


class _Machine:
    """The ranks of a machine and its launcher. A phase is a method; `PHASES` says what goes before it, unmeasured."""

    def __init__(self, node: int, size: int, port: int, folder: Path) -> None:
        self.node, self.size, self.port, self.folder = node, size, port, folder
        self.num_nodes = -(-size // RANKS_A_MACHINE)
        self.ranks = range(node * RANKS_A_MACHINE, min(size, (node + 1) * RANKS_A_MACHINE))
        self.joined: dict[int, tuple[RankEnv, rendezvous.Rendezvous]] = {}
        self.worlds: dict[int, world.World] = {}
        self.heartbeats: dict[int, Heartbeat] = {}
        self.recorders: dict[int, Recorder] = {}
        self.snapshot = LastSnapshot()

    def of_each_rank(self, work: Callable[[int], Any], ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """Return what ``work`` returns for each rank, each in a thread of its own; raises the first exception."""
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                if rank in self.joined:
                    LOCAL.store = self.joined[rank][1].store
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in (self.ranks if ranks is None else ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    # Ranks.

    def connect(self) -> None:
        def join(rank: int) -> tuple[RankEnv, rendezvous.Rendezvous]:
            place = rank, self.ranks.index(rank), self.size, len(self.ranks), self.node
            env = RankEnv(*place, "127.0.0.1", self.port, Launcher.TORCHRUN)
            return env, rendezvous.join_rendezvous(env, TIMEOUT_S)

        self.joined = self.of_each_rank(join)

    def sign_in(self, rank: int, timeout_s: float) -> None:
        """Do what `lockstep.init` does before it makes a process group."""
        _, met = self.joined[rank]
        rendezvous.check_membership(
            store.PrefixStore(f"{met.prefix}/members", met.store),
            rendezvous.Participant(rank, self.size, "gloo", f"machine{self.node}", 1000 + rank),
            deadline=time.monotonic() + timeout_s,
            timeout_s=timeout_s,
            is_host=rank == 0,
        )

    def meet(self) -> None:
        def start(rank: int) -> world.World:
            env, met = self.joined[rank]
            self.sign_in(rank, TIMEOUT_S)
            machines = hierarchy.find_machines(store.PrefixStore(f"{met.prefix}/group", met.store), rank, self.size)
            assert sum(map(len, machines)) == self.size
            made = world.World(env, torch.device("cpu"), GROUP, (met, ExitStack()))
            made.barrier()
            return made

        self.worlds = self.of_each_rank(start)

    def prepare_heartbeat(self) -> None:
        self.heartbeats = {rank: Heartbeat(str(self.folder), rank, patience_s=60.0) for rank in self.ranks}
        self.watchdog = Watchdog(
            self.folder,
            60.0,
            is_strict=False,
            num_nodes=self.num_nodes,
            store=InterNodeStore(f"127.0.0.1:{self.port}", "job"),
            resources=Resources(),
            on_report=lambda *_: True,
        )

    def heartbeat(self) -> None:
        for each in self.heartbeats.values():
            each.write()
        assert self.watchdog._check()

    def prepare_status(self) -> None:
        def make(rank: int) -> Recorder:
            recorder = Recorder(Place(rank, self.size), [torch.device("cpu")], Snapshot(num_steps=100))
            recorder.subscribe(self.snapshot)
            recorder.keys = StatusKeys(rank, self.size)
            return recorder

        self.recorders = self.of_each_rank(make)
        self.status()
        self.snapshot.num_ranks = 0

    def status(self) -> None:
        self.of_each_rank(lambda rank: self.recorders[rank].report())

    def finish_status(self) -> None:
        if self.node == 0:
            self.recorders[0].close()
            assert self.snapshot.num_ranks == self.size, self.snapshot.num_ranks

    def leave(self) -> None:
        self.of_each_rank(lambda rank: self.worlds[rank].close())

    def missing(self) -> None:
        lost = self.size - 1

        def wait_in_vain(rank: int) -> str:
            try:
                self.sign_in(rank, PATIENCE_S)
            except WorldSizeMismatch as error:
                return str(error).splitlines()[0]
            raise AssertionError("a rank was missing")

        told = set(self.of_each_rank(wait_in_vain, [rank for rank in self.ranks if rank != lost]).values())
        assert told <= {f"{lost} of {self.size} ranks came within {PATIENCE_S:g} s; missing: rank {lost}."}, told

    # The launcher.

    def hang(self) -> None:
        seen = [
            RankState(rank, frames=FRAMES, still_s=70.0, collective="all_reduce", is_stopped=rank == 1)
            for rank in self.ranks
        ]
        assert self.watchdog._shared is not None
        self.watchdog._shared._next_s = 0.0  # now, however many machines there are
        self.found = self.watchdog._judge(seen)

    def prepare_hang(self) -> None:
        self.hang()

    def finish_hang(self) -> None:
        assert self.found.verdict is Verdict.HANGS, self.found
        assert f"; ranks 0, 2-{self.size - 1} wait" in self.found.text, self.found
        assert "machines are known here" not in self.found.text, self.found

    def failure(self) -> None:
        mine = NodeFailure(self.ranks[0], self.node != 1, f"machine {self.node}")
        found = find_cause(InterNodeStore(f"127.0.0.1:{self.port}", "job"), mine, num_nodes=self.num_nodes)
        assert found.text == "machine 1", found

    def prepare_restart(self) -> None:
        self.side = RendezvousPerRestart("job", Met(self.node, self.num_nodes, self.port), lambda: False)
        self.side.num_restarts = self.node - 1

    def restart(self) -> None:
        self.side.next_rendezvous()
        assert self.side.num_restarts == self.num_nodes - 1

    def elastic(self) -> None:
        sizes, conf = (self.num_nodes, self.num_nodes), {"join_timeout": 300, "last_call_timeout": 1}
        where = "c10d", f"127.0.0.1:{self.port}", "job"
        inner = get_rendezvous_handler(RendezvousParameters(*where, *sizes, "127.0.0.1", is_host=0, **conf))
        self.handler = RendezvousPerRestart("job", inner, lambda: False)
        self.handler.next_rendezvous()

    # --- in its process

    def serve(self, orders: Connection, inherited: Sequence[Any]) -> None:
        """Run the phases that are asked for, and send what each took; end when nobody can ask any more."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
        for each in inherited:  # only the parent holds the other ends
            each.close()
        with suppress(EOFError, OSError):
            while True:
                phase = orders.recv()
                before, error = taken(), ""
                try:
                    getattr(self, phase)()
                except BaseException:
                    error = traceback.format_exc()
                after = taken()
                after.subtract(before)
                orders.send((error, dict(after)))
        os._exit(0)  # what threads there are does not matter


# --- all machines -----------------------------------------------------------------------------------------------------

# What goes before a phase and behind it, how often it is measured, and what of its seconds it is not to blame for.
PHASES: dict[str, dict[str, Any]] = {
    "connect": {},
    "meet": {},
    "heartbeat": {"before": ["prepare_heartbeat"], "repeats": NUM_REPEATS},
    "status": {"before": ["prepare_status"], "repeats": NUM_REPEATS, "behind": ["finish_status"]},
    "leave": {},
    "missing": {"before": ["connect"], "beyond_s": PATIENCE_S},
    # In the first rounds one becomes the judge.
    "hang": {"before": ["prepare_hang"] * 4, "repeats": NUM_REPEATS, "behind": ["finish_hang"]},
    "failure": {},
    "restart": {"before": ["prepare_restart"]},
    "elastic": {},
}
COLUMNS = {
    "seconds": "seconds",
    "cpu_ms": "cpu ms/rank",
    "store_ms": "store ms/rank",
    "requests": "requests/rank",
    "polls": "polls/rank",
    "kib": "KiB/rank",
    "store_kib": "store KiB/rank",
}


class Cluster:
    """So many ranks, within a ``with``: a process for each machine, and one for the store."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen([sys.executable, "-c", SERVER], **pipes)
        self._store = psutil.Process(self._server.pid)
        self._folder = tempfile.TemporaryDirectory()
        self._machines: dict[Any, Any] = {}

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._machines.values(), self._server):
            process.kill()
        for process in self._machines.values():
            process.join()
        self._server.communicate()
        self._folder.cleanup()

    def start(self) -> None:
        """Start all machines."""
        port = int(self._server.stdout.readline())
        for node in range(-(-self.num_ranks // RANKS_A_MACHINE)):
            ours, theirs = mp.Pipe()
            folder = Path(self._folder.name, str(node))
            folder.mkdir()
            machine = _Machine(node, self.num_ranks, port, folder)
            inherited = [ours, *self._machines, self._server.stdin]
            process = mp.get_context("fork").Process(target=machine.serve, args=(theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            self._machines[ours] = process

    def run(self, phase: str) -> Counter[str]:
        """Let all machines run ``phase``; return what that took of all of them together."""
        began_s, times, rss = time.perf_counter(), self._store.cpu_times(), self._store.memory_info().rss
        where = f"The phase {phase} of {self.num_ranks} ranks"
        total: Counter[str] = Counter()
        left = set(self._machines)
        for each in left:
            each.send(phase)
        while left:
            ready = wait(left, max(0.0, began_s + LIMIT_S - time.perf_counter()))
            if not ready:
                num_left = f"{len(left)} of {len(self._machines)} machines are not done"
                sys.exit(f"{where} takes more than {LIMIT_S:g} s: {num_left}.")
            for each in ready:
                try:
                    error, took = each.recv()
                except EOFError:
                    error, took = "Its process has ended.", {}
                if error:
                    sys.exit(f"{where} failed on a machine.\n{error}")
                total.update(took)
                left.discard(each)
        after = self._store.cpu_times()
        total["store_s"] = max(0.0, after.user + after.system - times.user - times.system)
        total["store_kib"] = (self._store.memory_info().rss - rss) // 1024
        total["seconds"] = time.perf_counter() - began_s
        return total


def simulate(num_ranks: int) -> dict[str, dict[str, float]]:
    """Return, by phase, the seconds that it took, and what it took of each rank."""
    found: dict[str, dict[str, float]] = {}
    with Cluster(num_ranks) as cluster:
        cluster.start()
        for phase in progress(list(PHASES), f"{num_ranks} ranks, phases"):
            about = PHASES[phase]
            for name in about.get("before", []):
                cluster.run(name)
            total: Counter[str] = Counter()
            repeats = about.get("repeats", 1)
            for _ in range(repeats):
                total.update(cluster.run(phase))
            for name in about.get("behind", []):
                cluster.run(name)
            each = {name: total[name] / repeats / num_ranks for name in ("requests", "polls", "kib", "store_kib")}
            each |= {f"{name}_ms": total[f"{name}_s"] * 1e3 / repeats / num_ranks for name in ("cpu", "store")}
            found[phase] = {"seconds": total["seconds"] / repeats - about.get("beyond_s", 0.0), **each}
            print(line(phase, num_ranks, found[phase]), file=sys.stderr)
    return found


def line(phase: str, num_ranks: int, found: dict[str, float]) -> str:
    return f"{phase:<10}{num_ranks:>6}" + "".join(f"{found[name]:>16.2f}" for name in COLUMNS)


def growth(by_size: dict[int, dict[str, dict[str, float]]], phase: str) -> dict[str, float]:
    """Return the powers of the number of ranks with which a phase grows, from the smallest size to the largest one."""
    small, large = min(by_size), max(by_size)

    def power(value: Callable[[dict[str, float]], float]) -> float:
        first, last = (value(by_size[size][phase]) for size in (small, large))
        return math.log(last / first) / math.log(large / small) if min(first, last) > 0 and small < large else math.nan

    return {
        "seconds": power(lambda each: each["seconds"]),
        "processor time": 1 + power(lambda each: each["cpu_ms"] + each["store_ms"]),
        "requests": 1 + power(lambda each: each["requests"]),
    }


def show(by_size: dict[int, dict[str, dict[str, float]]]) -> None:
    print(f"\nMedians\n{'':<10}{'ranks':>6}" + "".join(f"{name:>16}" for name in COLUMNS.values()))
    for phase in PHASES:
        for size, phases in by_size.items():
            print(line(phase, size, phases[phase]))
    print(f"\nGrowth from {min(by_size)} to {max(by_size)} ranks, as a power of their number; 1 is linear")
    for phase in PHASES:
        print(f"{phase:<10}" + "".join(f"   {name} {value:.2f}" for name, value in growth(by_size, phase).items()))


@contextmanager
def patched() -> Iterator[None]:
    """Count requests, and give each thread the store of its rank, as each rank is a process otherwise."""
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, environment))
        for module in (rendezvous, hierarchy, store, world):
            if hasattr(module, "PrefixStore"):
                stack.enter_context(patch.object(module, "PrefixStore", Counted))
        for module in (store, world):
            stack.enter_context(patch.object(module, "default_store", lambda: LOCAL.store))
        stack.enter_context(patch.object(dynamic_rendezvous, "get_method_name", lambda depth=2: "join"))
        yield


def leave_network() -> None:
    """Start again in a network without DNS; do nothing where that is not allowed."""
    unshare, mark = ["unshare", "--net", "--map-root-user", "sh", "-c"], "LOCKSTEP_BENCH_NETWORK"
    if mark in os.environ:
        return
    with suppress(OSError):  # no such program
        if subprocess.run([*unshare, "ip link set lo up"], capture_output=True, check=False).returncode == 0:
            # c10d warns of each name that it does not get.
            os.environ |= {mark: "own", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            command = [sys.executable, "-m", "bench.control_plane", *sys.argv[1:]]
            os.execvp("unshare", [*unshare, 'ip link set lo up && exec "$@"', "sh", *command])
    print("No network of its own: c10d asks DNS for names, which may take seconds in any phase.")


def main() -> None:
    made = parser(__doc__, rounds=3, meaning="simulations of each size")
    made.add_argument("--ranks", type=positive, nargs="+", metavar="N", help=f"sizes {SIZES}")
    options = made.parse_args()
    leave_network()
    threading.stack_size(256 * 1024)

    def measure() -> dict[str, Any]:
        sizes, num_rounds = (QUICK_SIZES, 1) if options.quick else (SIZES, options.rounds)
        sizes = options.ranks or sizes
        rounds: dict[int, list[dict[str, dict[str, float]]]] = defaultdict(list)
        with patched():
            for _ in range(num_rounds):
                for size in sizes:
                    rounds[size].append(simulate(size))
        medians = {
            size: {
                phase: {name: statistics.median(each[phase][name] for each in found) for name in COLUMNS}
                for phase in PHASES
            }
            for size, found in rounds.items()
        }
        show(medians)
        return {
            "ranks": {str(size): found for size, found in rounds.items()},
            "growth": {phase: growth(medians, phase) for phase in PHASES},
        }

    record(options.json, measure)


if __name__ == "__main__":
    main()
