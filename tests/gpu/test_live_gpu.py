"""What a run on CUDA tells of itself while it runs, without a record in a folder. Skips itself without a GPU."""

import pytest
import torch

import lockstep
from lockstep.telemetry.sinks import Subscriber
from lockstep.train import run
from tests.training import make_task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class Display(Subscriber):
    """Keeps what it is given."""

    def __init__(self):
        self.snapshots, self.said = [], []

    def event(self, event):
        pass

    def update(self, snapshot):
        self.snapshots.append(snapshot)

    def log(self, text):
        self.said.append(text)

    def close(self):
        pass


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_figures_are_those_of_the_device(monkeypatch, strategy):
    display = Display()
    monkeypatch.setattr(run.live_view, "Display", lambda view, silent: display)
    result = lockstep.fit(make_task(), strategy=strategy, steps=300, clip=1.0)
    last = display.snapshots[-1]
    assert last.step == 300 and last.is_last
    assert last.loss in result.losses and last.grad_norm > 0
    told = [rank for snapshot in display.snapshots for rank in snapshot.ranks if rank.num_steps]
    for rank in told:
        assert 0 < rank["forward_s"] < rank["step_s"] and 0 < rank["backward_s"] < rank["step_s"]
        parts_s = rank["data_wait_s"] + rank["forward_s"] + rank["backward_s"] + rank["optimizer_s"] + rank["exposed_s"]
        assert parts_s == pytest.approx(rank["step_s"], rel=0.05)
    assert told[-1].device == "cuda:0" and told[-1]["memory_peak_bytes"] > 0
    assert display.said[-1].startswith("a step took ") and "\nused " in display.said[-1]
