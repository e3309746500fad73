"""``lockstep verify`` as a user starts it."""

import json
import signal
import subprocess
import time

import psutil
import pytest

import lockstep
from lockstep.cli import main
from lockstep.errors import ConfigurationError
from lockstep.study.verify import diagnose
from lockstep.study.verify.diagnose import verify
from tests.distributed.commands import lockstep as run
from tests.distributed.commands import start
from tests.verifying import FAULTS, causes, check_counts, processes_of


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def on_pool(monkeypatch, ranks):
    """Let verify take workers of the pool for the processes that it would start."""
    monkeypatch.setattr(diagnose, "run_ranks", processes_of(ranks))


def test_a_fault_is_named_in_words_and_in_json(tmp_path, on_pool, capsys):
    file = tmp_path / "found.json"
    flags = ["--devices", "2", "--steps", "2", "--json", str(file)]
    assert main(["verify", str(FAULTS / "learning_rate_rule.py"), *flags]) == 1
    done = capsys.readouterr()
    # What experiments report in other processes is on their standard error.
    assert done.err.splitlines()[:2] == ["one process, twice", "2 ranks"]
    words = " ".join(done.out.split())
    assert words.startswith(
        "Not the same training run: 2 ranks differ from one process, first in the learning rate lr of group 0 at step "
        "0 (0.2 instead of 0.1). Cause: learning-rate rule. The ranks train with another learning rate lr of group 0 "
        "at step 0 (0.2 instead of 0.1). Fix: Let the learning rate depend on the global batch and the number of "
        "updates only"
    )
    assert "learning_rate_rule.py: one process and 2 ranks, steps 0 and 5, the epoch's last" in words
    record = json.loads(file.read_text())
    assert [found["cause"] for found in record["causes"]] == ["learning-rate rule"]
    assert record["setup"]["steps"] == [0, 5]
    assert record["apart_from"] == []


def test_dropout_masks_end_with_3(tmp_path, on_pool, capsys):
    file = tmp_path / "found.json"
    flags = ["--devices", "2", "--steps", "2", "--json", str(file)]
    assert main(["verify", str(FAULTS / "random_state.py"), *flags]) == 3
    words = " ".join(capsys.readouterr().out.split())
    verdict = (
        "The same training run, apart from dropout masks: without them, 2 ranks train as one process does, over steps "
        "0 and 5, the epoch's last (float64, to 1e-08 of each tensor's size)."
    )
    assert words.startswith(f"{verdict} Cause: random state. Forward draws random numbers (dropout of 0.2), and each")
    record = json.loads(file.read_text())
    assert (record["same"], record["apart_from"]) == (False, ["dropout masks"])
    assert record["verdict"][0] == verdict


def test_a_sound_task_ends_with_0(on_pool, capsys):
    assert main(["verify", str(FAULTS / "sound.py"), "--devices", "2", "--steps", "2"]) == 0
    done = capsys.readouterr()
    assert done.err.splitlines() == ["one process, twice", "2 ranks"]
    assert "The same training run: 2 ranks train as one process does, over steps 0 and 5" in done.out


@pytest.mark.soak
def test_processes_of_its_own_report_their_experiments():
    done = run("verify", str(FAULTS / "loss_sums.py"), "--devices", "2", "--steps", "2")
    assert done.code == 1
    assert done.err.splitlines()[:4] == [
        "one process, twice",
        "2 ranks",
        "experiment 1 of at most 24: one process, random state turned off",
        "experiment 2 of at most 24: one process, nothing turned off",
    ]
    assert check_counts(done.err.splitlines()) < 12


@pytest.mark.soak
def test_processes_of_its_own_do_the_same():
    done = run("verify", str(FAULTS / "sound.py"), "--devices", "2", "--steps", "2")
    assert (done.code, done.err.splitlines()) == (0, ["one process, twice", "2 ranks"])
    assert "The same training run: 2 ranks train as one process does, over steps 0 and 5" in done.out


def test_python_can_verify_a_task_of_its_own(on_pool):
    import torch

    task = lockstep.Task(
        model=lambda: torch.nn.Linear(6, 3),
        dataset=lambda: torch.utils.data.TensorDataset(torch.ones(12, 6)),
        loss=lambda model, batch: model(batch[0]).square().sum(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        global_batch_size=4,
    )
    assert causes(verify(task, steps=1, quiet=True)) == ["a loss that sums instead of averages"]


@pytest.mark.parametrize(
    ("file", "flags", "message"),
    [
        ("nothing.py", {}, "does not exist.\nName a Python file that has a lockstep.Task."),
        ("sound.py", {"devices": 0}, "devices=0 is not allowed.\nGive a whole number of at least 1."),
        ("sound.py", {"steps": 0}, "steps=0 is not allowed.\nGive a whole number of at least 1."),
    ],
)
def test_wrong_input_is_refused_before_anything_starts(file, flags, message, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigurationError) as error:
        verify(str(FAULTS / file), **flags)
    assert message in str(error.value)


def test_a_task_that_fails_is_an_error_with_its_own_line(tmp_path):
    file = tmp_path / "broken.py"
    text = (FAULTS / "loss_sums.py").read_text()
    file.write_text(text.replace("F.cross_entropy(model(batch[0]), batch[1], reduction", "batch[7] + dict(reduction"))
    done = run("verify", str(file))
    assert done.code == 1
    assert "lockstep: Rank 0 failed: IndexError: list index out of range" in done.err
    assert done.err.count("Traceback") == 1


@pytest.mark.soak
def test_ctrl_c_leaves_nothing():
    process = start("verify", str(FAULTS / "sound.py"), "--steps", "100000", stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        children = []
        while len(children) < 3:  # two ranks and the reaper
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
            children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "lockstep: stopped by Ctrl-C"
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
