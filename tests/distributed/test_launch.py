"""`lockstep.launch`: functions of any kind, their results, and their failures."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

import lockstep
from lockstep.errors import ConfigurationError, LaunchTimeout, RankFailed
from lockstep.launcher.fork_server import ForkServer


def test_a_function_may_change_the_variables_of_its_rank():
    def work():
        rank = os.environ.pop("RANK")
        read, write = os.pipe()
        if os.fork() == 0:
            with open("/proc/self/cmdline") as title:
                os.write(write, title.read().encode())
            os._exit(0)
        os.wait()
        return rank, os.read(read, 100).decode().rstrip("\0")

    for number, (rank, title) in enumerate(lockstep.launch(work, devices=2)):
        assert rank == str(number) and title.startswith(f"lockstep: child of rank {number} of 2, ")


def test_results_come_back_by_rank_and_prints_are_visible(capsys):
    factor = 3

    class Answer:
        def __init__(self, value):
            self.value = value

    def work(offset):
        with lockstep.init() as world:
            total = torch.ones(2) * (world.rank + offset)
            torch.distributed.all_reduce(total)
            print("computed on", world.rank)
            return Answer(total * factor), world.rank, os.environ["OMP_NUM_THREADS"]

    before = (dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    answers = lockstep.launch(work, 10, devices=2)
    assert before == (dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert [rank for _, rank, _ in answers] == [0, 1]
    for answer, _, threads in answers:
        assert isinstance(answer, Answer)
        assert answer.value.tolist() == [63.0, 63.0]
        assert int(threads) >= 1
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 1] computed on 1", "computed on 0"]


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_of_cleaning_up_changes_nothing(monkeypatch, capfd, fails):
    """Neither does an exception whose class cannot print it."""

    def work(fails):
        class Unprintable(Exception):
            def __str__(self):
                raise AttributeError("of printing")

        if fails:
            raise Unprintable
        return 7

    def fail(*args):
        raise ValueError("planted")

    monkeypatch.setattr("lockstep.launcher.rank_processes.process_state", fail)
    monkeypatch.setattr("lockstep.launcher.node_rendezvous.RendezvousPerRestart.shutdown", fail)
    if fails:
        with pytest.raises(RankFailed, match="Rank 0 failed: Unprintable: <exception str") as found:
            lockstep.launch(work, fails, devices=1)
        assert "of printing" not in str(found.value)
    else:
        assert lockstep.launch(work, fails, devices=1) == [7]
    said = "lockstep: an error while cleaning up, which changes nothing else: ValueError: planted\n"
    assert said in capfd.readouterr().err


def test_the_first_error_comes_back_with_its_traceback():
    def work():
        if os.environ["RANK"] == "1":
            raise KeyError("inner")
        time.sleep(60)

    with pytest.raises(RankFailed) as raised:
        lockstep.launch(work, devices=2)
    lines = str(raised.value).splitlines()
    assert lines[0] == "Rank 1 failed: KeyError: 'inner'"
    assert re.fullmatch(rf"At {__file__}:\d+, on {socket.gethostname()}, PID \d+\.", lines[1])
    assert lines[2:4] == ["", "Traceback (most recent call last):"]
    assert f'  File "{__file__}", line {work.__code__.co_firstlineno + 2}, in work' in lines
    assert lines[-3:-1] == ["KeyError: 'inner'", ""]
    assert re.fullmatch(r"rank 0 \(PID \d+\): stopped by the launcher", lines[-1])
    assert raised.value.rank == 1
    assert isinstance(raised.value.__cause__, KeyError)
    assert raised.value.__cause__.args == ("inner",)


def test_time_is_limited():
    start = time.monotonic()
    with pytest.raises(LaunchTimeout) as raised:
        lockstep.launch(time.sleep, 60, devices=2, timeout_s=3)
    assert str(raised.value) == (
        "The 2 ranks did not finish within 3 s and were ended.\n"
        "Pass a longer timeout_s, or look for a rank that waits for another."
    )
    assert time.monotonic() - start < 20


def test_no_time_at_all():
    with pytest.raises(LaunchTimeout):
        lockstep.launch(time.sleep, 60, devices=2, timeout_s=0.0)


def test_it_works_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.extend(lockstep.launch(os.getpid, devices=2)))
    thread.start()
    thread.join(100)
    assert len(set(results)) == 2


def test_a_plain_script_needs_no_guard(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(
        "import os, lockstep\n"
        "print('once')\n"
        "secret = 41\n"
        "def work(): return secret + int(os.environ['RANK'])\n"
        "print(lockstep.launch(work, devices=2))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "once\n[41, 42]\n"


def test_what_cannot_be_sent():
    lock = threading.Lock()
    with pytest.raises(ConfigurationError) as raised:
        lockstep.launch(lambda: lock, devices=1)
    assert str(raised.value) == (
        "The function or one of its arguments cannot be sent to the ranks: cannot pickle '_thread.lock' object\n"
        "Create what cannot be pickled, such as locks, open files and CUDA tensors, inside the function."
    )


def test_what_cannot_be_sent_back():
    with pytest.raises(RankFailed) as raised:
        lockstep.launch(threading.Lock, devices=1)
    assert str(raised.value).splitlines()[0] == (
        f"Rank 0 failed: LockstepError: What {threading.Lock.__name__} returned on rank 0 cannot be sent back: "
        "cannot pickle '_thread.lock' object"
    )


@pytest.mark.parametrize("devices", [0, 2.5, "many"])
def test_devices_that_make_no_sense(devices):
    with pytest.raises(ConfigurationError, match=r"Use at least one|Pass a number, 'gpu', 'cpu' or 'auto'"):
        lockstep.launch(print, devices=devices)


def test_not_from_inside_a_rank(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigurationError) as raised:
        lockstep.launch(print, devices=2)
    assert str(raised.value) == (
        "launch() was called inside rank 1 of 4, which has been launched already.\n"
        "Call the function itself, or run the script with plain python instead of `lockstep run` or torchrun."
    )


CELL = """
import torch, lockstep

class Net(torch.nn.Linear):
    pass

task = lockstep.Task(
    model=lambda: Net(6, 3, dtype=torch.float64),
    dataset=lambda: torch.utils.data.TensorDataset(torch.arange(240.0, dtype=torch.float64).view(40, 6) / 240),
    loss=lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    global_batch_size=7,
)
result = lockstep.fit(task, devices=2, quiet=True)
"""


def test_fit_starts_ranks_from_a_cell_and_returns_what_rank_zero_returns():
    names = {"__name__": "__main__"}
    exec(compile(CELL, "<cell>", "exec"), names)
    alone = lockstep.fit(names["task"], quiet=True)
    assert names["result"].num_steps == alone.num_steps == 6
    assert names["result"].losses == pytest.approx(alone.losses, rel=1e-12)
    assert (names["result"].stopped, names["result"].exit_code) == (None, 0)


def test_a_function_of_a_script_has_the_names_of_the_main_module():
    # Where torch.compile looks for them.
    names = {"__name__": "__main__", "NUMBER": 3}
    exec("def work():\n    import sys\n    return NUMBER, sys.modules['__main__'].__dict__ is work.__globals__", names)
    assert lockstep.launch(names["work"], devices=2) == [(3, True)] * 2


def test_fit_refuses_what_its_ranks_would_before_it_starts_them(monkeypatch):
    names = {}
    exec(CELL.rpartition("result")[0], names)
    monkeypatch.setattr("lockstep.launcher.api.launch", None)
    with pytest.raises(ConfigurationError, match="reproducible=1 leaves 1 of 2 devices"):
        lockstep.fit(names["task"], devices=2, reproducible=1)


def test_ctrl_c_while_ranks_are_being_started_leaves_none(monkeypatch, tmp_path):
    started = []

    def work():
        (tmp_path / "runs").touch()
        time.sleep(60)

    fork = ForkServer.fork

    def fork_one(self, *args, **kwargs):
        if started:
            while not (tmp_path / "runs").exists():
                time.sleep(0.02)
            signal.raise_signal(signal.SIGINT)
        started.append(fork(self, *args, **kwargs))
        return started[-1]

    monkeypatch.setattr(ForkServer, "fork", fork_one)
    with pytest.raises(KeyboardInterrupt):
        lockstep.launch(work, devices=2)
    deadline = time.monotonic() + 5
    (process,) = started
    while process.poll() is None:
        time.sleep(0.02)  # the reaper has been told to end it; else it sleeps for a minute
        assert time.monotonic() < deadline
