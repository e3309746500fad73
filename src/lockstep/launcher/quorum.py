"""The machines of a job as members of a quorum, so that a lost rank or machine costs the others one step.

[Note: machines]
On one machine the launcher decides who is in the next generation (comm/generations.py); on several, the launchers have
to agree. torchft's lighthouse is the service for that. Each launcher sends it heartbeats, and asks it for a quorum:
twice a second, and at once when a rank was lost or ranks report that their groups are broken. The answer comes when all
machines whose heartbeats arrive have asked. It lists them with what each says about itself, and is the same for all. So
each launcher computes from it alone, with `next_generation`, whether there is a next generation, and its number, ranks
and store. A launcher that an answer does not reach is left out: its next request shows an old generation.

- A machine that is lost sends no heartbeats: after the timeout the answer comes without it.
- A machine that comes back, or whose ranks are started again after an error of the program, finds the lighthouse's
  address in the store of the rendezvous. It starts its ranks, each with a group of its own, and asks for the first time
  when they are ready, so nobody waits for it.
- Heartbeats are a lease: a launcher whose own have not been answered for the timeout ends its ranks, as the others may
  have gone on without them, and joins again. So do the launchers of the others if the first machine, which serves the
  lighthouse, starts its own ranks again. A machine that serves it keeps its ranks: nobody goes on without it.
- There are no more machines than MAX of ``--nnodes``. One too many waits for a place, as with torch elastic. If it was
  given a place (``--node-rank``) that another launcher has, it ends: both may be on the same devices.
- Each start of a job has a lighthouse with a name of its own (`Lighthouse.job`).
- The first generation, number 0, is that of the rendezvous. It counts once all its machines have asked. If one is lost
  before that, the others wait for it as long as for heartbeats, and go on without it.
- When the ranks of all machines have ended, a machine that still would join ends, too.

Source: torchft (https://github.com/meta-pytorch/torchft), whose managers use the lighthouse in the same way.
"""

import ipaddress
import math
import os
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousGracefulExitError

from lockstep.base import rank_files
from lockstep.base.activity import format_ranks, log
from lockstep.base.env import machine_timeout_s
from lockstep.comm.rendezvous import poll_until
from lockstep.comm.store import InterNodeStore, start_store_server
from lockstep.errors import ConfigurationError, LockstepError

_TOPIC = "lighthouse"
# How often to ask without a reason, and how soon a reason is noticed.
_PERIOD_S, _NOTICE_S = 0.5, 0.05
# How often to look for the lighthouse, and whether the ranks are ready, at the start.
_SEARCH_S = 0.2
# How long a machine waits until the others take it in, or go on with it after a loss.
_PATIENCE_S = 60.0
# How long a machine waits at the end for the others; torch elastic's default.
_END_S = 300.0
# How long the server of the lighthouse stays, so that its last answer arrives.
_FAREWELL_S = 0.2
_STORE_TIMEOUT_S = 600.0
# Names this launcher. Who has taken a place last is in the board: the start and the generation, negative, and its name.
_LAUNCHER, _BY_NEWEST = uuid.uuid4().hex, itemgetter(0, 1)
_WITHOUT = (
    "if a rank is lost, the ranks of all machines start again: to go on in place, the machines need torchft, which is "
    'not installed (pip install "lockstep-torch[recovery]")'
)


class Member(NamedTuple):
    """A machine as it describes itself when it asks for a quorum.

    Attributes:
        name: Unique in the job.
        store: Host and port of its store.
        number: The generation of its ranks; -1: none yet.
        num_ranks: The number of its ranks.
        of: The digest of the machines of that generation; of a machine that joins, empty.
        place: Orders the machines; None: the first place that is free.
        most: How many machines the job may have.
        host: The name of the machine, for the user.
        is_broken: Whether its ranks need a next generation.
        is_done: Whether its ranks have ended.
    """

    name: str
    store: str
    number: int
    num_ranks: int
    of: str
    place: int | None
    most: int
    host: str
    is_broken: bool
    is_done: bool


def digest(names: Sequence[str]) -> str:
    """Return a short text that identifies a set of machines."""
    return f"{len(names)}:{zlib.crc32(' '.join(sorted(names)).encode()):08x}"


def admitted(machines: Sequence[Member]) -> list[Member]:
    """Return the machines that may be in the next generation, each with its place, in the order of their ranks.

    The others went on without a machine with an older generation: it comes again, with other ranks. A machine that
    joins waits as long as its place, or every place, is taken.
    """
    newest = max(machine.number for machine in machines)
    most = min((machine.most for machine in machines if machine.of), default=0)  # else nobody holds the state
    placed: dict[int, Member] = {}
    # Whoever is in the newest generation keeps its place; then who began the job, then who joins.
    for machine in sorted(machines, key=lambda entry: (-entry.number, not entry.of, entry.name)):
        free = next((number for number in range(most) if number not in placed), most)
        place = free if machine.place is None else machine.place
        if machine.number in (-1, newest) and place < most and place not in placed:
            placed[place] = machine._replace(place=place)
    return [placed[place] for place in sorted(placed)]


def next_generation(machines: Sequence[Member]) -> tuple[int, list[Member]] | None:
    """Return the next generation and its machines in the order of their ranks; None: the present one goes on."""
    members, newest = admitted(machines), max(machine.number for machine in machines)
    of = digest([machine.name for machine in members])
    is_same = all(machine.of == of for machine in members)
    if newest < 0:
        # The ranks are in generation 0 already, but not all launchers may have asked yet. They are waited for until the
        # ranks of the launchers that have cannot go on.
        began = [machine for machine in members if machine.of]
        goes_on = not (began and (is_same or all(machine.is_broken for machine in began)))
    else:
        goes_on = is_same and not any(machine.is_broken for machine in members)
    if goes_on or any(machine.is_done for machine in machines):
        return None
    return 0 if newest < 0 and is_same else max(newest, 0) + 1, members


class Lighthouse(NamedTuple):
    """Where the machines of a running job agree, as the first of them has written it for the others.

    Attributes:
        start: How often the ranks of the job had been started.
        address: Of the server.
        job: Identifies this start of the job; begins the names of the machines.
        is_served: Whether a launcher of the job serves it.
        have_met: Whether the machines have come together: another one need not come to the rendezvous.
    """

    start: int
    address: str
    job: str
    is_served: bool
    have_met: bool = False


def running_job(board: InterNodeStore) -> Lighthouse | None:
    """Return the lighthouse of the job whose machines meet in the store of ``board``; None if there is none."""
    lighthouses = []
    for note in board.others(_TOPIC).values():
        with suppress(TypeError):  # None: the job was restarted
            lighthouses.append(Lighthouse(*note))
    return max(lighthouses, default=None)


def has_begun(board: InterNodeStore) -> bool:
    """Return whether a job has had a lighthouse since the store of ``board`` was made."""
    return board.count(f"{_TOPIC}/count") > 0


@dataclass(eq=False)
class Machines:
    """This machine as a member of the quorum of the job; see [Note: machines].

    Args:
        folder: The launcher's.
        pids: The processes of the ranks of this machine, in their order.
        board: The store in which the machines met.
        address: At which others reach this machine.
        place: The index of this machine; None if the job decides.
        num_machines: That began together with this one, which is one of them.
        min_machines: The ranks wait while there are fewer.
        max_machines: Another one waits for a place.
        start: How often the ranks of the job were started.
        lighthouse: ``HOST:PORT`` of a lighthouse to use; None: the first machine serves one.
        joins: The running job that this machine joins.

    Attributes:
        number: The generation; -1: the machines have not come together.
        found: The lighthouse that it uses.
    """

    folder: Path
    pids: list[int]
    board: InterNodeStore
    address: str
    place: int | None
    num_machines: int
    min_machines: int
    max_machines: int
    start: int
    lighthouse: str | None = None
    joins: Lighthouse | None = None
    number: int = -1

    def __post_init__(self) -> None:
        self.found = self.joins
        # Whether the first machine has started the job once more, without this one.
        self._is_behind = False
        # Since when this machine waits for a place.
        self._waits_since_s = math.inf
        self._store: Any = None
        self._server: Any = None
        self._library: Any = None
        self._name, self._of = "", ""
        self._members: dict[str, Member] = {}
        self._answer: list[Member] = []
        self._is_done = False
        # Why the present generation cannot go on: since when, and how a rank of this machine was lost, if one was.
        self._lost_at_ns, self._why = 0, ""
        # When a heartbeat that was answered was sent; before the first, nothing is expected.
        self._alive_at_s = math.inf
        self._lock, self._ends, self._wake = threading.Lock(), threading.Event(), threading.Event()

    # --- the launcher's main thread -----------------------------------------------------------------------------------

    def poll(self) -> str | None:
        """Take part from now on if the ranks can go on in place; return why they have to end and join again.

        Raises:
            RendezvousClosedError: The ranks of all machines of the job that this one would join have ended.
            RendezvousGracefulExitError: The same, and it has waited for a place.
            LockstepError: Another launcher has the place that this one was given.
        """
        if self._library is None:  # while the ranks start
            self._library = _torchft()
            threading.Thread(target=self._run, name="lockstep-quorum", daemon=True).start()
        with self._lock:
            if self._is_broken:  # not when it is asked for: a request may wait for a machine that is lost
                self._lost_at_ns = self._lost_at_ns or time.time_ns()
        limit_s, is_outside = machine_timeout_s(), self.joins is not None and self.number < 0
        # A lighthouse of the cluster may be away for a while: nothing is lost as long as the ranks reach each other.
        is_needed = is_outside or self._is_broken or (self.found is not None and self.found.is_served)
        if self._is_silent and is_needed and self._server is None:
            return f"this machine has not reached the others for {limit_s:g} s; its ranks end, and join again"
        if self._is_left_out or self._is_behind:
            return "the other machines went on without this one; its ranks end, and it joins again"
        if self._lost_at_ns and time.time_ns() - self._lost_at_ns > _PATIENCE_S * 1e9:
            return f"the other machines did not go on with this one within {_PATIENCE_S:g} s"
        if is_outside and self._are_done:
            raise RendezvousClosedError if self._waits_since_s == math.inf else RendezvousGracefulExitError
        # Not at once: it may be the one that this launcher had before it was cut off.
        if self.place is not None and time.monotonic() - self._waits_since_s > 2 * limit_s:
            raise self._is_taken
        return None

    def have_met(self) -> bool:
        """Return whether all machines take part; wait some seconds for that if the ranks have just become ready."""
        return poll_until(lambda: self.number >= 0, machine_timeout_s() * self._is_ready(), _NOTICE_S)

    def replaced(self, pids: list[int], at_ns: int, why: str) -> None:
        """Ask for a next generation, as a rank of this machine was lost and ``pids`` are its processes now."""
        with self._lock:
            self.pids, self._lost_at_ns, self._why = pids, at_ns, why
        self._wake.set()

    def finish(self) -> None:
        """Wait until the ranks of all machines have ended, as the others may use the store of this one."""
        self._is_done = True
        self._wake.set()
        poll_until(lambda: self._are_done or self._is_silent, _END_S, _NOTICE_S)
        if self._server is not None:
            time.sleep(_FAREWELL_S)

    def check_place(self, board: InterNodeStore) -> None:
        """Raise LockstepError if another launcher has taken the place that this one had."""
        holder = board.least(f"place/{self.place}", _BY_NEWEST) if self.number >= 0 else None
        if holder is not None and holder[-1] != _LAUNCHER:
            raise self._is_taken

    def close(self) -> None:
        """Leave: the next heartbeats of this machine do not come."""
        with self._lock:
            self._ends.set()
            if self.found is not None and self._is_first:
                self.board.post(_TOPIC, None)
            self._server = self._store = None

    # --- the state ----------------------------------------------------------------------------------------------------

    @property
    def _is_first(self) -> bool:
        """Whether this machine tells the others where the lighthouse is."""
        return self.place == 0 and self.joins is None

    @property
    def _is_broken(self) -> bool:
        """Whether the ranks of this machine need a next generation."""
        return bool(self._why) or rank_files.broken_generation(self.folder) == max(self.number, 0)

    @property
    def _is_silent(self) -> bool:
        """Whether the heartbeats of this machine have not been answered for too long."""
        return time.monotonic() - self._alive_at_s > machine_timeout_s()

    @property
    def _is_left_out(self) -> bool:
        return 0 <= self.number < max((machine.number for machine in self._answer), default=-1)

    @property
    def _is_taken(self) -> LockstepError:
        return LockstepError(f"the job goes on with another launcher that has --node-rank {self.place}")

    @property
    def _are_done(self) -> bool:
        """Whether the ranks of all machines have ended, apart from machines that would join."""
        members = [machine for machine in self._answer if machine.of]
        return bool(members) and all(machine.is_done for machine in members)

    def _is_ready(self) -> bool:
        """Return whether all ranks of this machine can go on in place."""
        return rank_files.recovering_processes(self.folder) >= {*self.pids}

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._is_ready() and (self.found is not None or not self._library)):
            if self._ends.wait(_SEARCH_S):
                return
            if self._library and self.joins is None:
                with suppress(RuntimeError, OSError):  # not there yet
                    self._find_lighthouse()
        if self.found is None:
            log(_WITHOUT)
            return
        if self.joins is None:
            names = [f"{self.found.job}/{place}" for place in range(self.num_machines)]
            self._name, self._of = names[self.place or 0], digest(names)
        else:
            self._name, self._alive_at_s = f"{self.found.job}/{uuid.uuid4()}", time.monotonic()
        self._store, port = start_store_server(self.address, _STORE_TIMEOUT_S)
        client = None
        while client is None and not self._ends.wait(_NOTICE_S):
            with suppress(RuntimeError, OSError):
                client = self._library.LighthouseClient(self.found.address, timedelta(seconds=machine_timeout_s()))
        self._alive_at_s = time.monotonic()
        threading.Thread(target=self._beat, args=(client,), name="lockstep-heartbeats", daemon=True).start()
        try:
            while not self._ends.is_set():
                self._ask(client, f"{self.address}:{port}")
                time.sleep(_NOTICE_S)  # also while requests fail at once
                poll_until(lambda: self._wake.is_set() or self._ends.is_set() or self._is_broken, _PERIOD_S, _NOTICE_S)
                self._wake.clear()
        finally:
            self._ends.set()  # the heartbeats end, too: the others would wait for a machine that does not ask

    def _find_lighthouse(self) -> None:
        """Find the lighthouse of this start of the job, or serve it."""
        if not self._is_first:
            if (lighthouse := running_job(self.board)) is not None:
                # One of an earlier start will be taken down.
                self.found = lighthouse if lighthouse.start == self.start else None
                self._is_behind = lighthouse.start > self.start
            return
        with self._lock:
            if self._ends.is_set() or self.found is not None:
                return
            address = self.lighthouse or self._serve()
            lighthouse = Lighthouse(self.start, f"http://{address}", uuid.uuid4().hex[:8], self.lighthouse is None)
            self.board.post(_TOPIC, lighthouse)
            self.found = lighthouse

    def _serve(self) -> str:
        """Serve a lighthouse; return its address."""
        host, limit_ms = f"[{self.address}]" if ":" in self.address else self.address, int(1000 * machine_timeout_s())
        try:
            ipaddress.ip_address(self.address.partition("%")[0])
            bind = host
        except ValueError:
            bind = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"
        # All that send heartbeats ask within the same time, or are left out.
        limits = {"join_timeout_ms": limit_ms, "heartbeat_timeout_ms": limit_ms}
        self._server = self._library.LighthouseServer(f"{bind}:0", 1, **limits)
        return f"{host}:{self._server.address().rpartition(':')[2]}"

    def _beat(self, client: Any) -> None:
        limit_s = machine_timeout_s()
        while not self._ends.wait(limit_s / 10):
            now_s = time.monotonic()
            with suppress(TimeoutError, RuntimeError):
                client.heartbeat(self._name, timedelta(seconds=limit_s / 2))
                self._alive_at_s = now_s

    def _ask(self, client: Any, store: str) -> None:
        if self.joins is not None and self.number < 0:
            self._lost_at_ns = self._lost_at_ns or time.time_ns()
        # Before the machines have come together, others may be a moment late.
        is_late = 0 < self._lost_at_ns < time.time_ns() - machine_timeout_s() * 1e9
        is_broken = self._is_broken and (self.number >= 0 or is_late)
        identity, host = (self._name, store, self.number, len(self.pids)), socket.gethostname()
        member = Member(*identity, self._of, self.place, self.max_machines, host, is_broken, self._is_done)
        with suppress(TimeoutError, RuntimeError):  # out of reach, or another machine has not asked in time
            answer = client.quorum(self._name, timedelta(seconds=3 * machine_timeout_s()), data=member._asdict())
            self._take([Member(**participant.data) for participant in answer.participants])

    def _take(self, machines: list[Member]) -> None:
        """Enter the next generation, if ``machines`` leads to one."""
        with self._lock:
            self._answer, agreed = machines, next_generation(machines)
            if self.number < 0:
                self._wait_for_place(machines)
            is_out = self._is_left_out or self._waits_since_s < math.inf
            if agreed is None or is_out or self._ends.is_set() or self._is_done:
                return
            self.number, members = agreed
            before, self._members = self._members, {machine.name: machine for machine in members}
            self._of, own_member = digest(list(self._members)), self._members[self._name]
            self.place, index = own_member.place, members.index(own_member)
            if self.found is not None and not before:
                if self._is_first:
                    self.board.post(_TOPIC, self.found._replace(have_met=True))
                self.board.least(f"place/{self.place}", _BY_NEWEST, [-self.found.start, -self.number, _LAUNCHER])
            if self.number > 0:
                self._post_generation(members, index, is_smaller=bool(before.keys() - self._members.keys()))
                _report(before, members, self.min_machines)
            self._lost_at_ns, self._why = 0, ""

    def _wait_for_place(self, machines: list[Member]) -> None:
        """Note whether this machine, which is in no generation yet, is one too many now."""
        if not (members := {machine.name for machine in admitted(machines)}) or self._name in members:
            self._waits_since_s = math.inf
            return
        self._lost_at_ns = 0  # the others need not go on with it
        if self._waits_since_s == math.inf:
            self._waits_since_s = time.monotonic()
            log(f"the job has the {self.max_machines} machines of --nnodes; this one waits for a place")

    def _post_generation(self, members: list[Member], index: int, *, is_smaller: bool) -> None:
        """Post the generation of ``members``, of which this is the one with that index, for the ranks."""
        first = sum(machine.num_ranks for machine in members[:index])
        world_size = sum(machine.num_ranks for machine in members)
        host, _, port = members[0].store.rpartition(":")
        # A machine that is lost without a word was there until its last heartbeat.
        silence_s = machine_timeout_s() if is_smaller else 0.0
        lost_at_ns = self._lost_at_ns or int((time.time() - silence_s) * 1e9)
        # With a rank too many, all wait until the next generation, which has another machine.
        world_size += len(members) < self.min_machines
        ranks = {pid: first + local for local, pid in enumerate(self.pids)}
        position = index, len(members), (host, int(port))
        rank_files.Generation(self.number, ranks, world_size, *position, lost_at_ns, self._why).post(self.folder)


def _report(before: dict[str, Member], members: list[Member], min_machines: int) -> None:
    """Print which machines were lost and which have come."""
    names = {machine.name for machine in members}
    lost = [f"machine {machine.host} was lost" for name, machine in before.items() if name not in names]
    # A machine that joins knows nothing of the machines before.
    came = [f"machine {machine.host} joins" for machine in members if before and machine.name not in before]
    num_ranks = sum(machine.num_ranks for machine in members)
    go_on = f"{format_ranks(range(num_ranks))} {'goes' if num_ranks == 1 else 'go'} on"
    if len(members) < min_machines:
        go_on = f"the ranks wait for {min_machines - len(members)} more of --nnodes"
    for text in lost + came:
        log(f"{text}; {go_on}")


def _torchft() -> Any:
    """Return torchft's coordination; False if it is not installed."""
    # Otherwise it logs each request; it reads the variable once.
    wanted = os.environ.get("RUST_LOG")
    os.environ["RUST_LOG"] = wanted or "error"
    try:
        from torchft import coordination
    except ImportError:
        return False
    finally:
        if wanted is None:
            del os.environ["RUST_LOG"]
    return coordination


def check_lighthouse(address: str | None, num_machines: int) -> None:
    """Raise ConfigurationError if ``--lighthouse`` has another form than HOST:PORT, or is of no use."""
    if address is not None and (not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit()):
        raise ConfigurationError(f"--lighthouse {address} is not an address.\nPass <host>:<port>.")
    if address is not None and num_machines == 1:
        raise ConfigurationError("--lighthouse needs several machines.\nAdd --nnodes, or omit --lighthouse.")
