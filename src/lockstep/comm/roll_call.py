"""The start-up check: every rank signs in, and all learn the same verdict: complete, or what is wrong."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import Store

from lockstep.errors import ConfigurationError, LockstepError, WorldSizeMismatch

_POLL_S = 0.002
_POLL_PER_RANK_S = 50e-6
FAREWELL_S = 3.0
"""How long the host of the store outlives a failed start-up, so that the others can read why."""

_COMPLETE = "complete"


@dataclass(frozen=True)
class Arrival:
    """One process that came to the start-up."""

    rank: int
    world_size: int
    backend: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def call_roll(
    store: Store,
    me: Arrival,
    *,
    deadline: float,
    timeout_s: float,
    is_host: bool,
    hint: str = "",
    objection: str | None = None,
) -> None:
    """Sign in and wait until all ranks have; every rank returns, or every rank raises.

    Collective: every rank. Blocks until the last rank has come, at most until ``deadline``.

    Args:
        store: Empty at the start of every roll call.
        me: What this rank signs in with.
        deadline: On the clock of ``time.monotonic``.
        timeout_s: What the user asked for, for the message.
        is_host: The store ends with this process, so it waits until the others have read a bad verdict.
        hint: What may keep the others away, for the message if they do not come.
        objection: Why this rank cannot take part, for the others to know.

    Raises:
        WorldSizeMismatch: Ranks are missing, or came twice; names them.
        ConfigurationError: The ranks were told different world sizes or backends, or one cannot take part.
    """
    complaint = _sign_in(store, me, objection)
    if complaint is not None:
        _decide(store, complaint)
    while not store.check(["verdict"]):
        if time.monotonic() >= deadline:
            _decide(store, _missing(store, me, timeout_s, hint))
        else:
            time.sleep(pause_s(me.world_size))
    verdict = store.get("verdict").decode()
    if verdict == _COMPLETE and complaint is None:
        return
    store.add("read", 1)
    if is_host:
        _see_off(store)
    # A process that came on top of a complete world is alone with its error.
    raise complaint if complaint is not None else _parse(verdict)


def _sign_in(store: Store, me: Arrival, objection: str | None) -> LockstepError | None:
    """Enter this rank; return what is wrong with that."""
    signature = json.dumps(asdict(me))
    present = store.compare_set(f"rank/{me.rank}", "", signature).decode()
    store.add("arrived", 1)
    if present != signature:
        other = Arrival(**json.loads(present))
        return WorldSizeMismatch(
            f"Two processes say that they are rank {me.rank}: pid {other.pid} on host {other.host} and "
            f"pid {me.pid} on host {me.host}.\n"
            f"Give each process a RANK of its own, from 0 to {me.world_size - 1}; if one belongs to another job, give "
            "this job another MASTER_PORT. `lockstep run` does both."
        )
    first = Arrival(**json.loads(store.compare_set("first", "", signature)))
    for name, mine, theirs in (
        ("WORLD_SIZE", me.world_size, first.world_size),
        ("backend", me.backend, first.backend),
    ):
        if mine and theirs and mine != theirs:
            return ConfigurationError(
                f"The ranks disagree about {name}: {mine} for {me}, {theirs} for {first}.\n"
                f"Start every rank with the same {name}."
            )
    if objection is not None:
        return ConfigurationError(f"{_capital(me)} cannot take part: {objection}")
    if store.add("agreeing", 1) == me.world_size:
        store.compare_set("verdict", "", _COMPLETE)
    return None


def _missing(store: Store, me: Arrival, timeout_s: float, hint: str) -> WorldSizeMismatch:
    keys = [f"rank/{rank}" for rank in range(me.world_size)]
    came = [Arrival(**json.loads(store.get(key))) for key in keys if store.check([key])]
    missing = sorted(set(range(me.world_size)) - {arrival.rank for arrival in came})
    return WorldSizeMismatch(
        f"{len(came)} of {me.world_size} ranks came within {timeout_s:g} s; missing: {listed(missing)}.\n"
        f"Came: {', '.join(map(str, came[:8]))}{' ...' if len(came) > 8 else ''}.\n"
        + (f"{hint}\n" if hint else "")
        + f"Check that {me.world_size} processes were started and that none of them died before lockstep.init(); "
        "if some only start slowly, pass a longer timeout_s."
    )


def pause_s(world_size: int) -> float:
    """Return how long to wait between two looks at the store: with many ranks it must not drown in questions."""
    return max(_POLL_S, world_size * _POLL_PER_RANK_S)


def listed(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 1, 2``; long lists are cut."""
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"


def _decide(store: Store, error: LockstepError) -> None:
    store.compare_set("verdict", "", json.dumps([type(error).__name__, str(error)]))


def _parse(verdict: str) -> LockstepError:
    kind, message = json.loads(verdict)
    return (ConfigurationError if kind == ConfigurationError.__name__ else WorldSizeMismatch)(message)


def _see_off(store: Store) -> None:
    deadline = time.monotonic() + FAREWELL_S
    while store.add("read", 0) < store.add("arrived", 0) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _capital(me: Arrival) -> str:
    return str(me)[0].upper() + str(me)[1:]
