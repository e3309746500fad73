"""What a loss counts other than samples: recorded by every rank, in the result, and in the report."""

import pytest

import lockstep
from lockstep.study.report.view import view_run
from lockstep.telemetry.record import read_run
from tests.training import NUM_SAMPLES, make_task, samples, token_loss

NUM_TOKENS = int(sum(length for _, _, length in samples()))


@pytest.mark.parametrize("strategy", ["ddp", "dp", "single"])
def test_tokens_are_counted_on_every_rank(ranks, tmp_path, strategy):
    def train(world, **changes):
        task = make_task(loss=token_loss, counts="words", **changes)
        return lockstep.fit(task, strategy=strategy, epochs=2, quiet=True, run_dir=tmp_path)

    results = ranks(2 if strategy == "ddp" else 1)(train)
    for result in results:
        assert (result.num_samples, result.num_counted) == (2 * NUM_SAMPLES, 2 * NUM_TOKENS)
        assert result.tokens_per_s == pytest.approx(result.samples_per_s * NUM_TOKENS / NUM_SAMPLES)
    for record in read_run(tmp_path).ranks.values():
        assert sum(step.counts for step in record.steps) == 2 * NUM_TOKENS
    view = view_run(tmp_path)
    assert view.run.last["counts"] == "words"
    assert view.figures.tokens_per_s > 0


def test_a_mean_over_samples_counts_nothing_else_also_where_a_rank_has_no_samples(ranks, tmp_path):
    def train(world):
        task = make_task(dataset=lambda: samples(25))  # the last batch of an epoch is one sample
        return lockstep.fit(task, epochs=2, quiet=True, run_dir=tmp_path)

    for result in ranks(2)(train):
        assert (result.num_samples, result.num_counted, result.tokens_per_s) == (50, None, None)
    for record in read_run(tmp_path).ranks.values():
        assert {step.counts for step in record.steps} == {None}


def test_a_rank_without_samples_in_a_batch_counts_what_the_others_do(ranks):
    def train(world):
        task = make_task(dataset=lambda: samples(25), loss=token_loss)
        return lockstep.fit(task, epochs=2, quiet=True)

    num_tokens = 2 * int(sum(length for _, _, length in samples(25)))
    assert [result.num_counted for result in ranks(2)(train)] == [num_tokens] * 2
