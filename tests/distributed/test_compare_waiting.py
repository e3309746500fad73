"""Ranks that have no part in a turn leave the cores to the one that computes."""

import time

import torch

from lockstep.study.compare.benchmark import Benchmark, _Track
from lockstep.train.settings import Settings
from tests.training import make_task

TURN_S = 1.5


def wait_for_a_turn(world):
    race = Benchmark(make_task(), Settings(), ("single", "ddp"), 2, 1, 1, 1, {"single": 1, "ddp": 1}, quiet=True)
    track = _Track(race, world)
    assert track._start("single") == (world.rank == 0)
    start, start_cpu = time.monotonic(), time.process_time()
    if world.rank == 0:
        time.sleep(TURN_S)  # in place of the turn
    assert track._start("ddp")
    return time.monotonic() - start, time.process_time() - start_cpu


def test_a_rank_that_waits_uses_next_to_no_core(ranks):
    for waited_s, cpu_s in ranks(2)(wait_for_a_turn):
        assert waited_s > 0.9 * TURN_S
        assert cpu_s < 0.15 * TURN_S


def threads_within(world):
    race = Benchmark(make_task(), Settings(), ("single", "ddp"), 2, 1, 1, 1, {"single": 2, "ddp": 1}, quiet=True)
    track, found = _Track(race, world), {}
    for name in ("single", "ddp", "single"):
        track._start(name)
        found[name] = torch.get_num_threads()
    return found


def test_each_contender_computes_with_its_own_number_of_threads(ranks):
    assert ranks(2)(threads_within) == [{"single": 2, "ddp": 1}] * 2
