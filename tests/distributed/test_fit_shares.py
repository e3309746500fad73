"""Parts of a global batch in given proportions: the same training run, with other work on each device."""

import contextlib

import pytest
import torch
from torch.utils.data import IterableDataset

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.training import make_task, mean_loss, relative_error, samples, token_loss, train, whole_batch

# 50 samples in global batches of 24: the third holds 2, so that there the third device has none.
NUM_STEPS = 4
SHARES = (2, 1, 0.5)


def check(found, expected):
    assert found["counts"] == expected["counts"] == [24, 24, 2, 24]
    for step in range(NUM_STEPS):
        assert relative_error(found["grads"][step], expected["grads"][step]) < 1e-12
        assert found["losses"][step] == pytest.approx(expected["losses"][step], rel=1e-12)
    assert relative_error(found["weights"], expected["weights"]) < 1e-12


@pytest.mark.parametrize("loss", [mean_loss, token_loss])
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2, "clip": 0.3}])
def test_gradients_are_those_of_the_whole_batch(ranks, settings, loss):
    task = make_task(loss=loss)
    expected = whole_batch(task, NUM_STEPS, **settings)

    def both(world):
        return [train(world, task, strategy, NUM_STEPS, shares=SHARES, **settings) for strategy in ("ddp", "torch-ddp")]

    for results in ranks(3)(both):
        for found in results:
            check(found, expected)


@pytest.mark.parametrize("loss", [mean_loss, token_loss])
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2, "clip": 0.3}])
def test_so_are_those_of_one_process_with_several_devices(settings, loss):
    task = make_task(loss=loss)
    check(train(None, task, "dp", NUM_STEPS, shares=SHARES, **settings), whole_batch(task, NUM_STEPS, **settings))


def test_a_device_without_samples_may_lie_between_two_that_have_some(ranks):
    """The last batch of 2 is divided into 1, 0 and 1."""
    task, shares = make_task(), (10, 1, 10)
    expected = whole_batch(task, NUM_STEPS)
    check(train(None, task, "dp", NUM_STEPS, shares=shares), expected)
    for found in ranks(3)(lambda world: train(world, task, "ddp", NUM_STEPS, shares=shares)):
        check(found, expected)


def test_each_device_computes_its_part(ranks):
    sizes = []

    def counted(model, batch):
        sizes.append(len(batch[0]))
        return mean_loss(model, batch)

    def run(world):
        settings = Settings(shares=SHARES)
        loop = Trainer(make_task(loss=counted), settings, world, strategy="ddp", devices=[world.device])
        with contextlib.closing(loop):
            for _ in range(3):
                loop.step()
        return sizes

    assert ranks(3)(run) == [[14, 14, 1], [7, 7, 1], [3, 3]]


def test_streams_are_divided_alike_and_evaluation_counts_each_sample_once(ranks):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from samples()

    def run(world, strategy, shares):
        task = make_task(dataset=Stream, eval_dataset=samples, metrics=lambda model, batch: {"one": batch[0][:, 0]})
        result = lockstep.fit(task, strategy=strategy, steps=4, shares=shares, quiet=True)
        return result.losses, result.metrics

    losses, metrics = run(None, "single", None)
    for found_losses, found in ranks(3)(run, "ddp", SHARES):
        assert found_losses == pytest.approx(losses, rel=1e-12)
        assert found == pytest.approx(metrics, rel=1e-12)


def test_what_does_not_fit_is_an_error_on_every_rank(ranks):
    def run(world, shares):
        lockstep.fit(make_task(), shares=shares, quiet=True)

    for outcome in ranks(2).each(run, (1, 1, 1)):
        assert isinstance(outcome.error, ConfigurationError)
        assert str(outcome.error) == (
            "shares=1,1,1 is for 3 devices, but this run has 2.\n"
            "Give one number for each device, or omit shares for equal shares."
        )
    with pytest.raises(ConfigurationError) as error:
        Trainer(make_task(), Settings(shares=(1, 2)), None, strategy="torch-dp", devices=[torch.device("cpu")] * 2)
    assert str(error.value) == (
        "Strategy torch-dp does not support shares: torch.nn.DataParallel divides a batch evenly.\n"
        "Use strategy dp, or omit shares."
    )


@pytest.mark.parametrize("shares", [(1,), (1, 1, 1)])
def test_so_it_is_with_virtual_shards(shares):
    with pytest.raises(ConfigurationError, match="but this run has 2"):
        lockstep.fit(make_task(), strategy="dp", devices=2, reproducible=4, shares=shares, quiet=True)
    lockstep.fit(make_task(), strategy="dp", devices=2, reproducible=4, shares=(3, 1), steps=1, quiet=True)


def test_the_plan_says_what_each_device_gets(capfd):
    lockstep.fit(make_task(), strategy="dp", devices=3, shares=SHARES, steps=1)
    assert "global batch 24 = 3 devices with 14 + 7 + 3 samples\n" in capfd.readouterr().out
