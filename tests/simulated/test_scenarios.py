"""What tests/gpu runs on each GPU over NCCL, here on simulated accelerators."""

import warnings

import pytest
import torch

from lockstep.study.verify.interventions import Watch
from tests.distributed.test_scenarios import ALIKE, SCENARIOS, SLOW, one_context
from tests.models import soak

QUICK = [name for name in SCENARIOS if name not in SLOW + ALIKE]


@pytest.mark.parametrize("name", [*QUICK, *soak(ALIKE)])
def test_two_devices(on_sim, name):
    on_sim(2)(SCENARIOS[name])


@pytest.mark.parametrize("name", soak([*QUICK, *ALIKE]))
@pytest.mark.parametrize("num_devices", [1, 4])
def test_other_numbers_of_devices(on_sim, num_devices, name):
    on_sim(num_devices)(SCENARIOS[name])


def test_a_record_and_checkpoints(on_sim, tmp_path):
    on_sim(2)(one_context, str(tmp_path))


def test_constant_draws_of_verify_leave_the_other_devices_alone(on_sim):
    def run(world):
        watch = Watch(frozenset({"random"}))
        with warnings.catch_warnings(), watch, watch.generators():
            warnings.simplefilter("error")  # torch warns where the state of every device is kept
            watch.active = True
            return torch.rand(3, device=world.device).tolist()

    assert on_sim(1)(run) == [[0.5] * 3]
