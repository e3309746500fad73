"""Ranks that train alone between exchanges: one that is lost or slow costs the others nothing, and comes back later."""

import os
import re

import pytest

from tests.distributed.commands import lockstep as run_lockstep
from tests.distributed.test_recovery import FAULTS, TASK
from tests.models import soak

SCRIPT = (
    FAULTS
    + """
import hashlib, sys, time
from pathlib import Path
import lockstep
from lockstep.parallel import local_sgd
from lockstep.base.rank_files import Arrival, Generation

if "LOCKSTEP_JOINS" in os.environ and "STARTS_IN" in os.environ:
    time.sleep(float(os.environ["STARTS_IN"]))
mine, folder = os.environ["RANK"], Path(os.environ["LOCKSTEP_RUN_DIR"])
is_first, events = "LOCKSTEP_JOINS" not in os.environ, os.environ["FAULTS"].split()
real_wait = local_sgd.wait_for

def wait_for(work, operation, **how):
    lose(f"wait{averaging.num_steps}")
    real_wait(work, operation, **how)

def until(found):
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def generation():
    found = Generation.read(folder)
    return 0 if found is None else len(found.ranks)

torch.set_num_threads(1)
with lockstep.init(backend=sys.argv[1]) as world:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    patience = 0.3 if "slow" in events else None
    averaging = lockstep.DiLoCo(net, optimizer, sync_every=4, fragments=2, sync_patience=patience)
    local_sgd.wait_for = wait_for
    recovery = lockstep.Recovery(world, model=net, optimizer=optimizer, averaging=averaging)
    sizes = ""
    while averaging.num_steps < 24:
        step = averaging.num_steps
        lose(f"step{step}")
        if "slow" in events and step == 5 and mine == "1":
            until(lambda: any(each.number > recovery.step for each in Arrival.read_all(folder).values()))
        if events and "STARTS_IN" not in os.environ and step == 17 and is_first:
            until(lambda: generation() == 3)  # a new rank is ready, or the slow one has come
        sizes += str(world.world_size)
        generator = torch.Generator().manual_seed(100 * step + int(mine))
        net(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    averaging.close()
    recovery.close()
    found = hashlib.sha1(b"".join(value.numpy().tobytes() for value in net.state_dict().values()))
    Path(f"{os.environ['ONCE']}-of-{mine}").write_text(f"{found.hexdigest()} {sizes}")
"""
)


@pytest.fixture
def run_script(tmp_path):
    """Return a function that runs the script: to weights, sizes of the group in each step, and the lines printed."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)

    def run(backend, faults="", restarts=5, **variables):
        once = tmp_path / f"once-{abs(hash((faults, restarts)))}"
        environ = {**os.environ, "FAULTS": faults, "ONCE": str(once), **variables}
        done = run_lockstep("run", "--devices", "3", "--max-restarts", str(restarts), path, backend, env=environ)
        assert done.code == 0, done.err
        found = [file.read_text().split() for file in sorted(tmp_path.glob(f"{once.name}-of-*"))]
        lines = [line.removeprefix("lockstep: ") for line in done.err.splitlines() if line.startswith("lockstep: rank")]
        return (
            [each for each, _ in found],
            [each for _, each in found],
            [re.sub(r"after [\d.]+ s", "after", line) for line in lines],
        )

    return run


def test_without_a_fault_the_bits_are_those_without_recovery(run_script):
    assert run_script("shm") == run_script("shm", restarts=0)


@pytest.mark.parametrize("backend", ["gloo", *soak(["shm"])])
def test_a_rank_that_is_lost_between_exchanges_costs_the_others_no_step(run_script, backend):
    weights, sizes, lines = run_script(backend, "step5@0")
    assert len(weights) == 3 and len(set(weights)) == 1
    # Ranks 1 and 2 make each step once: without rank 0 from the exchange after step 6 on, with it after it was ready.
    assert sizes[1] == sizes[2] and len(sizes[1]) == 24 and re.fullmatch("3{6}(22)+(33)+", sizes[1])
    assert sizes[0] == sizes[1][6:].lstrip("2")
    lost, back = lines
    assert lost.endswith("; ranks 1, 2 go on")
    assert re.fullmatch("rank 0 is back after with the state of rank 1; exchange [4-9] is done again", back)


def test_an_exchange_is_begun_again_without_the_rank_that_was_lost_in_it(run_script):
    weights, sizes, lines = run_script("shm", "wait8@2")
    assert len(set(weights)) == 1 and len(lines) == 2
    assert sizes[0] == sizes[1] and len(sizes[1]) == 24 and re.fullmatch("3{8}(22)+(33)+", sizes[1])


def test_the_others_end_without_a_rank_that_is_not_ready(run_script):
    weights, sizes, lines = run_script("shm", "step5@0", STARTS_IN="60")
    assert len(set(weights)) == 1 and sizes == ["3" * 6 + "2" * 18] * 2
    assert lines[1:] == ["rank 0 was killed by SIGKILL (signal 9); the training was complete"]


@pytest.mark.flaky("on a busy machine the other ranks, too, come more than 0.3 s late to an exchange")
def test_a_slow_rank_is_left_out_and_comes_back(run_script):
    weights, sizes, lines = run_script("shm", "slow")
    assert len(set(weights)) == 1
    assert sizes[0] == sizes[2] and len(sizes[0]) == 24 and sizes[0][6] == "2" and sizes[0][-1] == "3"
    assert lines[0] == "rank 1 did not come to an exchange within 0.3 s; the others go on without"
    assert lines[1].startswith("rank 1 is back after with the state of rank 0; exchange")


def test_fit_goes_on_without_a_lost_rank(tmp_path):
    path = tmp_path / "task.py"
    path.write_text(TASK)

    def run(name, faults, restarts, epochs):
        environ = {**os.environ, "FAULTS": faults, "ONCE": str(tmp_path / name)}
        command = "train", path, "--devices", "3", "--strategy", "diloco", "--sync-every", "4"
        command += "--max-restarts", restarts, "--epochs", epochs
        done = run_lockstep(*command, "--export", tmp_path / f"{name}.safetensors", env=environ)
        assert done.code == 0, done.err
        lines = [line for line in done.err.splitlines() if line.startswith("lockstep: rank")]
        return (tmp_path / f"{name}.safetensors").read_bytes(), lines, done.out

    plain, _, _ = run("plain", "", "0", "2")
    undisturbed, nothing, _ = run("undisturbed", "", "3", "2")
    assert undisturbed == plain and nothing == []
    _, lines, out = run("lost", "before5@0 evaluation@1", "5", "12")
    assert [line for line in lines if "restart" in line] == []
    assert [line.partition(";")[2] for line in lines if "killed" in line] == [" ranks 1, 2 go on", " ranks 0, 2 go on"]
    assert re.search(r"\n(\[rank \d\] )?epoch 12.0  step 108/108  evaluation", out)
    assert len(re.findall(r"step 108/108", out)) == 1


# Rank 1 is lost, and back when rank 2 has evaluated, but does not know yet that all have, and rank 0 trains on.
BETWEEN = """
import time
from pathlib import Path
from lockstep.base.rank_files import Arrival
from lockstep.loop.recovery import Recovery

def until(found):
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)

waits = Path(os.environ["ONCE"] + "-waits")
real_refuse_cut = Recovery.refuse_cut

def refuse_cut(self):
    if os.environ["RANK"] == "2" and self._doing() == "the evaluation after step 18" and not waits.exists():
        folder = Path(os.environ["LOCKSTEP_RUN_DIR"])
        until(lambda: any(each.number > self.step for each in Arrival.read_all(folder).values()))
        waits.touch()
        until(lambda: self._membership.is_cut)
    real_refuse_cut(self)

Recovery.refuse_cut = refuse_cut
if "LOCKSTEP_JOINS" in os.environ:
    until(waits.exists)
"""


def test_a_rank_that_evaluates_takes_part_in_the_exchange_that_the_others_have_come_to(tmp_path):
    path = tmp_path / "task.py"
    path.write_text(TASK + BETWEEN)
    environ = {**os.environ, "FAULTS": "evaluation@1", "ONCE": str(tmp_path / "once")}
    command = "train", path, "--devices", "3", "--strategy", "diloco", "--sync-every", "4", "--max-restarts", "5"
    done = run_lockstep(*command, "--epochs", "3", env=environ)
    assert done.code == 0 and "restart" not in done.err, done.err
    assert re.search("ranks 1, 2 are back .*; the exchange after step 20 is done again", done.err)
    assert len(re.findall("step 27/27  evaluation", done.out)) == 1
