"""The jobs of bench/recovery.py: the contenders' processes, and what their ranks have logged."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

LOOPS = Path(__file__).with_name("recovery_loops.py")
TIMEOUT_S, WAIT_S, POLL_S = 180.0, 60.0, 0.02
RESTARTS = "100000"
WHOLE = 0.999  # a sum of shares
LOCKSTEP = [sys.executable, "-m", "lockstep", "run", "--max-restarts", RESTARTS]


@dataclass(frozen=True)
class Contender:
    """A way to go on after a loss.

    Args:
        loop: In bench/recovery_loops.py.
        start_s: How long it takes to make the model.
        ranks: How many.
        flags: Of the launcher.
        deaths: How many a job of `seconds` may have.
        spares: How many processes wait for a death.
    """

    loop: str
    start_s: float = 0.0
    ranks: int = 2
    flags: tuple[str, ...] = ()
    deaths: int = 3
    spares: int = 0

    def absent(self) -> str | None:
        """Return why it cannot be measured here."""
        if self.loop == "torchft" and importlib.util.find_spec("torchft") is None:
            return "torchft is not installed"
        known = launcher_help() if self.flags else ""
        missing = [flag for flag in self.flags if flag.startswith("--") and flag not in known]
        return f"this `lockstep run` has no {missing[0]}" if missing else None


SLOW_S = 20.0
SPARES, FEWER = ("--spares", "3"), ("--min-devices", "1")
CONTENDERS = {
    "ours, script": Contender("in-place"),
    "ours, fit": Contender("fit"),
    "ours, a spare": Contender("in-place", flags=SPARES, spares=3),
    "ours, fewer ranks": Contender("in-place", flags=FEWER, deaths=1),
    "ours, restart": Contender("restart"),
    "torchrun, restart": Contender("torch"),
    "torchft": Contender("torchft"),
}
SLOW = {
    "ours, a new rank": Contender("in-place", SLOW_S),
    "ours, a spare": Contender("in-place", SLOW_S, flags=SPARES, spares=3),
    "ours, fewer ranks": Contender("in-place", SLOW_S, flags=FEWER, deaths=1),
    "torchrun, restart": Contender("torch", SLOW_S),
    "torchft": Contender("torchft", SLOW_S),
}
"""With a start of 20 s."""
STOP = threading.Event()
"""Ends the waits of all threads."""


@dataclass(frozen=True)
class Event:
    """A line of bench/recovery_loops.py."""

    at_s: float
    what: str
    rank: int
    pid: int
    step: int
    share: float

    @classmethod
    def of(cls, line: str) -> "Event":
        """Read a line."""
        at_s, what, rank, pid, step, share = line.split()
        return cls(float(at_s), what, int(rank), int(pid), int(step), float(share))


def whole_steps(events: Iterable[Event]) -> dict[int, float]:
    """Return when each step was done on the whole batch, by all ranks that share it."""
    shares: dict[int, dict[int, float]] = defaultdict(dict)
    whole: dict[int, float] = {}
    for event in events:
        if event.what == "done":
            shares[event.step][event.rank] = event.share
            if sum(shares[event.step].values()) > WHOLE:
                whole.setdefault(event.step, event.at_s)
    return whole


class Job:
    """A contender's processes, with a folder of their own."""

    def __init__(self, commands: list[list[str]], folder: Path, **environ: str) -> None:
        self.folder, self.events = folder, list[Event]()
        (folder / "log").touch()
        self._log = (folder / "log").open()
        self._rest = ""
        self._shares: dict[int, dict[int, float]] = defaultdict(dict)
        self._newest = 0
        self._pids: dict[int, int] = {}
        self.processes = []
        for number, command in enumerate(commands):
            own = {"REPLICA_GROUP_ID": str(number - 1)} if "NUM_REPLICA_GROUPS" in environ else {}
            with (folder / f"output-{number}").open("w") as output:
                env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environ, **own}
                pipes = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
                self.processes.append(subprocess.Popen(command, env=env, **pipes))  # type: ignore[call-overload]

    @property
    def output(self) -> str:
        """What the launchers have printed."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("output-*")))

    def read(self) -> list[Event]:
        """Return all events so far."""
        *lines, self._rest = (self._rest + self._log.read()).split("\n")
        for event in map(Event.of, lines):
            self.events.append(event)
            if event.what in ("start", "done"):
                self._pids[event.rank] = event.pid
            if event.what == "done":
                self._shares[event.step][event.rank] = event.share
                if sum(self._shares[event.step].values()) > WHOLE:
                    self._newest = max(self._newest, event.step)
        return self.events

    def wait(self, is_reached: Callable[[], Any], limit_s: float = WAIT_S) -> Any:
        """Wait until something is true of the events, and return it."""
        deadline = time.monotonic() + limit_s
        while not (found := is_reached()):
            if (
                STOP.is_set()
                or time.monotonic() > deadline
                or any(process.poll() is not None for process in self.processes)
            ):
                raise RuntimeError(f"The job ended, or took more than {limit_s:g} s:\n{self.output[-4000:]}")
            time.sleep(POLL_S)
        return found

    def sleep(self, seconds: float) -> None:
        """Wait so long, if the job goes on."""
        end_s = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= end_s, max(seconds, 0.0) + WAIT_S)

    def newest(self) -> int:
        """Return the newest step that was done on the whole batch."""
        self.read()
        return self._newest

    def alive(self) -> dict[int, int]:
        """Return the processes of the ranks that run, as they have logged them."""
        self.read()
        return {rank: pid for rank, pid in self._pids.items() if psutil.pid_exists(pid)}

    def end(self) -> None:
        """End all its processes."""
        self._log.close()
        found = list(self.processes)
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(process.pid).children(recursive=True)
            process.terminate()
        for process in found:
            with contextlib.suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self.processes:
            process.wait()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def launcher_help() -> str:
    return subprocess.run([sys.executable, "-m", "lockstep", "run", "--help"], capture_output=True, text=True).stdout


@contextlib.contextmanager
def job(contender: Contender, ranks: int, *more: str, pause_s: float) -> Iterator[Job]:
    """Start a job; end it afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as name:
        words = [name, "--pause", str(pause_s), "--build", str(contender.start_s), *more]
        script = [str(LOOPS), contender.loop, *words]
        environ = {}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", RESTARTS]
        if contender.loop == "torchft":
            port = free_port()
            environ = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "NUM_REPLICA_GROUPS": str(ranks)}
            lighthouse = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"[::]:{port}"]
            limits = ["--quorum_tick_ms", "100", "--join_timeout_ms", "10000", "--heartbeat_timeout_ms", "1000"]
            one = ["--nnodes", "1", "--nproc-per-node", "1", "--master-port"]
            groups = [[*torchrun, *one, free_port(), *script] for _ in range(ranks)]
            commands = [[*lighthouse, "--min_replicas", "1", *limits], *groups]
        elif contender.loop == "torch":
            commands = [[*torchrun, "--standalone", "--nproc-per-node", str(ranks), *script]]
        else:
            commands = [[*LOCKSTEP, "--devices", str(ranks), *contender.flags, *script]]
        made = Job(commands, Path(name), **environ)
        try:
            yield made
        finally:
            made.end()


def present(contenders: Mapping[str, Contender], names: Collection[str]) -> dict[str, Contender]:
    """Return the contenders that can be measured; print a line about each other one."""
    found = {}
    for name, contender in contenders.items():
        if name in names and (why := contender.absent()):
            print(f"  {name} is left out: {why}")
        elif name in names:
            found[name] = contender
    return found
