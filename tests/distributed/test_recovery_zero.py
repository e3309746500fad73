"""With ddp-zero1 and a copy of each shard at the next rank, a lost rank is replaced while the others go on."""

import os
import re

import pytest
import torch

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.loop.recovery import check_parts
from lockstep.train.settings import FitSettings
from tests.distributed.commands import lockstep as run_lockstep
from tests.distributed.test_recovery import MODES, TASK
from tests.models import soak

# A subclass is not known to be element-wise; here its step is one of the places where a rank ends.
SHARDED = (
    TASK.replace("    num_steps = 0\n", "    num_steps = 0\n    elementwise = True\n")
    + """
import functools
import lockstep.train.fit
from lockstep import ZeroRedundancyOptimizer as Sharded
lockstep.train.fit.init = functools.partial(lockstep.init, backend=os.environ["BACKEND"])

allocate = Sharded._allocate
def lose_while_it_is_divided(self, *args):
    if not self.has_state:
        lose("divided")
    return allocate(self, *args)
Sharded._allocate = lose_while_it_is_divided
"""
)


LOST = (
    "A rank and the next one, which held the copy of its optimizer state, were lost at once, "
    "or a rank while the state was divided again"
)


@pytest.fixture(scope="module")
def undisturbed_runs():
    """What runs without faults have ended with, by all that was run: many tests compare with the same one."""
    return {}


@pytest.fixture
def train(tmp_path, undisturbed_runs):
    """Return a function that trains the task with faults, and returns its weights and what the launcher said."""
    path = tmp_path / "task.py"
    path.write_text(SHARDED)

    def run(faults="", *flags, ranks=2, backend="shm", redundancy="1"):
        run_of = path.read_text(), flags, ranks, backend, redundancy
        if not faults and run_of in undisturbed_runs:
            return undisturbed_runs[run_of]
        name = f"weights-{abs(hash((faults, flags, backend, redundancy, ranks)))}.safetensors"
        environ = {**os.environ, "FAULTS": faults, "ONCE": str(tmp_path / f"once-{name}"), "BACKEND": backend}
        command = "train", path, "--devices", str(ranks), "--max-restarts", "8", "--strategy", "ddp-zero1"
        given = "--redundancy", redundancy, "--export", tmp_path / name, *(flags or ("--epochs", "3"))
        done = run_lockstep(*command, *given, env=environ)
        assert done.code == 0, done.err
        lines = [line for line in done.err.splitlines() if line.startswith("lockstep: rank")]
        said = [re.sub(r"[\d.]+ s ", "", line.removeprefix("lockstep: ")) for line in lines]
        ended = (tmp_path / name).read_bytes(), said, done.out + done.err
        if not faults:
            undisturbed_runs[run_of] = ended
        return ended

    return run


@pytest.mark.parametrize("backend", ["shm", *soak(["gloo"])])
def test_each_moment_of_a_step_on_two_ranks(train, backend):
    undisturbed, nothing, _ = train(backend=backend)
    assert nothing == []
    found, lines, _ = train("sample77@0 backward@1 before3@1 after4@0 before5@0 after6@1 evaluation@1", backend=backend)
    assert found == undisturbed
    assert len(lines) == 14 and not any("restart" in line for line in lines)


def test_the_switch_of_an_optimizer_with_modes_is_undone(train, tmp_path):
    (tmp_path / "task.py").write_text(SHARDED.replace("    num_steps = 0\n    elementwise = True\n", MODES))
    undisturbed, _, _ = train()
    found, lines, _ = train("mode9@1 evaluation@0 before10@1")
    assert found == undisturbed
    assert len(lines) == 6 and not any("restart" in line for line in lines)


@pytest.mark.parametrize("backend", ["gloo", *soak(["shm"])])
def test_each_of_three_ranks(train, backend):
    undisturbed, _, _ = train(ranks=3, backend=backend)
    found, lines, _ = train("backward@2 before3@1 after6@0 before9@2", ranks=3, backend=backend)
    assert found == undisturbed
    assert len(lines) == 8 and not any("restart" in line for line in lines)


def test_the_holder_of_a_copy_is_lost_too_or_a_rank_while_the_state_is_divided_again(train):
    undisturbed, _, _ = train(ranks=3)
    # All ranks restart; then in the evaluation after the first epoch, or the second one, they do so again.
    found, lines, said = train("backward@1 divided@0 evaluation@0 evaluation@1", ranks=3)
    assert found == undisturbed
    assert len([line for line in lines if "; restart " in line]) == 2
    # The others wait for memory of all, and cannot have their parts.
    assert said.count(f"{LOST}: all ranks restart") >= 2


@pytest.mark.soak
def test_over_gloo_a_rank_is_lost_while_the_state_is_divided_again(train):
    undisturbed, _, _ = train(ranks=3, backend="gloo")
    assert train("backward@1 divided@0", ranks=3, backend="gloo")[0] == undisturbed


def test_a_rank_is_lost_in_the_first_step_after_a_resume(train, tmp_path):
    undisturbed, _, _ = train()
    kept = "--checkpoint", tmp_path / "kept", "--steps", "5"
    train("", *kept)
    resumed, lines, said = train("backward@1", *kept[:3], "27")
    assert "resumed after step 5 of 27" in said
    assert resumed == undisturbed
    assert len(lines) == 2 and not any("restart" in line for line in lines)


def test_without_copies_all_ranks_start_again(train):
    undisturbed, _, _ = train()
    found, lines, said = train("backward@1", redundancy="0")
    assert found == undisturbed
    assert [line.partition(";")[2] for line in lines] == [" restart 1 of 8"]
    assert (
        "a lost rank restarts all: it holds the only copy of its optimizer state (redundancy=1 keeps one more)" in said
    )


def test_what_cannot_have_copies_is_refused():
    with pytest.raises(ConfigurationError) as found:
        FitSettings(strategy="ddp", redundancy=1)
    assert str(found.value) == "redundancy is for strategy ddp-zero1, but the strategy is ddp.\nOmit redundancy."
    with pytest.raises(ConfigurationError) as found:
        FitSettings(strategy="ddp-zero1", redundancy=2)
    assert str(found.value) == "redundancy=2 is not allowed.\nGive 0 or 1."
    optimizer = object.__new__(lockstep.ZeroRedundancyOptimizer)
    with pytest.raises(ConfigurationError, match=r"^optimizer is a ZeroRedundancyOptimizer: a lost rank takes"):
        check_parts({"optimizer": optimizer})


def test_an_optimizer_of_whole_parameters_has_no_copies():
    optimizer = object.__new__(lockstep.ZeroRedundancyOptimizer)
    optimizer.is_elementwise, optimizer._class = False, torch.optim.Adafactor
    with pytest.raises(ConfigurationError, match=r"^redundancy=1 needs an element-wise optimizer, which Adafactor is"):
        optimizer.keep_copies()
