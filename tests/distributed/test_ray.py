"""`lockstep.ray` on a local cluster of two nodes: the workers' world, failures, checkpoints, restarts, resizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs ray[train]")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]  # most of it goes into Ray's start

JOBS = Path(__file__).with_name("ray_jobs.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What came of the jobs, by name; in a process of its own, as Ray leaves threads behind."""
    folder = tmp_path_factory.mktemp("ray")
    done = subprocess.run(
        [sys.executable, str(JOBS), str(folder), "killed,raises,elastic"],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout
    return json.loads((folder / "found.json").read_text())


def test_a_killed_worker_costs_no_bit(found):
    killed = found["killed"]
    assert killed["backend"] == "shm"
    assert killed["ranks"] == [0, 2, 0, 2, 0]
    assert killed["wrapper"] == "lockstep.parallel.ddp.wrapper.DistributedDataParallel"
    assert killed["restarts"] == "1"
    # Killed in step 7, perhaps before the checkpoint of step 6 was on disk.
    assert killed["first_step"] in (4, 6)
    assert killed["num_steps"] == killed["step"] == 12
    assert killed["weights"] == found["oracle"]


def test_ray_keeps_the_checkpoints(found):
    killed = found["killed"]
    assert killed["metrics"] == ["eval/loss", "step", "train/loss"]
    assert killed["latest"] == "step-0000000012"
    assert killed["kept"] == killed["known"] == ["step-0000000010", "step-0000000012"]


def test_an_exception_is_in_rays_error_under_its_rank(found):
    raised = found["raises"]
    assert raised["failures"] == {"1": "ValueError: no more data on this worker"}
    assert "[Rank 1 Error Snippet]" in raised["text"]
    assert "in train_raises" in raised["text"]


def test_a_lost_and_a_new_node_cost_no_bit(found):
    elastic = found["elastic"]
    assert elastic["num_workers"] == 2
    assert elastic["restarts"] == 2
    assert elastic["first_step"] >= 5
    assert elastic["weights"] == found["oracle"]
