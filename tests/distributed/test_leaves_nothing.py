"""Whatever ends the launcher, no rank, no child of a rank and no file is left."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.distributed import commands

SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
if sys.argv[2] == "spare":
    import lockstep
    from lockstep.comm.generations import Membership
    member = Membership(lockstep.init(backend="gloo"))
    member.join(0)
folder, stubborn = Path(sys.argv[1]), sys.argv[2] == "stubborn"
if stubborn:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
if sys.argv[2] == "loader":
    from torch.utils.data import DataLoader
    batches = iter(DataLoader(range(100), num_workers=2))
    next(batches)
    children = [worker.pid for worker in batches._workers]
else:
    import multiprocessing.util
    multiprocessing.util.get_temp_dir()  # for sockets: pymp-...
    children = [subprocess.Popen(["sleep", "100"]).pid]
ready = folder / f"ready-{os.environ.get('LOCKSTEP_SPARE', os.environ['RANK'])}"
ready.with_suffix(".new").write_text(" ".join(map(str, [os.getpid(), *children])))
ready.with_suffix(".new").rename(ready)
if "LOCKSTEP_SPARE" in os.environ:
    member.rejoin()
time.sleep(100)
"""


def wait_for(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def alive(pids):
    """Those that still run; a zombie has ended and only waits for init."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            pass
    return found


@pytest.fixture
def job(tmp_path):
    """Start two ranks with children; gives the launcher and all pids once everything runs."""
    started = []

    def start(kind, *flags, names=("0", "1")):
        (tmp_path / "train.py").write_text(SCRIPT)
        # Not below tmp_path, which may be too long for the sockets that loader processes hand tensors over with.
        scratch = Path(tempfile.mkdtemp(prefix="scratch-"))
        process = commands.start(
            "run", "--devices", "2", *flags, str(tmp_path / "train.py"), str(tmp_path), kind,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(scratch)}, start_new_session=True,
        )  # fmt: skip
        started.append((process, scratch))
        files = [tmp_path / f"ready-{name}" for name in names]
        wait_for(lambda: all(file.exists() for file in files), 90)
        pids = {int(pid) for file in files for pid in file.read_text().split()}
        # The reaper and the fork server too.
        pids |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        assert len(alive(pids)) >= 5
        return process, pids, scratch

    yield start
    for process, scratch in started:
        process.kill()
        process.communicate()
        shutil.rmtree(scratch, ignore_errors=True)


def assert_nothing_left(pids, scratch):
    wait_for(lambda: not alive(pids), 30)
    wait_for(lambda: not [entry for entry in scratch.iterdir() if entry.name.startswith(("lockstep-", "pymp-"))], 30)


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (signal.SIGINT, 130, "lockstep: Stopped by Ctrl-C; all ranks have ended.\n"),
        pytest.param(
            signal.SIGTERM, 143, "lockstep: Stopped by SIGTERM; all ranks have ended.\n", marks=pytest.mark.soak
        ),
    ],
)
def test_signals_end_everything(job, number, code, text):
    process, pids, scratch = job("plain")
    os.killpg(process.pid, number)  # as a terminal does
    out, err = process.communicate(timeout=60)
    assert not alive(pids)
    assert_nothing_left(pids, scratch)
    assert (process.returncode, out, err.splitlines(keepends=True)[1:]) == (code, "", [text])


@pytest.mark.parametrize("fork", ["1", "0"])
def test_signals_that_were_ignored_at_the_start_stay_ignored(tmp_path, monkeypatch, fork):
    """As ``nohup`` wants of SIGHUP, and shells of SIGINT and SIGQUIT in the programs of their background."""
    monkeypatch.setenv("LOCKSTEP_FORK", fork)
    (tmp_path / "train.py").write_text(
        "import os\n"
        "for number in (1, 2, 3):\n"
        "    for pid in (os.getpid(), os.getppid()): os.kill(pid, number)\n"
        "os.write(1, b'done\\n')\n"
    )
    command = [sys.executable, "-m", "lockstep", "run", "--devices", "2", "--logs", "raw", tmp_path / "train.py"]
    words = ["sh", "-c", """trap '' HUP INT QUIT; exec "$@" """, "sh", *command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "done\ndone\n"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_waits_for_other_machines_ends_at_a_signal(tmp_path, number):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    scratch = Path(tempfile.mkdtemp(prefix="scratch-"))
    place = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    (tmp_path / "train.py").touch()
    process = commands.start(
        "run", *place, "--devices", "2", str(tmp_path / "train.py"),
        env={**os.environ, "TMPDIR": str(scratch)}, start_new_session=True,
    )  # fmt: skip
    try:
        # Its store listens: torch's C++ code waits in it for the other machine, and runs no handler of Python's.
        wait_for(lambda: port in [each.laddr.port for each in psutil.Process(process.pid).net_connections()], 90)
        time.sleep(0.5)
        pids = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        process.send_signal(number)
        assert process.wait(timeout=30) == -number
        assert_nothing_left(pids, scratch)
    finally:
        process.kill()
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.mark.parametrize("kind", ["stubborn", pytest.param("loader", marks=pytest.mark.soak)])
def test_a_killed_launcher_takes_everything_along(job, kind):
    process, pids, scratch = job(kind)
    process.kill()
    assert_nothing_left(pids, scratch)


SPARE = ["--max-restarts", "1", "--spares", "1"], ["0", "1", "spare-1"]


@pytest.mark.parametrize(("kind", "flags", "names"), [("stubborn", [], ["0", "1"]), ("spare", *SPARE)])
def test_a_launcher_that_is_killed_with_its_reaper_takes_everything_along(job, kind, flags, names):
    """Also a process that waits for its place, which has no limit of its own."""
    process, pids, _ = job(kind, *flags, names=names)
    for child in psutil.Process(process.pid).children():
        if "reaper.py" in " ".join(child.cmdline()):
            child.kill()
    process.kill()
    wait_for(lambda: not alive(pids), 30)


def test_what_ranks_left_behind_on_purpose_may_stay(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "if child := os.fork(): print(child)\n"
        "else: os.close(1); os.close(2); os.execvp('sleep', ['sleep', '100'])\n"
    )
    done = commands.lockstep("run", "--devices", "1", str(tmp_path / "train.py"))
    left = int(done.out)
    time.sleep(0.5)
    assert alive([left]) == [left]
    os.kill(left, signal.SIGKILL)


def test_a_rank_that_ignores_sigterm_is_not_waited_for_long(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(1)\n"
        "if os.environ['RANK'] == '1': print(time.monotonic()); os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(100)\n"
    )
    (tmp_path / "launcher.py").write_text(
        "import sys\n"
        "from lockstep.cli import main\n"
        "from lockstep.launcher import failure_report\n"
        "failure_report.SIGTERM_S = 1\n"
        "sys.exit(main(['run', '--devices', '2', sys.argv[1]]))\n"
    )
    words = [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "train.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert time.monotonic() - float(done.stdout.removeprefix("[rank 1] ")) < 20  # torch elastic waits for 30
    assert "lockstep: Rank 1 was killed by SIGKILL" in done.stderr
    assert re.search(r"\nrank 0 \(PID \d+\): stopped by the launcher\n$", done.stderr)


def test_a_second_ctrl_c_does_not_wait_for_stubborn_ranks(job):
    process, pids, scratch = job("stubborn")
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None  # the ranks have half a minute to end by themselves
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert_nothing_left(pids, scratch)


def test_children_of_a_failed_rank_end_as_well(tmp_path):
    (tmp_path / "train.py").write_text(
        "import subprocess, sys\n"
        "print(subprocess.Popen(['sleep', '100'], stdout=subprocess.DEVNULL).pid, flush=True)\n"
        "raise ValueError('boom')\n"
    )
    done = commands.lockstep("run", "--devices", "1", str(tmp_path / "train.py"))
    assert done.code == 1
    wait_for(lambda: not alive([int(done.out)]), 30)


def test_a_killed_caller_of_launch_takes_its_ranks_along(tmp_path):
    (tmp_path / "plain.py").write_text(
        "import os, sys, time, lockstep\n"
        "def work():\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"  # in one piece: both ranks write to the same pipe
        "    time.sleep(100)\n"
        "lockstep.launch(work, devices=2)\n"
    )
    with subprocess.Popen([sys.executable, str(tmp_path / "plain.py")], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        assert len(alive(pids)) == 2
        process.kill()
        wait_for(lambda: not alive(pids), 30)
