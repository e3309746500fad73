"""Signals stop a run after a step, with a checkpoint and an exit code that says so; a second one stops it at once."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

import lockstep
from lockstep.launcher import fork_server
from lockstep.train.stopping import StopSignals
from tests.distributed import commands
from tests.training import make_task, mean_loss, read_state, samples

pytestmark = pytest.mark.timeout(120)

TASK = """\
import os, time
import torch
from torch import nn
import lockstep

num_calls = 0

def loss(model, batch):
    global num_calls
    num_calls += 1
    if num_calls == 3 and "REACHED" in os.environ:
        open(os.environ["REACHED"], "w").close()
    time.sleep(float(os.environ.get("STEP_S", "0")))
    return (model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

task = lockstep.Task(
    model=lambda: nn.Linear(3, 1, dtype=torch.float64),
    dataset=lambda: torch.utils.data.TensorDataset(torch.arange(90, dtype=torch.float64).reshape(30, 3) / 90),
    eval_dataset=lambda: torch.utils.data.TensorDataset(torch.ones(8, 3, dtype=torch.float64)),
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    global_batch_size=6,
)
"""
SCRIPT = """\
import sys
import lockstep
from mine import task

result = lockstep.fit(task, steps=40, checkpoint="runs", checkpoint_every=3, quiet=True)
print("stopped by", result.stopped, flush=True)
sys.exit(result.exit_code)
"""
STUCK = """\
import os, signal, time
from lockstep.base.rank_files import announce_graceful_stop, launcher_folder

signal.signal(signal.SIGINT, signal.SIG_IGN)
announce_graceful_stop(launcher_folder(), int(os.environ["RANK"]))
open(f"announced-{os.environ['RANK']}", "w").close()
time.sleep(1000)
"""


@pytest.fixture
def start(tmp_path):
    """Start a command in a folder with a task; the run is under way when it has written a checkpoint."""
    started = []
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "script.py").write_text(SCRIPT)

    def begin(*args, step_s=0.05, **env):
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "STEP_S": str(step_s), **env}
        process = commands.start(
            *map(str, args), cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        wait_for(lambda: list(tmp_path.glob("runs/step-??????????")) or process.poll() is not None, 60)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def descendants(process):
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes):
    wait_for(lambda: not [each for each in processes if each.is_running() and each.status() != "zombie"], 10)


OPTIONS = ("--steps", 40, "--checkpoint", "runs", "--checkpoint-every", 3, "--eval-every", 4)


@pytest.mark.soak
def test_sigterm_stops_all_ranks_after_a_step_and_the_run_goes_on_from_there(start, tmp_path, monkeypatch):
    process = start("train", "mine.py", "--devices", 2, "--run-dir", "record", *OPTIONS)
    ranks = descendants(process)
    began_at = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - began_at < 20
    assert process.returncode == 75, err
    newest = max(tmp_path.glob("runs/step-*"))
    step = int(newest.name[5:])
    assert without_loss(err) == (
        f"lockstep: Stopped by SIGTERM after step {step} of 40, saved in runs/{newest.name}.\n"
        "The same command resumes from there.\n"
    )
    assert "Stopped" not in out
    assert_gone(ranks)
    lines = map(json.loads, (tmp_path / "record" / "rank-0.jsonl").read_text().splitlines())
    logged = [line["loss"] for line in lines if line["kind"] == "step"]
    assert len(logged) == step
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    from mine import task

    whole = lockstep.fit(task, strategy="single", steps=40, quiet=True).losses
    rest = lockstep.fit(task, strategy="single", steps=40, checkpoint=tmp_path / "runs", resume=True, quiet=True)
    assert logged + rest.losses == pytest.approx(whole, rel=1e-12)


@pytest.mark.soak
def test_a_script_of_ones_own_is_told_and_the_launcher_passes_the_code_on(start, tmp_path):
    process = start("run", "--devices", 2, "script.py")
    # As SLURM does: to all processes of the job at once.
    for each in [*descendants(process), psutil.Process(process.pid)]:
        each.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=30)
    step = int(max(tmp_path.glob("runs/step-*")).name[5:])
    assert process.returncode == 75, err
    assert out == "stopped by SIGUSR1\n"  # once, as both say it
    assert without_loss(err) == (
        f"lockstep: Stopped by SIGUSR1 after step {step} of 40, saved in runs/step-{step:010d}.\n"
        "The same command resumes from there.\n"
    )


def test_a_second_ctrl_c_does_not_wait_for_a_step_that_does_not_end(start, tmp_path):
    (tmp_path / "runs" / "step-0000000001").mkdir(parents=True)
    (tmp_path / "script.py").write_text(STUCK)
    process = start("run", "--devices", 2, "script.py")
    wait_for(lambda: len(list(tmp_path.glob("announced-*"))) == 2, 30)
    ranks = descendants(process)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert err == (
        "lockstep: stopping after this step; Ctrl-C again stops at once\n"
        "lockstep: Stopped by Ctrl-C; all ranks have ended.\n"
    )
    assert_gone(ranks)


def test_ranks_that_do_not_stop_in_time_are_ended(start, tmp_path):
    (tmp_path / "runs" / "step-0000000001").mkdir(parents=True)
    (tmp_path / "script.py").write_text(STUCK)
    process = start("run", "--quiet", "--devices", 2, "script.py", LOCKSTEP_STOP_TIMEOUT_S="0.5")
    wait_for(lambda: len(list(tmp_path.glob("announced-*"))) == 2, 30)
    ranks = descendants(process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (143, "", "lockstep: Stopped by SIGTERM; all ranks have ended.\n")
    assert_gone(ranks)


def task_that_signals(number, *, at, times=1):
    """A task that signals its own process in the forward of one step."""
    task = make_task(eval_dataset=samples)
    calls = []

    def loss(model, batch):
        if model.training:
            calls.append(None)
            if len(calls) == at:
                for _ in range(times):
                    os.kill(os.getpid(), number)
        return mean_loss(model, batch)

    return make_task(**{**vars(task), "loss": loss})


def fit(task, folder, **settings):
    how = {"strategy": "single", "steps": 8, "checkpoint_every": 3, "eval_every": 4, "quiet": True}
    return lockstep.fit(task, checkpoint=folder, **{**how, **settings})


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [(signal.SIGTERM, "SIGTERM", 75), (signal.SIGUSR2, "SIGUSR2", 75), (signal.SIGINT, "SIGINT", 130)],
)
def test_in_one_process(tmp_path, capfd, number, name, code):
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)]
    whole = fit(make_task(eval_dataset=samples), tmp_path / "whole")
    assert (whole.stopped, whole.exit_code) == (None, 0)
    result = fit(task_that_signals(number, at=4), tmp_path / "run", quiet=False)
    assert (result.num_steps, result.stopped, result.exit_code) == (4, name, code)
    assert result.checkpoint == tmp_path / "run" / "step-0000000004"
    out, err = capfd.readouterr()
    by = {"SIGINT": "Ctrl-C"}.get(name, name)
    assert out.endswith(
        f"Stopped by {by} after step 4 of 8, loss {result.losses[-1]:.4f}, saved in {result.checkpoint}.\n"
        "The same command resumes from there.\n"
    )
    said = "lockstep: stopping after this step; Ctrl-C again stops at once\n"
    assert err == (said if name == "SIGINT" else "")
    assert result.evaluations == [], "there was no time for the one that was due"
    rest = fit(make_task(eval_dataset=samples), tmp_path / "run")
    assert (rest.first_step, rest.stopped) == (4, None)
    assert rest.evaluations == whole.evaluations, "so it is made up for"
    assert result.losses + rest.losses == whole.losses
    same = [read_state(each.checkpoint) for each in (rest, whole)]
    assert all(torch.equal(value, same[1]["model"][key]) for key, value in same[0]["model"].items())
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)] == before


def test_ctrl_c_twice_stops_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(task_that_signals(signal.SIGINT, at=5, times=2), tmp_path)
    assert fit(make_task(eval_dataset=samples), tmp_path).first_step == 3
    assert fit(task_that_signals(signal.SIGINT, at=2), tmp_path, steps=9, resume=False).stopped == "SIGINT"


NOT_SAVED = (
    "lockstep: Stopped by {} after step {} of {}; nothing was saved, because no folder for checkpoints was given.\n"
    "Add checkpoint=DIR (--checkpoint DIR): then a run that is stopped saves, and the same command resumes it.\n"
)


def without_loss(text):
    assert re.search(r"step \d+ of \d+, loss \d+\.\d{4}[,;]", text), text
    return re.sub(r", loss [\d.]+", "", text)


def test_without_a_folder_to_save_to_ctrl_c_stops_at_once(capfd):
    with pytest.raises(KeyboardInterrupt):
        lockstep.fit(task_that_signals(signal.SIGINT, at=2), strategy="single", steps=9, quiet=True)
    assert without_loss(capfd.readouterr().err) == NOT_SAVED.format("Ctrl-C", 1, 9)


def test_ctrl_c_in_the_first_second_says_so(capfd, monkeypatch):
    def interrupted(_names):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)

    monkeypatch.setattr(fork_server, "import_modules", interrupted)
    monkeypatch.setattr(sys, "argv", ["lockstep"])
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fork_server.start()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGINT
    assert capfd.readouterr().err == "lockstep: stopped by Ctrl-C before anything was started\n"


@pytest.mark.parametrize("devices", [1, 2])
def test_without_a_folder_to_save_to_a_signal_ends_the_run_and_says_so(start, tmp_path, devices):
    (tmp_path / "runs" / "step-0000000000").mkdir(parents=True)  # nothing is saved: do not wait for it
    process = start("train", "mine.py", "--devices", devices, step_s=1.0, REACHED=str(tmp_path / "reached"))
    wait_for((tmp_path / "reached").exists, 60)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert without_loss(err) == NOT_SAVED.format("SIGTERM", 1, 5)


def test_handlers_of_ones_own_are_left_alone_and_children_have_those_of_before(tmp_path):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
    try:
        result = fit(task_that_signals(signal.SIGTERM, at=4), tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (seen, result.stopped, result.num_steps) == (["mine"], None, 8)
    with StopSignals(saves=True, rank=0) as signals:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGINT)  # ignored
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert signals.asked() is None


class Interrupted(torch.utils.data.Dataset):
    """Sends Ctrl-C to the loader process, as a terminal does."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGINT)
        return samples()[index]


def test_loader_processes_leave_ctrl_c_to_the_one_that_trains():
    result = lockstep.fit(make_task(dataset=Interrupted), strategy="single", steps=2, workers=1, quiet=True)
    assert result.num_steps == 2


@pytest.mark.parametrize("strategy", ["ddp", "ddp-zero1"])
def test_all_ranks_stop_after_the_same_step_if_one_is_asked(ranks, tmp_path, strategy):
    whole = fit(make_task(eval_dataset=samples), tmp_path / "whole")

    def run(world, number):
        task = task_that_signals(number, at=4) if number and world.rank == 1 else make_task(eval_dataset=samples)
        result = fit(task, tmp_path / "run", strategy=strategy)
        return result.num_steps, result.stopped, result.exit_code, result.losses, result.evaluations

    first = ranks(2)(run, signal.SIGTERM)
    # The flags travel with the sums of the losses, which start after the last forward of a step. A signal that comes in
    # forward is in time for them, so the run stops after that same step, the fourth, and not only after the next.
    assert [outcome[:3] for outcome in first] == [(4, "SIGTERM", 75)] * 2
    second = ranks(2)(run, None)
    assert [outcome[:3] for outcome in second] == [(8, None, 0)] * 2
    assert first[0][3] + second[1][3] == pytest.approx(whole.losses, rel=1e-12)
    assert [each.step for each in first[1][4] + second[0][4]] == [4, 8]
