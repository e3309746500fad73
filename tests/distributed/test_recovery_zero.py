"""With ddp-zero1 and a copy of each shard at the next rank, a lost rank is replaced while the others go on."""

import os
import re

import pytest

from tests.distributed.commands import lockstep as run_lockstep
from tests.distributed.test_recovery import TASK

# A subclass is not known to be element-wise; here its step is one of the places where a rank ends.
SHARDED = (
    TASK.replace("    num_steps = 0\n", "    num_steps = 0\n    elementwise = True\n")
    + """
import functools
import lockstep.train.fit
lockstep.train.fit.init = functools.partial(lockstep.init, backend=os.environ["BACKEND"])
"""
)


@pytest.fixture
def train(tmp_path):
    """Return a function that trains the task with faults, and returns its weights and what the launcher said."""
    path = tmp_path / "task.py"
    path.write_text(SHARDED)

    def run(faults="", *flags, ranks=2, backend="shm", redundancy="1"):
        name = f"weights-{abs(hash((faults, flags, backend, redundancy, ranks)))}.safetensors"
        environ = {**os.environ, "FAULTS": faults, "ONCE": str(tmp_path / f"once-{name}"), "BACKEND": backend}
        command = "train", path, "--devices", str(ranks), "--max-restarts", "8", "--strategy", "ddp-zero1"
        given = "--redundancy", redundancy, "--epochs", "3", "--export", tmp_path / name, *flags
        done = run_lockstep(*command, *given, env=environ)
        assert done.code == 0, done.err
        lines = [line for line in done.err.splitlines() if line.startswith("lockstep: rank")]
        said = [re.sub(r"[\d.]+ s ", "", line.removeprefix("lockstep: ")) for line in lines]
        return (tmp_path / name).read_bytes(), said, done.out + done.err

    return run


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_each_moment_of_a_step_on_two_ranks(train, backend):
    undisturbed, nothing, _ = train(backend=backend)
    assert nothing == []
    found, lines, _ = train("sample77@0 backward@1 before3@1 after4@0 before5@0 after6@1 evaluation@1", backend=backend)
    assert found == undisturbed
    assert len(lines) == 14 and not any("restart" in line for line in lines)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_each_of_three_ranks(train, backend):
    undisturbed, _, _ = train(ranks=3, backend=backend)
    found, lines, _ = train("backward@2 before3@1 after6@0 before9@2", ranks=3, backend=backend)
    assert found == undisturbed
    assert len(lines) == 8 and not any("restart" in line for line in lines)


def test_a_rank_and_the_holder_of_its_copy_are_lost(train):
    undisturbed, _, _ = train(ranks=3)
    found, lines, said = train("evaluation@0 evaluation@1", ranks=3)
    assert found == undisturbed
    print(lines, said)


def test_without_copies_all_ranks_start_again(train):
    undisturbed, _, said = train(redundancy="0")
    found, lines, _ = train("backward@1", redundancy="0")
    assert found == undisturbed
    assert [line.partition(";")[2] for line in lines] == [" restart 1 of 8"]
    assert (
        "a lost rank restarts all: it holds the only copy of its optimizer state (redundancy=1 keeps one more)" in said
    )
