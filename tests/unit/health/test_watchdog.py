"""What a rank writes of itself, and a watchdog that no wrong file, note or error of its own stops."""

import errno
import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lockstep.base import activity
from lockstep.base.rank_files import HEARTBEAT, rank_file, read_object
from lockstep.health import watchdog as module
from lockstep.health.heartbeat import (
    STACKS_SIGNAL,
    Heartbeat,
    read_step_counter,
    recorded_call,
)
from lockstep.health.rank_state import RankState
from lockstep.health.watchdog import Judgement, Verdict, Watchdog
from lockstep.telemetry.resources import Resources


def read_heartbeat(folder, rank):
    return read_object(rank_file(folder, HEARTBEAT, rank))


@pytest.fixture
def heartbeat(tmp_path):
    before = activity.now.step_counter
    made = Heartbeat(str(tmp_path), 0, patience_s=60.0)
    yield made
    activity.now.step_counter = before
    faulthandler.unregister(STACKS_SIGNAL)
    made._stacks.close()


def test_a_heartbeat_is_replaced_as_a_whole(tmp_path, heartbeat):
    """A reader that polls meanwhile only ever finds whole ones, be they long or short."""
    over, wrong = threading.Event(), []

    def read():
        while not over.is_set():
            found = read_heartbeat(tmp_path, 0)
            if found and (found["collective"] not in ("", "x" * 20_000) or len(found["frames"]) < 2):
                wrong.append(found)

    heartbeat.write()
    reader = threading.Thread(target=read)
    reader.start()
    for number in range(300):
        with activity.waiting("x" * 20_000 if number % 2 else ""):
            heartbeat.write()
    over.set()
    reader.join()
    assert wrong == []
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".new")]


def test_a_rank_that_cannot_write_its_heartbeat_has_none(tmp_path, heartbeat, monkeypatch):
    """With the last one, it would seem not to respond, and be killed because a disk is full."""

    def fail(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    heartbeat.write()
    assert read_heartbeat(tmp_path, 0)
    monkeypatch.setattr("lockstep.health.heartbeat.replace_file", fail)
    heartbeat.write()
    assert read_heartbeat(tmp_path, 0) == {}
    monkeypatch.undo()
    heartbeat.write()
    assert read_heartbeat(tmp_path, 0)["pid"] == os.getpid()


def test_what_a_rank_does_is_in_its_heartbeat(tmp_path, heartbeat):
    activity.now.step = 4
    try:
        with activity.waiting("barrier"), activity.waiting("all_to_all"):
            heartbeat.write()
        inner = read_heartbeat(tmp_path, 0)
        heartbeat.write()
    finally:
        activity.now.step = None
    outer = read_heartbeat(tmp_path, 0)
    assert (inner["collective"], outer["collective"], inner["step"]) == ("barrier", "", 4)
    assert inner["frames"][0][2] == "write" and inner["pid"] == os.getpid()
    assert read_step_counter(tmp_path, 0) == (None, activity.now.num_steps)
    assert read_heartbeat(tmp_path, 7) == {}


def test_other_threads_do_not_mark_what_the_main_thread_waits_in():
    seen = []

    def wait():
        with activity.waiting("all_gather"):
            seen.append(activity.now.collective)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert seen == [""]


GOOD = {
    "pid": os.getpid(),
    "frames": [
        ["/x/site-packages/torch/distributed/distributed_c10d.py", 3, "all_reduce"],
        ["/x/train.py", 7, "<module>"],
    ],
    "step": None,
    "phase": "",
    "num_steps": 3,
    "collective": "",
    "recorded_call": "",
    "failure": "",
    "uses_gpu": False,
    "devices": [],
    "num_bytes": 0,
}


def write(folder, rank, **content):
    now_s = time.monotonic()
    text = json.dumps({**GOOD, "beat_s": now_s, "moved_s": now_s - 9.0, **content})
    (folder / f"heartbeat-{rank}").write_text(text)


def test_connections_that_a_group_opens_later_are_probed_as_well(heartbeat, monkeypatch):
    """NCCL opens them when a collective first needs them."""
    calls, group, enough = [], object(), threading.Event()

    def probe():
        calls.append(1)
        if len(calls) == 3:
            enough.set()

    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setattr("lockstep.comm.network.set_keepalive", probe)
    for name, value in {"_process_groups": lambda: [group], "_PERIOD_S": 0.01, "_MEMORY_PERIOD_S": 0.02}.items():
        monkeypatch.setattr(f"lockstep.health.heartbeat.{name}", value)
    thread = threading.Thread(target=heartbeat._run, daemon=True)
    thread.start()
    assert enough.wait(30.0)
    heartbeat._ends.set()
    thread.join()


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A watchdog of two ranks, one of which waits in a collective and the other in code of its own."""
    reports, reported = [], threading.Event()

    def on_report(text, verdict, awaited):
        reports.append((text, verdict, awaited))
        reported.set()
        return False

    monkeypatch.setattr(module, "_PERIOD_S", 0.05)
    monkeypatch.setattr(module, "keep_stacks", lambda *_: tmp_path / "none")
    options = {"is_strict": True, "num_nodes": 1, "store": None, "resources": Resources()}
    dog = Watchdog(tmp_path, 1.0, **options, on_report=on_report)
    return dog, reports, reported


@pytest.mark.parametrize(
    "content", ['[1, "a"]', "{}", '{"pid": 1}', json.dumps({**GOOD, "beat_s": "x", "moved_s": []}), "\x00"]
)
def test_a_file_that_is_no_heartbeat_does_not_end_the_watchdog(tmp_path, watched, content, capfd):
    dog, reports, reported = watched
    (tmp_path / "heartbeat-0").write_text(content)
    write(tmp_path, 1)
    with dog:
        time.sleep(0.3)
        assert not reported.is_set()
        # Rank 1 first: between the two writes both would seem to wait in a collective.
        write(tmp_path, 1, frames=[["/x/train.py", 9, "load"]])
        write(tmp_path, 0, collective="all_reduce")
        assert reported.wait(30.0), capfd.readouterr()
    ((text, verdict, awaited),) = reports
    assert verdict is Verdict.HANGS and awaited == {1: os.getpid()}
    assert "rank 1 is in load (train.py:9) for " in text


def test_an_error_of_its_own_is_printed_once_and_the_ranks_are_watched_on(tmp_path, watched, capfd, monkeypatch):
    dog, _, reported = watched
    errors = [RuntimeError("planted")] * 3

    def fail(*args):
        if errors:
            raise errors.pop()

    monkeypatch.setattr(dog.resources, "update", fail, raising=False)
    write(tmp_path, 0, collective="all_reduce")
    write(tmp_path, 1, frames=[["/x/train.py", 9, "load"]])
    with dog:
        assert reported.wait(30.0)
    said = "lockstep: the watchdog continues after an internal error: RuntimeError: planted\n"
    assert capfd.readouterr().err == said


class Store:
    """In which another program writes ``notes``, one after the other."""

    def __init__(self, *notes):
        self.notes = list(notes)

    def post(self, topic, note):
        return True

    def others(self, topic):
        return {"ranks/2": self.notes.pop(0)}


@pytest.mark.parametrize("note", [7, "x", {}, [], [1], [None], {"ranks": [1]}, [{"rank": 1, "x": 2}]])
def test_a_wrong_note_of_another_machine_is_left_out(note):
    def judge(ranks, num_seen):
        return Judgement(Verdict.FINE, f"{len(ranks)} {num_seen}", all_wait=False)

    # The second is new, so it is not too old.
    store, found = Store([{"rank": 3}], [{"rank": 4}], note), []
    shared = module.SharedJudgement(store, 2, judge)
    while store.notes:
        found.append(shared.update([RankState(0)], is_idle=True).text)
        shared._next_s = 0.0  # does not wait
    assert found == ["1 1", "2 2", "1 1"]


@pytest.mark.parametrize("note", [7, "x", {}, [1], [1, 9, "", False], [1, "x", "", False], {"verdict": 2}])
def test_a_wrong_judgement_is_left_out(note):
    store, found = Store([1, 0, "old", False], [2, 0, "new", False], note), []
    shared = module.SharedJudgement(store, 2, lambda *_: 1 // 0)
    while store.notes:
        found.append(shared.update([RankState(1)], is_idle=True))
        shared._next_s = 0.0
    assert found == [None, Judgement(Verdict.FINE, "new", all_wait=False), None]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_stopped_loader_process_does_not_keep_a_rank_from_ending(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, signal, sys, time\n"
        "from lockstep.health.heartbeat import Heartbeat\n"
        "Heartbeat(sys.argv[1], 0, patience_s=60.0).start()\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,), daemon=True)\n"
        "child.start()\n"
        "time.sleep(1.2)\n"
        "os.kill(child.pid, signal.SIGSTOP)\n"
        "time.sleep(0.2)\n"
    )
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], timeout=20, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_thread_has_ended_before_the_interpreter_goes(tmp_path):
    """It would free what the frames hold that it looks at, such as a process group: that ends in SIGABRT."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, sys, threading\n"
        "from lockstep.health.heartbeat import Heartbeat\n"
        "atexit.register(lambda: print(*(thread.name for thread in threading.enumerate())))\n"
        "Heartbeat(sys.argv[1], 0, patience_s=60.0).start()\n"
    )
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], timeout=20, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("MainThread\n", "")


def test_a_rank_that_closes_its_world_counts_as_finished(tmp_path, watched):
    """It needs nothing from the others any more, and may wait for them as long as they work."""
    dog, reports, reported = watched
    write(tmp_path, 0, collective="World.close")
    write(tmp_path, 1, collective="all_reduce")
    with dog:
        assert reported.wait(30.0)
    ((text, verdict, awaited_pids),) = reports
    assert verdict is Verdict.HANGS and awaited_pids == {0: os.getpid()}
    assert text.splitlines()[1].startswith(
        "rank 0 ended normally [after 3 optimizer steps]; rank 1 waits in all_reduce (train.py:7) for "
    )
    assert text.splitlines()[-1] == f"Their PIDs: {os.getpid()} (rank 0), {os.getpid()} (rank 1)."


def entry(number, state, **more):
    """An entry as torch 2.11 to 2.13 write it (FlightRecorderDetail.hpp)."""
    is_over = state == "completed"
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "thread_name": "pt_main_thread",
        "thread_id": "140245",
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1000 + number,
        "input_sizes": [[64, 32], [10]],
        "input_dtypes": ["Float", "Float"],
        "output_sizes": [[64, 32], [10]],
        "output_dtypes": ["Float", "Float"],
        "state": state,
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 2000 if is_over else 0,
        "retired": is_over,
        "timeout_ms": 600000,
        "is_p2p": False,
    } | more


RECORD = {
    "version": "2.10",
    "comm_lib_version": "2.27.5",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "pg_status": {"0": {"last_enqueued_collective": "3", "last_started_collective": "-1"}},
}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (
            # Not in this order, as the record is a ring.
            [entry(2, "scheduled"), entry(0, "completed"), entry(1, "started", profiling_name="nccl:broadcast")],
            "broadcast of 2058 elements, number 2, started",
        ),
        ([entry(0, "completed"), entry(1, "completed")], "all_reduce of 2058 elements, number 2, completed"),
        # Gloo's record does not say which are over: then it is the last.
        ([entry(0, "scheduled"), entry(1, "scheduled")], "all_reduce of 2058 elements, number 2, scheduled"),
        ([entry(0, "scheduled", profiling_name="nccl:send 0->1", is_p2p=True)], ""),
        (None, ""),
    ],
)
def test_the_collective_that_nccl_is_in_is_taken_from_the_record_of_torch(monkeypatch, entries, expected):
    import torch

    dump = json.dumps(RECORD | ({} if entries is None else {"entries": entries})).encode()
    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda: dump, raising=False)
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: b"{}")
    assert recorded_call() == expected
