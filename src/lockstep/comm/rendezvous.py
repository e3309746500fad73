"""Rendezvous of the ranks: a connection to the store of their job, and the membership check at the start."""

import errno
import json
import multiprocessing
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from torch.distributed import DistError, HashStore, Store

from lockstep.base.activity import format_ranks, in_time
from lockstep.base.env import AGENT_STORE, LAUNCHER_STORE, RankEnv, is_loopback
from lockstep.base.rank_files import RUN_DIR, FailureRecord, own_name
from lockstep.comm.store import listen, open_store, read_present, serve_store
from lockstep.errors import ConfigurationError, LockstepError, WorldSizeMismatch

_RETRY_S = 0.1


# --- The store of the job


class Rendezvous(NamedTuple):
    """An open store, and the prefix of this start of the job in it.

    Attributes:
        store: The store.
        is_host: Whether its server runs in this process and ends with it.
        prefix: Of the keys of this start.
    """

    store: Store
    is_host: bool
    prefix: str


# The environment variable of a process that takes the place of a lost rank, or is a spare: `init` gives it a group of
# its own, in which it can prepare. Then `lockstep.comm.generations` takes it into the job.
JOINS = "LOCKSTEP_JOINS"

Address = tuple[str, int]

# Servers in this process. They live as long as it does, so that a second world finds the same one.
_hosted: dict[Address, Store] = {}

_num_starts: Counter[Address] = Counter()


def join_rendezvous(env: RankEnv, timeout_s: float) -> Rendezvous:
    """Connect to the store of this job, which rank zero hosts unless the launcher does.

    Blocks until connected, at most ``timeout_s``.

    Raises:
        ConfigurationError: The port is taken.
        WorldSizeMismatch: No process hosts the store: rank zero did not start, or cannot be reached.
    """
    if env.master_addr is None or env.master_port is None:
        return Rendezvous(HashStore(), is_host=False, prefix="lockstep")
    host, port = meeting_place(env.master_addr, env.master_port, env.rank, env.world_size)
    address = ((host or "").strip("[]"), port)
    prefix = f"lockstep/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if os.environ.get(AGENT_STORE) == "True":
        store = _connect(env, address, timeout_s, host="The launcher of the first machine")
        prefix = f"{prefix}/{env.world_size}"
        # torchrun's store outlives its workers: the n-th start of this rank belongs to the n-th start of the job. A
        # process that takes the place of a lost rank has no part in that start.
        number = store.add(f"{prefix}/starts/{env.rank}", int(JOINS not in os.environ))
        return Rendezvous(store, is_host=False, prefix=f"{prefix}/{number}")
    _num_starts[address] += 1
    if address in _hosted:
        store = _hosted[address]
    elif env.rank == 0:
        store = _host(env, address, timeout_s)
    else:
        store = _connect(env, address, timeout_s, host="Rank 0")
    return Rendezvous(store, address in _hosted, f"{prefix}/{_num_starts[address]}")


def _host(env: RankEnv, address: Address, timeout_s: float) -> Store:
    """Start the server in this process."""
    loopback, one_machine = is_loopback(address[0]), env.local_world_size == env.world_size
    try:
        listener = listen(address[0] if loopback else "", address[1])
    except OSError as error:
        # Another process with rank zero may host it already: the membership check detects that.
        store = _client(address, min(timeout_s, 3.0)) if error.errno == errno.EADDRINUSE else None
        if store is not None:
            return store
        raise ConfigurationError(
            f"Rank 0 cannot listen on port {address[1]}: {error.strerror}.\n"
            "Set MASTER_PORT to a free port above 1023, the same on every rank; `lockstep run` finds one by itself."
        ) from None
    # If the address is forwarded, the server's own machine may not reach the server at that address.
    host = listener.getsockname()[0] if loopback else "localhost"
    store = serve_store(listener, host, timeout_s, one_user=loopback or one_machine)
    _hosted[address] = store
    return store


def _connect(env: RankEnv, address: Address, timeout_s: float, *, host: str) -> Store:
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while True:
        try:
            # Tried before torch's own client, which logs every attempt.
            socket.create_connection(address, timeout=1.0).close()
            store = _client(address, max(1.0, deadline - time.monotonic()))
            if store is not None:
                return store
            reason = "a program that is not a torch.distributed store answers there"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() >= deadline:
            raise WorldSizeMismatch(
                f"Rank {env.rank} of {env.world_size} could not reach the store at {address[0]}:{address[1]} "
                f"within {timeout_s:g} s: {reason}.\n"
                f"{host} hosts it: that did not start, has given up already, or cannot be reached from "
                f"{socket.gethostname()}; this rank cannot tell which other ranks are missing.\n"
                "Check that it was started, that MASTER_ADDR is an address of its machine, that MASTER_ADDR and "
                "MASTER_PORT are the same on every rank, and that no firewall blocks it."
            )
        time.sleep(pause_s := min(1.5 * pause_s, _RETRY_S))  # rank 0 often listens a few ms later


def _client(address: Address, timeout_s: float) -> Store | None:
    """Connect to the server, or return ``None`` if the program that answers there is not a store.

    torch's client waits without limit for a program that accepts connections but does not answer.
    """
    with suppress(RuntimeError, TimeoutError):  # c10d's errors are RuntimeErrors
        return in_time(timeout_s, open_store, address, timeout_s)
    return None


# --- Where the ranks of a group meet

# Counts the groups of all ranks that this process has met them for.
_num_meetings = count()


def meeting_place(host: str | None, port: int, rank: int, world_size: int) -> tuple[str | None, int]:
    """Return where this process meets the other ranks of a group, given where its program says they do.

    Scripts written to start their ranks themselves set MASTER_ADDR and MASTER_PORT, or an ``init_method``. At another
    port than the launcher's, rank zero has to serve the store, so torch's variable is set accordingly.

    Raises:
        ConfigurationError: The other ranks cannot be there, or meet at another port; or this is a process that a rank
            has started.
    """
    env = os.environ
    if LAUNCHER_STORE not in env:
        return host, port
    launcher_host, _, launcher_port = env[LAUNCHER_STORE].rpartition(":")
    is_launchers, size = str(port) == launcher_port, env.get("WORLD_SIZE", "1")
    is_rank, parent = (str(rank), str(world_size)) == (env.get("RANK"), size), multiprocessing.parent_process()
    if parent is not None and size != "1" and not (is_rank and is_launchers):
        error = ConfigurationError(
            f"The script starts its own processes (this is number {rank} of {world_size}), and `lockstep run` has "
            f"already started {size} ranks, each of which runs the whole script.\n"
            "Run such a script with `python`, or with --devices 1; or let each rank call its training function itself, "
            "without mp.spawn, with RANK and WORLD_SIZE from the environment."
        )
        # The rank that started this process may not look at how it ends, and would then end normally.
        text = f"{type(error).__name__}: {error}"
        FailureRecord(text, type(error).__name__, trace=text, time_ns=time.time_ns()).write(env[RUN_DIR], own_name())
        os.kill(parent.pid or 0, signal.SIGTERM)
        raise error
    if not is_launchers and is_loopback(host or "") and env.get("LOCAL_WORLD_SIZE", size) != size:
        raise ConfigurationError(
            f"Rank {rank}: the script changed the address at which the ranks meet from {env[LAUNCHER_STORE]} to "
            f"{host}:{port}, where the ranks of the other machines cannot come.\n"
            "Remove the lines that set MASTER_ADDR and MASTER_PORT, or the init_method: the launcher has set them."
        )
    if is_rank and parent is None and size != "1" and JOINS not in env:
        store = open_store((launcher_host, int(launcher_port)))
        key = f"lockstep/ports/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_num_meetings)}"
        first_rank, first_port = store.compare_set(key, "", f"{rank} {port}").decode().split()
        if first_port != str(port):
            raise ConfigurationError(
                f"Rank {rank} meets the other ranks at port {port}, but rank {first_rank} at port {first_port}.\n"
                "Set the same MASTER_PORT or init_method on every rank; or remove the lines that set them, as the "
                "launcher has set MASTER_ADDR and MASTER_PORT."
            )
    env[AGENT_STORE] = str(is_launchers)
    if is_launchers:
        host = env["MASTER_ADDR"] = launcher_host
        env["MASTER_PORT"] = launcher_port
    return host, port


def meet(rendezvous: Callable[..., Any], url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
    """Call torch's ``rendezvous`` for a process group, at the `meeting_place`."""
    parts, env = urlsplit(url), os.environ
    settings = env | {name.upper(): value for name, value in parse_qsl(parts.query)}
    arguments = {"RANK": rank, "WORLD_SIZE": world_size}
    numbers = [int(settings.get(name, -1)) if value < 0 else value for name, value in arguments.items()]
    meeting_place(parts.hostname or env.get("MASTER_ADDR"), parts.port or int(env.get("MASTER_PORT", 0)), *numbers)
    if parts.scheme == "tcp" and env.get(AGENT_STORE) == "True":
        url = f"env://?{parts.query}"
    return rendezvous(url, rank, world_size, **kwargs)


# --- The membership check

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.1
_PAUSE_SHARE, _PAUSE_PER_RANK_S = 0.03, 50e-6
# How long the host of the store stays after a failed start, so that the other ranks can read the reason.
FAREWELL_S = 3.0

_COMPLETE = "complete"


class Participant(NamedTuple):
    """One process that takes part in the start."""

    rank: int
    world_size: int
    backend: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@contextmanager
def naming_a_lost_store(me: Participant) -> Iterator[None]:
    """Raise WorldSizeMismatch, with what to check, if the store cannot be reached any more."""
    try:
        yield
    except DistError as error:
        raise WorldSizeMismatch(
            f"Rank {me.rank} of {me.world_size} lost the connection to the store while it waited for the "
            "other ranks: the process that hosts it ended.\n"
            "Look at the output of rank 0, which hosts it, or of the launcher."
        ) from error


def check_membership(
    store: Store, me: Participant, *, deadline: float, timeout_s: float, is_host: bool, objection: str | None = None
) -> None:
    """Sign in and wait until all ranks have. All ranks get the same verdict: every rank returns, or every rank raises.

    Collective: every rank. Blocks until the last rank has signed in, at most until ``deadline``.

    Args:
        store: Empty at the start of every check.
        me: The entry of this rank.
        deadline: On the clock of ``time.monotonic``.
        timeout_s: The timeout that the user set, for the message.
        is_host: Whether the store ends with this process, which then waits until the others have read a bad verdict.
        objection: Why this rank cannot take part, for the other ranks.

    Raises:
        WorldSizeMismatch: Ranks are missing, or signed in twice; names them.
        ConfigurationError: The ranks have different world sizes or backends, or one cannot take part.
    """
    # A rank with an objection posts it at once; the rank that completes the list posts success. The first one counts.
    complaint = _sign_in(store, me, objection)
    if complaint is not None:
        _decide(store, complaint)
    elif store.add("agreeing", 1) == me.world_size:
        store.compare_set("verdict", "", _COMPLETE)
    if not await_key(store, "verdict", deadline - time.monotonic(), me.world_size):
        # Any rank may find that the time is up: the first verdict in the store counts for all.
        text = find_once(store, "missing", lambda: _describe_missing(store, me, timeout_s), me.world_size)
        _decide(store, WorldSizeMismatch(text))
    verdict = store.get("verdict").decode()
    if verdict == _COMPLETE and complaint is None:
        return
    store.add("read", 1)
    if is_host:
        poll_until(lambda: store.add("read", 0) >= store.add("arrived", 0), FAREWELL_S, _LONGEST_PAUSE_S)
    if complaint is not None:  # only a surplus process gets this error, if the world was complete before
        raise complaint
    kind, message = json.loads(verdict)
    raise (ConfigurationError if kind == ConfigurationError.__name__ else WorldSizeMismatch)(message)


def _sign_in(store: Store, me: Participant, objection: str | None) -> LockstepError | None:
    """Add this rank to the list; return an error if its entry is wrong."""
    signature = json.dumps(me)
    present = store.compare_set(f"rank/{me.rank}", "", signature).decode()
    # A surplus process is counted, too: the host waits until as many have read the verdict as have arrived.
    store.add("arrived", 1)
    if present != signature:
        rival = Participant(*json.loads(present))
        return WorldSizeMismatch(
            f"Two processes have the rank {me.rank}: pid {rival.pid} on host {rival.host} and "
            f"pid {me.pid} on host {me.host}.\n"
            f"Give each process a RANK of its own, from 0 to {me.world_size - 1}; if one belongs to another job, give "
            "this job another MASTER_PORT. `lockstep run` does both."
        )
    # Compared with the first rank that signed in, not with rank zero, which may be missing.
    first = Participant(*json.loads(store.compare_set("first", "", signature)))
    pairs = {"WORLD_SIZE": (me.world_size, first.world_size), "backend": (me.backend, first.backend)}
    for name, (own_value, first_value) in pairs.items():
        if own_value and first_value and own_value != first_value:  # without a device there is no backend
            return ConfigurationError(
                f"The ranks disagree about {name}: {own_value} for {me}, {first_value} for {first}.\n"
                f"Start every rank with the same {name}."
            )
    return None if objection is None else ConfigurationError(f"R{str(me)[1:]} cannot take part: {objection}")


def _describe_missing(store: Store, me: Participant, timeout_s: float) -> str:
    present = read_present(store, [f"rank/{rank}" for rank in range(me.world_size)], set())
    came = [Participant(*json.loads(text)) for text in present.values()]
    missing = sorted(set(range(me.world_size)) - {participant.rank for participant in came})
    return (
        f"{len(came)} of {me.world_size} ranks came within {timeout_s:g} s; missing: {format_ranks(missing)}.\n"
        f"Came: {', '.join(map(str, came[:8]))}{' ...' if len(came) > 8 else ''}.\n"
        f"Check that {me.world_size} processes were started and that none of them died before lockstep.init(); "
        "if some only start slowly, pass a longer timeout_s."
    )


def find_once(store: Store, key: str, find: Callable[[], str], world_size: int) -> str:
    """Return what ``find`` returned on the first rank that called this; ``find`` may need a request for each rank.

    Blocks until that rank has the result. If that takes more than some seconds, because the rank is lost or the store
    is busy, one more rank calls ``find``, and not all of them at once.
    """
    for attempt in count():
        if store.add(f"{key}/count/{attempt}", 1) == 1:
            store.set(key, find())
        if await_key(store, key, FAREWELL_S, world_size):
            break
    return store.get(key).decode()


def await_key(store: Store, key: str, limit_s: float, world_size: int, is_over: Callable[[], bool] = bool) -> bool:
    """Block until ``key`` exists, at most ``limit_s``; return whether it does. ``world_size`` ranks may wait here.

    ``is_over`` ends the wait early.
    """
    return poll_until(lambda: is_over() or store.check([key]), limit_s, poll_interval_s(world_size))


def poll_until(is_over: Callable[[], bool], limit_s: float, longest_pause_s: float) -> bool:
    """Block until ``is_over`` returns true, at most ``limit_s``; return whether it did."""
    # Polled, because a blocking wait would delay Ctrl-C, and c10d's client logs every wait that times out.
    began_s = time.monotonic()
    while not is_over():
        waited_s = time.monotonic() - began_s
        if waited_s >= limit_s:
            return False
        # The longer the wait so far, the longer it may last: each pause is a small part of the time waited so far.
        time.sleep(min(max(_FIRST_PAUSE_S, _PAUSE_SHARE * waited_s), longest_pause_s))
    return True


def poll_interval_s(world_size: int) -> float:
    """Return the longest pause between two polls of the store: many ranks must not overload it."""
    return max(_LONGEST_PAUSE_S, world_size * _PAUSE_PER_RANK_S)


def _decide(store: Store, error: LockstepError) -> None:
    """Make ``error`` the verdict for all ranks, unless there is one already."""
    store.compare_set("verdict", "", json.dumps([type(error).__name__, str(error)]))
