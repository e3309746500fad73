"""What it takes to start, watch, restart and end hundreds of ranks, without training: 64, 256 and 1,000 of them.

Each rank is a thread with a connection of its own to a real store of c10d, which a process of its own serves as the
first machine's launcher does. Eight ranks are a machine, with a launcher: another thread. They run Lockstep's own code:

    connect      ranks open their connections to the store
    meet         they sign in, learn that all have come, and on which machines; then a barrier
    status       every rank posts its figures, and rank zero reads those of all; a beat
    missing      one rank does not come: all others raise an error that names it, from the end of their patience on
    hang         launchers exchange what they see of ranks that stand still; a round
    failure      launchers tell each other how the job ended on their machine
    restart      launchers agree on the number of restarts
    elastic      torch elastic's own rendezvous of the launchers, with the store that ranks get then
    leave        all ranks leave, rank zero last

By number of ranks: seconds until the last is done; processor time of all ranks together and of the store's process, a
rank; requests to the store, a rank (and polls, which depend on how long one waits); what memory grew by, a rank. All
ranks share the cores of one machine and one interpreter here, so seconds are far above those of a cluster: what counts
is how they grow.

Usage: python -m bench.control_plane [--quick] [--rounds N] [--ranks N [N ...]] [--json FILE]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from bench.harness import parser, positive, record
from lockstep.comm import hierarchy, rendezvous, store, world
from lockstep.comm.store import InterNodeStore, StatusKeys
from lockstep.env import Launcher, RankEnv
from lockstep.errors import WorldSizeMismatch
from lockstep.launcher.failure_report import NodeFailure, exchange_failures
from lockstep.launcher.node_rendezvous import RendezvousPerRestart
from lockstep.telemetry.metrics import RankFigures
from lockstep.telemetry.rank_state import RankState
from lockstep.telemetry.resources import Resources
from lockstep.telemetry.watchdog import Watchdog

SIZES, QUICK_SIZES = (64, 256, 1000), (16, 64)
RANKS_A_MACHINE = 8
TIMEOUT_S = 60.0
PATIENCE_S = 5.0
"""Of ranks that wait for one that does not come; all others must have signed in by then."""
SERVER = """
import signal, socket
from torch.distributed import TCPStore
listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
port = listener.getsockname()[1]
store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
print(port, flush=True)
signal.pause()
"""
PHASES = ("connect", "meet", "status", "missing", "hang", "failure", "restart", "elastic", "leave")


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


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


class Meter:
    """Measures what all ranks together take for a phase."""

    def __init__(self, server: psutil.Process, num_ranks: int) -> None:
        self.server, self.num_ranks = server, num_ranks
        self.phases: dict[str, dict[str, float]] = {}

    def server_s(self) -> float:
        """Return the processor time of the store's process."""
        times = self.server.cpu_times()
        return float(times.user + times.system)

    @contextmanager
    def phase(self, name: str, *, repeats: int = 1, beyond_s: float = 0.0) -> Iterator[None]:
        """Measure what runs within."""
        Counted.requests.clear()
        wall_s, cpu_s, server_s, before = time.perf_counter(), time.process_time(), self.server_s(), resident_bytes()
        yield
        share = 1 / repeats / self.num_ranks
        self.phases[name] = {
            "seconds": (time.perf_counter() - wall_s - beyond_s) / repeats,
            "cpu_ms_a_rank": 1e3 * share * (time.process_time() - cpu_s),
            "store_ms_a_rank": 1e3 * share * (self.server_s() - server_s),
            "requests_a_rank": share * Counted.requests["requests"],
            "polls_a_rank": share * Counted.requests["polls"],
            "kib_a_rank": share * (resident_bytes() - before) / 1024,
        }


def all_at_once(work: Callable[[int], Any], count: int) -> list[Any]:
    """Return what ``work`` returns for each number, each in a thread of its own; raises the first exception."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def one(index: int) -> None:
        try:
            results[index] = work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


# --- ranks ------------------------------------------------------------------------------------------------------------


class SimulatedGroup:
    """What a `World` asks a process group for."""

    group_name = "world"

    def name(self) -> str:
        """Return the backend's name."""
        return "simulated"


GROUP = SimulatedGroup()
LOCAL = threading.local()


def env_of(rank: int, size: int, port: int) -> RankEnv:
    node, local_rank = divmod(rank, RANKS_A_MACHINE)
    return RankEnv(rank, local_rank, size, RANKS_A_MACHINE, node, "127.0.0.1", port, Launcher.TORCHRUN)


def connect(rank: int, size: int, port: int) -> tuple[RankEnv, rendezvous.Rendezvous]:
    env = env_of(rank, size, port)
    return env, rendezvous.join_rendezvous(env, TIMEOUT_S)


def sign_in(env: RankEnv, met: rendezvous.Rendezvous, timeout_s: float) -> None:
    """Do what `lockstep.init` does before it makes a process group."""
    rank, size = env.rank, env.world_size
    rendezvous.check_membership(
        store.PrefixStore(f"{met.prefix}/members", met.store),
        rendezvous.Participant(rank, size, "gloo", f"machine{env.node_rank}", 1000 + rank),
        deadline=time.monotonic() + timeout_s,
        timeout_s=timeout_s,
        is_host=rank == 0,
    )


def meet(env: RankEnv, met: rendezvous.Rendezvous) -> world.World:
    sign_in(env, met, TIMEOUT_S)
    prefixed = store.PrefixStore(f"{met.prefix}/group", met.store)
    hierarchy.find_machines(prefixed, env.rank, env.world_size)
    LOCAL.store = met.store
    made = world.World(env, torch.device("cpu"), GROUP, (met, ExitStack()))  # type: ignore[arg-type]
    made.barrier()
    return made


def wait_in_vain(env: RankEnv, met: rendezvous.Rendezvous) -> str:
    try:
        sign_in(env, met, PATIENCE_S)
    except WorldSizeMismatch as error:
        return str(error).splitlines()[0]
    raise AssertionError("a rank was missing")


def status_round(keys: Sequence[StatusKeys]) -> int:
    for rank, each in enumerate(keys):
        note = asdict(RankFigures(rank=rank, host=f"machine{rank // 8}", device="cuda:0", step=100, num_steps=10))
        if rank:
            each.post([1, note])
    return len(keys[0].read())


# --- launchers --------------------------------------------------------------------------------------------------------


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


def frames(depth: int = 30) -> list[tuple[str, int, str]]:
    return [
        (f"/opt/python/site-packages/torch/nn/modules/module{line}.py", line, "_call_impl") for line in range(depth)
    ]


def watchdog_of(node: int, num_nodes: int, port: int, folder: Path) -> Watchdog:
    return Watchdog(
        folder,
        60.0,
        is_strict=False,
        num_nodes=num_nodes,
        store=InterNodeStore(f"127.0.0.1:{port}", "job"),
        resources=Resources(),
        on_report=lambda *_: True,
        on_slow=lambda _: None,
    )


def exchange(watchdog: Watchdog, node: int) -> int:
    ranks = range(node * RANKS_A_MACHINE, (node + 1) * RANKS_A_MACHINE)
    seen = [RankState(rank, frames=frames(), still_s=50.0, collective="all_reduce", has_trained=True) for rank in ranks]
    return len(watchdog._with_other_machines(seen)[0])


def elastic(node: int, num_nodes: int, port: int) -> RendezvousPerRestart:
    conf = {"join_timeout": 300, "last_call_timeout": 1}
    inner = get_rendezvous_handler(
        RendezvousParameters("c10d", f"127.0.0.1:{port}", "job", num_nodes, num_nodes, "127.0.0.1", is_host=0, **conf)
    )
    made = RendezvousPerRestart("job", inner)
    made.next_rendezvous()
    return made


# --- all of it --------------------------------------------------------------------------------------------------------


def simulate(num_ranks: int, folder: Path, *, num_beats: int) -> dict[str, dict[str, float]]:
    num_nodes = -(-num_ranks // RANKS_A_MACHINE)
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline())
            meter = Meter(psutil.Process(server.pid), num_ranks)
            with meter.phase("connect"):
                joined = all_at_once(lambda rank: connect(rank, num_ranks, port), num_ranks)
            with meter.phase("meet"):
                worlds = all_at_once(lambda rank: meet(*joined[rank]), num_ranks)

            def keys_of(rank: int) -> StatusKeys:
                LOCAL.store = worlds[rank]._owned[0].store
                return StatusKeys(worlds[rank], num_ranks)

            keys = all_at_once(keys_of, num_ranks)
            status_round(keys)  # connects
            with meter.phase("status", repeats=num_beats):
                for _ in range(num_beats):
                    assert status_round(keys) == num_ranks - 1
            with meter.phase("leave"):
                all_at_once(lambda rank: worlds[rank].close(), num_ranks)

            joined = all_at_once(lambda rank: connect(rank, num_ranks, port), num_ranks - 1)
            with meter.phase("missing", beyond_s=PATIENCE_S):
                causes = all_at_once(lambda rank: wait_in_vain(*joined[rank]), num_ranks - 1)
            assert set(causes) == {
                f"{num_ranks - 1} of {num_ranks} ranks came within {PATIENCE_S:g} s; missing: rank {num_ranks - 1}."
            }, set(causes)

            watchdogs = [watchdog_of(node, num_nodes, port, folder) for node in range(num_nodes)]
            all_at_once(lambda node: exchange(watchdogs[node], node), num_nodes)
            for each in watchdogs:
                each._next_exchange_s = 0.0
            with meter.phase("hang"):
                seen = all_at_once(lambda node: exchange(watchdogs[node], node), num_nodes)
            assert set(seen) == {num_nodes * RANKS_A_MACHINE}
            notes = [NodeFailure(node * RANKS_A_MACHINE, node != 1, f"machine {node}") for node in range(num_nodes)]
            with meter.phase("failure"):
                found = all_at_once(
                    lambda node: exchange_failures(watchdogs[node]._store, notes[node], num_nodes=num_nodes), num_nodes
                )
            assert {len(each) for each in found} == {num_nodes - 1}
            sides = all_at_once(lambda node: RendezvousPerRestart("job", Met(node, num_nodes, port)), num_nodes)
            all_at_once(lambda node: sides[node].next_rendezvous(), num_nodes)
            with meter.phase("restart"):
                assert set(all_at_once(lambda node: sides[node].agree_on_restarts(node), num_nodes)) == {num_nodes - 1}
            with meter.phase("elastic"):
                handlers = all_at_once(lambda node: elastic(node, num_nodes, port), num_nodes)
            for handler in handlers:
                handler._inner._stop_heartbeats()
            return meter.phases
        finally:
            server.kill()


def show(by_size: dict[int, dict[str, dict[str, float]]]) -> None:
    columns = ("seconds", "cpu_ms_a_rank", "store_ms_a_rank", "requests_a_rank", "polls_a_rank", "kib_a_rank")
    print(f"\n{'':<10}{'ranks':>6}" + "".join(f"{name:>17}" for name in columns))
    for phase in PHASES:
        for size, phases in by_size.items():
            print(f"{phase:<10}{size:>6}" + "".join(f"{phases[phase][name]:>17.2f}" for name in columns), flush=True)


def run_one(num_ranks: int, num_beats: int) -> dict[str, dict[str, float]]:
    """Simulate in a new process, whose memory is not that of the one before."""
    code = f"from bench.control_plane import child; child({num_ranks}, {num_beats})"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(num_ranks: int, num_beats: int) -> None:
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    threading.stack_size(256 * 1024)
    modules = (rendezvous, hierarchy, store, world)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for module in modules:
            if hasattr(module, "PrefixStore"):
                stack.enter_context(patch.object(module, "PrefixStore", Counted))
        stack.enter_context(patch.object(dist.distributed_c10d, "_get_default_store", lambda: LOCAL.store))
        print(json.dumps(simulate(num_ranks, Path(folder), num_beats=num_beats)))


def main() -> None:
    made = parser(__doc__, rounds=3, meaning="simulations of each size")
    made.add_argument("--ranks", type=positive, nargs="+", metavar="N", help=f"sizes {SIZES}")
    options = made.parse_args()

    def measure() -> dict[str, Any]:
        sizes, num_rounds = (QUICK_SIZES, 1) if options.quick else (SIZES, options.rounds)
        sizes = options.ranks or sizes
        rounds: dict[int, list[dict[str, dict[str, float]]]] = defaultdict(list)
        for _ in range(num_rounds):
            for size in sizes:
                rounds[size].append(run_one(size, 2 if options.quick else 5))
        medians = {
            size: {
                phase: {name: statistics.median(each[phase][name] for each in found) for name in found[0][phase]}
                for phase in PHASES
            }
            for size, found in rounds.items()
        }
        show(medians)
        return {"ranks": {str(size): found for size, found in rounds.items()}}

    record(options.json, measure)


if __name__ == "__main__":
    main()
