"""What tests/gpu runs on each GPU over NCCL, here on CPU ranks."""

import pytest

from tests.models import soak
from tests.scenarios import SCENARIOS, SLOW, launch_losing, resume_on_fewer

EAGER = [name for name in SCENARIOS if name not in SLOW]
# On the CPU other tests have most of it, too; these are enough to keep what tests/gpu runs in order.
QUICK = [
    "torch's gradients, mlp",
    "weights, reused",
    "zero, overlapping",
    "compression, int8",
    "captured, mlp",
    "batch norm",
]


@pytest.mark.parametrize("name", [*QUICK, *soak([name for name in SCENARIOS if name not in QUICK])])
def test_two_ranks(ranks, name):
    ranks(2, warnings="default")(SCENARIOS[name], timeout=100)


@pytest.mark.parametrize("name", soak(EAGER))
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_other_numbers_of_ranks(ranks, num_ranks, name):
    ranks(num_ranks, warnings="default")(SCENARIOS[name])


@pytest.mark.parametrize("strategy", ["ddp", *soak(["ddp-zero1", "fsdp"])])
def test_a_run_goes_on_with_fewer_ranks(ranks, tmp_path, strategy):
    def run(fn, *args, devices):
        return ranks(devices, warnings="default")(fn, *args)

    resume_on_fewer(run, 2, str(tmp_path), strategy)


@pytest.mark.parametrize("how", soak(["killed", "stopped"]))
def test_a_lost_rank_is_named(how):
    launch_losing(2, how, device="cpu")
