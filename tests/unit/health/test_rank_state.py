"""When the watchdog fires, and what it says, as functions of what is seen of the ranks."""

import os
import selectors
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

import lockstep.train.trainer
from lockstep.base import accelerator
from lockstep.base.activity import DEVICE, format_ranks, name_of_bucket
from lockstep.base.env import process_tree
from lockstep.health.rank_state import COMPUTES, STOPPED, Sample, sample, sign_of_life, state_of, waits_outside
from lockstep.health.watchdog import Verdict, busy_workers, judge, keep_stacks, report
from lockstep.launcher.reaper import kill_sessions, start_time

C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"
FINE, EARLY, SUSPECT, HANGS = Verdict


IDLE = {"step": None, "phase": "", "num_steps": 0, "failure": "", "collective": ""}


def seen_in(rank, frames, idle_s=0.0, process="S", life="", **more):
    times = {"moved_s": time.monotonic() - idle_s, "beat_s": time.monotonic() - more.pop("silent_s", 0.0)}
    heartbeat = {**IDLE, **times, "pid": 7, "recorded_call": "", "uses_gpu": False, "frames": frames, **more}
    return state_of(rank, heartbeat, process, life)


def waits(rank, idle_s, line=3, name="all_reduce", **more):
    frames = [
        (C10D, 9, name),
        ("/x/site-packages/torch/distributed/c10d_logger.py", 8, "wrapper"),
        ("/x/train.py", line, "<module>"),
    ]
    return seen_in(rank, frames, idle_s, **more)


def works(rank, idle_s, **more):
    return seen_in(rank, [("/x/train.py", 7, "load")], idle_s, **more)


def in_bucket(rank, bucket):
    return works(rank, 4, collective=f"all_reduce of bucket {bucket}")


def on_device(rank, idle_s, line=3, **more):
    return seen_in(rank, [("/x/train.py", line, "<module>")], idle_s, collective=DEVICE, uses_gpu=True, **more)


STOPPED_AT_ONCE = works(1, 0.2, process="T")
GONE = works(1, 99.0, process="")
DEBUGGED = seen_in(1, [("/lib/python3.11/pdb.py", 9, "interaction"), ("/x/train.py", 7, "load")], 99)


@pytest.mark.parametrize(
    ("ranks", "strict", "else_"),
    [
        ([waits(0, 4), works(1, 4)], HANGS, HANGS),
        ([waits(0, 2), works(1, 4)], FINE, FINE),
        ([waits(0, 4), works(1, 1)], FINE, FINE),  # it moves
        ([waits(0, 4), works(1, 4, life=COMPUTES)], FINE, FINE),  # it computes
        ([waits(0, 16), works(1, 0, life=COMPUTES)], HANGS, SUSPECT),  # an endless loop, or a long evaluation
        ([waits(0, 4), works(1, 4, life="it reads or writes")], SUSPECT, SUSPECT),  # a download
        ([waits(0, 16), works(1, 16, life="it reads or writes")], HANGS, HANGS),
        ([waits(0, 4), waits(1, 4)], FINE, FINE),  # a slow transfer
        ([waits(0, 16), waits(1, 16, life="it wakes up repeatedly")], HANGS, HANGS),
        ([waits(0, 16), waits(1, 16, life="it reads or writes")], HANGS, SUSPECT),
        ([waits(0, 16), waits(1, 16, life=COMPUTES)], HANGS, SUSPECT),
        ([waits(0, 4), waits(1, 4, line=5)], FINE, FINE),  # one call, written twice
        ([waits(0, 4), waits(1, 4, name="barrier")], HANGS, HANGS),
        ([waits(0, 4, name="send", life="it reads or writes"), waits(1, 4, name="recv")], FINE, FINE),
        ([waits(0, 4, name="send"), waits(1, 4, name="recv")], HANGS, HANGS),
        ([in_bucket(0, "1 (a.*)"), in_bucket(1, "2 (b.*)")], FINE, FINE),  # on its way
        ([waits(0, 4), in_bucket(1, "2 (b.*)")], HANGS, HANGS),
        ([works(0, 4, collective="all_to_all"), works(1, 4)], HANGS, HANGS),  # as our collectives mark it
        ([works(0, 16), GONE], HANGS, SUSPECT),  # left alone at its end
        ([works(0, 16, life="it reads or writes"), GONE], FINE, FINE),
        ([works(0, 16)], FINE, FINE),  # a single rank may wait for anything
        ([works(0, 4, process="T")], SUSPECT, SUSPECT),  # but goes on only if somebody sends SIGCONT
        ([works(0, 16, process="T")], HANGS, SUSPECT),
        ([works(0, 4), works(1, 4)], SUSPECT, SUSPECT),  # nobody waits for anybody
        ([works(0, 16), works(1, 16)], HANGS, HANGS),
        ([works(0, 16), works(1, 16, life=COMPUTES)], FINE, FINE),
        ([waits(0, 4), GONE], HANGS, HANGS),
        ([waits(0, 4), STOPPED_AT_ONCE], HANGS, HANGS),
        ([waits(0, 4), works(1, 4, silent_s=4)], HANGS, HANGS),
        ([waits(0, 99), DEBUGGED], FINE, FINE),
        ([on_device(0, 4), works(1, 4)], HANGS, HANGS),
        ([on_device(0, 4), STOPPED_AT_ONCE], HANGS, HANGS),
        ([on_device(0, 4), works(1, 4, life=COMPUTES)], FINE, FINE),
        # Their devices may compute; and which collective they are in, if any, their hosts do not know.
        ([on_device(0, 4), on_device(1, 4, line=5)], FINE, FINE),
        ([on_device(0, 16), on_device(1, 16, line=5)], HANGS, SUSPECT),
        ([on_device(0, 4), waits(1, 4, name="barrier")], FINE, FINE),
        ([on_device(0, 16), waits(1, 16, name="barrier")], HANGS, SUSPECT),
        ([on_device(0, 4), waits(1, 4), waits(2, 4, name="barrier")], HANGS, HANGS),
    ],
)
def test_judge(ranks, strict, else_):
    ranks = [replace(ranks[0], num_steps=1), *ranks[1:]]
    assert (judge(ranks, 3, is_strict=True), judge(ranks, 3, is_strict=False)) == (strict, else_)


@pytest.mark.parametrize(
    ("ranks", "strict", "else_"),
    [
        ([waits(0, 2), works(1, 4)], FINE, FINE),
        ([waits(0, 4), works(1, 4)], HANGS, EARLY),  # a download that waits for its server
        ([waits(0, 99), works(1, 99)], HANGS, EARLY),
        ([waits(0, 99), works(1, 99, life="it reads or writes")], HANGS, EARLY),
        ([waits(0, 4), works(1, 4, life=COMPUTES)], FINE, FINE),
        ([waits(0, 4), works(1, 4, silent_s=4)], HANGS, EARLY),
        ([waits(0, 4), waits(1, 4)], FINE, FINE),
        ([waits(0, 16), waits(1, 16)], HANGS, EARLY),
        ([works(0, 4), works(1, 4)], SUSPECT, FINE),
        ([works(0, 16), works(1, 16)], HANGS, EARLY),  # all loaders hang
        ([works(0, 16)], FINE, FINE),
        ([works(0, 16, process="T")], HANGS, EARLY),
        # These can never go on.
        ([waits(0, 4), waits(1, 4, name="barrier")], HANGS, HANGS),
        ([waits(0, 4), GONE], HANGS, HANGS),
        ([waits(0, 4), STOPPED_AT_ONCE], HANGS, HANGS),
    ],
)
def test_before_the_first_step_what_may_go_on_is_not_ended(ranks, strict, else_):
    assert (judge(ranks, 3, is_strict=True), judge(ranks, 3, is_strict=False)) == (strict, else_)


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [
        ([waits(0, 1801, uses_gpu=True), works(1, 1801)], HANGS),
        ([waits(0, 1801, uses_gpu=True), waits(1, 1801, uses_gpu=True)], HANGS),
        ([waits(0, 1801), works(1, 1801)], EARLY),  # the time-out of Gloo ends it
        ([waits(0, 1790, uses_gpu=True), works(1, 1801, uses_gpu=True)], EARLY),
        ([works(0, 1801, uses_gpu=True), works(1, 1801, uses_gpu=True)], EARLY),  # they prepare
        ([waits(0, 1801, uses_gpu=True), works(1, 1801, life=COMPUTES)], SUSPECT),
    ],
)
def test_the_first_step_on_gpus_has_a_limit(ranks, verdict):
    assert judge(ranks, 60, is_strict=False) is verdict


def test_different_calls_of_one_machine_among_several_may_be_a_pipeline():
    ranks = [waits(0, 4), waits(1, 4, name="barrier")]
    assert judge(ranks, 3, is_strict=True, sees_all=False) is FINE


def test_the_operation_is_the_one_that_was_called():
    assert waits(0, 1).operation == "all_reduce"
    assert works(0, 1).operation == waits(0, 4, silent_s=4).operation == waits(0, 4, process="").operation == ""
    assert works(0, 1, collective="barrier").operation == "barrier"


def test_a_host_waits_for_its_device_where_a_value_is_read(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("norm.item()\nfloat(norm)\ntime.sleep(90)\n")

    def of(line, **more):
        return seen_in(0, [(str(script), line, "<module>")], uses_gpu=True, **more).operation

    assert [of(line, life=COMPUTES) for line in (1, 2, 3)] == [DEVICE, DEVICE, ""]
    assert [of(line) for line in (1, 2, 3)] == [DEVICE, "", ""]  # while idle, the second may do something else
    assert of(1, process="T") == ""
    for frames in (
        [("/x/site-packages/torch/cuda/streams.py", 3, "synchronize"), (str(script), 3, "<module>")],
        [(accelerator.__file__, _line_of("awaited.synchronize()"), "synchronize"), (str(script), 3, "<module>")],
    ):
        assert seen_in(0, frames, uses_gpu=True).operation == DEVICE
        assert seen_in(0, frames).operation == ""


def _line_of(text):
    with open(accelerator.__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["layers.7.mlp.out.bias", "layers.7.mlp.in.weight"], "layers.7.mlp.*"),
        (["head.bias", "head.weight"], "head.*"),
        (["layers.11.weight", "layers.1.weight"], "layers.*"),
        (["0.weight", "1.weight"], "0.weight ... 1.weight"),
        (["weight"], "weight"),
        (["weight", "bias"], "weight ... bias"),
    ],
)
def test_name_of_bucket(names, name):
    assert name_of_bucket(names) == name


def test_report_names_who_waits_for_whom():
    loader = [("/x/site-packages/torch/utils/data/dataloader.py", 9, "__next__"), ("/x/train.py", 41, "<module>")]
    bucket = "all_reduce of bucket 4 (layers.7.mlp.*)"
    ranks = [waits(rank, 32, line=44, collective=bucket, step=11, phase="backward") for rank in range(3)]
    ranks.append(seen_in(3, loader, 32.4, step=11, phase="loader"))
    assert report(ranks, 30, HANGS) == (
        "The job hangs: ranks have waited for each other for more than 30 s.\n"
        "rank 3 is in DataLoader.__next__ (train.py:41) for 32 s [in step 12 (loader)]; "
        "ranks 0-2 wait in all_reduce of bucket 4 (layers.7.mlp.*) (train.py:44) for 32 s [in step 12 (backward)]\n"
        "If a rank may need more than 30 s, pass a larger --watchdog SECONDS."
    )
    ranks[3] = works(3, 32, process="T")
    assert "--watchdog" not in report(ranks, 30, HANGS)


def test_report_of_ranks_that_do_nothing_before_their_first_step():
    assert report([works(0, 301), works(1, 301)], 60, EARLY) == (
        "The job may hang: no rank has done anything for more than 300 s.\n"
        "ranks 0, 1 are in load (train.py:7) for 301 s"
    )


def test_report_of_what_a_host_does_not_know_has_the_record_of_torch():
    record = "all_reduce of 6 elements, number 5, scheduled"
    ranks = [on_device(rank, 8, recorded_call=record) for rank in range(2)]
    ranks.append(works(2, 8, uses_gpu=True, recorded_call="all_reduce of 6 elements, number 4, completed"))
    waiting = f"ranks 0, 1 wait for their devices: {record} (train.py:3) for 8 s"
    head = "The job hangs: ranks have waited for each other for more than 6 s."
    longer = "If a rank may need more than 6 s, pass a larger --watchdog SECONDS."
    assert report(ranks, 6, HANGS) == f"{head}\nrank 2 is in load (train.py:7) for 8 s; {waiting}\n{longer}"
    assert report(ranks[:2], 6, SUSPECT).splitlines()[1:] == [
        waiting,
        "All ranks wait, some of them for their devices, which may compute, or be in a collective.",
    ]
    engine = [("/x/site-packages/torch/autograd/graph.py", 3, "_engine_run_backward"), ("/x/train.py", 3, "<module>")]
    ranks = [works(1, 8), seen_in(0, engine, 8, step=2, recorded_call=record)]
    assert report(ranks, 6, HANGS) == (
        f"{head}\nrank 1 is in load (train.py:7) for 8 s; "
        f"rank 0 waits in backward (gradient exchange): {record} (train.py:3) for 8 s [in step 3]\n{longer}"
    )


def test_report_of_what_may_be_only_slow():
    ranks = [waits(0, 4), works(1, 4, life="it reads or writes", num_steps=7)]
    assert report(ranks, 3, SUSPECT, num_nodes=2) == (
        "The job may hang: ranks have waited for each other for more than 3 s.\n"
        "rank 1 is in load (train.py:7) for 4 s [after 7 optimizer steps]; "
        "rank 0 waits in all_reduce (train.py:3) for 4 s\n"
        "rank 1 may only be slow: it reads or writes.\n"
        "Only 1 of 2 machines are known here; the launchers of the others report their ranks."
    )


def test_numbers_of_ranks():
    assert [format_ranks(ranks) for ranks in ([3], [0, 1], [5, 2, 0, 1])] == ["rank 3", "ranks 0, 1", "ranks 0-2, 5"]


NOTHING = {"cpu_s": 1.0, "num_bytes": 100, "num_wakeups": 7, "pids": frozenset({1, 2}), "states": "SS"}


@pytest.mark.parametrize(
    ("later", "sign"),
    [
        ({}, ""),
        ({"num_wakeups": 12, "num_bytes": 30_000, "cpu_s": 1.1}, ""),  # DataLoader looks every five seconds
        ({"cpu_s": 4.0}, COMPUTES),
        ({"cpu_s": 1.3}, "it uses the processor a little"),
        ({"num_bytes": 60_000}, "it reads or writes"),
        ({"num_wakeups": 40}, "it wakes up repeatedly"),
        ({"pids": frozenset({1, 3})}, "its child processes start or end"),
        ({"states": "SR"}, COMPUTES),  # others have the processor
        ({"states": "DS"}, "it waits for a disk or a network file system"),
    ],
)
def test_signs_of_life(later, sign):
    states = {"states": later.get("states", "SS")}
    samples = [Sample(float(at_s), **NOTHING | states) for at_s in range(1, 10)]
    assert sign_of_life([*samples, Sample(10.0, **NOTHING | later)]) == sign
    assert sign_of_life([Sample(10.0, **NOTHING | later)]) == ""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_sample_of_this_process():
    before = sample(os.getpid(), own_bytes=0)
    sum(range(3_000_000))
    with open(os.devnull, "wb") as file:
        file.write(bytes(100_000))
    after = sample(os.getpid(), own_bytes=0)
    assert os.getpid() in set(process_tree(os.getpid())) == before.pids
    assert after.cpu_s > before.cpu_s and after.num_bytes - before.num_bytes >= 100_000


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_names_of_processes_may_be_no_text(tmp_path):
    # The kernel cuts a name after 15 bytes, here within a letter; it may also be in another encoding.
    for name in (b"aaaaaaaaaaaaaa\xc3\xa9", b"t\xe4sk) R 1"):
        program = os.path.join(os.fsencode(tmp_path), name)
        shutil.copy(shutil.which("sleep"), program)
        process = subprocess.Popen([program, "60"], start_new_session=True)
        try:
            comm = Path(f"/proc/{process.pid}/comm")
            while comm.read_bytes() != name[:15] + b"\n":
                time.sleep(0.01)
            with pytest.raises(UnicodeDecodeError):
                comm.read_text("utf-8")
            assert sample(process.pid, own_bytes=0).pids == {process.pid}
            assert int(start_time(process.pid)) > 0
            run_dir = tmp_path / "run"
            run_dir.mkdir(exist_ok=True)
            shutil.rmtree(keep_stacks(run_dir, {0: process.pid}))
        finally:
            kill_sessions([process.pid])
        assert process.wait() == -signal.SIGKILL


def test_what_lies_outside_of_the_job():
    assert (
        waits_outside([("/lib/socket.py", 1, "readinto"), ("/x/a.py", 2, "get")])
        == "it waits for the network or another program, in socket.py of Python"
    )
    assert waits_outside([("/x/a.py", 2, "get")]) == ""


def test_loader_processes_that_work_are_named(tmp_path):
    worker = '  File "/p/torch/utils/data/_utils/worker.py", line 374 in _worker_loop\n'
    at_rest = '  File "/lib/multiprocessing/connection.py", line 930 in wait\n'
    (tmp_path / "rank-1-process-70.txt").write_text(f'Thread:\n  File "/x/data.py", line 5 in __getitem__\n{worker}')
    (tmp_path / "rank-1-process-71.txt").write_text(f"Thread:\n{at_rest}{worker}")
    (tmp_path / "rank-1-process-72.txt").write_text('Thread:\n  File "/x/server.py", line 5 in serve\n')
    (tmp_path / "rank-0-process-73.txt").write_text(f'Thread:\n  File "/x/data.py", line 5 in __getitem__\n{worker}')
    (tmp_path / "rank-1-process-74.txt").write_text(STOPPED)
    assert busy_workers(tmp_path, [1]) == [
        "process 70 of rank 1 is in __getitem__ (data.py:5)",
        "process 74 of rank 1 is stopped by a signal (SIGSTOP)",
    ]


def test_places_in_the_package_are_named_by_its_folders():
    trainer = lockstep.train.trainer.__file__
    click = ("/x/site-packages/click/core.py", 3, "main")
    frames = [(selectors.__file__, 4, "select"), (trainer, 9, "step"), click]
    assert seen_in(0, frames).place == "is in step (lockstep/train/trainer.py:9)"
