"""How a rank's exception or exit status becomes the launcher's message: who failed first, why, and what to do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.comm.store import InterNodeStore
from lockstep.launcher.reaper import Reaper
from lockstep.telemetry.heartbeat import read_step_counter
from lockstep.telemetry.rank_state import user_frame
from lockstep.telemetry.resources import OF_EACH, Resources, says_out_of_memory

# What the errors of NCCL, Gloo and the store mean, in plain words, and what to do. The same list: docs/failures.md.


@dataclass(frozen=True)
class ErrorHint:
    """What one of several marks in an error's text means, and what to do about it."""

    marks: tuple[str, ...]
    means: str
    do: str


ERROR_HINTS = (
    ErrorHint(
        ("Connection closed by peer", "Connection reset by peer", "remote process exited", "ncclRemoteError"),
        "Another rank's process has ended, or the network has dropped the connection to it.",
        "Look for the rank that failed first, here or on the other machines; this one only noticed.",
    ),
    ErrorHint(
        ("Duplicate GPU detected",),
        "Two ranks use the same GPU.",
        "Let each rank use the GPU of its LOCAL_RANK, as lockstep.init() does, and start at most one rank a GPU.",
    ),
    ErrorHint(
        ("unhandled system error", "ncclSystemError"),
        "A call of the operating system failed inside NCCL: mostly the network, or too little shared memory.",
        "Set NCCL_DEBUG=WARN to see which; check `df /dev/shm` (docker run --shm-size=8g) and NCCL_SOCKET_IFNAME.",
    ),
    ErrorHint(
        ("unhandled cuda error", "ncclUnhandledCudaError"),
        "CUDA failed inside NCCL: often an earlier error of the same process, or GPUs that cannot reach each other.",
        "Set NCCL_DEBUG=INFO and CUDA_LAUNCH_BLOCKING=1 to see where; NCCL_P2P_DISABLE=1 tells whether it is the link.",
    ),
    ErrorHint(
        ("ncclInternalError", "NCCL internal error"),
        "NCCL itself failed: mostly different versions of it or of the driver on the machines.",
        "Compare torch.cuda.nccl.version() and `nvidia-smi` on all machines; set NCCL_DEBUG=INFO.",
    ),
    ErrorHint(
        (
            "Watchdog caught collective operation timeout",
            "CollectiveFingerPrint",
            "Detected mismatch between collectives",
        ),
        "The ranks did not all call the same collective: one was skipped, or stuck elsewhere.",
        "Look for code behind `if rank == 0`, and use `lockstep run`, whose watchdog names the rank and the line.",
    ),
    ErrorHint(
        ("op.preamble.length <= op.nbytes",),
        "Two ranks sent tensors of different sizes in the same collective.",
        "Look for collectives behind `if rank == 0`, and for shapes that depend on a rank's own data.",
    ),
    ErrorHint(
        ("Socket Timeout", "wait timeout after", "Timed out waiting", "Timed out after"),
        "A rank or the store did not answer in time: it never started, has died, or is stuck.",
        "Look for the rank that is missing; check that all were started with the same MASTER_ADDR and MASTER_PORT.",
    ),
    ErrorHint(
        ("no socket interface found", "Unable to find interface", "Unable to find address for"),
        "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names a network interface that this machine does not have.",
        "Take the name from `ip -brief address`, or unset the variable.",
    ),
    ErrorHint(
        ("No route to host", "Network is unreachable"),
        "The address of another machine cannot be reached from here: a wrong interface, or a firewall.",
        "Choose the interface with NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME; try `ping` to MASTER_ADDR.",
    ),
    ErrorHint(
        ("Connection refused",),
        "Nothing listens at that address: rank zero has not started, has ended, or has another address.",
        "Check MASTER_ADDR and MASTER_PORT on every machine, and that the first machine's job runs.",
    ),
    ErrorHint(
        ("Connection timed out",),
        "No answer came from that address: mostly a firewall that drops what it does not know.",
        "Open the ports between the machines, or choose another interface with NCCL_SOCKET_IFNAME.",
    ),
    ErrorHint(
        ("Address already in use", "EADDRINUSE"),
        "Another program, maybe an earlier run of this one, listens on that port.",
        "End it, or choose another port with --master-port; on one machine `lockstep run` finds a free one.",
    ),
    ErrorHint(
        ("Name or service not known", "Temporary failure in name resolution"),
        "A machine's name leads to no address.",
        "Use an IP address for --master-addr, or put the name into /etc/hosts on all machines.",
    ),
    ErrorHint(
        ("out of memory",),
        "The device's memory is full.",
        "Use a smaller batch or more micro-batches (accumulate); `nvidia-smi` shows who else uses the device.",
    ),
    ErrorHint(
        ("device-side assert", "illegal memory access"),
        "A kernel on the GPU failed some time ago; the line above is only where that was noticed.",
        "Run again with CUDA_LAUNCH_BLOCKING=1 to see the right line; mostly an index is out of range.",
    ),
    ErrorHint(
        ("Too many open files",),
        "This process may not open more files: mostly many DataLoader workers that share tensors.",
        "Raise the limit with `ulimit -n 65536`, or use fewer workers.",
    ),
    ErrorHint(
        ("No space left on device",),
        "A disk, or shared memory, is full.",
        "Look at `df` and `df /dev/shm`; DataLoader workers need shared memory (docker run --shm-size=8g).",
    ),
    ErrorHint(
        ("Expected to have finished reduction in the prior iteration",),
        "torch's DistributedDataParallel waits for gradients of parameters that took no part in the loss.",
        "Run the script with --adopt, as Lockstep's engine needs no flag, or pass find_unused_parameters=True.",
    ),
)


def hint_for(error: str) -> str:
    """Return what the text of an error means and what to do, in two lines; empty if it is none of these."""
    for meaning in ERROR_HINTS:
        if any(mark in error for mark in meaning.marks):
            return f"What that means: {meaning.means}\n{meaning.do}"
    return ""


# Say what happened when ranks failed: who was first, with its traceback, and one line for each other.

_LIKELY = {
    signal.SIGKILL: "most likely the machine ran out of memory.\n"
    "Look for 'Out of memory' in `dmesg`; use fewer ranks, a smaller batch or fewer DataLoader workers.",
    signal.SIGSEGV: "native code touched memory that is not its own.\n"
    "An extension module or a driver may be broken; the Python stack says who called it.",
    signal.SIGBUS: "most likely shared memory is full.\n"
    "Look at `df /dev/shm`; use fewer DataLoader workers, or more shared memory (docker run --shm-size).",
    signal.SIGABRT: "native code gave up.\nIts own message is further up.",
    signal.SIGTERM: "something outside the job asked it to end.\nA scheduler, a time limit or `kill` does that.",
}


_SHORT_OF_MEMORY = (
    "the kernel ended it, as memory ran out.\nUse fewer ranks, a smaller batch or fewer DataLoader workers."
)
_NOT_SHORT = (
    "something outside the job did that, such as a scheduler or `kill -9`.\n"
    "The kernel has ended nothing for lack of memory meanwhile."
)

_CONSEQUENCES = (
    "CollectiveError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "BrokenPipeError",
    "ConnectionResetError",
    "Connection closed by peer",
    "Connection reset by peer",
    "remote process exited",
    "gloo/transport",
    "NCCL error",
)
"""What errors say that tell no more than that another rank is gone or silent."""

_LINE_LIMIT = 200


@dataclass(frozen=True)
class RankExit:
    """How one rank ended.

    Attributes:
        exit_code: As of ``subprocess``: negative for a signal.
        ended_at_ns: When it was gone, in nanoseconds since the epoch; ``None`` if unknown.
        failed_at_ns: When its exception was raised; ``None`` if it left none.
        message: The last line of its traceback, such as ``ValueError: boom``.
        error_type: The name of the exception's class.
        where: File and line of the exception, in the user's code.
        trace: Its whole traceback.
        crash: The Python stack that a fatal signal left.
        place: A sentence that says in which step, at which line and on which machine.
        facts: A sentence with figures, such as those of memory.
        was_short: Whether the kernel has ended processes for lack of memory meanwhile; ``None`` if it does not say.
    """

    rank: int
    pid: int
    exit_code: int
    ended_at_ns: int | None = None
    failed_at_ns: int | None = None
    message: str = ""
    error_type: str = ""
    where: str = ""
    trace: str = ""
    crash: str = ""
    place: str = ""
    facts: str = ""
    was_short: bool | None = None


def first_failure(ends: list[RankExit]) -> RankExit:
    """Return the rank that failed before the others, and made them fail."""
    first_gone = min((end.ended_at_ns for end in ends if end.ended_at_ns is not None), default=None)
    return min(ends, key=lambda end: (_blame(end, first_gone), end.failed_at_ns or end.ended_at_ns or 0, end.rank))


def _blame(end: RankExit, first_gone_ns: int | None) -> int:
    """Say how likely a rank is the cause: 0 for its own fault, 1 for noticing another's, 2 for being stopped.

    Time alone does not tell: the kernel closes a killed process's connections, which its peers notice at once, well
    before it has taken down its memory and reports the end.
    """
    if end.exit_code == -signal.SIGTERM and not end.message:
        # The launcher stops the others only after one has ended, so the first to go was stopped from outside.
        return 0 if end.ended_at_ns is not None and end.ended_at_ns == first_gone_ns else 2
    return 1 if is_consequence(end) else 0


def is_consequence(end: RankExit) -> bool:
    """Tell whether a rank's error says no more than that another rank is gone or silent."""
    return any(mark in f"{end.error_type}: {end.message}" for mark in _CONSEQUENCES)


def tidy_crash(stack: str, *, own_folder: str) -> str:
    """Return what faulthandler wrote without our own frames and the list of extension modules."""
    rank_lines = stack.splitlines()
    return "\n".join(
        line for line in rank_lines if own_folder not in line and not line.startswith("Extension modules:")
    )


def failure_report(ends: list[RankExit], local_ranks: range) -> str:
    """Return the whole report, the cause on its first line.

    Args:
        ends: The ranks of this machine that did not end well.
        local_ranks: All ranks of this machine.
    """
    first = first_failure(ends)
    by_rank = {end.rank: end for end in ends}
    others = rank_lines(ends, [rank for rank in local_ranks if rank != first.rank])
    elsewhere = _elsewhere([rank for rank in local_ranks if rank not in by_rank]) if is_consequence(first) else ""
    top = [headline(first), first.place, first.facts, _WENT_ON if first.exit_code == 0 else ""]
    trace, meaning = (first.trace or first.crash).rstrip(), "" if elsewhere else hint_for(first.message)
    parts = ["\n".join(filter(None, top)), trace, meaning, others, elsewhere]
    return "\n\n".join(part for part in parts if part)


_WENT_ON = "The program caught that and went on to its end, while other ranks waited for this one."


def rank_lines(ends: list[RankExit], ranks: Iterable[int]) -> str:
    """Return a line for each of ``ranks``."""
    by_rank = {end.rank: end for end in ends}
    return "\n".join(f"rank {rank}: {_rank_line(by_rank.get(rank))}" for rank in ranks)


def _elsewhere(finished: list[int]) -> str:
    if not finished:  # No rank of this machine is the cause.
        return "It says only that another rank is gone: look at the other machines."
    ranks = f"rank{'s' * (len(finished) > 1)} {', '.join(map(str, finished))}"
    return f"It says only that another rank is gone: {ranks} finished while others waited, or look at other machines."


def headline(end: RankExit) -> str:
    """Say in one line, or two with what to do, why a rank ended."""
    if end.error_type == "SystemExit":
        return f"Rank {end.rank} left with exit code {end.exit_code} ({end.message} at {end.where})."
    if end.message:
        # The rest of a long message stands in the traceback below.
        return f"Rank {end.rank} failed: {end.message.splitlines()[0]}"
    if end.exit_code - 128 in _LIKELY:  # a shell, or a wrapper like it, tells a signal this way
        return f"Rank {end.rank} left with exit code {end.exit_code}: {_a_child(end.exit_code - 128)}"
    if end.exit_code >= 0:
        return (
            f"Rank {end.rank} left with exit code {end.exit_code}, without an exception.\n"
            "What it wrote before is further up."
        )
    likely = _likely(-end.exit_code)
    if end.exit_code == -signal.SIGKILL and end.was_short is not None:
        likely = _SHORT_OF_MEMORY if end.was_short else _NOT_SHORT
    return f"Rank {end.rank} {_killed_by(-end.exit_code)}: {likely}"


def brief(end: RankExit) -> str:
    """Say in a few words how a rank ended, to be put behind its name."""
    return f"failed: {_rank_line(end)}" if end.message else _rank_line(end)


def _rank_line(end: RankExit | None) -> str:
    if end is None:
        return "finished"
    if end.message:
        text = end.message.splitlines()[0]
        text = text if len(text) <= _LINE_LIMIT else f"{text[:_LINE_LIMIT]} ..."
        return f"{text} ({end.where})" if end.where else text
    if end.exit_code == -signal.SIGTERM:
        return "stopped by the launcher"
    return f"left with exit code {end.exit_code}" if end.exit_code >= 0 else _killed_by(-end.exit_code)


def _a_child(number: int) -> str:
    return f"what it ran {_killed_by(number)}, {_likely(number)}"


def _killed_by(number: int) -> str:
    try:
        return f"was killed by {signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"was killed by signal {number}"


def _likely(number: int) -> str:
    return _LIKELY.get(number, "what it wrote before is further up.")  # type: ignore[call-overload, no-any-return]


# How ranks ended, put together from what torch elastic, the ranks themselves and the watchdog have left.


def rank_exits(failures: Mapping[int, ProcessFailure], guard: Reaper, resources: Resources) -> list[RankExit]:
    """Return how the ranks ended that did not end well, and those that ended well after an exception of their own."""
    ended = guard.ended_at_ns({failure.pid for failure in failures.values()})
    ends = [_end(rank, failure, ended, guard.run_dir, resources) for rank, failure in failures.items()]
    for path in guard.run_dir.glob("failure-*"):
        number = path.name.partition("-")[2]  # of one that is being written, it ends in .new
        if number.isdigit() and int(number) not in failures and (record := _record_of(_read(path))):
            ends.append(_raised(int(number), 0, 0, None, record, guard.run_dir))
    return ends


def _end(rank: int, failure: ProcessFailure, ended: Mapping[int, int], run_dir: Path, resources: Resources) -> RankExit:
    # Written by our bootstrap, or by elastic's own `record`, which has less; else a text of elastic's.
    record = _record_of(failure.message) or _record_of(_read(run_dir / f"failure-{rank}"))
    ended_at_ns = ended.get(failure.pid)
    if record:
        end = _raised(rank, failure.pid, failure.exitcode, ended_at_ns, record, run_dir)
        return replace(end, facts=resources.of_each()) if _ran_out_of_memory(end) else end
    number = -failure.exitcode if failure.exitcode < 0 else failure.exitcode - 128
    facts, was_short = "", None
    if number == signal.SIGKILL:
        was_short = resources.was_short_of_memory()
        facts = resources.of_each() if was_short else resources.of_memory(rank)
    elif number == signal.SIGBUS:
        facts = resources.of_shm()
    beacon = _with_step(_read(run_dir / f"beacon-{rank}"), *read_step_counter(run_dir, rank))
    file, line, _ = user_frame(beacon.get("frames", []))
    crash = run_dir / f"crash-{rank}"
    return RankExit(
        rank=rank,
        pid=failure.pid,
        exit_code=failure.exitcode,
        ended_at_ns=ended_at_ns,
        place=_place(beacon, f"{file}:{line}" if os.path.isabs(file) else "", seen=True),
        crash=tidy_crash(crash.read_text(), own_folder=str(Path(__file__).parent)) if crash.is_file() else "",
        facts=facts,
        was_short=was_short,
    )


def _raised(
    rank: int, pid: int, exit_code: int, ended_at_ns: int | None, record: Mapping[str, Any], run_dir: Path
) -> RankExit:
    where = record.get("where", "")
    return RankExit(
        rank=rank,
        pid=pid,
        exit_code=exit_code,
        ended_at_ns=ended_at_ns,
        failed_at_ns=record.get("time_ns"),
        message=record.get("message", ""),
        error_type=record.get("type", ""),
        where=where,
        # An exit on purpose has said what it had to say.
        trace="" if record.get("type") == "SystemExit" else record.get("py_callstack", ""),
        place=_place(record, where, seen=False),
    )


def _ran_out_of_memory(end: RankExit) -> bool:
    """Tell whether an error says so."""
    return end.error_type.endswith(("MemoryError", "OutOfMemory")) or says_out_of_memory(end.message)


def _with_step(beacon: dict[str, Any], step: int | None, num_steps: int) -> dict[str, Any]:
    """Return what a beacon said with the step that the rank was in at its end; the beacon's is half a second old."""
    phase = beacon.get("phase") if step == beacon.get("step") else ""
    return {**beacon, "step": step, "num_steps": num_steps, "phase": phase}


def _place(marks: Mapping[str, Any], where: str, *, seen: bool) -> str:
    """Say where a rank was: the step, file and line, and the machine."""
    phase = f" ({marks['phase']})" if marks.get("phase") else ""
    parts = []
    if marks.get("step") is not None:
        parts.append(f"in step {marks['step'] + 1}{phase}")
    elif marks.get("num_steps"):
        parts.append(f"after {marks['num_steps']} optimizer step{'s' * (marks['num_steps'] != 1)}")
    if where:
        parts.append(f"at {where}")
    parts.append(f"on {socket.gethostname()}")
    text = ", ".join(parts)
    return f"Last seen {text}." if seen else f"{text[0].upper()}{text[1:]}."


def _record_of(said: Any) -> dict[str, Any]:
    if not isinstance(said, dict):
        return {}
    inner = said.get("message", said)
    said = inner if isinstance(inner, dict) else said
    return {"message": said.get("message", ""), **said.get("extraInfo", {})} if said.get("message") else {}


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        said = json.loads(path.read_bytes())
        return said if isinstance(said, dict) else {}
    return {}


def write_failure(run_dir: Path, rank: int, message: str) -> None:
    """Say in a rank's name why it failed, as it is ended for that and cannot say so itself."""
    data = {"message": {"message": message, "extraInfo": {"type": message.partition(":")[0]}}}
    with contextlib.suppress(OSError):
        (run_dir / f"failure-{rank}.new").write_text(json.dumps(data))
        os.replace(run_dir / f"failure-{rank}.new", run_dir / f"failure-{rank}")


# How the job ended on the other machines: the launchers tell each other before they leave, so all name the cause.

_ENDED, _READ = "ended", "read"
_LIMIT_S = 3.0
_PAUSE_S = 0.1


@dataclass(frozen=True)
class RemoteFailure:
    """How the job ended on one machine.

    Attributes:
        rank: The rank that failed first there.
        is_consequence: Whether that only noticed that another was gone.
        says: Why that rank ended, and where it was.
        hang: The watchdog's report, if that ended the job.
        memory: What its ranks held, as `Resources.of_each` says it.
    """

    rank: int
    is_consequence: bool
    says: str
    hang: str = ""
    memory: str = ""


def remote_failure_of(first: RankExit) -> RemoteFailure:
    """Return what to tell the other machines of the rank that failed first on this one."""
    return RemoteFailure(first.rank, is_consequence(first), "\n".join(filter(None, (headline(first), first.place))))


def exchange_failures(bulletin: InterNodeStore | None, mine: RemoteFailure, *, num_nodes: int) -> list[RemoteFailure]:
    """Tell the other machines how the job ended here, and return what they tell.

    Blocks until all have told, and if this machine hosts the store in which they do, until all have read it; at most
    three seconds.
    """
    if bulletin is None:
        return []
    is_host = bulletin.is_host()
    bulletin.post(_ENDED, asdict(mine))
    deadline = time.monotonic() + _LIMIT_S
    notes = _await(bulletin, _ENDED, num_nodes - 1, deadline)
    if is_host:
        _await(bulletin, _READ, num_nodes - 1, deadline)
    else:
        bulletin.post(_READ, True)
    return [RemoteFailure(**note) for note in notes]


def _await(bulletin: InterNodeStore, topic: str, count: int, deadline: float) -> list[Any]:
    while True:
        notes = bulletin.others(topic)
        if len(notes) >= count or time.monotonic() >= deadline:
            return notes
        time.sleep(_PAUSE_S)


def remote_cause(mine: RemoteFailure, others: list[RemoteFailure]) -> RemoteFailure | None:
    """Return how the job ended on the machine that is the cause; ``None`` if that is this one, or nobody says."""
    if not mine.is_consequence or mine.hang:
        return None
    causes = [other for other in others if other.hang or not other.is_consequence]
    return min(causes, key=lambda other: (not other.hang, other.rank), default=None)


def remote_report(cause: RemoteFailure, lines: str) -> str:
    """Return the report of this machine, with a line for each of its ranks; the cause lies elsewhere."""
    return f"{cause.says}\nThe report of that machine has more.\n\n{lines}"


def with_memory(ends: list[RankExit], others: list[RemoteFailure]) -> list[RankExit]:
    """Return how ranks ended, for one that had no memory left with what the ranks of other machines held as well."""
    there = [line for other in others for line in other.memory.splitlines() if line.startswith("rank ")]
    if not there:
        return ends
    more = "\n".join(["Of the other machines:", *there])
    return [replace(end, facts=f"{end.facts}\n{more}") if end.facts.startswith(OF_EACH) else end for end in ends]
