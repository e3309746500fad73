"""Any global batch on any number of devices: parts that differ by one sample are exact, and so are virtual shards."""

from functools import partial

import pytest
import torch

import lockstep
from lockstep.errors import ConfigurationError
from tests.reproducing import bits
from tests.training import make_task, mean_loss, samples, token_loss


def fit(world, strategy, sizes=None, loss=mean_loss, **settings):
    """Train, and return the losses and the weights."""
    kept = {}

    def counted(model, batch):
        if sizes is not None and model.training:
            sizes.append(len(batch[0]))
        return loss(model, batch)

    task = make_task(loss=counted, dataset=lambda: samples(64), after=lambda model: kept.update(model.state_dict()))
    result = lockstep.fit(task, strategy=strategy, **{"global_batch_size": 64, "steps": 3, "quiet": True, **settings})
    weights = torch.cat([kept[name].flatten() for name in sorted(kept)]) if kept else None
    return result.losses, weights


@pytest.mark.parametrize(("settings", "loss"), [({}, token_loss), ({"accumulate": 4}, mean_loss)])
def test_a_batch_that_does_not_divide_by_the_devices_trains_as_on_one(ranks, settings, loss):
    losses, weights = fit(None, "single", loss=loss)

    def divided(world):
        sizes = []
        found = {name: fit(world, name, sizes, loss=loss, **settings) for name in ("ddp", "torch-ddp", "ddp-zero1")}
        return found, sizes

    results = ranks(3)(divided)
    for rank, (found, sizes) in enumerate(results):
        assert sum(sizes) == 3 * 3 * (22, 21, 21)[rank]
        for strategy, (here, there) in found.items():
            assert here == pytest.approx(losses, rel=1e-12), strategy
            if rank == 0:
                torch.testing.assert_close(there, weights, rtol=1e-12, atol=1e-14)
    here, there = fit(None, "dp", loss=loss, devices=3, **settings)
    assert here == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(there, weights, rtol=1e-12, atol=1e-14)


def test_there_may_be_more_devices_than_samples(ranks):
    """The last rank has nothing to compute, in no step."""
    losses, weights = fit(None, "single", global_batch_size=2)
    results = ranks(3)(partial(fit, global_batch_size=2), "ddp")
    assert [found for found, _ in results] == [pytest.approx(losses, rel=1e-12)] * 3
    torch.testing.assert_close(results[0][1], weights, rtol=1e-12, atol=1e-14)


def test_virtual_shards_may_differ_by_a_sample_and_keep_the_bits(ranks):
    """30 samples in 4 shards are 8 + 8 + 7 + 7, on 1, 2 and 3 devices."""
    how = {"reproducible": 4, "global_batch_size": 30}
    losses, weights = fit(None, "single", **how)
    for num_devices in (2, 3):
        here, there = fit(None, "dp", devices=num_devices, **how)
        assert (here, bits(there)) == (losses, bits(weights))
        results = ranks(num_devices)(partial(fit, **how), "ddp")
        assert [found for found, _ in results] == [losses] * num_devices
        assert bits(results[0][1]) == bits(weights)


def test_more_micro_batches_than_samples_are_refused():
    with pytest.raises(ConfigurationError) as error:
        fit(None, "single", global_batch_size=3, accumulate=4)
    assert str(error.value) == (
        "A global batch of 3 samples does not have a sample for each of 1 device in each of 4 micro-batches.\n"
        "Set the global batch size to 4 or more, or decrease accumulate."
    )


def test_one_sample_for_batch_norm_is_explained():
    model = lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4)).double()  # noqa: E731
    with pytest.raises(ConfigurationError) as error:
        lockstep.fit(make_task(model=model, dataset=lambda: samples(25)), strategy="single", quiet=True)
    assert str(error.value) == (
        "A batch of 1 samples leaves this rank one in step 2, on which batch norm cannot train: Expected more than 1 "
        "value per channel when training, got input size torch.Size([1, 6])\nOmit an incomplete last batch "
        "(drop_last=True in the task), choose another global_batch_size, or use nn.SyncBatchNorm."
    )


class Normalised(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4)
        self.double()

    def forward(self, inputs):
        return self.last(self.norm(self.first(inputs)).tanh())


@pytest.mark.parametrize("strategy", ["ddp", "ddp-zero1"])
def test_batch_norm_is_that_of_one_device(ranks, strategy):
    """Also in a last batch of 4 samples on 3 ranks, two of which have a single one."""

    def run(world, strategy, **settings):
        kept = {}
        after = lambda model: kept.update(model.state_dict())  # noqa: E731
        task = make_task(model=Normalised, dataset=lambda: samples(24), global_batch_size=10, after=after)
        result = lockstep.fit(task, strategy=strategy, epochs=2, quiet=True, **settings)
        return result.losses, kept

    losses, weights = run(None, "single")
    results = ranks(3)(run, strategy)
    assert [found for found, _ in results] == [pytest.approx(losses, rel=1e-11)] * 3
    torch.testing.assert_close(results[0][1], weights, rtol=1e-11, atol=1e-13)
    apart = ranks(2)(partial(run, sync_batchnorm=False), strategy)
    assert apart[0][0] != pytest.approx(losses, rel=1e-3)


def test_the_plan_says_what_each_device_gets(capfd):
    fit(None, "dp", devices=3, quiet=False)
    assert "global batch 64 = 3 devices with 22 + 21 + 21 samples" in capfd.readouterr().out.splitlines()
