"""What bench/trainers.py makes of the moments at which forward passes began, and the table of it."""

import json
from pathlib import Path

import pytest
import torch

from bench import trainer_loops
from bench.report.table import trainers


def test_step_and_epoch_are_without_the_first_epoch(monkeypatch):
    job = trainer_loops.Job(torch.nn.Identity, lambda size: (torch.zeros(size), torch.zeros(size)), 1, num_steps=3)
    epochs = [[0, 50, 90], [100, 102, 104], [200, 204, 208], [300, 306, 312]]
    monkeypatch.setattr(trainer_loops, "STAMPS", [float(stamp) for epoch in epochs for stamp in epoch])
    assert trainer_loops.seconds(job) == {"step": 4.0, "epoch": 100.0}
    trainer_loops.STAMPS.pop()
    with pytest.raises(AssertionError, match=r"^11 forward passes, not 12"):
        trainer_loops.seconds(job)


def test_the_table_has_who_was_measured_and_who_is_missing():
    rounds = {"rounds_s": {"torch": [0.004, 0.004], "fit": [0.003, 0.003]}}
    kinds = dict.fromkeys(("step", "step, quiet", "epoch", "epoch, quiet"), rounds)
    part = {"missing": {"fabric": "lightning is not installed"}, "models": {"mlp": kinds}, "first_step": rounds}
    lines = trainers({"parts": {"trainers": part}})
    assert lines[3:] == [
        "| torch DDP, own loop | 4.0 (1.00) | 4.0 (1.00) | 4.0 (1.00) | 0.0 (1.00) |",
        "| Lightning Fabric, own loop | | | | lightning is not installed |",
        "| **`lockstep.fit`** | 3.0 (0.75) | 3.0 (0.75) | 3.0 (0.75) | 0.0 (0.75) |",
    ]
    assert trainers({"parts": {}}) == []


def test_the_table_of_the_page_is_made_from_the_kept_figures():
    repo = Path(__file__).parents[3]
    lines = trainers({"parts": {"trainers": json.loads((repo / "bench/results/trainers.json").read_text())}})
    assert "\n".join(line for line in lines if line.startswith("|")) in (repo / "docs/speed.md").read_text()
