"""Launchers of several machines name the same cause: here two of them on one."""

import re
import shutil
import socket
import subprocess

import pytest

from tests.distributed.commands import start

# Without torch, whose import is what such a job would spend its time on: as ranks look that wait in a collective.
SCRIPT = """\
import os, sys, time
from lockstep.base import activity
if os.environ["RANK"] == sys.argv[2]:
    time.sleep(0.5)
    if sys.argv[1] == "fail": raise ValueError("boom")
    time.sleep(60)
if sys.argv[1] == "fail":
    time.sleep(1)
    raise ConnectionResetError("Connection reset by peer")
with activity.waiting("barrier"): time.sleep(60)
"""


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)

    def start_both(*args):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--devices", "1"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        nodes = [
            start("run", *options, "--watchdog", "2", "--node-rank", str(node), str(path), *args, **pipes)
            for node in range(2)
        ]
        try:
            told = [node.communicate(timeout=60)[1] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
        return [node.returncode for node in nodes], [text[text.rindex("lockstep: ") :] for text in told]

    return start_both


@pytest.mark.timeout(100)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_all_machines_name_the_rank_that_failed_first(run, rank):
    codes, told = run("fail", str(rank))
    head = rf"lockstep: Rank {rank} failed: ValueError: boom\nAt \S+train.py:5, on {socket.gethostname()}, PID \d+\.\n"
    assert codes == [1, 1]
    assert re.match(rf"{head}\nTraceback ", told[rank])
    assert re.match(
        rf"{head}The report of that machine has more\.\n\nrank {1 - rank} \(PID \d+\): ConnectionResetError: ",
        told[1 - rank],
    )


@pytest.mark.timeout(100)
def test_all_machines_say_who_waits_for_whom(run):
    codes, told = run("hang", "1")
    assert codes == [83, 83]
    for each in told:
        text, _, folder = each.rstrip(".\n").partition("The Python stacks of the ranks are in ")
        shutil.rmtree(folder, ignore_errors=True)  # if one was quicker, both name its folder
        assert re.sub(r"\d+ s\b", "N s", text) == (
            "lockstep: The job hangs: ranks have waited for each other for more than N s.\n"
            "rank 1 is in <module> (train.py:6) for N s; rank 0 waits in barrier (train.py:10) for N s\n"
            "If a rank may need more than N s, pass a larger --watchdog SECONDS.\n"
        )
