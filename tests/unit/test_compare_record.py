import json
import re
import subprocess
from dataclasses import replace

import pytest

import lockstep
from lockstep.study.compare.table import comparison_to_json
from lockstep.study.compare.verdict import judge
from lockstep.telemetry.provenance import Provenance, commit_of, gather
from tests.unit.compare_planted import MIB, comparison, contender

PROVENANCE = Provenance("2026-01-01T00:00:00+00:00", {"torch": "2.13.0"}, {"cpu": "any"}, {"lockstep": "abc"})


def record(*contenders):
    found = comparison(*contenders)
    return json.loads(comparison_to_json(found, judge(found), PROVENANCE))


def test_the_record_holds_raw_rounds_and_their_summary():
    found = record(contender("single", 20.0), contender("ddp", 10.0, exposed_ms=1.0, losses=(2.0, 1.5)))
    assert found["version"] == 1
    assert found["setup"]["command"] == "lockstep compare digits.py --devices 2"
    assert found["provenance"]["versions"] == {"torch": "2.13.0"}
    assert found["verdict"]["use"] == "ddp"
    ddp = found["contenders"][1]
    assert ddp["strategy"] == "ddp"
    assert ddp["samples_per_s"]["median"] == pytest.approx(6400.0)
    assert ddp["speed_up"]["median"] == pytest.approx(2.0)
    assert ddp["efficiency"] == pytest.approx(1.0)
    assert ddp["step"]["exposed_s"] == pytest.approx(0.001)
    assert ddp["peak_bytes"] == [100 * MIB, 100 * MIB]
    assert ddp["imbalance"] == 1.0
    assert (ddp["last_loss"], ddp["loss_difference"], ddp["losses"]) == (1.5, 0.5, [2.0, 1.5])
    assert [turn["round"] for turn in ddp["turns"]] == [0, 1, 2, 3, 4]
    assert ddp["turns"][0]["seconds"] == pytest.approx(0.1)


def test_a_loss_that_is_not_a_number_is_null_as_json_has_none():
    found = record(contender("single", 20.0, losses=(2.0, float("nan"))), contender("ddp", 10.0))
    assert found["contenders"][0]["losses"] == [2.0, None]
    assert found["contenders"][1]["loss_difference"] is None


def test_no_memory_is_null():
    found = record(replace(contender("single", 20.0), memory=None))
    assert (found["contenders"][0]["peak_bytes"], found["contenders"][0]["imbalance"]) == (None, None)


def test_the_machine_and_the_versions_are_recorded():
    found = gather()
    assert {"lockstep", "torch", "python"} <= set(found.versions)
    assert {"os", "cpu", "cores", "memory", "load"} <= set(found.machine)
    assert found.versions["lockstep"] == lockstep.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found.when)


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_of_the_task_is_recorded_with_a_mark_if_files_differ(tmp_path):
    task = tmp_path / "task.py"
    task.write_text("task = None\n")
    assert commit_of(tmp_path) is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "task.py")
    git(tmp_path, "commit", "-q", "-m", "A task")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert gather(task).commits["task"] == commit
    task.write_text("task = 1\n")
    assert gather(task).commits["task"] == f"{commit}+"
