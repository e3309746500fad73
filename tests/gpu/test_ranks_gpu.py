"""The scenarios of tests/distributed on all GPUs over NCCL: a world of one on one GPU, real ranks on several."""

import os
import shutil
import time

import pytest
import torch

from lockstep.errors import LockstepError
from tests.distributed.test_recovery import run_task  # noqa: F401 - a fixture
from tests.distributed.test_scenarios import LOST, SCENARIOS, launch_losing, one_context, resume_on_fewer, run_in_turn

pytestmark = pytest.mark.timeout(600)

JOB_S, LEAST_S = 240.0, 10.0
"""For all scenarios; and what a job needs at least: ranks start."""


def failures_of(run, tmp_path_factory, seconds, names=SCENARIOS):
    """Run all scenarios in one job; after one that fails, the rest in a new job. Return the errors by name.

    Args:
        run: ``run(fn, *args, timeout_s=...)`` runs ``fn(world, *args)`` on each rank.
        tmp_path_factory: The fixture.
        seconds: For all jobs together; the tests of the scenarios that there is no time for are skipped.
        names: Which scenarios.
    """
    left, found, end = list(names), {}, time.monotonic() + seconds
    while left:
        folder = tmp_path_factory.mktemp("passed")
        if (left_s := end - time.monotonic()) < LEAST_S:
            found |= dict.fromkeys(left, pytest.skip.Exception(f"the {seconds:g} s for the scenarios are over"))
            break
        try:
            run(run_in_turn, left, str(folder), timeout_s=left_s)
        except LockstepError as error:
            num_passed = len(list(folder.iterdir()))
            found[left[num_passed]] = error
            left = left[num_passed + 1 :]
        else:
            break
    return found


@pytest.fixture(scope="module")
def failures(on_gpus, tmp_path_factory):
    return failures_of(on_gpus, tmp_path_factory, JOB_S)


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_gpus(failures, name):
    if name in failures:
        raise failures[name]


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
