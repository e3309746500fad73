"""The scenarios of tests/distributed on all GPUs over NCCL: a world of one on one GPU, real ranks on several."""

import math
import os
import shutil
import time

import pytest
import torch

from bench.gpu_tests import TEST_END
from lockstep.errors import LaunchTimeout, LockstepError
from tests.distributed.test_recovery import run_task, undisturbed_runs  # noqa: F401 - fixtures
from tests.distributed.test_scenarios import LOST, SCENARIOS, launch_losing, one_context, resume_on_fewer, run_in_turn

pytestmark = pytest.mark.timeout(600)

JOB_S, LEAST_S, FAIR_S = 240.0, 10.0, 30.0
"""For all scenarios; what a job needs at least, as ranks start; and what a scenario has at least before it has failed
because it did not end."""
END_S = 10.0
"""Between the end of a job and that of the test which runs it: the job's error comes first."""


class Scenarios:
    """Runs scenarios in few jobs: a test whose scenario has not been run starts one, with those behind it.

    So each passes when it has come through, whatever happens later.

    Args:
        run: ``run(fn, *args, timeout_s=...)`` runs ``fn(world, *args)`` on each rank.
        folder: Returns a new one.
        seconds: For all jobs together; the tests of the scenarios that there is no time for are skipped.
        names: Of the scenarios, in the order of their tests.
    """

    def __init__(self, run, folder, seconds, names):
        self.run, self.folder, self.names, self.end = run, folder, list(names), time.time() + seconds
        self.found = {}

    def check(self, name):
        """Raise the error of this scenario, if it has one."""
        if name not in self.found:
            self.run_from(name)
        if self.found[name] is not None:
            raise self.found[name]

    def run_from(self, name):
        """Run this one and those behind it, as long as the test may take that does it."""
        left, folder = self.names[self.names.index(name) :], self.folder()
        left_s = min(self.end, float(os.environ.get(TEST_END, math.inf)) - END_S) - time.time()
        not_reached = pytest.skip.Exception("not reached: the time for the scenarios was over")
        self.found[name] = not_reached
        if left_s < LEAST_S:
            return
        num_passed = len(left)
        try:
            self.run(run_in_turn, left, str(folder), timeout_s=left_s)
        except LockstepError as error:
            num_passed = len(list(folder.iterdir()))
            if not isinstance(error, LaunchTimeout) or (num_passed == 0 and left_s > FAIR_S):
                self.found[left[num_passed]] = error  # others that were late have a job of their own
        self.found |= dict.fromkeys(left[:num_passed])


def names_of(request):
    """Return the scenarios of the tests that use a fixture, of those that run."""
    items = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params["name"] for item in items if request.fixturename in item.fixturenames]


@pytest.fixture(scope="module")
def scenarios(request, on_gpus, tmp_path_factory):
    return Scenarios(on_gpus, lambda: tmp_path_factory.mktemp("passed"), JOB_S, names_of(request))


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_gpus(scenarios, name):
    scenarios.check(name)


def test_compiled_by_the_inductor(on_gpus):
    pytest.importorskip("triton")
    # Triton compiles what launches its kernels.
    if not any(map(shutil.which, [os.environ.get("CC", "cc"), "gcc", "clang"])):
        pytest.skip("needs a C compiler")
    from tests.distributed.test_scenarios import compiled

    on_gpus(compiled, "inductor")


def test_a_rank_has_a_context_on_its_own_gpu_only(on_gpus, tmp_path):
    """Also with a record and with checkpoints, which have threads of their own."""
    on_gpus(one_context, str(tmp_path))


@pytest.mark.parametrize("strategy", ["ddp-zero1", "fsdp"])
def test_a_run_goes_on_with_fewer_gpus(on_gpus, tmp_path, strategy):
    resume_on_fewer(on_gpus, torch.cuda.device_count(), str(tmp_path), strategy)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
@pytest.mark.parametrize("how", LOST)
def test_a_lost_rank_is_named(how):
    launch_losing(torch.cuda.device_count(), how)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_a_rank_is_replaced_in_place_with_the_same_bits(run_task):  # noqa: F811
    undisturbed, _ = run_task()
    found, lines = run_task("backward@1 before3@0")
    assert found == undisturbed
    assert len(lines) == 4 and not any("restart" in line for line in lines)
