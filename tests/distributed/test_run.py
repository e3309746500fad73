"""`lockstep run`: what the script sees, and what the user sees when a rank fails."""

import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import ConfigurationError
from lockstep.launcher.command import run as start
from tests.distributed.commands import lockstep

OMP_NOTE = "lockstep: OMP_NUM_THREADS="

LOOK = """
import json, os, sys
import __main__
names = ("RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_", "NCCL_", "TORCH_")
with open(f"{sys.argv[1]}-{os.environ['RANK']}", "w") as file:
    json.dump({
        "env": {name: value for name, value in os.environ.items() if name.startswith(names)},
        "argv": sys.argv[2:], "path": sys.path[0], "cwd": os.getcwd(), "unbuffered": sys.stdout.write_through,
        "main": [__name__, __file__, __package__, repr(__spec__), __main__.__dict__ is globals()],
    }, file)
"""


@pytest.fixture
def script(tmp_path):
    def write(text, name="train.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def seen(prefix):
    return [json.loads(Path(f"{prefix}-{rank}").read_text()) for rank in range(2)]


def test_a_script_sees_what_it_sees_under_torchrun(script, tmp_path):
    path = script(LOOK)
    ours = lockstep("run", path, "--devices", "2", str(tmp_path / "ours"), "--lr", "0.1")
    assert (ours.code, ours.out) == (0, "")
    torchrun = script("from torch.distributed.run import main; main()", "torchrun.py")  # a script is forked
    command = [sys.executable, torchrun, "--nproc-per-node", "2", path, str(tmp_path / "theirs"), "--lr", "0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    # The address is a number, as names need not resolve; the rest differs from run to run. Some signals are ours.
    volatile = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS"}
    volatile |= {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
    for mine, theirs in zip(seen(tmp_path / "ours"), seen(tmp_path / "theirs"), strict=True):
        assert mine["env"].keys() == theirs["env"].keys()
        assert mine["env"]["MASTER_ADDR"] == "127.0.0.1"
        for found in (mine, theirs):
            for name in volatile:
                del found["env"][name]
        assert mine == theirs


TASK = """
import lockstep, torch
task = lockstep.Task(
    model=lambda: torch.nn.Linear(4, 2),
    dataset=lambda: torch.utils.data.TensorDataset(torch.ones(16, 4), torch.zeros(16, dtype=torch.long)),
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    global_batch_size=8,
)
"""


@pytest.mark.parametrize("devices", ["1", "2"])
def test_a_file_that_only_defines_a_task_is_refused(script, devices):
    path = script(TASK, "task.py")
    done = lockstep("run", "--quiet", "--devices", devices, path)
    text = f"lockstep: {path} only defines a task, which `lockstep run` does not train.\n"
    assert (done.code, done.err) == (2, f"{text}Train it: lockstep train {path} --devices {devices}\n")
    trains = script(f"{TASK}\nif __name__ == '__main__': lockstep.fit(task, epochs=1, quiet=True)\n", "trains.py")
    done = lockstep("run", "--quiet", "--devices", devices, trains)
    assert (done.code, done.err) == (0, "")


def test_a_script_is_main_for_pickle_and_for_spawned_children(script):
    path = script(
        "import atexit, multiprocessing, pickle, threading, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "class Point:\n"
        "    def __init__(self, x): self.x = x\n"
        "def double(point): return Point(2 * point.x)\n"
        "def again(text): print(text, pickle.loads(pickle.dumps(Point(7))).x)\n"
        "def late():\n"
        "    time.sleep(0.3)\n"
        "    again('thread')\n"
        "if __name__ == '__main__':\n"
        "    for method in ('fork', 'spawn', 'forkserver'):\n"
        "        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:\n"
        "            print(method, pool.submit(double, Point(4)).result().x)\n"
        "    threading.Thread(target=late).start()\n"
        "    atexit.register(again, 'exit')\n"
    )
    done = lockstep("run", path, "--devices", "1")
    assert (done.out, done.code) == ("fork 8\nspawn 8\nforkserver 8\nthread 7\nexit 7\n", 0)


def test_modules_and_other_programs_can_be_started(script, tmp_path):
    script("import sys; print(__name__, __spec__.name, sys.argv[1:])", "app.py")
    done = lockstep("run", "--devices", "1", "-m", "app", "--adopted", cwd=tmp_path)
    assert (done.code, done.out) == (0, "__main__ app ['--adopted']\n")
    done = lockstep("run", "--devices", "2", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE $0", "x")
    assert (done.code, sorted(done.out.splitlines())) == (0, ["0 of 2 x", "[rank 1] 1 of 2 x"])


def test_the_first_failing_rank_comes_first(script):
    path = script(
        "import os, signal, time\n"
        "def late(*_): raise KeyError('late')\n"
        "def step(): raise ValueError('boom')\n"
        "if os.environ['RANK'] == '1': signal.signal(signal.SIGTERM, late), open(f'{__file__}.ready', 'w')\n"
        "while os.environ['RANK'] == '2' and not os.path.exists(f'{__file__}.ready'): time.sleep(0.01)\n"
        "if os.environ['RANK'] == '2': step()\n"
        "time.sleep(60)\n"
    )
    done = lockstep("run", "--devices", "3", path)
    notes, report = done.err.split("lockstep: Rank", 1)
    assert notes.startswith(OMP_NOTE)
    marks = "~~~~^^" if sys.version_info >= (3, 13) else "^^^^^^"
    assert re.sub(r"PID \d+", "PID N", f"Rank{report}") == (
        "Rank 2 failed: ValueError: boom\n"
        f"At {path}:3, on {socket.gethostname()}, PID N.\n"
        "\n"
        "Traceback (most recent call last):\n"
        f'  File "{path}", line 6, in <module>\n'
        "    if os.environ['RANK'] == '2': step()\n"
        f"                                  {marks}\n"
        f'  File "{path}", line 3, in step\n'
        "    def step(): raise ValueError('boom')\n"
        "                ^^^^^^^^^^^^^^^^^^^^^^^^\n"
        "ValueError: boom\n"
        "\n"
        "rank 0 (PID N): stopped by the launcher\n"
        f"rank 1 (PID N): KeyError: 'late' ({path}:2)\n"
    )
    assert (done.code, done.out) == (1, "")


def test_a_killed_rank_is_named_and_not_the_one_that_noticed(script):
    path = script(
        "import os, signal, time; time.sleep(1)\n"  # a first heartbeat has been written
        "if os.environ['RANK'] == '1': open(f'{__file__}.gone', 'w'), os.kill(os.getpid(), signal.SIGKILL)\n"
        "while not os.path.exists(f'{__file__}.gone'): time.sleep(0.01)\n"
        "raise ConnectionResetError('Connection reset by peer')\n"  # as from a collective
    )
    done = lockstep("run", "--devices", "2", path)
    report = done.err[done.err.index("lockstep: Rank") :].splitlines()
    assert report[0].startswith("lockstep: Rank 1 was killed by SIGKILL (signal 9): ")
    assert report[2].startswith("Last seen ") and re.search(rf" on {socket.gethostname()}, PID \d+\.$", report[2])
    assert re.match(r"rank 1: \S+ .iB on the host \(at most ", report[5])
    assert re.fullmatch(r"The minimum of free memory was \S+ GiB of the host's \S+ GiB\.", report[6])
    assert report[7] == ""
    noticed = rf"ConnectionResetError: Connection reset by peer \({path}:4\)"
    assert re.fullmatch(rf"rank 0 \(PID \d+\): ({noticed}|stopped by the launcher)", report[8])
    assert (len(report), done.code) == (9, 1)


EARLY = """\
import os, sys
import torch, torch.distributed as dist
import lockstep
how, backend, engine = sys.argv[1:]
if engine == "torch":
    dist.init_process_group(backend)
    rank, DDP = dist.get_rank(), torch.nn.parallel.DistributedDataParallel
else:
    world = lockstep.init(backend=backend)
    rank, DDP = world.rank, lockstep.DistributedDataParallel
model = DDP(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    if rank == 1 and step == 50:
        if how == "break": break
        sys.exit(0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("options", "how", "backend", "engine"),
    [
        ([], "break", "shm", "ours"),
        (["--watchdog", "0"], "exit", "gloo", "ours"),
        (["--watchdog", "5"], "break", "gloo", "torch"),
        (["--adopt"], "exit", "gloo", "torch"),
    ],
)
def test_a_rank_that_leaves_its_loop_early_is_named_and_not_the_one_that_noticed(script, options, how, backend, engine):
    path = script(EARLY)
    done = lockstep("run", "--devices", "2", *options, path, how, backend, engine)
    report = re.sub(r"PID \d+", "PID N", done.err[done.err.index("lockstep: Rank") :])
    where = f"At {path}:16, on" if how == "exit" else "On"
    head, noticed = report.split("\n\n")
    assert head == (
        f"lockstep: Rank 1 ended normally after 50 optimizer steps while rank 0 was still training ({path}:17).\n"
        "Every rank must run the same steps: let all ranks leave the loop in the same one, give them the same number of"
        f"\nbatches, or train within `with model.join()`.\n{where} {socket.gethostname()}, PID N."
    )
    assert re.fullmatch(rf"rank 0 \(PID N\): .* \({path}:17\)\n", noticed)
    assert done.code == 1


ALONE = """\
import os, sys, time
import torch, torch.distributed as dist
how, rank = sys.argv[1], os.environ["RANK"]
def join():
    dist.init_process_group("gloo")
    dist.barrier()  # else the other rank may still connect to this one, which leaves
    dist.destroy_process_group()
if how == "joins first": join()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(90 if how == "joins late" else 110):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
time.sleep(0 if how == "fails" else 1.1)  # two heartbeats: one may come before the last step
if how == "joins late": join()
if how == "fails": raise ValueError("boom")
sys.exit(0)
"""
NOTE = (
    "lockstep: no rank has joined a process group: each of 2 processes runs the whole script alone.\n"
    "To train one model on all of them, call lockstep.init() and wrap the model in lockstep.DistributedDataParallel; "
    "if each is to run alone, nothing is wrong.\n"
)


@pytest.mark.parametrize(
    ("options", "how", "notes"),
    [
        ([], "trains alone", NOTE),
        (["--adopt", "--watchdog", "0"], "trains alone", NOTE),
        (["--quiet"], "trains alone", ""),
        ([], "joins first", ""),
        ([], "joins late", ""),
    ],
)
def test_ranks_that_never_join_a_group_are_told_so(script, options, how, notes):
    done = lockstep("run", "--devices", "2", *options, script(ALONE), how)
    assert "".join(line for line in done.err.splitlines(True) if not line.startswith(OMP_NOTE)) == notes
    assert done.code == 0
    if how == "trains alone" and not options:
        assert "no rank" not in lockstep("run", "--devices", "2", script(ALONE), "fails").err.partition("failed")[2]
        assert "no rank" not in lockstep("run", "--devices", "1", script(ALONE), how).err


def test_a_crash_in_native_code_shows_the_python_stack(script):
    path = script("import ctypes\ndef crash(): ctypes.string_at(0)\ncrash()\n")
    done = lockstep("run", "--devices", "1", path)
    assert "lockstep: Rank 0 was killed by SIGSEGV (signal 11): native code accessed invalid memory" in done.err
    assert f'  File "{path}", line 2 in crash\n  File "{path}", line 3 in <module>\n' in done.err
    assert "bootstrap.py" not in done.err
    assert done.code == 1


def test_a_failed_rank_does_not_wait_for_its_peers_to_leave(script):
    # As Gloo's destructor, which waits for the collective that the peer never joins: the job would hang.
    path = script(
        "import os, time\n"
        "from lockstep.launcher import bootstrap\n"
        "bootstrap._FREE_S = 1.0\n"
        "class Group:\n"
        "    def __del__(self, sleep=time.sleep): sleep(90)\n"
        "group = Group()\n"
        "if os.environ['RANK'] == '1': raise ValueError('boom')\n"
        "time.sleep(90)\n"
    )
    done = lockstep("run", "--devices", "2", path, timeout=60)
    assert "lockstep: Rank 1 failed: ValueError: boom\n" in done.err
    assert re.search(r"\nrank 0 \(PID \d+\): stopped by the launcher\n$", done.err)
    assert done.code == 1


def test_a_failing_script_ends_as_in_a_single_process(script, tmp_path):
    path = script(
        "import atexit, gzip, logging, logging.handlers, multiprocessing.util, os, sys, tempfile, threading, weakref\n"
        "import torch, torch.distributed as dist\n"
        "rank, how = os.environ['RANK'], sys.argv[1]\n"
        "dist.init_process_group('gloo')\n"
        "sys.excepthook = lambda kind, error, trace: print('hook', error)\n"
        "atexit.register(lambda: print('exit handler', repr(getattr(sys, 'last_value', None))))\n"
        "class Tracker:\n"
        "    def __del__(self): report.write('destructor ')\n"
        "report = open(rank + '.txt', 'w')\n"
        "tracker = Tracker()\n"
        "weakref.finalize(Tracker, report.write, 'finalizer ')\n"
        "multiprocessing.util.Finalize(None, report.write, ('multiprocessing ',), exitpriority=1)\n"
        "logs = logging.handlers.MemoryHandler(99, target=logging.StreamHandler(report))\n"
        "logging.getLogger().addHandler(logs)\n"
        "def main():\n"
        "    folder, file = tempfile.TemporaryDirectory(dir='.'), tempfile.NamedTemporaryFile(dir='.')\n"
        "    packed = gzip.open(rank + '.gz', 'wt')\n"
        "    packed.write('packed')\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "    dist.barrier()\n"
        "    pending = dist.all_reduce(torch.ones(1), async_op=True) if rank == '1' else None\n"
        "    logging.warning('logged')\n"
        "    if rank == '1': raise ValueError('boom') if how == 'raises' else SystemExit('a message')\n"
        "    threading.Event().wait()\n"
        "main()\n"
    )
    for how, out, err in (
        ("raises", "hook boom\n[rank 1] exit handler ValueError('boom')\n", "Rank 1 failed: ValueError: boom\n"),
        ("leaves", "exit handler None\n", "Rank 1 left with exit code 1 (SystemExit: a message at "),
    ):
        done = lockstep("run", "--devices", "2", path, how, cwd=tmp_path)
        assert done.out == f"[rank 1] {out}" and f"lockstep: {err}" in done.err
        assert ("[rank 1] a message\n" in done.err) == (how == "leaves")
        words = (tmp_path / "1.txt").read_text().split()
        assert sorted(words) == ["destructor", "finalizer", "logged", "multiprocessing"]
        assert gzip.decompress((tmp_path / "1.gz").read_bytes()) == b"packed"
        assert len([path for path in tmp_path.iterdir() if path.name.startswith("tmp")]) == 2  # of rank 0, was killed
        for each in tmp_path.glob("tmp*"):
            shutil.rmtree(each) if each.is_dir() else each.unlink()


@pytest.mark.soak
def test_restarts_show_every_failure_and_meet_anew(script):
    # With torch's own function: the rank that comes later must not be looked for where it was before the restart.
    path = script(
        "import os, time, lockstep, torch, torch.distributed as dist\n"
        "is_first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "time.sleep(0 if is_first or os.environ['RANK'] == '1' else 1)\n"
        "dist.init_process_group('gloo')\n"
        "with lockstep.init() as world:\n"
        "    total = torch.ones(1)\n"
        "    dist.all_reduce(total)\n"
        "    if is_first and world.rank == 0: raise ValueError('first try')\n"
        "    world.barrier()\n"
        "    world.print('sum', total.item())\n"
    )
    done = lockstep("run", "--devices", "2", "--max-restarts", "1", path)
    end = f"ValueError: first try\nlockstep: rank 0 failed: ValueError: first try ({path}:8); restart 1 of 1\n"
    assert done.err.endswith(end)
    assert done.err.count("Traceback") == 1
    assert (done.code, done.out) == (0, "sum 2.0\n")


def test_a_restart_names_the_rank_that_was_killed(script):
    path = script(
        "import os, signal, time\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1': raise SystemExit(print('again'))\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)\n"
    )
    done = lockstep("run", "--devices", "2", "--max-restarts", "1", path)
    assert (done.code, done.out) == (0, "again\n")
    assert done.err.endswith(f"lockstep: rank 1 was killed by SIGKILL (signal 9); restart 1 of 1\n{NOTE}"), done.err


def test_of_ranks_killed_within_one_poll_of_torchs_the_first_is_named(script):
    path = script(
        "import os, pathlib, select, signal, time\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1': raise SystemExit\n"
        "here, rank = pathlib.Path(__file__).parent, os.environ['RANK']\n"
        "(here / f'new-{rank}').write_text(str(os.getpid()))\n"
        "(here / f'new-{rank}').rename(here / f'pid-{rank}')\n"
        "while rank == '0' and len(list(here.glob('pid-*'))) < 4: time.sleep(0.01)\n"
        "time.sleep(1)  # forked ranks are there before the launcher watches them\n"
        "for killed in '31' if rank == '0' else '':\n"
        "    pid = int((here / f'pid-{killed}').read_text())\n"
        "    process = os.pidfd_open(pid)\n"
        "    os.kill(pid, signal.SIGKILL)\n"
        "    select.select([process], [], [])  # it needs a core to end\n"
        "time.sleep(60)\n"
    )
    done = lockstep("run", "--devices", "4", "--max-restarts", "1", "--watchdog", "0", path)
    assert done.code == 0, done.err
    assert "\nlockstep: rank 3 was killed by SIGKILL (signal 9); restart 1 of 1\n" in done.err, done.err


def test_logs_go_where_torchrun_puts_them(script, tmp_path):
    path = script("import os; print('hello', os.environ['RANK'])")
    done = lockstep("run", "--devices", "2", "--log-dir", str(tmp_path / "logs"), "-r", "1", path)
    assert (done.code, done.out) == (0, "")
    logs = sorted((tmp_path / "logs").glob("*/attempt_0/*/stdout.log"))
    assert [log.read_text() for log in logs] == ["hello 0\n", "hello 1\n"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--devices", "2", "nothere.py"],
            "There is no script nothere.py (looked in {cwd}).\nCheck the path; with -m it is a module's name.",
        ),
        (["--devices", "2", "trian.py"], "There is no script trian.py (looked in {cwd}).\nDid you mean train.py?"),
        (
            ["--no-python", "no-such-program"],
            "Executable not found: no-such-program.\nCheck its name, or leave --no-python out.",
        ),
        (["--devices", "0", "train.py"], "0 is not a valid number of devices.\nUse at least one."),
        (
            ["--devices", "many", "train.py"],
            "--devices many: Unsupported nproc_per_node value: many.\nPass a number, 'gpu', 'cpu' or 'auto'.",
        ),
        (
            ["--nnodes", "two", "train.py"],
            "--nnodes two is not a number of machines.\nPass one such as 2, or a range such as 1:4.",
        ),
        (
            ["--nnodes", "2", "train.py"],
            "--nnodes 2 needs the place where the machines meet.\n"
            "Add --node-rank I --master-addr HOST, with the name or address of the first machine, the same on every "
            "machine.",
        ),
        (
            ["--nnodes", "1:4", "--rdzv-backend", "c10d", "train.py"],
            "--nnodes 1:4 needs the place where the machines meet.\n"
            "Add --rdzv-endpoint HOST:PORT, with the name or address of the first machine, the same on every machine.",
        ),
        (
            ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host:port", "train.py"],
            "--rdzv-endpoint host:port is not an address.\nPass <host>:<port>.",
        ),
    ],
)
def test_what_cannot_be_started(script, tmp_path, monkeypatch, args, message):
    script("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as raised:
        start(args)
    assert str(raised.value) == message.format(cwd=os.getcwd())


def test_a_port_in_use_is_named(script):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError) as raised:
            start(["--devices", "2", "--master-port", str(port), script("")])
    assert str(raised.value) == (
        f"Port {port} on this machine is already in use.\n"
        "Choose another with --master-port, the same on every machine; on one machine leave it out for a free one."
    )
