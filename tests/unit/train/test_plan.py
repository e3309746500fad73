"""What a run comes to, before it starts."""

import pytest

from lockstep.data.order import BatchSplit
from lockstep.errors import ConfigurationError
from lockstep.train.plan import check_split, make_plan
from lockstep.train.settings import Settings
from tests.training import make_task


def split(num_shares, accumulate, proportions=None):
    return BatchSplit(num_shares, range(num_shares), accumulate, proportions)


def plan(num_samples=50, accumulate=1, num_shares=2, task=None, **settings):
    settings = Settings(accumulate=accumulate, **settings)
    return make_plan(task or make_task(), settings, split(num_shares, accumulate), num_samples=num_samples)


def test_the_number_of_steps_is_that_asked_for_or_that_of_the_epochs():
    assert plan().num_steps == 3
    assert plan(epochs=4).num_steps == 12
    assert plan(steps=5).num_steps == 5
    assert plan(task=make_task(epochs=2)).num_steps == 6
    assert plan(task=make_task(epochs=2), epochs=1).num_steps == 3


def test_any_number_of_devices_takes_any_batch():
    for batch_size, num_shares in ((64, 3), (24, 5), (3, 4)):
        check_split(batch_size, split(num_shares, 1))
    check_split(24, split(5, 4))


def test_more_micro_batches_than_samples_are_refused():
    with pytest.raises(ConfigurationError) as error:
        check_split(3, split(4, 2))
    assert str(error.value) == (
        "A global batch of 3 samples does not have a sample for each of 4 devices in each of 2 micro-batches.\n"
        "Set the global batch size to 8 or more, or decrease accumulate."
    )
    check_split(8, split(4, 2))


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "proportions", "enough"),
    [(2, 1, (2, 1, 1), 4), (1, 1, (2, 1), 3), (5, 2, (2, 1, 1), 8), (100, 1, (1000, 1), 1001)],
)
def test_shares_must_have_a_sample_for_each_micro_batch(batch_size, accumulate, proportions, enough):
    with pytest.raises(ConfigurationError, match=f"Set the global batch size to {enough} or more, or make the shares"):
        check_split(batch_size, split(len(proportions), accumulate, proportions))
    check_split(enough, split(len(proportions), accumulate, proportions))


def test_a_last_batch_that_is_not_full_can_be_left_out():
    assert plan(task=make_task(drop_last=True)).num_steps == 2
    assert plan(num_samples=48, task=make_task(drop_last=True)).num_steps == 2
    with pytest.raises(ConfigurationError) as error:
        plan(num_samples=23, task=make_task(drop_last=True))
    assert str(error.value) == (
        "The data set of 23 samples is smaller than a global batch of 24.\n"
        "Decrease the global batch size, or omit drop_last from the task."
    )


def test_the_learning_rate_follows_the_batch_from_the_tasks_own_or_the_one_named():
    assert plan(global_batch_size=48).learning_rate.scale == 1.0
    assert plan(global_batch_size=48, lr_scaling="linear").learning_rate.scale == 2.0
    assert plan(global_batch_size=48, lr_scaling="linear", base_batch_size=12).learning_rate.scale == 4.0
    assert plan(global_batch_size=96, lr_scaling="sqrt").learning_rate.scale == 2.0


def test_the_settings_schedule_goes_before_the_tasks():
    def own(step, num_steps):
        return 1.0

    assert plan().learning_rate.decay == "constant"
    assert plan(task=make_task(schedule=own)).learning_rate.decay is own
    assert plan(task=make_task(schedule=own), schedule="linear").learning_rate.decay == "linear"


def test_a_stream_needs_a_number_of_steps():
    assert plan(num_samples=None, steps=7).num_steps == 7
    with pytest.raises(ConfigurationError) as error:
        plan(num_samples=None)
    assert str(error.value) == (
        "The data set is a stream without a length, so its epochs cannot be planned.\n"
        "Give the number of steps instead: steps=1000 (--steps 1000)."
    )
