"""What is refused of profiling, and the names of phases."""

from contextlib import contextmanager

import pytest
import torch

from lockstep.errors import ConfigurationError
from lockstep.telemetry import ranges
from lockstep.telemetry.recorder import StepTimer
from lockstep.train.settings import FitSettings


@pytest.mark.parametrize(
    ("settings", "first_line"),
    [
        ({"profile": True}, "profile needs profile_dir or run_dir."),
        ({"profile_steps": (3, 2), "run_dir": "x"}, "profile_steps needs profile."),
        ({"profile": True, "run_dir": "x", "profile_steps": (3,)}, "profile_steps=(3,) is not allowed."),
        ({"profile": True, "run_dir": "x", "profile_steps": (3, 1.5)}, "profile_steps=(3, 1.5) is not allowed."),
        ({"profile": True, "run_dir": "x", "profile_steps": (3, 5, 9)}, "profile_steps=(3, 5, 9) is not allowed."),
    ],
)
def test_what_cannot_be_profiled_is_refused(settings, first_line):
    with pytest.raises(ConfigurationError) as error:
        FitSettings(**settings)
    assert str(error.value).splitlines()[0] == first_line


def test_phases_are_ranges_one_after_the_other(monkeypatch):
    told = []

    @contextmanager
    def record_function(name):
        told.append(name)
        yield
        told.append(".")

    assert ranges.around("nobody looks") is ranges.around("at all")
    monkeypatch.setattr(ranges, "record_function", record_function)
    monkeypatch.setattr(ranges, "now", True)
    timer = StepTimer(torch.device("cpu"))
    for phase in ("forward", "backward", "data_wait", "forward", "backward"):
        timer.begin(phase)
    with ranges.around("exchange/bucket 0"):
        pass
    timer.begin("data_wait")
    timer.begin("communication")
    timer.begin("optimizer")
    timer.begin("")
    assert " ".join(told) == (
        "data_wait . forward . backward . data_wait . forward . backward exchange/bucket 0 . . "
        "data_wait . communication . optimizer ."
    )
