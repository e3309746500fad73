"""`lockstep.ray` on a local cluster of two nodes: the workers' world, failures, checkpoints, restarts, resizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs ray[train]")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]  # most of it goes into Ray's start

JOBS = Path(__file__).with_name("ray_jobs.py")


def run_jobs(folder, names, **env):
    """Return what came of the jobs, by name; in a process of its own, as Ray leaves threads behind."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(JOBS), str(folder), names],  # with an option it is not forked off
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_jobs(tmp_path_factory.mktemp("ray"), "killed,raises,elastic")


def check_killed(killed, oracle):
    assert killed["restarts"] == "1"
    # Killed in step 7, perhaps before the checkpoint of step 6 was there.
    assert killed["first_step"] in (4, 6)
    assert killed["num_steps"] == killed["step"] == 12
    assert killed["weights"] == oracle
    assert killed["metrics"] == ["eval/loss", "step", "train/loss"]
    assert killed["latest"] == "step-0000000012"
    assert killed["kept"] == killed["known"] == ["step-0000000010", "step-0000000012"]


def test_workers_are_ranks(found):
    assert found["killed"]["backend"] == "shm"
    assert found["killed"]["ranks"] == [0, 2, 0, 2, 0]
    assert found["killed"]["wrapper"] == "lockstep.parallel.ddp.wrapper.DistributedDataParallel"


def test_a_killed_worker_costs_no_bit_and_ray_keeps_the_checkpoints(found):
    check_killed(found["killed"], found["oracle"])


def test_checkpoints_in_an_object_store(tmp_path):
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        found = run_jobs(tmp_path, "s3", AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", **keys)
    finally:
        server.stop()
    check_killed(found["s3"], found["oracle"])


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
