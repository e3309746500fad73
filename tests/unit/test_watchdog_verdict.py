"""When the watchdog fires, and what it says, as functions of what is seen of the ranks."""

import os
import selectors

import pytest

import lockstep.train.trainer
from lockstep import accelerator
from lockstep.activity import DEVICE, format_ranks, name_of_bucket
from lockstep.telemetry.rank_state import (
    Liveness,
    RankState,
    Sample,
    operation,
    place,
    process_tree,
    sample,
    waits_outside,
)
from lockstep.telemetry.watchdog import Verdict, busy_workers, judge, report

C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"
FINE, SUSPECT, HANGS = Verdict.FINE, Verdict.SUSPECT, Verdict.HANGS


def waits(rank, still_s, line=3, name="all_reduce", **more):
    frames = [
        (C10D, 9, name),
        ("/x/site-packages/torch/distributed/c10d_logger.py", 8, "wrapper"),
        ("/x/train.py", line, "<module>"),
    ]
    return RankState(rank, frames, still_s, **more)


def works(rank, still_s, **more):
    return RankState(rank, [("/x/train.py", 7, "load")], still_s, **more)


def on_device(rank, still_s, line=3, **more):
    return RankState(rank, [("/x/train.py", line, "<module>")], still_s, collective=DEVICE, uses_gpu=True, **more)


DEBUGGED = RankState(1, [("/lib/python3.11/pdb.py", 9, "interaction"), ("/x/train.py", 7, "load")], 99)


@pytest.mark.parametrize(
    ("ranks", "strict", "else_"),
    [
        ([waits(0, 4), works(1, 4)], HANGS, HANGS),
        ([waits(0, 2), works(1, 4)], FINE, FINE),
        ([waits(0, 4), works(1, 1)], FINE, FINE),  # it moves
        ([waits(0, 4), works(1, 4, is_busy=True)], FINE, FINE),  # it computes
        ([waits(0, 16), works(1, 0, is_busy=True)], HANGS, SUSPECT),  # an endless loop, or a long evaluation
        ([waits(0, 4), works(1, 4, life="it reads or writes")], SUSPECT, SUSPECT),  # a download
        ([waits(0, 16), works(1, 16, life="it reads or writes")], HANGS, HANGS),
        ([waits(0, 4), waits(1, 4)], FINE, FINE),  # a slow transfer
        ([waits(0, 16), waits(1, 16, life="it wakes up repeatedly")], HANGS, HANGS),
        ([waits(0, 16), waits(1, 16, life="it reads or writes")], HANGS, SUSPECT),
        ([waits(0, 16), waits(1, 16, is_busy=True)], HANGS, SUSPECT),
        ([waits(0, 4), waits(1, 4, line=5)], FINE, FINE),  # one call, written twice
        ([waits(0, 4), waits(1, 4, name="barrier")], HANGS, HANGS),
        ([waits(0, 4, name="send", life="it reads or writes"), waits(1, 4, name="recv")], FINE, FINE),
        ([waits(0, 4, name="send"), waits(1, 4, name="recv")], HANGS, HANGS),
        ([waits(0, 4, bucket="bucket 1 (a.*)"), waits(1, 4, bucket="bucket 2 (b.*)")], FINE, FINE),  # on its way
        ([waits(0, 4), waits(1, 4, bucket="bucket 2 (b.*)")], HANGS, HANGS),
        ([works(0, 4, collective="all_to_all"), works(1, 4)], HANGS, HANGS),  # as our collectives mark it
        ([works(0, 16, has_trained=True), RankState(1, has_left=True)], HANGS, SUSPECT),  # left alone at its end
        ([works(0, 16, has_trained=True, life="it reads or writes"), RankState(1, has_left=True)], FINE, FINE),
        ([works(0, 16, has_trained=True)], FINE, FINE),  # a single rank may wait for anything
        ([works(0, 4, is_stopped=True)], SUSPECT, FINE),  # but goes on only if somebody sends SIGCONT
        ([works(0, 16, is_stopped=True, has_trained=True, is_busy=True)], HANGS, SUSPECT),
        ([works(0, 4), works(1, 4)], SUSPECT, FINE),  # nobody waits for anybody
        ([works(0, 16), works(1, 16)], HANGS, FINE),
        ([works(0, 16, has_trained=True), works(1, 16, has_trained=True)], HANGS, HANGS),
        ([works(0, 16, has_trained=True), works(1, 16, is_busy=True)], FINE, FINE),
        ([waits(0, 4), RankState(1, has_left=True)], HANGS, HANGS),
        ([waits(0, 4), works(1, 0.2, is_stopped=True)], HANGS, HANGS),
        ([waits(0, 4), works(1, 0.2, silent_s=4)], HANGS, HANGS),
        ([waits(0, 99), DEBUGGED], FINE, FINE),
        ([on_device(0, 4), works(1, 4)], HANGS, HANGS),
        ([on_device(0, 4), works(1, 0.2, is_stopped=True)], HANGS, HANGS),
        ([on_device(0, 4), works(1, 4, is_busy=True)], FINE, FINE),
        # Their devices may compute; and which collective they are in, if any, their hosts do not know.
        ([on_device(0, 4), on_device(1, 4, line=5)], FINE, FINE),
        ([on_device(0, 16), on_device(1, 16, line=5)], HANGS, SUSPECT),
        ([on_device(0, 4), waits(1, 4, name="barrier")], FINE, FINE),
        ([on_device(0, 16), waits(1, 16, name="barrier")], HANGS, SUSPECT),
        ([on_device(0, 4), waits(1, 4), waits(2, 4, name="barrier")], HANGS, HANGS),
    ],
)
def test_judge(ranks, strict, else_):
    assert (judge(ranks, 3, is_strict=True), judge(ranks, 3, is_strict=False)) == (strict, else_)


def test_different_calls_of_one_machine_among_several_may_be_a_pipeline():
    ranks = [waits(0, 4), waits(1, 4, name="barrier")]
    assert judge(ranks, 3, is_strict=True, sees_all=False) is FINE


def test_the_operation_is_the_one_that_was_called():
    assert operation(waits(0, 1)) == "all_reduce"
    assert operation(works(0, 1)) is None
    assert operation(works(0, 1, bucket="bucket 4 (layers.7.mlp.*)")) == "all_reduce of bucket 4 (layers.7.mlp.*)"


def test_a_host_waits_for_its_device_where_a_value_is_read(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("norm.item()\nfloat(norm)\ntime.sleep(90)\n")

    def of(line, **more):
        return operation(RankState(0, [(str(script), line, "<module>")], uses_gpu=True, **more))

    assert [of(line, is_busy=True) for line in (1, 2, 3)] == [DEVICE, DEVICE, None]
    assert [of(line) for line in (1, 2, 3)] == [DEVICE, None, None]  # while idle, the second may do something else
    assert of(1, is_stopped=True) is None
    for frames in (
        [("/x/site-packages/torch/cuda/streams.py", 3, "synchronize"), (str(script), 3, "<module>")],
        [(accelerator.__file__, _line_of("awaited.synchronize()"), "synchronize"), (str(script), 3, "<module>")],
    ):
        assert operation(RankState(0, frames, uses_gpu=True)) == DEVICE
        assert operation(RankState(0, frames)) is None


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
    bucket = "bucket 4 (layers.7.mlp.*)"
    ranks = [waits(rank, 32, line=44, bucket=bucket, step=11, phase="backward") for rank in range(3)]
    ranks.append(RankState(3, loader, 32.4, step=11, phase="loader"))
    assert report(ranks, 30, HANGS) == (
        "The job hangs: ranks have waited for each other for more than 30 s.\n"
        "rank 3 is in DataLoader.__next__ (train.py:41) for 32 s [step 12, loader]; "
        "ranks 0-2 wait in all_reduce of bucket 4 (layers.7.mlp.*) (train.py:44) for 32 s [step 12, backward]"
    )


def test_report_of_ranks_that_wait_for_their_devices_has_the_record_of_their_collectives():
    ranks = [on_device(rank, 8, recorded_call="all_reduce of 6 elements, number 5, scheduled") for rank in range(2)]
    ranks.append(works(2, 8, recorded_call="all_reduce of 6 elements, number 4, completed"))
    assert report(ranks, 6, HANGS) == (
        "The job hangs: ranks have waited for each other for more than 6 s.\n"
        "rank 2 is in load (train.py:7) for 8 s; ranks 0, 1 wait for their devices (train.py:3) for 8 s\n"
        "The collectives in torch's record: all_reduce of 6 elements, number 4, completed (rank 2); "
        "all_reduce of 6 elements, number 5, scheduled (ranks 0, 1)."
    )
    assert report(ranks[:2], 6, SUSPECT).splitlines()[1:] == [
        "ranks 0, 1 wait for their devices (train.py:3) for 8 s",
        "All ranks wait, some of them for their devices, which may compute, or be in a collective.",
        "The collectives in torch's record: all_reduce of 6 elements, number 5, scheduled (ranks 0, 1).",
    ]


def test_report_of_what_may_be_only_slow():
    ranks = [waits(0, 4), works(1, 4, life="it reads or writes", num_steps=7)]
    assert report(ranks, 3, SUSPECT, num_nodes=2) == (
        "The job may hang: ranks have waited for each other for 4 s.\n"
        "rank 1 is in load (train.py:7) for 4 s [after 7 optimizer steps]; "
        "rank 0 waits in all_reduce (train.py:3) for 4 s\n"
        "rank 1 may only be slow: it reads or writes.\n"
        "Only 1 of 2 machines are known here; the launchers of the others report their ranks."
    )


def test_numbers_of_ranks():
    assert [format_ranks(ranks) for ranks in ([3], [0, 1], [5, 2, 0, 1])] == ["rank 3", "ranks 0, 1", "ranks 0-2, 5"]


IDLE = {"cpu_s": 1.0, "num_bytes": 100, "num_wakeups": 7, "pids": frozenset({1, 2})}


@pytest.mark.parametrize(
    ("later", "is_busy", "signs"),
    [
        ({}, False, ""),
        ({"num_wakeups": 12, "num_bytes": 30_000, "cpu_s": 1.1}, False, ""),  # DataLoader looks every five seconds
        ({"cpu_s": 4.0}, True, "it uses the processor a little"),
        ({"cpu_s": 1.3}, False, "it uses the processor a little"),
        ({"num_bytes": 60_000}, False, "it reads or writes"),
        ({"num_wakeups": 40}, False, "it wakes up repeatedly"),
        ({"pids": frozenset({1, 3})}, False, "its child processes start or end"),
        ({"is_ready": True}, True, ""),  # others have the processor
        ({"is_in_disk": True}, False, "it waits for a disk or a network file system"),
    ],
)
def test_signs_of_life(later, is_busy, signs):
    life = Liveness(10.0)
    life.add(Sample(-99.0, **IDLE | {"cpu_s": 0.0}))  # before the window
    for at_s in range(1, 10):
        states = {name: later.get(name, False) for name in ("is_in_disk", "is_ready")}
        life.add(Sample(float(at_s), **IDLE | states))
    life.add(Sample(10.0, **IDLE | later))
    assert (life.is_busy, life.signs()) == (is_busy, signs)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_sample_of_this_process():
    before = sample(os.getpid(), own_bytes=0)
    sum(range(3_000_000))
    with open(os.devnull, "wb") as file:
        file.write(bytes(100_000))
    after = sample(os.getpid(), own_bytes=0)
    assert os.getpid() in set(process_tree(os.getpid())) == before.pids
    assert after.cpu_s > before.cpu_s and after.num_bytes - before.num_bytes >= 100_000


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
    assert busy_workers(str(tmp_path), [1]) == ["loader process 70 of rank 1 is in __getitem__ (data.py:5)"]


def test_places_in_the_package_are_named_by_its_folders():
    trainer = lockstep.train.trainer.__file__
    click = ("/x/site-packages/click/core.py", 3, "main")
    frames = [(selectors.__file__, 4, "select"), (trainer, 9, "step"), click]
    assert place(RankState(0, frames, 5)) == "is in step (lockstep/train/trainer.py:9)"
