"""What the ranks of ``lockstep tune`` do: train some steps, and take turns."""

import time
from dataclasses import replace

import pytest

from lockstep.study.common import paired_ratio
from lockstep.study.tune import NOW, Sweep, probe, rounds_of
from lockstep.train.settings import FitSettings

pytestmark = pytest.mark.timeout(120)

TASK = """
import time
import torch
from torch import nn
import lockstep

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        time.sleep(0.01)  # much more than a step computes, however busy the machine
        return torch.full((6,), number / 64, dtype=torch.float64)

def loss(model, batch):
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
def sweep_of(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "slow.py").write_text(TASK)
    task = str(tmp_path / "slow.py")
    start = FitSettings()
    return lambda batch: Sweep("slow", task, 1, 2, batch, ("ddp",), 60.0, time.time() + 60, start, start)


def _probe(world, trial):
    return probe(trial, world)


def _rounds(world, trial):
    return rounds_of(trial, world)


def test_what_is_known_before_the_first_stage(ranks, sweep_of):
    sweep = replace(sweep_of(8), num_devices=2)
    (layers, wait_share), _ = ranks(2)(_probe, sweep.trial({NOW: sweep.start}))
    assert layers == ()
    assert 0 < wait_share < 1


def test_settings_take_turns_and_loading_ahead_is_seen(ranks, sweep_of):
    small = FitSettings(global_batch_size=8)
    entrants = {NOW: small, "workers 2": replace(small, workers=2)}
    sweep = replace(sweep_of(8), num_devices=2)
    first, second = ranks(2)(_rounds, sweep.trial(entrants, time.time() + 4))
    assert first.keys() == second.keys() == entrants.keys()
    assert len(first[NOW]) == len(second["workers 2"]) > 0
    assert all(seconds > 4.5e-3 for seconds in first[NOW])  # 4 samples of 10 ms each on both ranks: 5 ms for each
    assert paired_ratio(first[NOW], first["workers 2"]).median > 1
