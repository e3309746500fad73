"""A lost rank is replaced while the others go on: no step is lost, and the run ends in the bits that it has without."""

import os
import re
import signal
import subprocess
import textwrap
import time
from importlib.util import find_spec
from unittest import mock

import numpy as np
import pytest
import torch

from lockstep.loop import recovery
from lockstep.study.report.run_page import report
from lockstep.telemetry.record import read_run
from tests.distributed.commands import lockstep as run_lockstep
from tests.distributed.commands import start
from tests.models import soak

# Ends a rank at a place, once in the whole job: "place@rank", by SIGKILL or, after a colon, in another way. If they are
# ORDERED, not before the one that is named before it.
FAULTS = """\
import os, pathlib, signal, time, torch
from torch import nn

def lose(place, rank=None):
    for number, fault in enumerate(os.environ.get("FAULTS", "").split()):
        fault, _, by = fault.partition(":")
        where, _, which = fault.rpartition("@")
        mine = os.environ["RANK"] if rank is None else str(rank)
        waits = number and "ORDERED" in os.environ and not os.path.exists(f"{os.environ['ONCE']}-{number - 1}")
        if where == place and which == mine and not waits:
            try:
                os.close(os.open(f"{os.environ['ONCE']}-{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            if number == 0:  # spares are ready some time after the ranks
                folder = pathlib.Path(os.environ["LOCKSTEP_RUN_DIR"])
                while len(list(folder.glob("recovers-*"))) < int(os.environ.get("READY", 0)):
                    time.sleep(0.02)
            if by == "exception":
                raise ValueError("boom")
            os.kill(os.getpid(), getattr(signal, by or "SIGKILL"))
"""

SCRIPT = (
    FAULTS
    + """
import hashlib, sys, threading
import lockstep

class Part:
    def __init__(self, world):
        self.world, self.step = world, -1
    def state_dict(self):
        if self.step == recovery.step:  # not for the copy at the begin of the block, but for the one that is sent
            lose("copied", self.world.rank)
        self.step = recovery.step
        return {}
    def load_state_dict(self, state):  # also to undo a block
        if self.step < 0:
            print("received by", "a spare" if is_spare else "a new rank", flush=True)
            lose("received", self.world.rank)

def used():
    # Threads, open files, what is mapped into memory, and what of it is shared: the old groups are gone.
    maps = open("/proc/self/maps").readlines()
    counts = threading.active_count(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(maps)
    return *counts, sum("memfd:lockstep" in line for line in maps)

torch.set_num_threads(1)
is_spare = "LOCKSTEP_SPARE" in os.environ
with lockstep.init(backend=sys.argv[1]) as world:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    model = lockstep.DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recovery = lockstep.Recovery(world, model=model, optimizer=optimizer, part=Part(world))
    while recovery.step < 30:
        with recovery.attempt():
            step = recovery.step
            lose(f"step{step}")
            generator = torch.Generator().manual_seed(100 * step + world.rank)
            loss = model(torch.randn(8, 16, generator=generator)).square().mean()
            loss.register_hook(lambda gradient: lose(f"backward{step}"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if os.environ.get("SHOWS") and recovery.step > step and step % 5 == 4:
            # Its default group is that of its import, which torch's optimizer does.
            assert int(torch.distributed.nn.functional.all_reduce(torch.ones(()))) == world.world_size
            if world.is_rank_zero:
                print("used", *used())
    found = hashlib.sha1(b"".join(value.numpy().tobytes() for value in net.state_dict().values()))
    if world.is_rank_zero:
        print("weights", recovery.step, found.hexdigest())
lose("end")
import atexit
atexit.register(lose, "exit")
"""
)


@pytest.fixture(scope="module")
def undisturbed_runs():
    """What runs without faults have ended with, by all that was run: many tests compare with the same one."""
    return {}


@pytest.fixture
def run_script(tmp_path, undisturbed_runs):
    """Return a function that runs the script with faults, and returns its weights and what the launcher said."""
    return script_runner(tmp_path, undisturbed_runs)


def script_runner(tmp_path, undisturbed_runs):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)

    def run(backend, faults="", *flags, ranks=2, restarts=5, **variables):
        run_of = (path.read_text(), backend, flags, ranks, restarts, *variables.items())
        if not faults and run_of in undisturbed_runs:
            return undisturbed_runs[run_of]
        once = tmp_path / f"once-{abs(hash((faults, flags)))}"
        environ = {**os.environ, "FAULTS": faults, "ONCE": str(once), **variables}
        command = "run", *flags, "--devices", str(ranks), "--max-restarts", str(restarts), path, backend
        done = run_lockstep(*command, env=environ)
        assert done.code == 0, done.err
        run.out = done.out
        lines = [line for line in done.err.splitlines() if re.match("lockstep: .*(rank|spare)|Rank", line)]
        ended = re.findall("weights (.*)", done.out), [line for line in lines if "OMP_NUM_THREADS" not in line]
        if not faults:
            undisturbed_runs[run_of] = ended
        return ended

    return run


def monitored(folder, where="after"):
    """The script with a monitor that it attaches before or after it creates its Recovery."""
    call = f"    lockstep.monitor(model, optimizer, run_dir={str(folder)!r})\n"
    marked = re.search(r"^    recovery = lockstep.Recovery.*\n", SCRIPT, re.MULTILINE)[0]
    return SCRIPT.replace(marked, call + marked if where == "before" else marked + call)


@pytest.fixture(scope="module")
def script_with_losses(tmp_path_factory, undisturbed_runs):
    """A monitored script that loses a rank again and again: its weights, the launcher's lines and the record."""
    path = tmp_path_factory.mktemp("script")
    run = script_runner(path, undisturbed_runs)
    (path / "train.py").write_text(monitored(path / "record"))
    # Rank zero first, and then no more: what it has not yet written would be lost with it.
    faults = "backward7@0 step12@1 step20@1:exception step29@1"
    return *run("shm", faults, "--recover", "exceptions"), path / "record"


def test_a_script_goes_on_in_place_with_the_same_bits(run_script, script_with_losses):
    undisturbed, nothing = run_script("shm")
    found, lines, _ = script_with_losses
    assert found == undisturbed and nothing == []
    killed = "was killed by SIGKILL (signal 9) after"
    lost, back, *others = without_times(lines[4:6] + lines[:4] + lines[6:])
    assert others == [
        f"rank 0 {killed} 7 optimizer steps; rank 1 goes on",
        "rank 0 is back after with the state of rank 1; step 8 is done again",
        f"rank 1 {killed} 12 optimizer steps; rank 0 goes on",
        "rank 1 is back after with the state of rank 0; step 13 is done again",
        f"rank 1 {killed} 29 optimizer steps; rank 0 goes on",
        "rank 1 is back after with the state of rank 0; step 30 is done again",
    ]
    # As `--recover exceptions` asks for.
    pattern = r"rank 1 ValueError: boom \(.*train.py:\d+\) after 20 optimizer steps; rank 0 goes on"
    assert re.fullmatch(pattern, lost)
    assert back == "rank 1 is back after with the state of rank 0; step 21 is done again"


def test_over_gloo_two_of_three_may_be_lost_at_once(run_script):
    undisturbed, _ = run_script("gloo", ranks=3)
    found, lines = run_script("gloo", "step7@1 step7@0 backward12@2", ranks=3)
    assert found == undisturbed
    assert [line for line in lines if "restart" in line] == []


TASK = (
    FAULTS
    + """
from dataclasses import replace
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import Dataset, TensorDataset
import lockstep

class Samples(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(size)
        self.inputs = torch.randn(size, 16, generator=generator)
        self.labels = torch.randint(0, 4, (size,), generator=generator)
    def __len__(self):
        return len(self.labels)
    def __getitem__(self, index):
        lose(f"sample{index}")
        return self.inputs[index], self.labels[index]

trained = []

class Adam(torch.optim.AdamW):
    num_steps = 0
    def step(self, closure=None):
        trained.append(1)
        lose(f"before{self.num_steps}")
        super().step(closure)
        lose(f"after{self.num_steps}")
        self.num_steps += 1

def loss(model, batch):
    inputs, labels = batch
    if not torch.is_grad_enabled() and trained:  # not in the trial before
        lose("evaluation")
    value = nn.functional.cross_entropy(model(inputs), labels)
    if value.requires_grad:
        value.register_hook(lambda gradient: lose("backward"))
    return value

task = lockstep.Task(
    model=lambda: nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4)
    ),
    dataset=lambda: Samples(200),
    eval_dataset=lambda: Samples(40),
    loss=loss,
    optimizer=lambda parameters: Adam(parameters, lr=1e-2),
    global_batch_size=24,
)
one_cycle = replace(task, schedule=lambda optimizer, n: OneCycleLR(optimizer, max_lr=0.03, total_steps=n))
plateau = replace(task, schedule=lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9))
"""
)


@pytest.fixture
def run_task(tmp_path, undisturbed_runs):
    """Return a function that trains the task with faults, and returns its weights and what the launcher said."""
    return task_runner(tmp_path, undisturbed_runs)


def task_runner(tmp_path, undisturbed_runs):
    path = tmp_path / "task.py"
    path.write_text(TASK)

    def run(faults="", *flags, ranks=2, code=0, restarts=5, name="task", **variables):
        run_of = (path.read_text(), name, flags, ranks, code, restarts, *variables.items())
        if not faults and run_of in undisturbed_runs:
            return undisturbed_runs[run_of]
        spec, name = f"{path}:{name}", f"weights-{abs(hash((faults, flags, name)))}.safetensors"
        environ = {**os.environ, "FAULTS": faults, "ONCE": str(tmp_path / f"once-{name}"), **variables}
        command = "train", spec, "--devices", str(ranks), "--max-restarts", str(restarts), "--steps", "27"
        done = run_lockstep(*command, "--export", tmp_path / name, *flags, env=environ)
        assert done.code == code, done.err
        lines = [line for line in done.err.splitlines() if line.startswith("lockstep: rank")]
        weights = (tmp_path / name).read_bytes() if code == 0 else b""
        ended = weights, [re.sub(r"[\d.]+ s ", "", line.removeprefix("lockstep: ")) for line in lines]
        if not faults:
            undisturbed_runs[run_of] = ended
        return ended

    return run


@pytest.fixture(scope="module")
def fit_with_losses(tmp_path_factory, undisturbed_runs):
    """A run of fit that loses a rank in every moment of a step, and writes all that it can: a folder, and the rest."""
    path = tmp_path_factory.mktemp("fit")
    run = task_runner(path, undisturbed_runs)
    faults = "before9@0 backward@1 after2@1 before3@1:SIGSEGV evaluation@1 sample77@1"
    flags = "--checkpoint", path / "kept", "--checkpoint-every", "4", "--run-dir", path / "record"
    if find_spec("tensorboard"):
        flags += "--log-to", f"tensorboard:{path}/board"
    # What the first rank zero has not yet written is lost; what comes then is in the record, as the second one stays.
    return path, *run(faults, *flags, "--log-dir", path / "logs", restarts=9, ORDERED="1")


def test_fit_goes_on_in_place_from_every_moment_of_a_step(run_task, fit_with_losses):
    undisturbed, nothing = run_task()
    assert nothing == []
    _, found, lines = fit_with_losses
    assert found == undisturbed
    assert len(lines) == 12 and not any("restart" in line for line in lines)
    assert [line for line in lines if "evaluation" in line] != []


# An optimizer with modes, which ZeRO-1 can divide by elements, and one that needs a closure.
MODES = """\
    elementwise = True
    num_steps = 0
    @torch.no_grad()
    def shift(self, factor):
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                if "exp_avg" in self.state[p]:
                    p.add_(self.state[p]["exp_avg"], alpha=factor)
                    lose(f"mode{self.num_steps}")
    def eval(self):
        self.shift(0.3)
    def train(self):
        self.shift(-0.3)
"""
CLOSURE = """\
    num_steps = 0
    def step(self, closure):
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-0.01)
        lose(f"between{self.num_steps}")
        with torch.enable_grad():
            closure()
        self.finish()
    def finish(self, closure=None):
"""


def test_the_switch_of_an_optimizer_with_modes_is_undone(run_task, tmp_path):
    (tmp_path / "task.py").write_text(TASK.replace("    num_steps = 0\n", MODES))
    flags = "--checkpoint-every", "3", "--eval-every", "3", "--early-stopping", "loss"
    flags = *flags, "--keep-best", "loss", "--load-best", "--schedule", "cosine", "--warmup", "5"
    undisturbed, _ = run_task("", *flags, "--checkpoint", tmp_path / "whole")
    found, lines = run_task("mode3@0 evaluation@1 mode9@1 before10@0", *flags, "--checkpoint", tmp_path / "lost")
    assert found == undisturbed
    assert len(lines) == 8 and not any("restart" in line for line in lines)


def test_a_rank_that_is_lost_in_an_update_with_a_closure_restarts_all(run_task, tmp_path):
    (tmp_path / "task.py").write_text(TASK.replace("    num_steps = 0\n    def step(self, closure=None):\n", CLOSURE))
    undisturbed, _ = run_task()
    found, lines = run_task("between3@0 evaluation@1")
    assert found == undisturbed
    assert ["restart" in line for line in lines].count(True) == 1 and "is back" in lines[-1]


def test_a_killed_loader_process_costs_its_rank_only(run_task):
    # With virtual shards, the bits are also those without loader processes, and those of one rank.
    undisturbed, _ = run_task("", "--reproducible", "4", ranks=1)
    found, lines = run_task("backward@0 sample77@0 before20@1", "--workers", "2", "--reproducible", "4")
    assert found == undisturbed
    assert len(lines) == 6 and not any("restart" in line for line in lines)
    assert len([line for line in lines if "LoaderDied: A loader process of rank" in line]) == 1


def test_what_ended_a_rank_is_shown_and_kept(fit_with_losses):
    path, _, _ = fit_with_losses
    texts = [event.text for event in read_run(path / "record").events if event.event == "recovery"]
    (text,) = [text for text in texts if "was killed by SIGSEGV" in text]
    assert 'task.py", line ' in text and "in lose" in text
    assert any("in lose" in each.read_text() for each in (path / "logs").rglob("*") if each.is_file())


END_SERVER = """
import lockstep, psutil

def end_server():
    for each in psutil.Process(os.getppid()).children():
        if "fork server" in " ".join(each.cmdline()):
            each.kill()
            return time.sleep(0.5)
    raise AssertionError("there is none")
"""


@pytest.mark.soak  # it takes two interpreters; test_fork_server.py has a restart of all off another server
def test_the_process_that_forks_ranks_is_started_again(run_script, tmp_path):
    undisturbed, _ = run_script("shm")
    body = SCRIPT.replace('lose(f"step{step}")', 'step == 3 and world.rank == 0 and end_server(), lose(f"step{step}")')
    (tmp_path / "train.py").write_text(body.replace("import lockstep\n", END_SERVER, 1))
    found, lines = run_script("shm", "step17@1")
    assert found == undisturbed
    assert "lockstep: the process that forks ranks has ended; another one is started" in lines
    assert len([line for line in lines if "is back" in line]) == 1


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        samples = Samples(200)
        return map(samples.__getitem__, range(200))

import dataclasses
task = dataclasses.replace(task, dataset=Stream)
"""


@pytest.mark.parametrize("flags", [["--workers", "1"], ["--min-devices", "1"]])
def test_a_stream_goes_on_with_a_new_rank_and_with_fewer(run_task, tmp_path, flags):
    path = tmp_path / "task.py"
    path.write_text(TASK + STREAM)
    undisturbed, _ = run_task("", "--reproducible", "4", ranks=1)
    # The third rank is lost before the first batch that is compared after the loss.
    found, lines = run_task("before2@2 before11@0", "--reproducible", "4", *flags, ranks=3)
    assert found == undisturbed
    assert not any("restart" in line for line in lines)


# Two calls of `fit`, each in a world of its own, or in the script's, which goes on after them.
TRAIN = """
import contextlib, sys
if __name__ == "__main__":
    with lockstep.init() if "init" in sys.argv else contextlib.nullcontext():
        lockstep.fit(task, epochs=3, export=f"{sys.argv[1]}1.safetensors")
        os.environ["FAULTS"] = os.environ["LATER"]
        lockstep.fit(task, epochs=3, export=f"{sys.argv[1]}2.safetensors")
        if "init" in sys.argv:
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
            print("summed over", int(total))
"""


@pytest.mark.parametrize("init", ["init", "fit"])
def test_fit_in_a_script_goes_on_in_place_once(tmp_path, run_task, init):
    undisturbed, _ = run_task()
    path = tmp_path / "script.py"
    path.write_text(TASK + TRAIN)
    environ = {
        **os.environ,
        "FAULTS": "before9@1",
        "LATER": "nowhere@0 before5@0",
        "ONCE": str(tmp_path / "once"),
    }
    command = "run", "--devices", "2", "--max-restarts", "3", path, tmp_path / "weights", init
    done = run_lockstep(*command, env=environ)
    assert done.code == 0, done.err
    assert {path.read_bytes() for path in tmp_path.glob("weights?.safetensors")} == {undisturbed}
    assert ("summed over 2" in done.out) == (init == "init")
    lines = re.findall("lockstep: (rank .*)", done.err)
    # A rank that is lost in the second call could not come to it without the first.
    assert [re.sub(r"[\d.]+ s | \([a-z ]+\)(?=;)|; step 1\d .*", "", line) for line in lines] == [
        "rank 1 was killed by SIGKILL (signal 9) in step 10; rank 0 goes on",
        "rank 1 is back after with the state of rank 0",
        "rank 0 was killed by SIGKILL (signal 9) in step 6; restart 2 of 3",
    ]


@pytest.mark.parametrize("name", ["plateau", *soak(["one_cycle"])])
def test_a_scheduler_of_torch_a_scaler_and_micro_batches_go_on(run_task, name):
    flags = "--precision", "fp16", "--accumulate", "2", "--clip", "0.5"
    undisturbed, _ = run_task("", *flags, name=name)
    found, lines = run_task("backward@0 before9@1 evaluation@1", *flags, name=name)
    assert found == undisturbed
    assert len(lines) == 6 and not any("restart" in line for line in lines)


@pytest.mark.parametrize("method", ["powersgd:1", *soak(["fp16", "int4", "int8"])])
def test_compressed_gradients_go_on(run_task, method):
    # Residuals of a lost rank are lost with it: the bits are the same only if it had none yet.
    undisturbed, _ = run_task("", "--compression", method)
    found, lines = run_task("backward@1", "--compression", method)
    assert found == undisturbed and len(lines) == 2
    found, lines = run_task("before9@0", "--compression", method)
    assert (found == undisturbed) == (method == "fp16")
    assert len(lines) == 2 and not any("restart" in line for line in lines)


def evaluations(path):
    """The steps of the evaluations that TensorBoard has."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(path / "board"))
    board.Reload()
    return sorted({each.step for each in board.Scalars("eval/loss")})


def checkpoints(path):
    return sorted(each.name for each in (path / "kept").iterdir() if each.name.startswith("step-"))


def test_checkpoints_go_on_after_the_loss_of_the_rank_that_writes_them(fit_with_losses):
    assert checkpoints(fit_with_losses[0]) == ["step-0000000024", "step-0000000027"]


def test_a_sink_gets_the_evaluation_just_before_rank_zero_was_lost(fit_with_losses):
    path, _, lines = fit_with_losses
    assert any(line.startswith("rank 0 was killed by SIGKILL (signal 9) in step 10") for line in lines)
    assert evaluations(path) == [9, 18, 27]


def test_an_exception_is_an_error_of_the_program(run_task, tmp_path):
    path = tmp_path / "task.py"
    path.write_text(TASK.replace('lose("evaluation")', 'raise ValueError("boom")'))
    _, lines = run_task(code=1, restarts=1)
    assert [line.partition(":")[0] for line in lines if "goes on" in line] == []
    assert any("restart 1 of 1" in line for line in lines)


def without_times(lines):
    return [re.sub(r"[\d.]+ s ", "", line.removeprefix("lockstep: ")) for line in lines]


@pytest.fixture(scope="module")
def script_with_spares(tmp_path_factory, undisturbed_runs):
    """A script that loses a rank, and the spare that takes its place; then it ends: its weights, lines and output."""
    run = script_runner(tmp_path_factory.mktemp("spares"), undisturbed_runs)
    # The first fault is that of a rank, which waits for the spares.
    faults = "step7@1 received@1 step20@1 end@1 exit@0"
    return *run("shm", faults, "--spares", "2", READY="4"), run.out


def test_a_spare_takes_the_place_of_a_lost_rank_and_of_a_spare_that_dies(run_script, script_with_spares):
    undisturbed, _ = run_script("shm")
    found, lines, out = script_with_spares
    assert found == undisturbed
    assert re.findall("received by a (.*)", out) == ["spare", "spare", "new rank"]
    assert [re.sub("( after .*)?;", ";", line) for line in without_times(lines[:5])] == [
        "rank 1 was killed by SIGKILL (signal 9); rank 0 goes on",
        "rank 1 was killed by SIGKILL (signal 9); rank 0 goes on",
        "rank 1 is back; step 8 is done again",
        "rank 1 was killed by SIGKILL (signal 9); rank 0 goes on",
        "rank 1 is back; step 21 is done again",
    ]


def test_a_rank_that_is_killed_after_the_training_is_not_missed(script_with_spares):
    _, lines, _ = script_with_spares
    killed = "was killed by SIGKILL (signal 9) after 30 optimizer steps; "
    # One line for both, if they were lost at once.
    assert sorted(re.findall("rank . was[^;]*; ", " ".join(lines[5:]))) == [
        f"rank {rank} {killed}" for rank in range(2)
    ]
    assert all(line.endswith("; the training was complete") for line in lines[5:])


def test_one_rank_fewer_has_the_same_bits_with_virtual_shards_and_the_new_rank_zero_writes(run_task, tmp_path):
    undisturbed, _ = run_task("", "--reproducible", "4", ranks=1)
    flags = "--checkpoint", tmp_path / "kept", "--checkpoint-every", "4", "--min-devices", "1"
    if find_spec("tensorboard"):
        flags += "--log-to", f"tensorboard:{tmp_path}/board"
    # Rank zero, and then the one that has become rank zero.
    found, lines = run_task("sample77@0 before9@0", "--reproducible", "4", *flags, ranks=3)
    assert found == undisturbed
    assert [line for line in lines if "from now on" in line] == [
        "rank 2 is rank 0 of 2 from now on",
        "rank 1 is rank 0 of 1 from now on",
    ]
    assert [line for line in lines if "restart" in line or "back" in line] == []
    assert checkpoints(tmp_path) == ["step-0000000024", "step-0000000027"]
    if find_spec("tensorboard"):
        assert evaluations(tmp_path) == [9, 18, 27]


def test_losses_during_a_recovery(run_script):
    # The rank that sends the state, and the rank that receives it; then all but one.
    undisturbed, _ = run_script("shm", ranks=3)
    found, lines = run_script("shm", "step7@1 copied@0 step12@2 received@2 step20@0 step20@1", ranks=3, restarts=9)
    assert found == undisturbed
    assert len([line for line in lines if "was killed" in line]) == 6
    assert not any("restart" in line for line in lines)


def test_a_rank_that_is_lost_in_the_same_step_again_and_again_is_not_replaced_for_ever(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace('lose(f"step{step}")', "step == 4 and world.rank == 1 and os.kill(os.getpid(), 9)"))
    done = run_lockstep("run", "--devices", "2", "--max-restarts", "3", path, "shm", env=os.environ)
    assert done.code == 1
    said = "lockstep: the ranks cannot go on in place: 3 times ranks were lost in step 5: its samples or its code may"
    assert f"{said} be to blame" in done.err
    # Restarts and replacements together are no more than allowed.
    assert "Before that, 2 lost ranks were replaced while the others went on." in done.err
    assert re.findall(r"restart \d of \d", done.err) == ["restart 3 of 3"]
    assert "Before that, 2 lost ranks were replaced" in done.err


def test_a_rank_that_is_killed_as_the_last_one_is_missed_where_ranks_do_not_train_together(tmp_path):
    path = tmp_path / "alone.py"
    path.write_text(
        FAULTS
        + """
ended = pathlib.Path(os.environ["LOCKSTEP_RUN_DIR"]) / "ended-0"
if os.environ["RANK"] == "1":
    while not ended.exists():
        time.sleep(0.02)
    lose("alone")
    print("done")
"""
    )
    environ = {**os.environ, "FAULTS": "alone@1", "ONCE": str(tmp_path / "once")}
    done = run_lockstep("run", "--devices", "2", "--max-restarts", "1", path, env=environ)
    assert done.code == 0 and "done" in done.out and "restart 1 of 1" in done.err


def test_only_the_first_training_of_a_script_goes_on_in_place(run_script, tmp_path):
    undisturbed, _ = run_script("shm")
    before, body = SCRIPT.split("torch.set_num_threads(1)\n")
    body = textwrap.indent(body.replace('lose(f"step', 'lose(f"{kind}'), "    ")
    (tmp_path / "train.py").write_text(f"{before}\nfor kind in ('step', 'again'):\n{body}")
    # The first loss is made up for; then the same ranks begin together again, and the second loss restarts all.
    found, lines = run_script("shm", "step7@1 again7@1")
    assert found == undisturbed * 3
    assert len(lines) == 3 and "is back" in lines[1] and "in step 38; restart 2 of 5" in lines[2]


def test_a_stopped_rank_is_killed_and_replaced(run_script):
    undisturbed, _ = run_script("shm")
    found, lines = run_script("shm", "step7@1:SIGSTOP", "--watchdog", "1")
    assert found == undisturbed
    assert "Rank 1 is replaced." in lines and not any("again" in line for line in lines if "done again" not in line)
    assert [line for line in lines if "is back" in line] != []


@pytest.mark.parametrize(
    ("number", "saves"), [(signal.SIGTERM, False), (signal.SIGTERM, True), *soak([(signal.SIGINT, False)])]
)
def test_a_signal_during_a_recovery_ends_the_job(tmp_path, number, saves):
    path = tmp_path / "task.py"
    # The new rank takes long to build; with checkpoints the others wait for it, and all stop after the next step.
    stop = "os.path.exists(os.environ['LOCKSTEP_RUN_DIR'] + '/stop')" if saves else "False"
    waits = f"while 'LOCKSTEP_JOINS' in os.environ and not {stop}:\n    time.sleep(0.02)\n"
    path.write_text(f"{TASK}\nprint(os.getpid(), file=open(os.environ['ONCE'] + '-pids', 'a'))\n{waits}")
    flags = ["--checkpoint", tmp_path / "kept"] if saves else []
    environ = {**os.environ, "FAULTS": "before9@1", "ONCE": str(tmp_path / "once")}
    with (tmp_path / "err").open("wb") as err:
        command = "train", path, "--devices", "2", "--max-restarts", "3", "--epochs", "3", *flags
        started = start(*command, stdout=subprocess.DEVNULL, stderr=err, env=environ)
        deadline = time.monotonic() + 60
        while "goes on" not in (tmp_path / "err").read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        while len((tmp_path / "once-pids").read_text().split()) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)  # until the new rank has started
        started.send_signal(number)
        code = started.wait(30)
    text = (tmp_path / "err").read_text()
    pids = (tmp_path / "once-pids").read_text().split()
    assert len(pids) >= 4 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    if saves:
        assert code == 75 and re.search("Stopped by SIGTERM after step 1[0-2] of 27, loss [0-9.]+, saved in", text)
    else:
        assert code in (128 + number, -number) and "restart" not in text


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_survivor_keeps_nothing_of_old_generations(tmp_path, backend):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    faults = " ".join(f"step{step}@1" for step in range(5, 26))
    environ = {**os.environ, "FAULTS": faults, "ONCE": str(tmp_path / "once"), "SHOWS": "1"}
    done = run_lockstep("run", "--devices", "2", "--max-restarts", "30", path, backend, env=environ)
    assert done.code == 0 and done.err.count("is back") == 21
    *used, shared = zip(*[map(int, line.split()) for line in re.findall("used (.*)", done.out)], strict=True)
    # Before the first recovery, and after 5, 10, 15, 20 and all, without a garbage collection.
    assert len(shared) == 6 and len(set(shared)) == 1 and (shared[0] > 0) == (backend == "shm")
    # Python's threads, the kernel's, files, mappings: the first recovery starts threads.
    assert all(max(counts[2:]) <= counts[1] + 4 for counts in used), used


def recoveries(run):
    """Return step and text of the recoveries in a record, without seconds."""
    found = [event for event in run.events if event.event == "recovery"]
    assert all(0 < event.seconds < 60 for event in found)
    # The phase is known if the rank has written a heartbeat in it.
    return [(event.step, re.sub(r" after [\d.]+ s| [\d,]+ bytes| \([a-z]+\)(?=;)", "", event.text)) for event in found]


def test_the_record_goes_on_when_a_rank_is_lost(fit_with_losses):
    folder = fit_with_losses[0] / "record"
    run = read_run(folder)
    assert run.gaps == [] and len(run.sessions) == 1 and list(folder.glob("earlier*")) == []
    steps, texts = zip(*[(step, text.partition("\n")[0]) for step, text in recoveries(run)], strict=True)
    assert len(steps) == 6 and steps[:2] == (10, 10)
    assert texts[0] == (
        "rank 0 was killed by SIGKILL (signal 9) in step 10; rank 0 is back with the state of rank 1; "
        "step 11 is done again; copied"
    )
    assert texts[1] == (
        "rank 1 was killed by SIGKILL (signal 9) in step 11; rank 1 is back with the state of rank 0; "
        "step 11 is done again; copied"
    )
    told = [re.sub(r" after [\d.]+ s| [\d,]+ bytes| \([a-z]+\)(?=;)", "", text) for text in report(folder).sentences]
    assert [f"Recovery {number}: {text}." for number, text in enumerate(texts, 1)] == told[3:9]
    kinds = {event.event for event in run.events}
    assert "restart" not in kinds and "resume" not in kinds and "end" in kinds
    # Of a rank, the last steps before its loss may not have been written.
    assert {line.step for line in run.ranks[1].steps} >= set(range(21, 27))
    assert {line.step for line in run.ranks[0].steps} >= set(range(10, 27))


def assert_steps_are_recorded(folder, lost_in, missing_of_rank):
    run = read_run(folder)
    assert run.gaps == [] and len(run.sessions) == 1
    assert [step for step, _ in recoveries(run)] == lost_in
    for rank, missing in enumerate(missing_of_rank):
        steps = {line.step for line in run.ranks[rank].steps}
        assert steps | set(missing) == set(range(30)), "those before the loss may not have been written"
        assert {line.samples for line in run.ranks[rank].steps} == {16.0}


def test_a_monitored_script_goes_on(script_with_losses):
    assert_steps_are_recorded(script_with_losses[2], [7, 12, 20, 29], (range(8), range(30)))


@pytest.mark.soak
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_monitor_before_or_after_recovery(run_script, tmp_path, where):
    (tmp_path / "train.py").write_text(monitored(tmp_path / "record", where))
    run_script("shm", "backward7@0 step20@1")
    assert_steps_are_recorded(tmp_path / "record", [7, 20], (range(8), range(21)))


def exchanged(world):
    """Send a state from rank 1 to rank 0, in messages of 16 bytes; return what arrived."""
    values = torch.arange(12.0).reshape(3, 4)
    state = {
        "model": {
            "transposed": values.t(),
            "bf16": values.bfloat16(),
            "scalar": torch.tensor(7),
            "no": torch.empty(0, 3),
        },
        "optimizer": {"state": {0: {"step": 3, "flag": torch.tensor([True, False])}}, "names": ("a", None)},
        # As schedulers and loaders return them.
        "own": {"lr": np.float64(0.5), "seen": {1}, "order": np.arange(3)},
    }
    with mock.patch.object(recovery, "_CHUNK_BYTES", 16):
        received, size = recovery.exchange_state(
            state if world.rank == 1 else {}, 1, 0, world.group, world.device, bool
        )
    if world.rank == 1:
        return received, size
    moved = received["model"].pop("transposed")
    assert torch.equal(moved, values.t()) and moved.is_contiguous()
    for name, value in received["model"].items():
        assert value.dtype == state["model"][name].dtype and torch.equal(value, state["model"][name])
    flags = received["optimizer"]["state"][0].pop("flag")
    own = received["own"]
    assert (own["lr"], own["seen"], own["order"].tolist()) == (0.5, {1}, [0, 1, 2])
    return flags.tolist(), received["optimizer"], size


def test_a_state_arrives_as_it_was(ranks):
    (flags, rest, size), (nothing, sent) = ranks(2)(exchanged)
    assert (flags, rest) == ([True, False], {"state": {0: {"step": 3}}, "names": ("a", None)})
    assert nothing == {} and size == sent > 12 * 4 + 12 * 2 + 8 + 2
