"""What tests/gpu runs on each GPU over NCCL, here on simulated accelerators."""

import pytest

from tests.models import soak
from tests.scenarios import SCENARIOS, SLOW, one_context

QUICK = [name for name in SCENARIOS if name not in SLOW]


@pytest.mark.parametrize("name", QUICK)
def test_two_devices(on_sim, name):
    on_sim(2)(SCENARIOS[name])


@pytest.mark.parametrize("name", soak(QUICK))
@pytest.mark.parametrize("num_devices", [1, 4])
def test_other_numbers_of_devices(on_sim, num_devices, name):
    on_sim(num_devices)(SCENARIOS[name])


def test_a_record_and_checkpoints(on_sim, tmp_path):
    on_sim(2)(one_context, str(tmp_path))
