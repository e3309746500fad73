"""Ranks that are forked are what new interpreters would be; where they cannot be, new interpreters are started."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

from lockstep import launch
from lockstep.launcher import fork_server
from tests import forking
from tests.distributed.commands import lockstep

FACTS = """
import sys
was_forked = "torch" in sys.modules
import atexit, json, os, random, signal, threading, time
import numpy, torch
folder, rank = sys.argv[1], os.environ["RANK"]
left_open = open(f"{folder}/open-{rank}", "w")
left_open.write("flushed")
threading.Thread(target=lambda: (time.sleep(0.3), left_open.write(" by a thread"))).start()
atexit.register(lambda: left_open.write(" and an exit handler"))
volatile = ("PORT", "RUN_ID", "ERROR_FILE", "LOCKSTEP_", "FORKED")
streams = [sys.stdin, sys.stdout, sys.stderr]
facts = {
    "environ": {name: value for name, value in os.environ.items() if not any(part in name for part in volatile)},
    "argv": sys.argv[2:], "path": sys.path, "flags": str(sys.flags), "cwd": os.getcwd(),
    "signals": {number: str(signal.getsignal(number)) for number in range(1, 32)},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "streams": [[each.name, each.encoding, each.errors, each.write_through, each.line_buffering] for each in streams],
    "unbuffered": [type(each.buffer).__name__ for each in streams[1:]],
    "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "threads": torch.get_num_threads(),
}
counts = []
for _ in range(10):  # the heartbeat has a file open for a moment
    counts.append(len(os.listdir("/proc/self/fd")))
    time.sleep(0.02)
facts["files"] = min(counts)
numbers = [random.random(), numpy.random.random(), torch.rand(1).item()]
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump({"was_forked": was_forked, "numbers": numbers, "hash": hash("text"), "facts": facts}, file)
"""


def seen_by_ranks(folder):
    opened = {(folder / f"open-{rank}").read_text() for rank in range(2)}
    assert opened == {"flushed by a thread and an exit handler"}  # an interpreter's end closes what is open
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_forked_rank_is_what_a_new_interpreter_is(tmp_path):
    (tmp_path / "train.py").write_text(FACTS)
    found = {}
    for name, fork in (("forked", "1"), ("new", "0")):
        (tmp_path / name).mkdir()
        command = ["run", "--devices", "2", str(tmp_path / "train.py"), str(tmp_path / name), "--lr", "0.1"]
        # A variable of Python's own that the tests do not have makes the command itself a new interpreter.
        # The command sets the last one itself when it is imported, which tests have done at some point.
        environ = {**os.environ, "LOCKSTEP_FORK": fork, "PYTHONPLATLIBDIR": "lib", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        if fork == "1":
            words = [sys.executable, "-m", "lockstep", *command]
            subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, timeout=100, check=True)
        else:
            assert lockstep(*command, env=environ, cwd=tmp_path).code == 0
        found[name] = seen_by_ranks(tmp_path / name)
    for forked, new in zip(found["forked"], found["new"], strict=True):
        assert (forked["was_forked"], new["was_forked"]) == (True, False)
        facts = new["facts"]
        assert {name: (fact, facts[name]) for name, fact in forked["facts"].items() if fact != facts[name]} == {}
    one, other = found["forked"]
    assert one["hash"] == other["hash"]
    assert not set(one["numbers"]) & set(other["numbers"])


@pytest.mark.parametrize("fork", ["1", "0"])
def test_the_title_of_a_process_has_the_number_of_its_rank(tmp_path, monkeypatch, fork):
    monkeypatch.setenv("LOCKSTEP_FORK", fork)
    # The kernel cuts the name after 15 bytes, here within a letter.
    (tmp_path / "t訓練.py").write_text(
        "import os, sys\n"
        "child = os.fork()\n"
        "line, name = (open(f'/proc/self/{file}').read().rstrip('\\0\\n') for file in ('cmdline', 'comm'))\n"
        "is_kept = 'PATH=' in open('/proc/self/environ').read() and 'SPT_NOENV' not in os.environ\n"
        "os.write(1, f'{line}|{name}|{is_kept}\\n'.encode())\n"  # in one piece: both ranks write to the same pipe
        "if child == 0: os._exit(0)\n"
        "os.wait()\n"
    )
    done = lockstep("run", "--devices", "2", "--logs", "raw", str(tmp_path / "t訓練.py"))
    assert (done.code, sorted(done.out.splitlines())) == (
        0,
        [
            "lockstep: child of rank 0 of 2, t訓練.py|child of rank 0|True",
            "lockstep: child of rank 1 of 2, t訓練.py|child of rank 1|True",
            "lockstep: rank 0 of 2, t訓練.py|rank 0 of 2, t|True",
            "lockstep: rank 1 of 2, t訓練.py|rank 1 of 2, t|True",
        ],
    )


def test_what_tests_start_is_forked_whatever_they_have_imported(tmp_path):
    """Without it the suite takes twice as long: each process would import torch."""
    (tmp_path / "script.py").write_text("import sys; print('torch._dynamo' in sys.modules)")
    for name in ("lockstep.cli", "torch._dynamo"):  # they set environment variables
        importlib.import_module(name)
    words = [sys.executable, str(tmp_path / "script.py")]
    assert subprocess.run(words, capture_output=True, text=True, timeout=100, check=True).stdout == "True\n"
    assert launch(lambda: "torch._dynamo" in sys.modules, devices=1) == [True]


def test_ranks_of_launch_are_forked_off_an_interpreter_that_knows_nothing_of_the_caller(monkeypatch):
    def work():
        return "torch._dynamo" in sys.modules, "pytest" in sys.modules, str(torch.get_default_dtype())

    monkeypatch.setattr(fork_server, "_server", None)
    monkeypatch.setattr(fork_server, "_interpreter", forking.interpreter)
    torch.set_default_dtype(torch.float64)
    try:
        assert launch(work, devices=2) == [(True, False, "torch.float32")] * 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_script_that_sets_what_torch_reads_when_it_is_imported_gets_new_interpreters(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, sys; os.environ['OMP_NUM_THREADS'] = '1'\n"
        "before = 'torch' in sys.modules\n"
        "import torch; print(before, torch.get_num_threads())\n"
    )
    done = lockstep("run", "--devices", "1", str(tmp_path / "train.py"))
    assert (done.out, done.code) == ("False 1\n", 0)


def test_files_beside_a_script_come_before_modules_of_that_name_that_are_already_imported(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import importlib, sys\n"
        "names = 'statistics', 'random', 'os', 'time', 'click', 'yaml'\n"
        "print([name for name in names if hasattr(importlib.import_module(name), 'own')])\n"
        "if 'torch' in sys.modules: import lockstep; lockstep.fit  # its parts have Python's\n"
    )
    (tmp_path / "click").mkdir()
    (tmp_path / "yaml").mkdir()
    for name in ("statistics", "random", "os", "time", "click/__init__", "yaml/other"):
        (tmp_path / f"{name}.py").write_text("own = True\n")
    expected = subprocess.run([sys.executable, "-c", script.read_text()], cwd=tmp_path, capture_output=True, text=True)
    assert expected.stdout == "['statistics', 'random', 'click']\n"
    for fork in ("1", "0"):
        done = lockstep("run", "--devices", "1", str(script), env={**os.environ, "LOCKSTEP_FORK": fork})
        assert (done.out, done.code) == (expected.stdout, 0)


def test_a_job_outlives_its_fork_server(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, psutil, sys\n"
        "print('torch' in sys.modules)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    others = [child for child in psutil.Process(os.getppid()).children() if child.pid != os.getpid()]\n"
        "    next(child for child in others if 'reaper.py' not in str(child.cmdline())).kill()\n"
        "    sys.exit(1)\n"
    )
    done = lockstep("run", "--devices", "1", "--max-restarts", "1", str(tmp_path / "train.py"))
    assert (done.out, done.code) == ("True\nTrue\n", 0)  # of another server
    assert "the process that forks ranks has ended; another one is started" in done.err
