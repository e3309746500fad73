"""How a rank's exception or exit status becomes the launcher's message; see `job_error`."""

import os
import re
import signal
import socket
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.base.activity import format_ranks
from lockstep.base.rank_files import CRASH, ENDED, HEARTBEAT, FailureRecord, rank_file, read_object
from lockstep.comm.rendezvous import poll_until
from lockstep.comm.store import InterNodeStore
from lockstep.errors import CALLED_ALONE, OF_COLLECTIVES, JobHangs, LockstepError, RankFailed, tells_of_others
from lockstep.health.heartbeat import read_step_counter
from lockstep.health.rank_state import user_frame
from lockstep.telemetry.resources import Resources, says_out_of_memory


@dataclass(frozen=True)
class RankExit:
    """How one rank ended.

    Attributes:
        exit_code: As of ``subprocess``: negative for a signal.
        record: What it wrote; or what is known of its end, with the stack that a fatal signal left as its trace.
        facts: A sentence with figures, such as those of memory.
        likely: What probably killed it, if more is known than the signal; a key of `_LIKELY`.
        was_stopped: Whether it still ran when the launcher stopped it because another rank had failed.
    """

    rank: int
    exit_code: int
    record: FailureRecord
    facts: str = ""
    likely: str = ""
    was_stopped: bool = False

    @property
    def is_normal(self) -> bool:
        """Whether its program ended normally."""
        return self.exit_code == 0 and not self.record.message

    @property
    def place(self) -> str:
        """A sentence with the step, the line, the machine and the process."""
        line = f"at {self.record.where}" if self.record.where else ""
        process = f"PID {self.record.pid}" if self.record.pid else ""
        step = "" if self.is_normal else self.record.in_step  # then the headline has it
        text = ", ".join(filter(None, (step, line, f"on {socket.gethostname()}", process)))
        is_known = self.is_normal or self.record.message
        return f"{text[0].upper()}{text[1:]}." if is_known else f"Last seen {text}."


def job_error(
    exits: list[RankExit], ranks: range, *, hang: str, store: InterNodeStore | None, num_nodes: int, num_replaced: int
) -> LockstepError:
    """Return the error to raise after ranks have failed. With several machines, waits some seconds for the others.

    [Note: the way of an exception]
    1. In the rank, `record_end` of bootstrap.py writes the exception into the launcher's folder as soon as it leaves
       the program (or the block of `lockstep.init`), before exit handlers run and before peers notice. A fatal signal
       leaves the Python stack in a file there (faulthandler). A rank that is killed leaves its last heartbeat and the
       step that it was in.
    2. torch elastic's agent (agent.py) detects that a process has ended, and stops the others. It records which
       ones it stopped, and when each process ended.
    3. `rank_exits` collects how each rank ended; `first_failure` decides which of them is the cause.
    4. If there are several machines, the launchers agree on the cause before they leave (`find_cause`).
    5. `failure_report` writes the message: the cause on its first line, its location, its traceback, a hint, and a line
       for each of the other ranks. `supervise` raises it.

    Args:
        exits: The ranks of this machine that failed or were stopped.
        ranks: All ranks of this machine.
        hang: The watchdog's report, if that ended the job.
        store: The store of the launchers, if there are several machines.
        num_nodes: The largest number of machines.
        num_replaced: Number of ranks of this machine that were lost before, and replaced in place.
    """
    first = first_failure(exits)
    text = "\n".join([headline(first, exits), first.place])
    own_failure = NodeFailure(first.rank, _of_others(first) > 0, text, hang, first.is_normal)
    cause = own_failure if store is None else find_cause(store, own_failure, num_nodes=num_nodes)
    if cause.hang:
        return JobHangs(cause.hang)
    if cause == own_failure:
        return RankFailed(failure_report(exits, ranks, num_nodes=num_nodes, num_replaced=num_replaced), rank=first.rank)
    lines = rank_lines(exits, ranks)
    return RankFailed(f"{cause.text}\nThe report of that machine has more.\n\n{lines}", rank=cause.rank)


# 3. How the ranks of this machine ended, and which was first.

# How long ranks have to end after SIGTERM when another one has failed, which they may wait for in vain. After that they
# are killed; torch elastic would wait for half a minute for one that ignores SIGTERM.
SIGTERM_S = 5


# By process, in nanoseconds since the epoch.
Times = Mapping[int, int]


def rank_exits(
    failures: Mapping[int, ProcessFailure], stopped_at_ns: Times, ended_at_ns: Times, folder: Path, resources: Resources
) -> list[RankExit]:
    """Return how ranks ended: ranks with a failure, and ranks that have written how they ended.

    Args:
        failures: torch elastic's records, by rank.
        stopped_at_ns: When the launcher began to stop each process that still ran.
        ended_at_ns: When each process ended.
        folder: The launcher's.
        resources: The memory that ranks used.
    """
    # A rank that caught the exception which ended `lockstep.init` has both, and the others waited for it.
    failed, ended = FailureRecord.read_all(folder), FailureRecord.read_all(folder, ENDED)
    exits = {rank: RankExit(rank, 0, record) for rank, record in (ended | failed).items()}
    for rank, failure in failures.items():
        pid, code = failure.pid, failure.exitcode
        ended_ns = ended_at_ns.get(pid, time.time_ns())  # not recorded yet: it was the last
        # A SIGKILL before the launcher sends one came from outside, and the kernel took long to end the rank.
        patience_ns = SIGTERM_S * 10**9 if code == -signal.SIGKILL else 0
        was_stopped = pid in stopped_at_ns and ended_ns - stopped_at_ns[pid] >= patience_ns
        if rank in failed:
            exits[rank] = replace(exits[rank], exit_code=code, was_stopped=was_stopped)
        elif rank not in ended or not was_stopped:  # else its interpreter was still on its way out
            exit = RankExit(rank, code, FailureRecord(time_ns=ended_ns, pid=pid), was_stopped=was_stopped)
            exits[rank] = _with_signs(exit, folder, resources)
    short = [rank for rank, exit in exits.items() if says_out_of_memory(exit.record.message)]
    return list((exits | {rank: replace(exits[rank], facts=resources.of_each()) for rank in short}).values())


def _with_signs(exit: RankExit, folder: Path, resources: Resources) -> RankExit:
    """Return how a rank without a recorded exception ended: it was killed, or is not a Python program."""
    number = -exit.exit_code if exit.exit_code < 0 else exit.exit_code - 128
    likely, facts, error_type = "", "", ""
    if number == signal.SIGKILL:
        likely = {True: "short of memory", False: "not short of memory", None: ""}[resources.was_short_of_memory()]
        facts = resources.of_each()
    elif number == signal.SIGBUS:
        facts = resources.of_shm()
    heartbeat = read_object(rank_file(folder, HEARTBEAT, exit.rank))
    # The step counter is current at the end; the heartbeat, with its phase, is up to half a second older.
    step, num_steps = read_step_counter(folder, exit.rank)
    phase = heartbeat.get("phase", "") if step == heartbeat.get("step") else ""
    file, line, _ = user_frame(heartbeat.get("frames", []))
    where = f"{file}:{line}" if os.path.isabs(file) else ""
    crash = rank_file(folder, CRASH, exit.rank)
    text = crash.read_text(errors="replace") if crash.is_file() else ""
    trace = text and tidy_crash(text, own_folder=str(Path(__file__).parent))
    # NCCL's watchdog ends the process in a thread without Python, so faulthandler marks no thread as the current one.
    if number == signal.SIGABRT and heartbeat.get("uses_gpu") and trace and _CURRENT not in trace:
        likely, error_type, call = "NCCL", _NCCL_ABORT, heartbeat.get("recorded_call")
        facts = f"The collective in torch's record: {call}." if call else ""
    record = replace(exit.record, trace=trace, where=where, step=step, phase=phase, num_steps=num_steps)
    return replace(exit, record=replace(record, error_type=error_type), facts=facts, likely=likely)


def tidy_crash(stack: str, *, own_folder: str) -> str:
    """Return the output of faulthandler without our own frames and the list of extension modules."""
    lines = stack.splitlines()
    return "\n".join(line for line in lines if own_folder not in line and not line.startswith("Extension modules:"))


# The class of the error after which NCCL's watchdog aborts, and a mark in the output of faulthandler.
_NCCL_ABORT, _CURRENT = "DistBackendError", "Current thread 0x"


def first_failure(exits: list[RankExit]) -> RankExit:
    """Return the rank that failed before the others, or ended normally before them, and made them fail."""
    first = min((exit for exit in exits if not exit.is_normal), key=_blame)
    # The other ranks then have ended, or only met it in another collective. If several made the call, they do not know.
    alone = [exit for exit in exits if CALLED_ALONE in exit.record.message.partition("\n")[0]]
    if len(alone) == 1 and _blame(first)[0] > 0:
        return alone[0]
    early = [exit for exit in exits if exit.is_normal and exit.record.has_joined]
    # Only an error of a collective means that another rank has ended: a script's own connections may break, too.
    is_missed = bool(early) and any(mark in _typed_message(first) for mark in OF_COLLECTIVES)
    return min(early, key=lambda exit: (exit.record.time_ns, exit.rank)) if is_missed else first


def _blame(exit: RankExit) -> tuple[int, int, int]:
    """Return how likely a rank is the cause; and when it failed.

    0: by its own error. 1: in a collective, to which the ranks may have come differently. 2: it noticed another's end.
    3: it was stopped.

    The time alone is not sufficient: the kernel closes a killed process's connections, which its peers notice at once,
    long before it has released the memory and reports the end.
    """
    # The launcher kills a rank that ignores SIGTERM; a rank with a message failed between the poll and the signal.
    likely = 3 if _was_only_stopped(exit) else _of_others(exit)
    return likely, exit.record.time_ns, exit.rank


def _was_only_stopped(exit: RankExit) -> bool:
    return exit.was_stopped and not exit.record.message and exit.exit_code in (-signal.SIGTERM, -signal.SIGKILL)


def _of_others(exit: RankExit) -> int:
    """Return what the error of a rank tells of others, as `tells_of_others`."""
    told = tells_of_others(_typed_message(exit))
    return 2 if told and not exit.record.message else told


def _typed_message(exit: RankExit) -> str:
    return f"{exit.record.error_type}: {exit.record.message}"


# 4. Several machines.

# How long to wait for the other machines, which notice the end within about a second.
_EXCHANGE_S = 3.0
_POLL_S = 0.1


@dataclass(frozen=True)
class NodeFailure:
    """How the job ended on one machine, for the launchers of the others.

    Attributes:
        rank: The first rank that failed there.
        is_consequence: Whether it only noticed that another rank was gone.
        text: Why that rank ended, and where.
        hang: The watchdog's report, if that ended the job.
        is_normal: Whether that rank ended normally, too early for the others.
    """

    rank: int
    is_consequence: bool
    text: str
    hang: str = ""
    is_normal: bool = False


def find_cause(store: InterNodeStore, own_failure: NodeFailure, *, num_nodes: int) -> NodeFailure:
    """Return how the job ended on the machine with the cause; ``own_failure`` if that is this one, or if it is unknown.

    Blocks until all machines have posted, and if this one hosts the store, until all have read; some seconds at most.
    """
    is_host, is_cause = store.is_host(), bool(own_failure.hang) or not own_failure.is_consequence
    if is_cause:
        # One shared note: with one per machine, every launcher would have to read all of them.
        store.least("cause", _rank_of_cause, asdict(own_failure))
    store.count("ended", 1)
    poll_until(lambda: store.count("ended") >= num_nodes, _EXCHANGE_S, _POLL_S)
    cause = None if is_cause and not own_failure.is_normal else store.least("cause", _rank_of_cause)
    store.count("read", 1)
    if is_host:  # the store ends with this process
        poll_until(lambda: store.count("read") >= num_nodes, _EXCHANGE_S, _POLL_S)
    return own_failure if cause is None else NodeFailure(**cause)


def _rank_of_cause(note: Mapping[str, Any]) -> tuple[bool, bool, int]:
    return not note["hang"], note["is_normal"], note["rank"]


# 5. The message.


def failure_report(exits: list[RankExit], ranks: range, *, num_nodes: int = 1, num_replaced: int = 0) -> str:
    """Return the whole report, the cause on its first line.

    Args:
        exits: The ranks of this machine that failed or were stopped; one of them is the cause.
        ranks: All ranks of this machine.
        num_nodes: Number of machines.
        num_replaced: Number of ranks that were lost before, and replaced in place.
    """
    first = first_failure(exits)
    record = first.record
    top = [headline(first, exits), first.place, first.facts]
    if first.exit_code == 0 and record.message:
        top.append("The program caught the exception and ended normally, while other ranks waited for this one.")
    # If the cause is not known here, a hint about the consequence would mislead.
    hint, elsewhere = hint_for(record.message), ""
    if CALLED_ALONE in record.message and any(exit.is_normal for exit in exits):
        hint = ""  # the headline says more
    elif _of_others(first) == 2:
        failed = {exit.rank for exit in exits if not exit.is_normal}
        finished = [rank for rank in ranks if rank not in failed]
        places = [f"{format_ranks(finished)} finished while others waited"] if finished else []
        places += ["look at the other machines"] if num_nodes > 1 else []
        nowhere = "no rank of this job has reported an error of its own"
        hint, elsewhere = "", f"This error only means that another rank ended: {', or '.join(places) or nowhere}."
    lines = rank_lines(exits, [rank for rank in ranks if rank != first.rank])
    # A program that calls sys.exit has printed its own message.
    trace = "" if record.error_type == "SystemExit" else record.trace.rstrip()
    ranks_were = "rank was" if num_replaced == 1 else "ranks were"
    earlier = f"Before that, {num_replaced} lost {ranks_were} replaced while the others went on." * bool(num_replaced)
    return "\n\n".join(filter(None, ("\n".join(filter(None, top)), trace, hint, lines, elsewhere, earlier)))


def restart_report(first: RankExit, restart: str) -> str:
    """Return the traceback and the line of the first failed rank, printed before the ranks are started again."""
    failure = f"failed: {_in_a_line(first)}" if first.record.message else _in_a_line(first)
    # Our loops count a step from 0 while it runs; other loops count the steps that are done.
    step = first.record.step if first.record.step is not None else first.record.num_steps or None
    place = "" if step is None or first.is_normal else f" in step {step + 1}"
    trace = "" if first.record.error_type == "SystemExit" else first.record.trace.rstrip()
    return "\n".join(filter(None, [trace, f"lockstep: rank {first.rank} {failure}{place}; {restart}"]))


def how_it_ended(exit: RankExit) -> str:
    """Return a line on a rank that is lost, while the others go on."""
    return " ".join(filter(None, (f"rank {exit.rank}", _in_a_line(exit), exit.record.in_step)))


# So many lines of a traceback are shown while the others go on; its log has all of it.
_NUM_LINES = 8


def why_lost(exit: RankExit) -> str:
    """Return what is known of the cause, for a rank that is replaced: the end of its traceback, or advice."""
    # A fatal signal leaves the stacks of all threads, each with the innermost call first.
    trace = exit.record.trace[max(0, exit.record.trace.find(_CURRENT)) :].splitlines()
    trace = trace[-_NUM_LINES:] if exit.record.message else trace[:_NUM_LINES]
    gives_advice = exit.likely == "short of memory" or exit.exit_code == -signal.SIGBUS
    return "\n".join(trace + headline(exit).splitlines()[1:] * gives_advice)


def rank_lines(exits: list[RankExit], ranks: Iterable[int]) -> str:
    """Return a line for each of ``ranks``."""
    exit_of = {exit.rank: exit for exit in exits}
    pids = {rank: f" (PID {exit.record.pid})" for rank, exit in exit_of.items() if exit.record.pid}
    lines = {rank: _in_a_line(exit_of[rank]) if rank in exit_of else "finished" for rank in ranks}
    return "\n".join(f"rank {rank}{pids.get(rank, '')}: {line}" for rank, line in lines.items())


# Why a rank ended and what to do, by the signal or by what else is known.
_LIKELY: dict[int | str, str] = {
    signal.SIGKILL: "most likely the machine ran out of memory.\n"
    "Look for 'Out of memory' in `dmesg`; use fewer ranks, a smaller batch or fewer DataLoader workers.",
    signal.SIGSEGV: "native code accessed invalid memory.\n"
    "An extension module or a driver may be broken; the Python stack shows the caller.",
    signal.SIGBUS: "most likely shared memory is full.\n"
    "Look at `df /dev/shm`; use fewer DataLoader workers, or more shared memory (docker run --shm-size).",
    signal.SIGABRT: "native code aborted.\nIts own message is further up.",
    signal.SIGTERM: "something outside the job asked it to end.\nA scheduler, a time limit or `kill` does that.",
    "short of memory": "the kernel killed it because memory ran out.\n"
    "Use fewer ranks, a smaller batch or fewer DataLoader workers.",
    "not short of memory": "something outside the job did that, such as a scheduler or `kill -9`.\n"
    "The kernel has not killed any process for lack of memory meanwhile.",
    "normal": "Every rank must run the same steps: let all ranks leave the loop in the same one, give them the same "
    "number of\nbatches, or train within `with model.join()`.",
    "NCCL": "most likely by NCCL, as another rank ended or did not take part in a collective in time.\n"
    "Its own message is further up.",
}


def headline(exit: RankExit, exits: Sequence[RankExit] = ()) -> str:
    """Return why a rank ended, in one line, or with advice in the lines that follow; ``exits`` are of all ranks."""
    name, code, record = f"Rank {exit.rank}", exit.exit_code, exit.record
    if exit.is_normal:
        missed = min((other for other in exits if not other.is_normal), key=_blame)
        during = f"while rank {missed.rank} was still training ({missed.record.where})"
        return f"{' '.join(filter(None, (name, 'ended normally', record.in_step, during)))}.\n{_LIKELY['normal']}"
    if record.error_type == "SystemExit":
        status = f" with exit code {code}" * (code >= 0)  # it may have been killed on its way out
        return f"{name} left{status} ({record.message} at {record.where})."
    if record.message:  # the rest of a long message is in the traceback below
        cause = "a GPU is needed, but torch finds none here: " * ("uses CUDA" in hint_for(record.message))
        return f"{name} failed: {cause}{_first_line(record.message)}"
    if code - 128 in _LIKELY:  # a shell or a similar wrapper reports a signal in this way
        return f"{name} left with exit code {code}: what it ran {_killed_by(code - 128)}, {_LIKELY[code - 128]}"
    if code >= 0:
        return f"{name} left with exit code {code}, without an exception.\nIts earlier output is further up."
    return f"{name} {_killed_by(-code)}: {_LIKELY.get(exit.likely or -code, 'its earlier output is further up.')}"


def _in_a_line(exit: RankExit) -> str:
    if exit.is_normal:
        return f"ended normally {exit.record.in_step}".rstrip()
    if exit.record.message:
        text = textwrap.shorten(_first_line(exit.record.message), 200, placeholder=" ...")
        return f"{text} ({exit.record.where})" if exit.record.where else text
    if _was_only_stopped(exit):
        return "stopped by the launcher"
    return f"left with exit code {exit.exit_code}" if exit.exit_code >= 0 else _killed_by(-exit.exit_code)


def _first_line(message: str) -> str:
    """Return the first line of an error; if it ends in a colon, with the next line."""
    first, _, tail = message.partition("\n")
    return f"{first} {tail.splitlines()[0].strip()}" if first.endswith(":") and tail.strip() else first


def _killed_by(number: int) -> str:
    names = {int(member): f"{member.name} (signal {number})" for member in signal.Signals}
    return f"was killed by {names.get(number, f'signal {number}')}"


# Hints: what the errors of NCCL, Gloo, the store and CUDA mean.

# Texts in an error; what they mean, and what to do about it.
_HINTS = """\
Connection closed by peer | Connection reset by peer | remote process exited | ncclRemoteError
    Another rank's process has ended, or the network has dropped the connection to it.
    Look for the rank that failed first, here or on another machine.
Duplicate GPU detected
    Two ranks use the same GPU.
    Let each rank use the GPU of its LOCAL_RANK, as lockstep.init() does, and start at most one rank per GPU.
unhandled system error | ncclSystemError
    A call of the operating system failed inside NCCL: mostly the network, or too little shared memory.
    Set NCCL_DEBUG=WARN to see which; check `df /dev/shm` (docker run --shm-size=8g) and NCCL_SOCKET_IFNAME.
unhandled cuda error | ncclUnhandledCudaError
    CUDA failed inside NCCL: often an earlier error of the same process, or GPUs that cannot reach each other.
    Set NCCL_DEBUG=INFO and CUDA_LAUNCH_BLOCKING=1 to see where; NCCL_P2P_DISABLE=1 tells whether it is the link.
Watchdog caught collective operation timeout | mismatch between collectives | op.preamble.length
    The ranks did not all call the same collective with the same shapes: one was skipped, or stuck elsewhere.
    Look for code under `if rank == 0`, and for shapes that depend on a rank's own data.
Socket Timeout | wait timeout after | Timed out waiting | Timed out after | socket has timed out
    A rank or the store did not answer in time: it never started, has died, or is stuck.
    Look for the rank that is missing; check that all were started with the same MASTER_ADDR and MASTER_PORT.
no socket interface found | Unable to find interface | Unable to find address for
    NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names a network interface that this machine does not have.
    Take the name from `ip -brief address`, or unset the variable.
No route to host | Network is unreachable | Connection timed out
    The address of another machine cannot be reached from here: a wrong interface, or a firewall.
    Choose the interface with NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME; try `ping` to MASTER_ADDR.
Connection refused
    Nothing listens at that address: rank zero has not started, has ended, or has another address.
    Check MASTER_ADDR and MASTER_PORT on every machine, and that the first machine's job runs.
Address already in use | EADDRINUSE
    Another program, maybe an earlier run of this one, listens on that port.
    End it, or choose another port with --master-port; on one machine `lockstep run` finds a free one.
device-side assert | illegal memory access
    A GPU kernel failed earlier; the line above is only where the error was reported.
    Run again with CUDA_LAUNCH_BLOCKING=1 to see the line; often an index is out of range.
attribute '_cuda_ | not compiled with CUDA | no NVIDIA driver | No CUDA GPUs | no GPUs found | is_available() is False
    The script uses CUDA, and this machine has no GPU, or this torch was built without CUDA.
    Use world.device of lockstep.init() in place of a CUDA device, or look at `lockstep doctor` for the driver.
--local_rank | --local-rank
    The script takes its local rank as an argument. Launchers set the variable LOCAL_RANK instead, as torchrun does.
    Give the argument that default: parser.add_argument("--local_rank", type=int, default=os.environ["LOCAL_RANK"])
Too many open files
    This process may not open more files: mostly many DataLoader workers that share tensors.
    Raise the limit with `ulimit -n 65536`, or use fewer workers.
No space left on device
    A disk, or shared memory, is full.
    Look at `df` and `df /dev/shm`; DataLoader workers need shared memory (docker run --shm-size=8g).
Expected to have finished reduction in the prior iteration
    torch's DistributedDataParallel waits for gradients of parameters that took no part in the loss.
    Run the script with --adopt, as Lockstep's engine needs no flag, or pass find_unused_parameters=True.
"""
_ENTRY = re.compile(r"^(\S.*)\n    (.*)\n    (.*)$", re.MULTILINE)
ERROR_HINTS = {tuple(marks.split(" | ")): f"{means}\n{advice}" for marks, means, advice in _ENTRY.findall(_HINTS)}


def hint_for(error: str) -> str:
    """Return what the text of an error means and what to do, in two lines; empty if no hint matches."""
    hints = (hint for marks, hint in ERROR_HINTS.items() if any(mark in error for mark in marks))
    return next((f"What that means: {hint}" for hint in hints), "")
