"""Samples that cannot be read: the run stops on every rank and says which, or goes on without them on any number."""

import json
from functools import partial

import pytest
import torch
from torch.utils.data import Dataset

import lockstep
from lockstep.errors import DataError
from tests.models import soak
from tests.training import make_task, mean_loss, relative_error, samples, token_loss

BAD = {3, 17, 31, 48}


class Damaged(Dataset):
    """The samples of the other tests, some of which cannot be read."""

    def __init__(self, bad=BAD):
        self.bad = bad
        self.samples = samples()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index in self.bad:
            raise DataError(
                f"part-0.tar: record {index} is cut short at byte {index * 512}.\nCopy it again.",
                file="part-0.tar",
                offset=index * 512,
                sample=index,
            )
        return self.samples[index]


def fit(world, strategy, **changes):
    """Train, and return the losses, the weights by name, what was skipped, and the result."""
    kept = {}
    settings = {name: changes.pop(name) for name in list(changes) if name not in ("dataset", "loss", "eval_dataset")}
    task = make_task(**{"dataset": Damaged, **changes}, after=lambda model: kept.update(model.state_dict()))
    result = lockstep.fit(task, strategy=strategy, **{"epochs": 2, "quiet": True, **settings})
    return result, torch.cat([kept[name].flatten() for name in sorted(kept)]) if kept else None


@pytest.mark.parametrize("loss", [*soak([mean_loss]), token_loss])
def test_the_same_samples_are_skipped_on_any_number_of_ranks_and_workers(ranks, loss):
    expected, weights = fit(None, "single", loss=loss, bad_samples="skip")
    assert expected.skipped_samples == 2 * len(BAD)
    assert {bad.sample for bad in expected.first_skipped} <= BAD
    assert expected.num_samples == 2 * 50 - 2 * len(BAD)
    runs = [
        [fit(None, "single", loss=loss, bad_samples="skip", workers=1)],
        [fit(None, "dp", loss=loss, bad_samples="skip", devices=3)],
        ranks(2)(partial(fit, loss=loss, bad_samples="skip", accumulate=2), "ddp"),
        ranks(3)(partial(fit, loss=loss, bad_samples="skip"), "torch-ddp"),
        ranks(2)(partial(fit, loss=loss, bad_samples="skip", shares=(3, 1), workers=1), "ddp"),
    ]
    for results in runs:
        assert relative_error(results[0][1], weights) < 1e-12
        for result, _ in results:
            assert result.losses == pytest.approx(expected.losses, rel=1e-12)
            assert (result.skipped_samples, result.first_skipped) == (8, expected.first_skipped)
            assert result.num_samples == expected.num_samples


@pytest.mark.parametrize("loss", [mean_loss, token_loss])
def test_what_is_left_is_averaged_over_what_was_there(loss):
    """The oracle: a collate function that throws the same samples out of a data set in which all can be read."""
    result, weights = fit(None, "single", loss=loss, bad_samples="skip", steps=2, epochs=None)
    task = make_task(loss=loss)
    from lockstep.train.settings import Settings
    from lockstep.train.trainer import Trainer

    loop = Trainer(task, Settings(), None, strategy="single", devices=[torch.device("cpu")])
    data, optimizer = samples(), task.optimizer(list(loop.model.parameters()))
    for step in range(2):
        indices = [index for index in loop.plan.order.batch(step).tolist() if index not in BAD]
        assert len(indices) < 24
        value = task.loss(loop.model, tuple(tensor[indices] for tensor in data.tensors))
        value = value.total / value.count if isinstance(value, lockstep.Loss) else value
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        assert result.losses[step] == pytest.approx(value.item(), rel=1e-12)
    state = loop.model.state_dict()
    assert relative_error(weights, torch.cat([state[name].flatten() for name in sorted(state)])) < 1e-12


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_stops_the_run_on_every_rank(ranks, workers):
    for num_ranks, strategy in ((2, "ddp"), (3, "torch-ddp")):
        stopped = partial(fit, dataset=lambda: Damaged({17}), workers=workers)
        outcomes = ranks(num_ranks).each(stopped, strategy)
        for outcome in outcomes:
            assert isinstance(outcome.error, DataError)
            assert str(outcome.error) == TEXT
            assert (outcome.error.file, outcome.error.offset, outcome.error.sample) == ("part-0.tar", 8704, 17)
    with pytest.raises(DataError) as error:
        fit(None, "dp", devices=2, dataset=lambda: Damaged({17}), workers=workers)
    assert str(error.value) == TEXT


TEXT = (
    "Sample 17 of the data set cannot be read (epoch 1, step 2).\n"
    "part-0.tar: record 17 is cut short at byte 8704.\n"
    "Copy it again.\n"
    "Repair or remove what cannot be read, or go on without such samples and have them counted: "
    'bad_samples="skip" (--bad-samples skip).'
)


def test_a_share_that_cannot_be_read_may_lie_between_two_that_can():
    """Batches of 6 on three devices, and what the second has of the first batch is bad."""
    from lockstep.data.order import GlobalOrder

    bad = set(GlobalOrder(50, 6, 0).batch(0)[2:4].tolist())
    run = partial(fit, dataset=lambda: Damaged(bad), bad_samples="skip", steps=3, epochs=None, global_batch_size=6)
    expected, weights = run(None, "single")
    found, others = run(None, "dp", devices=3)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert relative_error(others, weights) < 1e-12
    assert found.skipped_samples == 2


def test_virtual_shards_are_summed_to_the_same_bits_without_them(ranks):
    expected, weights = fit(None, "single", bad_samples="skip", epochs=1)
    run = partial(fit, bad_samples="skip", reproducible=4, epochs=1)
    ((one, found),) = ranks(1)(run, "ddp")
    (two, again), _ = ranks(2)(run, "ddp")
    assert torch.equal(found, again)
    assert (one.losses, one.first_skipped) == (two.losses, two.first_skipped)
    assert one.first_skipped == expected.first_skipped
    assert relative_error(found, weights) < 1e-12


class Broken(Dataset):
    """A data set with a mistake in it."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return undefined  # noqa: F821


def test_an_exception_of_the_data_set_is_named_with_its_line():
    with pytest.raises(DataError) as error:
        fit(None, "single", dataset=Broken)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("Sample ") and lines[0].endswith(" of the data set cannot be read (epoch 1, step 1).")
    line = Broken.__getitem__.__code__.co_firstlineno + 1
    assert lines[1] == f"NameError: name 'undefined' is not defined ({__file__}:{line} in __getitem__)"
    assert "return undefined" in error.value.__notes__[0]


class Ragged(Damaged):
    """Some samples are longer than the others."""

    def __getitem__(self, index):
        inputs, *rest = self.samples[index]
        return torch.cat([inputs, inputs]) if index in BAD else inputs, *rest


@pytest.mark.parametrize("rule", ["stop", "skip"])
def test_samples_that_make_no_batch_end_the_run_on_every_rank(ranks, rule):
    for outcome in ranks(2).each(partial(fit, dataset=Ragged, bad_samples=rule, workers=1), "ddp"):
        assert isinstance(outcome.error, DataError)
        lines = str(outcome.error).splitlines()
        assert lines[0].startswith("Samples ")
        assert lines[0].endswith(", ... of the data set cannot be collated into a batch (epoch 1, step 1).")
        assert lines[1].startswith("RuntimeError: stack expects each tensor to be equal size, but got [")
        assert lines[-1] == (
            "Return samples of one kind and shape from the data set, or make batches of them with Task.collate."
        )


def test_a_data_set_of_which_too_much_is_bad_is_not_trained_on(ranks):
    for outcome in ranks(2).each(partial(fit, dataset=lambda: Damaged(set(range(25))), bad_samples="skip"), "ddp"):
        assert isinstance(outcome.error, DataError)
        lines = str(outcome.error).splitlines()
        assert lines[0].startswith("1")
        assert ' samples of the data set cannot be read, more than bad_samples="skip" allows (10). ' in lines[0]
        assert lines[1].startswith("Check that the storage is available")


def last_two(order_seed=0):
    """Return the samples of the third global batch, which holds what is left over."""
    from lockstep.data.order import GlobalOrder

    return set(GlobalOrder(50, 24, order_seed).batch(2).tolist())


@pytest.mark.parametrize("strategy", ["ddp", "torch-ddp"])
def test_without_any_sample_there_is_no_update_but_the_step_counts(ranks, strategy):
    def run(world, strategy):
        from lockstep.train.settings import Settings
        from lockstep.train.trainer import Trainer

        task = make_task(dataset=lambda: Damaged(last_two()))
        settings = Settings(bad_samples="skip")
        devices = [torch.device("cpu")] * (2 if strategy == "dp" else 1)
        loop = Trainer(task, settings, world, strategy=strategy, devices=devices)
        weights, updated = [], []
        for _ in range(4):
            updated.append(loop.step().updated)
            weights.append(torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()]))
        loop.close()
        return weights, updated, loop.num_steps_done

    expected, *_ = run(None, "single")
    for found, updated, num_steps_done in [*ranks(2)(run, strategy), run(None, "dp")]:
        assert (updated, num_steps_done) == ([True, True, False, True], 4)
        assert torch.equal(found[1], found[2])
        assert relative_error(found[3], expected[3]) < 1e-12


def test_what_was_skipped_is_shown_and_recorded(tmp_path, capfd):
    fit(None, "single", bad_samples="skip", quiet=False, epochs=1, run_dir=tmp_path)
    lines = capfd.readouterr().out.splitlines()
    assert "4 samples skipped: could not be read" in lines
    recorded = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    skipped = [line["text"] for line in recorded if line.get("event") == "skipped"]
    assert all(any(f"sample left out: sample {sample}: " in text for text in skipped) for sample in BAD)
    named = sorted(line.partition("  skipped ")[2] for line in lines if "  skipped sample" in line)
    assert named == sorted(
        f"sample {sample}: part-0.tar: record {sample} is cut short at byte {sample * 512}." for sample in BAD
    )


def test_evaluation_goes_by_the_same_rule(ranks, capfd):
    def metrics(world, strategy, **settings):
        return fit(world, strategy, dataset=samples, eval_dataset=Damaged, epochs=1, **settings)[0].evaluations

    for outcome in ranks(2).each(metrics, "ddp"):
        assert isinstance(outcome.error, DataError)
        assert str(outcome.error).startswith("Sample 3 of the evaluation data set cannot be read.\n")
    expected = metrics(None, "single", bad_samples="skip", quiet=False)
    assert "  without 4 that cannot be read\n" in capfd.readouterr().out
    for found in ranks(3)(partial(metrics, bad_samples="skip"), "ddp"):
        assert [evaluation.step for evaluation in found] == [evaluation.step for evaluation in expected]
        assert found[0].metrics == pytest.approx(expected[0].metrics, rel=1e-12)
