"""`python -m bench.published`: the page is what the script writes, and the model is asked as the page says."""

import pytest

from bench import published
from bench.published import Claim, Figure, fits, fused, gbits_for, number, percent, split, summary
from lockstep.study.common import Table
from lockstep.study.links import Method, ReadyBucket


def test_the_page_is_what_the_script_writes():
    assert published.PAGE.read_text() == published.page(published.claims())


def test_the_bandwidth_of_diloco_is_that_of_the_exchange_within_the_time_left():
    """80 % of the time computes 100 steps of 0.8 s, so 20 s are left for 160 Gbit."""
    model = published.SCALING_LAWS[0]
    found = gbits_for(0.8, model.step_s, model.buckets(), Method("", sync_every=100))
    assert found == pytest.approx(160 / 20, rel=2e-3)


def test_the_bandwidth_of_data_parallel_hides_all_but_one_layer_behind_backward():
    """50 %: 0.8 s may be exposed; the first of 48 buckets is ready after a 48th of backward."""
    model = published.SCALING_LAWS[0]
    found = gbits_for(0.5, model.step_s, model.buckets(), Method(""))
    assert found == pytest.approx(160 / (0.8 + 0.8 * 2 / 3 * 47 / 48), rel=2e-3)


def test_split():
    assert split([(100.0, 0.5), (50.0, 1.0)], 40.0) == [
        ReadyBucket(33, pytest.approx(1 / 6)),
        ReadyBucket(33, pytest.approx(1 / 3)),
        ReadyBucket(33, 0.5),
        ReadyBucket(25, 0.75),
        ReadyBucket(25, 1.0),
    ]
    assert len(fused(published.VGG16)) == 9
    assert all(len(model.buckets()) == model.num_layers for model in (*published.SCALING_LAWS, *published.STREAMING))


def test_the_fit_does_not_see_what_it_predicts(monkeypatch):
    before = fits()
    known = {count: rate for count, rate in published.TOKENS_PER_S.items() if count <= 64}
    monkeypatch.setattr(published, "TOKENS_PER_S", {**known, 128: 1.0, 256: 1.0})
    assert fits() == before
    counted = [figure.what for figure in published.playbook().figures]
    assert counted == ["128 GPUs", "256 GPUs"]


def claim(*figures, is_measured=True):
    return Claim("", "", "", "", "", figures, [Table("", [], [])], "", is_measured)


def test_summary_counts_no_bounds():
    made = [
        claim(Figure("a", 100.0, 109.0), Figure("b", 100.0, 80.0)),
        claim(Figure("c", 1.0, 1.5), Figure("d", 1.0, 9.0, is_bound=True), is_measured=False),
    ]
    assert summary(made) == (
        "Of 3 published figures, 1 are predicted within 10 % and 2 within 25 %. The worst is c: 1 published, 1.5 "
        "predicted (+50 %). Most were simulated by their authors: of the 2 that were measured, 1 are predicted within "
        "10 % and 2 within 25 %."
    )


def test_numbers():
    assert [number(value) for value in (0.1206, 99.94, 99.95, 5319.4)] == ["0.121", "99.9", "100", "5,319"]
    assert [percent(error) for error in (0.144, -0.004, -0.13)] == ["+14 %", "+0 %", "-13 %"]
