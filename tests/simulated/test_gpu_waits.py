"""What `make gpu` finds of the waits of the host, tried out on simulated accelerators."""

import json
import re

import pytest

from bench import gpu_waits


def test_waits(on_sim, tmp_path):
    names = ["plain", "ddp-zero1"]

    def run(world):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(gpu_waits, "WARM_UP_STEPS", 4)
            monkeypatch.setattr(gpu_waits, "STEPS", 4)
            gpu_waits.measure(names, "sim", str(tmp_path))
            gpu_waits.check(names, "sim", str(tmp_path))

    on_sim(2)(run)
    for name in names:
        assert (tmp_path / name).exists()
        waits = json.loads((tmp_path / f"{name}.json").read_text())
        for wait in waits:
            assert re.fullmatch(r"[a-z_/]+\.py:\d+( \(beside the steps, in thread .+\))?", wait["place"])
            assert wait["seconds_per_step"] > 0
