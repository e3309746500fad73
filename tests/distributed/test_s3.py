"""Checkpoints in S3, as moto's server and s3fs have it: a run by command, killed, resumed, and two at once."""

import os
import signal
import subprocess
import sys
import time

import pytest

import lockstep
from lockstep.checkpoints import object_store
from lockstep.checkpoints.object_store import Lease, place_of
from lockstep.errors import CheckpointError
from tests.training import make_task, read_state

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def bucket():
    """Give the URL of an empty bucket, which child processes can reach as well."""
    s3fs = pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture
def ranks_with(ranks, bucket):
    """Give what runs functions on ranks that know the server."""
    surroundings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}

    def run(num_ranks, function, *args):
        def here(world):
            os.environ.update(surroundings)
            return function(world, *args)

        return ranks(num_ranks, warnings="ignore")(here)

    return run


def test_a_run_goes_on_with_other_strategies_and_numbers_of_ranks(ranks_with, bucket):
    task = make_task(drop_last=True)
    whole = lockstep.fit(task, strategy="single", steps=9, quiet=True)

    def fit(world, strategy, steps):
        result = lockstep.fit(
            task, strategy=strategy, steps=steps, checkpoint=f"{bucket}/run", checkpoint_every=3, quiet=True
        )
        return result.losses, result.checkpoint

    losses = []
    for strategy, num_ranks, steps in (("fsdp", 2, 4), ("ddp-zero1", 3, 7), ("fsdp", 1, 9)):
        found, newest = ranks_with(num_ranks, fit, strategy, steps)[0]
        losses += found
        assert newest == f"{bucket}/run/step-{steps:010d}"
    assert losses == pytest.approx(whole.losses, rel=1e-12)
    assert len(read_state(f"{bucket}/run/step-0000000009")["model"]) == 8
    assert lockstep.load(f"{bucket}/run/step-0000000009")["num_steps_done"] == 9
    assert len(list(place_of(f"{bucket}/run").iterdir())) == 3, "two checkpoints and the lease"


SAVE = """
import sys, torch, lockstep
step = int(sys.argv[2])
while True:
    step += 1
    lockstep.save(sys.argv[1], step=step, tensor=torch.full([3_000_000], float(step)))
    print(step, flush=True)
"""


def test_a_process_that_is_killed_while_it_saves_leaves_the_last_whole_one(bucket):
    path, step = f"{bucket}/killed", 0
    lockstep.save(path, step=0)
    for round_number in range(5):
        child = subprocess.Popen([sys.executable, "-c", SAVE, path, str(step)], stdout=subprocess.PIPE, text=True)
        step = int(child.stdout.readline())
        time.sleep(0.05 + 0.07 * round_number)
        child.send_signal(signal.SIGKILL)
        child.wait()
        step = max([step, *map(int, child.stdout.read().split())])
        state = lockstep.load(path)
        assert state["step"] in (step, step + 1), "it was killed before it could print, or while it was saving"
        assert state["tensor"].unique().tolist() == [state["step"]]
        step = state["step"]


def test_two_jobs_do_not_write_one_prefix(bucket, monkeypatch):
    monkeypatch.setattr(object_store, "RENEW_S", 0.5)
    monkeypatch.setattr(object_store, "LEASE_S", 3.0)
    place = place_of(f"{bucket}/two")
    lease = Lease(place)
    assert lease.take()
    began_at = time.monotonic()
    with pytest.raises(CheckpointError, match="Another process is writing the checkpoint s3://bucket/two"):
        lockstep.save(str(place), step=1)
    assert time.monotonic() - began_at < 2.9
    with pytest.raises(FileExistsError):  # a conditional write
        (place / "lock-0000000001").write_bytes(b"another", exclusive=True)
    lease.close()
    lockstep.save(str(place), step=1)
    assert lockstep.load(str(place)) == {"step": 1}
