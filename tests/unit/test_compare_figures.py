import itertools
from dataclasses import replace

import pytest
from torch import nn

from lockstep.study.compare.benchmark import choose_steps, merge, order_of_round, split_layers
from lockstep.study.compare.comparison import Memory, StepTime
from tests.unit.compare_planted import comparison, contender

NAMES = ["single", "dp", "torch-ddp", "ddp"]


def test_step_time_takes_exposed_communication_out_of_backward():
    step = contender("ddp", 10.0, noise=(1.0, 1.0, 1.0), exposed_ms=2.0).step
    assert step.total_s == pytest.approx(0.010)
    assert step.forward_s == pytest.approx(0.002)
    assert step.backward_s == pytest.approx(0.004)
    assert step.exposed_s == pytest.approx(0.002)
    assert step.parts_s == pytest.approx(0.010)
    assert step.computing_s == pytest.approx(0.008)


def test_what_no_part_accounts_for_is_other():
    turn = replace(contender("single", 10.0).turns[0], forward_s=0.001)
    assert turn.other_s == pytest.approx(0.0015)
    assert StepTime.of((turn,)).other_s == pytest.approx(0.0015)


@pytest.mark.parametrize(("exposed_s", "shown_s"), [(-0.001, 0.0), (0.5, 0.005)])
def test_noise_in_exposed_communication_stays_within_backward(exposed_s, shown_s):
    turn = replace(contender("ddp", 10.0).turns[0], exposed_s=exposed_s)
    step = StepTime.of((turn,))
    assert step.exposed_s == pytest.approx(shown_s)
    assert step.backward_s + step.exposed_s == pytest.approx(0.005)


def test_imbalance_is_the_highest_over_the_mean():
    assert Memory((300, 100)).imbalance == 1.5
    assert Memory((100,)).imbalance is None


def test_speed_over_another_is_paired_by_round():
    hit = (1.0, 4.0, 1.0, 1.0, 1.0)
    found = comparison(contender("single", 20.0, noise=hit), contender("ddp", 10.0, noise=hit))
    assert found.contenders[1].speed_over(found.single).low == pytest.approx(2.0)
    assert found.contenders[1].speed_over(found.single).high == pytest.approx(2.0)


def test_merging_takes_the_slowest_ranks_wall_time_and_the_mean_of_the_parts():
    fast = contender("ddp", 10.0, noise=(1.0,), exposed_ms=1.0).turns[0]
    slow = replace(fast, seconds=0.2, step_s=0.02, forward_s=fast.forward_s + 0.004, exposed_s=0.003)
    (merged,) = merge([[fast], [slow]])
    assert (merged.seconds, merged.step_s) == (0.2, 0.02)
    assert merged.forward_s == pytest.approx(fast.forward_s + 0.002)
    assert merged.exposed_s == pytest.approx(0.002)
    assert merged.num_samples == fast.num_samples  # of the global batch already


def test_merging_leaves_out_ranks_that_only_waited():
    turns = contender("single", 10.0).turns
    assert merge([turns, []]) == turns


def test_every_contender_follows_every_other_about_as_often():
    orders = [order_of_round(NAMES, index) for index in range(8)]
    assert all(sorted(order) == sorted(NAMES) for order in orders)
    follows = [pair for order in orders for pair in itertools.pairwise(order)]
    assert follows.count(("torch-ddp", "ddp")) == follows.count(("ddp", "torch-ddp")) == 3
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(NAMES)


@pytest.mark.parametrize(
    ("step_s", "steps"),
    [
        ([0.1, 0.01], 50),  # half a second of the faster
        ([1.0, 0.01], 5),  # no more than five seconds of the slower
        ([30.0, 20.0], 3),
        ([1e-5, 1e-5], 500),
    ],
)
def test_a_turn_is_long_for_the_fastest_and_not_too_long_for_the_slowest(step_s, steps):
    assert choose_steps(step_s) == steps


@pytest.mark.parametrize(
    ("layer", "kinds"),
    [
        (nn.Linear(2, 2), ()),
        (nn.BatchNorm1d(2), ("batch norm",)),
        (nn.SyncBatchNorm(2), ()),
        (nn.Dropout(0.1), ("dropout",)),
        (nn.Dropout(0.0), ()),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.1), ("dropout",)),
        (nn.Sequential(nn.BatchNorm2d(2), nn.Dropout2d()), ("batch norm", "dropout")),
        (nn.TransformerEncoderLayer(4, 2, dropout=0.0), ()),
    ],
)
def test_layers_that_see_how_a_batch_is_split_are_found(layer, kinds):
    assert split_layers(layer) == kinds


def test_a_module_whose_dropout_is_a_module_is_no_rate():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Identity()

    assert split_layers(Model()) == ()
