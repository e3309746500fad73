"""What `make gpu` finds of the waits of the host, tried out on simulated accelerators."""

import contextlib
import json
import re

import pytest
import torch

from bench import gpu_waits


def test_waits(on_sim, tmp_path):
    names = ["plain", "fp16, fused", "ddp-zero1"]

    def run(world):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(gpu_waits, "WARM_UP_STEPS", 4)
            monkeypatch.setattr(gpu_waits, "STEPS", 4)
            gpu_waits.measure(names, "sim", str(tmp_path))
            gpu_waits.check(names, "sim", str(tmp_path))
            gpu_waits.measure(["fp16"], "sim", str(tmp_path), deadline=0.0)
            gpu_waits.check(["fp16"], "sim", str(tmp_path), deadline=0.0)

    on_sim(2)(run)
    assert len(list(tmp_path.iterdir())) == 2 * len(names)  # what was late did not begin
    for name in names:
        assert (tmp_path / name).exists()
        waits = json.loads((tmp_path / f"{name}.json").read_text())
        for wait in waits:
            assert re.fullmatch(r"[a-z_/]+\.py:\d+( \(beside the steps, in thread .+\))?", wait["place"])
            assert wait["seconds_per_step"] > 0


def waits_of_steps(world, name, num_steps=4):
    """Return the waits of steady steps that are not for an event, with what torch says of them."""
    with contextlib.closing(gpu_waits.run_of(world, gpu_waits.SETTINGS[name], gpu_waits.Waits())) as run:
        for _ in range(4):
            run.step()
        with torch.sim.counting() as counts:
            for _ in range(num_steps):
                run.step()
    return [(wait.kind, wait.line) for wait in counts.waits if wait.kind != "event"]


@pytest.mark.parametrize("name", ["plain", "fused", "fp16, fused", "on_nan=skip, fused"])
def test_steps_wait_for_no_stream(on_sim, name):
    assert on_sim(2)(waits_of_steps, name) == [[]] * 2


def test_steps_of_an_lstm_with_dropout_wait_for_no_stream(on_sim):
    assert on_sim(2)(waits_of_steps, "LSTM with dropout") == [[]] * 2
