"""``lockstep tune``: what its ranks do, and the command from end to end."""

import signal
import subprocess
import time
import warnings
from collections import deque
from dataclasses import replace

import psutil
import pytest

import lockstep
from lockstep.study.tune import baseline, judge
from lockstep.study.tune.ask import Ask, read_journal
from lockstep.study.tune.ranks import Ranks
from lockstep.study.tune.search import Search
from lockstep.train.settings import read_settings
from lockstep.train.task import load_task
from tests.distributed.commands import start

pytestmark = pytest.mark.timeout(100)

TASK = """
import time
import torch
from torch import nn
import lockstep

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        time.sleep(0.002)
        return torch.full((6,), number / 64, dtype=torch.float64)

def loss(model, batch):
    if model.training and len(batch) > 4:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return model(batch).square().mean()

task = lockstep.Task(
    model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double(),
    dataset=Slow,
    eval_dataset=lambda: 1 / 0,
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    global_batch_size=16,
    after=lambda model: 1 / 0,
)
"""


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Start the command on a task with a slow loader and little memory."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "slow.py").write_text(TASK)
    started = []

    def begin(*args):
        pipe = subprocess.PIPE
        process = start("tune", "slow.py", "--devices", "2", *args, stdout=pipe, stderr=pipe, cwd=tmp_path)
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_it_finds_workers_and_pieces_that_fit_and_the_training_stays_the_same(ranks, tmp_path):
    (tmp_path / "slow.py").write_text(TASK)
    start = {"check_replicas": 7}
    ask = Ask(str(tmp_path / "slow.py"), 2, False, 2, 16, start, ("ddp",), 60.0, time.time(), 2**33)

    def tune_and_train(world):
        driver = Ranks(replace(ask, began_at=time.time()), tmp_path, world)
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(baseline, "_SECONDS", 1.0)
            patch.setattr(judge, "MOST_ROUNDS", 2)
            if driver._search is not None:
                driver._search._queue = deque(["loading"])  # the others are like it
            warnings.filterwarnings("ignore", "This DataLoader will create")  # there may be few cores
            driver.run()
        driver.close_all()
        task = replace(load_task(ask.task), eval_dataset=None, after=None)

        def losses(**settings):
            return lockstep.fit(task, steps=6, quiet=True, **settings).losses

        same = {"accumulate": 2, **start}
        return losses(**same), losses(**same, workers=1, prefetch=4), losses(**same, bucket_cap_mb=5.0, threads=2)

    for at_first, with_workers, rounded in ranks(2)(tune_and_train):
        assert with_workers == at_first
        assert rounded == pytest.approx(at_first, rel=1e-12)

    found, entries = Search(ask), read_journal(tmp_path)
    found._queue = deque(["loading"])
    for entry in entries:
        found.next()
        found.record(entry)
    found.finish()
    assert [entry["size"] for entry in entries if entry["kind"] == "probe"] == [2, 4, 8]
    assert entries[2]["peak_bytes"] is None
    assert found.start == {"check_replicas": 7, "accumulate": 2}
    (recorded,) = [entry for entry in entries if entry["kind"] == "baseline"]
    assert recorded["wait_share"] > 0.3
    assert any("loader worker" in each["change"] or "loading" in each["cause"] for each in recorded["advice"])
    assert [result.candidate.name for result in found.results] == ["workers 1", "workers 2", "workers 4"]
    first = next(entry for entry in entries if entry["kind"] == "round")
    assert first["rates"].keys() == {"now", "workers 1", "workers 2", "workers 4"}
    # 16 samples of 2 ms each on 2 ranks: no more than 1000 a second without loader processes.
    assert all(entry["rates"]["now"] < 1000 for entry in entries if entry["kind"] == "round")
    assert max(result.ratio.median for result in found.results) > 1


def test_ctrl_c_gives_what_was_found_and_leaves_nothing(begin, tmp_path):
    process = begin("--minutes", "5", "--strategies", "ddp")
    children = wait_for_ranks(process)
    for line in process.stderr:
        if line.startswith("recording, "):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "Stopped by Ctrl-C: this is what was found by then." in out
    assert read_settings(tmp_path / "slow-tuned.toml")["accumulate"] == 2
    _, alive = psutil.wait_procs(children, timeout=20)
    assert [process.cmdline() for process in alive] == []
    assert left_behind(tmp_path) == []


def left_behind(folder):
    """Return what is left in the folder for temporary files but the cache that torch makes when it is imported."""
    return [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor")]


def wait_for_ranks(process):
    """Return all processes of the job once there are some."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        found = psutil.Process(process.pid).children(recursive=True)
        if len(found) >= 3:
            return found
        time.sleep(0.05)
    raise AssertionError("No ranks were started.")
