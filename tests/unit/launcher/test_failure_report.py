"""Which rank failed first, and how the report reads."""

import argparse
import json
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.base import activity, rank_files
from lockstep.base.rank_files import ENDED, RUN_DIR, FailureRecord
from lockstep.comm.collectives import wait_for
from lockstep.errors import RankFailed
from lockstep.launcher import bootstrap
from lockstep.launcher.bootstrap import record_end
from lockstep.launcher.failure_report import (
    ERROR_HINTS,
    NodeFailure,
    RankExit,
    failure_report,
    first_failure,
    headline,
    hint_for,
    job_error,
    rank_exits,
    restart_report,
    tidy_crash,
)
from lockstep.telemetry.resources import Resources

GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


HOST = socket.gethostname()


def ended(rank, exit_code, at=0, message="", error_type="", *, record=(), **more):
    record = {"time_ns": at, "message": message, "error_type": error_type, **dict(record)}
    return RankExit(rank, exit_code, FailureRecord(**record), **more)


def raised(rank, message, at, *, error_type="ValueError", trace="Traceback ...\nValueError: boom\n"):
    record = {"where": f"/x/train.py:{rank}", "trace": trace, "pid": 70 + rank}
    return ended(rank, 1, at, message, error_type, record=record)


def test_the_exception_that_was_raised_first_is_first_however_the_processes_ended():
    early = ended(1, 1, 10, message="ValueError: boom", error_type="ValueError")
    late = ended(0, 1, 20, message="KeyError: 'x'", error_type="KeyError")
    assert first_failure([late, early]) is early


def test_a_killed_rank_is_the_cause_although_its_peer_noticed_before_its_end_was_seen():
    killed = ended(1, -signal.SIGKILL, 50)
    noticed = raised(0, GONE, 40, error_type="RuntimeError")
    assert first_failure([noticed, killed]) is killed


def test_an_abort_after_an_exception_is_not_the_cause():
    aborted = ended(0, -signal.SIGABRT, 50)
    error = raised(1, "ValueError: boom", 40)
    assert first_failure([aborted, error]) is error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_that_the_launcher_stopped_are_never_the_cause(number):
    # Their ends may be noted before that of the rank that failed, which the kernel takes longer to take down.
    stopped = ended(2, -number, 40, was_stopped=True)
    killed = ended(3, -signal.SIGKILL, 50, record={"step": 4})
    assert first_failure([stopped, killed]) is killed
    assert restart_report(killed, "restart 1 of 2") == (
        "lockstep: rank 3 was killed by SIGKILL (signal 9) in step 5; restart 1 of 2"
    )


def test_what_the_kernel_knows_of_the_ends_decides_who_was_first(tmp_path):
    # Ranks 0 and 1 were killed 20 ms apart; 2 was stopped by SIGTERM; 3 did not heed it and was killed 5 s later.
    codes = {0: -signal.SIGKILL, 1: -signal.SIGKILL, 2: -signal.SIGTERM, 3: -signal.SIGKILL}
    failures = {rank: ProcessFailure(rank, 10 + rank, code, "") for rank, code in codes.items()}
    ended_at_ns = {10: 1_020_000_000, 11: 1_000_000_000, 12: 1_050_000_000, 13: 6_100_000_000}
    # The kernel took rank 1 down so slowly that it seemed to run when the launcher began to stop all.
    stopped_at_ns = {11: 990_000_000, 12: 1_030_000_000, 13: 1_030_000_000}
    exits = rank_exits(failures, stopped_at_ns, ended_at_ns, tmp_path, Resources())
    assert [exit.was_stopped for exit in exits] == [False, False, True, True]
    assert first_failure(exits).rank == 1


ABORT = """\
import ctypes, faulthandler, sys, time
faulthandler.enable(open(sys.argv[1], "w"))
native, thread = ctypes.CDLL(None), ctypes.c_ulong()
if sys.argv[2] == "in a native thread":
    native.pthread_create(ctypes.byref(thread), None, ctypes.cast(native.abort, ctypes.c_void_p), None)
    time.sleep(60)
native.abort()
"""


@pytest.mark.parametrize(
    ("where", "uses_gpu", "first"),
    [("in a native thread", True, 1), ("in a native thread", False, 0), ("in the main thread", True, 0)],
)
def test_an_abort_by_the_watchdog_of_nccl_is_not_the_cause(tmp_path, where, uses_gpu, first):
    """It ends the other ranks when one is lost, maybe before its end was seen: on another machine, for example."""
    done = subprocess.run([sys.executable, "-c", ABORT, str(tmp_path / "crash-0"), where], stderr=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGABRT
    call = "all_reduce of 6 elements, number 5, scheduled"
    (tmp_path / "heartbeat-0").write_text(json.dumps({"uses_gpu": uses_gpu, "recorded_call": call}))
    codes = {0: -signal.SIGABRT, 1: -signal.SIGKILL}
    failures = {rank: ProcessFailure(rank, 10 + rank, code, "") for rank, code in codes.items()}
    exits = rank_exits(failures, {}, {10: 1_000, 11: 2_000}, tmp_path, Resources())
    assert first_failure(exits).rank == first
    reason = (
        "native code aborted.\nIts own message is further up.",
        "most likely by NCCL, as another rank ended or did not take part in a collective in time.\n"
        "Its own message is further up.",
    )[first]
    assert exits[0].facts == ("", f"The collective in torch's record: {call}.")[first]
    assert headline(exits[0]) == f"Rank 0 was killed by SIGABRT (signal 6): {reason}"


def test_a_rank_that_was_terminated_from_outside_is_the_cause():
    terminated = ended(1, -signal.SIGTERM, 50)
    noticed = ended(0, 1, 49, GONE, "RuntimeError")
    assert first_failure([noticed, terminated]) is terminated


def test_report():
    ends = [
        raised(2, "ValueError: boom\nmore", 10),
        raised(0, f"{GONE} {'x' * 300}", 20, error_type="RuntimeError"),
        ended(3, -signal.SIGTERM, 90, record={"pid": 73}, was_stopped=True),
        ended(4, -signal.SIGKILL, 95),
        ended(5, 7, 96),
    ]
    assert failure_report(ends, range(6)) == (
        "Rank 2 failed: ValueError: boom\n"
        f"At /x/train.py:2, on {HOST}, PID 72.\n"
        "\n"
        "Traceback ...\n"
        "ValueError: boom\n"
        "\n"
        f"rank 0 (PID 70): {GONE} ... (/x/train.py:0)\n"
        "rank 1: finished\n"
        "rank 3 (PID 73): stopped by the launcher\n"
        "rank 4: was killed by SIGKILL (signal 9)\n"
        "rank 5: left with exit code 7"
    )


@pytest.mark.parametrize(("num", "were"), [(1, "1 lost rank was"), (3, "3 lost ranks were")])
def test_report_counts_the_ranks_that_were_replaced_before(num, were):
    report = failure_report([raised(0, "ValueError: boom", 10)], range(1), num_replaced=num)
    assert report.splitlines()[-1] == f"Before that, {were} replaced while the others went on."


@pytest.mark.parametrize(
    ("num_ranks", "num_nodes", "where"),
    [
        (1, 2, "look at the other machines"),
        (2, 2, "rank 1 finished while others waited, or look at the other machines"),
        (2, 1, "rank 1 finished while others waited"),
        (1, 1, "no rank of this job has reported an error of its own"),
    ],
)
def test_report_says_where_the_cause_may_be(num_ranks, num_nodes, where):
    exits = [raised(0, GONE, 10, error_type="RuntimeError", trace="")]
    assert failure_report(exits, range(num_ranks), num_nodes=num_nodes) == (
        f"Rank 0 failed: {GONE}\nAt /x/train.py:0, on {HOST}, PID 70.\n\n{'rank 1: finished' * (num_ranks - 1)}"
        f"{chr(10) * 2 * (num_ranks - 1)}This error only means that another rank ended: {where}."
    )


MISMATCH = "Rank {} in all_reduce on shm: the ranks call different collectives. This rank calls ..."
UNCONNECTED = (
    "DistNetworkError: The client socket has timed out after 300000ms while trying to connect to (localhost, 1)."
)


@pytest.mark.parametrize(
    ("message", "last"),
    [
        (MISMATCH, ""),
        ("Rank {} waited 3 s in World.barrier() number 1; missing: rank 1.", ""),
        (UNCONNECTED, "Look for the rank that is missing; check that all were started with the same MASTER_ADDR and"),
        ("DistNetworkError: EADDRINUSE", "End it, or choose another port with --master-port; on one machine"),
    ],
)
def test_an_error_of_a_collective_that_is_the_cause_is_not_called_the_end_of_another_rank(message, last):
    kind = message.partition(": ")[0] if message.startswith("Dist") else "CollectiveError"
    exits = [raised(rank, message.format(rank), 10 + rank, error_type=kind, trace="") for rank in range(2)]
    report = failure_report(exits, range(2))
    assert "another rank ended" not in report
    assert last in report


def test_ranks_that_call_different_collectives_are_the_cause_of_those_that_gave_up_but_not_of_an_error_of_its_own():
    gave_up = raised(
        0, "Rank 0 in all_reduce on shm waited for rank 1, which gave up:", 10, error_type="CollectiveError"
    )
    differs = raised(1, MISMATCH.format(1), 20, error_type="CollectiveError")
    error = raised(2, "ValueError: boom", 30)
    assert first_failure([gave_up, differs]) is differs
    assert first_failure([gave_up, differs, error]) is error


ALONE = "lockstep.save is collective: call it on every rank, not behind `if rank == 0`."


def test_a_call_that_one_rank_makes_alone_is_the_cause_of_a_mismatch_but_not_of_an_error_or_of_several():
    other = raised(0, MISMATCH.format(0), 10, error_type="CollectiveError")
    alone = raised(1, f"{ALONE}\n{MISMATCH.format(1)}", 20, error_type="CollectiveError")
    assert failure_report([other, alone], range(2)).startswith(f"Rank 1 failed: {ALONE}\nAt /x/train.py:1,")
    error = raised(2, "ValueError: boom", 30)
    assert first_failure([other, alone, error]) is error
    assert first_failure([other, alone, replace(alone, rank=2)]) is other


def test_a_call_that_one_rank_makes_alone_is_the_cause_though_the_others_have_ended():
    message = f"{ALONE}\nCollectiveError: {GONE}"
    alone = raised(0, message, 30, error_type="CollectiveError", trace="")
    left = ended(1, 0, 20, record={"has_joined": True, "pid": 71})
    assert first_failure([replace(alone, record=replace(alone.record, message=GONE)), left]) is left
    place = f"At /x/train.py:0, on {HOST}, PID 70."
    assert (
        failure_report([alone, left], range(2)) == f"Rank 0 failed: {ALONE}\n{place}\n\nrank 1 (PID 71): ended normally"
    )


class HandlerObject:
    def __call__(self, *_):
        raise RuntimeError("too slow")


def handler(*_):
    raise RuntimeError("too slow")


@pytest.mark.parametrize("chosen", [handler, HandlerObject(), partial(handler, 1)])
def test_the_error_of_a_signal_handler_in_a_wait_is_not_one_of_the_collective(chosen):
    class Work:
        def wait(self, _timeout=None):
            signal.raise_signal(signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, chosen)
    try:
        with pytest.raises(RuntimeError, match=r"^too slow$") as caught:
            wait_for(Work())
    finally:
        signal.signal(signal.SIGALRM, before)
    assert type(caught.value) is RuntimeError


EARLY = """\
Every rank must run the same steps: let all ranks leave the loop in the same one, give them the same number of
batches, or train within `with model.join()`."""


@pytest.mark.parametrize("was_stopped", [True, False])  # the launcher stops those whose interpreter is on its way out
def test_a_rank_that_ended_normally_while_others_trained_is_the_cause(tmp_path, was_stopped):
    noticed = FailureRecord(GONE, "RuntimeError", "a page", "/x/train.py:7", 30, num_steps=50, pid=70)
    noticed.write(tmp_path, 0)
    left = FailureRecord(where="/x/train.py:4", time_ns=20, num_steps=50, pid=71, has_joined=True)
    left.write(tmp_path, 1)
    failures = {0: ProcessFailure(0, 70, 1, "")}
    if was_stopped:
        failures[1] = ProcessFailure(1, 71, -signal.SIGTERM, "")
    exits = rank_exits(failures, {71: 40}, {70: 35, 71: 45}, tmp_path, Resources())
    error = job_error(exits, range(2), hang="", store=None, num_nodes=1, num_replaced=0)
    assert (str(error), error.rank) == (
        "Rank 1 ended normally after 50 optimizer steps while rank 0 was still training (/x/train.py:7).\n"
        f"{EARLY}\nAt /x/train.py:4, on {HOST}, PID 71.\n\nrank 0 (PID 70): {GONE} (/x/train.py:7)",
        1,
    )
    # A connection of the script's own is another matter, and so is a rank that never was in a group.
    own = replace(noticed, message="ConnectionResetError: Connection reset by peer", error_type="ConnectionResetError")
    assert first_failure([ended(0, 1, record=asdict(own)), *exits[1:]]).rank == 0
    replace(left, has_joined=False).write(tmp_path, 1)
    assert first_failure(rank_exits(failures, {71: 40}, {70: 35, 71: 45}, tmp_path, Resources())).rank == 0
    # A crash on its way out is its own failure.
    failures[1] = ProcessFailure(1, 71, -signal.SIGSEGV, "")
    assert first_failure(rank_exits(failures, {}, {70: 35, 71: 45}, tmp_path, Resources())).rank == 1


def test_records_of_an_end(tmp_path):
    failed, left = FailureRecord("ValueError: boom", "ValueError", step=3, pid=7), FailureRecord(num_steps=3)
    assert FailureRecord.read_all(tmp_path) == {}
    failed.write(tmp_path, 1)
    left.write(tmp_path, 1)
    assert (FailureRecord.read_all(tmp_path), FailureRecord.read_all(tmp_path, ENDED)) == ({1: failed}, {1: left})


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (
            ended(1, 3, 0, "SystemExit: 3", "SystemExit", record={"where": "/x/train.py:4"}),
            "Rank 1 left with exit code 3 (SystemExit: 3 at /x/train.py:4).",
        ),
        (
            ended(1, 3),
            "Rank 1 left with exit code 3, without an exception.\nIts earlier output is further up.",
        ),
        (
            ended(1, -9),
            "Rank 1 was killed by SIGKILL (signal 9): most likely the machine ran out of memory.\n"
            "Look for 'Out of memory' in `dmesg`; use fewer ranks, a smaller batch or fewer DataLoader workers.",
        ),
        (
            ended(1, -9, likely="short of memory"),
            "Rank 1 was killed by SIGKILL (signal 9): the kernel killed it because memory ran out.\n"
            "Use fewer ranks, a smaller batch or fewer DataLoader workers.",
        ),
        (
            ended(1, -9, likely="not short of memory"),
            "Rank 1 was killed by SIGKILL (signal 9): something outside the job did that, such as a scheduler or "
            "`kill -9`.\nThe kernel has not killed any process for lack of memory meanwhile.",
        ),
        (
            ended(1, -7),
            "Rank 1 was killed by SIGBUS (signal 7): most likely shared memory is full.\n"
            "Look at `df /dev/shm`; use fewer DataLoader workers, or more shared memory (docker run --shm-size).",
        ),
        (
            ended(1, 139),
            "Rank 1 left with exit code 139: what it ran was killed by SIGSEGV (signal 11), native code accessed "
            "invalid memory.\nAn extension module or a driver may be broken; the Python stack shows the caller.",
        ),
        (ended(1, -63), "Rank 1 was killed by signal 63: its earlier output is further up."),
    ],
)
def test_headline(end, text):
    assert headline(end) == text


def test_top_of_the_report():
    record = {"step": 2, "phase": "loader", "where": "/x/train.py:5", "pid": 71}
    end = ended(1, -7, record=record, facts="Of /dev/shm, ...")
    assert failure_report([end], range(2)) == (
        "Rank 1 was killed by SIGBUS (signal 7): most likely shared memory is full.\n"
        "Look at `df /dev/shm`; use fewer DataLoader workers, or more shared memory (docker run --shm-size).\n"
        f"Last seen in step 3 (loader), at /x/train.py:5, on {HOST}, PID 71.\n"
        "Of /dev/shm, ...\n"
        "\n"
        "rank 0: finished"
    )


def test_a_rank_that_caught_its_exception_and_finished_is_the_cause():
    caught = ended(1, 0, 30, message="ValueError: boom", error_type="ValueError", record={"where": "a.py:1"})
    assert failure_report([raised(0, GONE, 40, error_type="RuntimeError"), caught], range(2)) == (
        "Rank 1 failed: ValueError: boom\n"
        f"At a.py:1, on {HOST}.\n"
        "The program caught the exception and ended normally, while other ranks waited for this one.\n"
        "\n"
        f"rank 0 (PID 70): {GONE} (/x/train.py:0)"
    )


def test_a_reason_on_the_second_line_is_not_cut_off():
    message = "CollectiveError: Rank 0 in all_reduce on shm waited for rank 1, which gave up:\nit read too much\nat x"
    exits = [raised(1, "ValueError: boom", 10), raised(0, message, 20, error_type="CollectiveError")]
    line = "CollectiveError: Rank 0 in all_reduce on shm waited for rank 1, which gave up: it read too much"
    assert failure_report(exits, range(2)).endswith(f"rank 0 (PID 70): {line} (/x/train.py:0)")


@pytest.mark.parametrize(("marks", "hint"), ERROR_HINTS.items(), ids=lambda part: part[0])
def test_errors_are_explained_in_the_report_and_on_the_page(marks, hint):
    assert hint.count("\n") == 1, "what it means, and what to do"
    for mark in marks:
        assert hint_for(f"RuntimeError: x {mark} y") == f"What that means: {hint}"


def test_the_meaning_follows_the_traceback():
    end = raised(0, "RuntimeError: No route to host", 10, error_type="RuntimeError")
    told = failure_report([end], range(1))
    assert told.endswith(f"ValueError: boom\n\n{hint_for('No route to host')}")
    assert hint_for("ValueError: boom") == ""


def test_crash_is_shown_without_our_own_frames():
    stack = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/x/train.py", line 12 in <module>\n'
        '  File "/site/lockstep/launcher/bootstrap.py", line 84 in run_script\n'
        "\nExtension modules: numpy (total: 1)\n"
    )
    assert tidy_crash(stack, own_folder="/site/lockstep/launcher") == (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/x/train.py", line 12 in <module>\n'
    )


CAUSE = NodeFailure(5, is_consequence=False, text="Rank 5 failed: ValueError: boom\nAt a.py:3, on host1.")


class OtherMachine:
    """The store of the launchers, in which another machine has left how the job ended there."""

    def is_host(self):
        return False

    def count(self, topic, amount=0):
        return 2

    def least(self, topic, order, note=None):
        return asdict(CAUSE)


def test_the_report_of_another_machine_begins_with_the_cause():
    noticed = ended(0, 1, message="Connection closed by peer", record={"where": "/x/a.py:1"})
    error = job_error([noticed], range(2), hang="", store=OtherMachine(), num_nodes=2, num_replaced=0)
    assert (type(error), error.rank) == (RankFailed, 5)
    assert str(error) == (
        "Rank 5 failed: ValueError: boom\nAt a.py:3, on host1.\nThe report of that machine has more.\n\n"
        "rank 0: Connection closed by peer (/x/a.py:1)\nrank 1: finished"
    )


@pytest.mark.parametrize(
    "message",
    [
        "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'",
        "AssertionError: Torch not compiled with CUDA enabled",
    ],
)
def test_a_script_for_gpus_on_a_machine_without_one(message):
    text = failure_report([ended(0, 1, message=message, error_type=message.partition(":")[0])], range(1))
    assert text.startswith(f"Rank 0 failed: a GPU is needed, but torch finds none here: {message}\n")
    assert text.endswith("or look at `lockstep doctor` for the driver.")


@pytest.mark.parametrize("shows", [True, False])
def test_the_exception_behind_an_exit_is_recorded_unless_the_program_hides_it(tmp_path, monkeypatch, shows):
    for name, value in {RUN_DIR: str(tmp_path), "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_files, "_own_name", "1")
    with pytest.raises(SystemExit) as left:  # as hydra.main does
        try:
            raise ValueError("bad label 7 in row 12")
        except ValueError:
            if shows:
                sys.exit(1)
            raise SystemExit(1) from None
    record_end(left.value)
    (record,) = FailureRecord.read_all(tmp_path).values()
    assert record.message == ("ValueError: bad label 7 in row 12" if shows else "SystemExit: 1")
    assert record.where.startswith(__file__)


def test_a_signal_handler_that_raises_while_a_lost_connection_is_recorded_tells_the_cause(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.setattr(rank_files, "_own_name", "1")
    left_with = []
    monkeypatch.setattr(bootstrap, "_leave", left_with.append)
    monkeypatch.setattr(bootstrap.time, "sleep", lambda _delay_s: signal.raise_signal(signal.SIGCHLD))
    monkeypatch.setattr(activity.now, "on_failure", record_end)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    killed = [7]

    def handler(_number, _frame):
        if killed:
            raise RuntimeError(f"DataLoader worker (pid {killed.pop()}) is killed by signal: Killed.")

    def program():
        raise ConnectionResetError(104, "Connection reset by peer")

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        bootstrap.run_recorded(program)
    finally:
        signal.signal(signal.SIGCHLD, before)
    (record,) = FailureRecord.read_all(tmp_path).values()
    assert (left_with, record.error_type) == ([1], "RuntimeError")
    assert record.message == "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."
    assert "in program\n" in record.trace and record.where.startswith(__file__)


@pytest.mark.parametrize("flag", ["--local_rank", "--local-rank"])
def test_what_argparse_misses_is_in_the_report_with_the_variable_for_the_local_rank(tmp_path, monkeypatch, flag):
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.setattr(rank_files, "_own_name", "0")
    parser = argparse.ArgumentParser()
    parser.add_argument(flag, type=int, required=True)
    with pytest.raises(SystemExit) as left:
        parser.parse_args([])
    record_end(left.value)
    (record,) = FailureRecord.read_all(tmp_path).values()
    assert record.message == f"SystemExit: the following arguments are required: {flag}"
    report = failure_report([RankExit(0, 2, record)], range(1))
    assert report.startswith(
        f"Rank 0 left with exit code 2 (SystemExit: the following arguments are required: {flag} at"
    )
    assert 'default=os.environ["LOCAL_RANK"]' in report
