"""Dropout masks and batch norm statistics are told from faults, in few experiments."""

import pytest

from tests.models import soak
from tests.verifying import FAULTS, causes, check_counts, plant, verify_on

DROPOUT = "h = F.dropout(h, 0.2, self.training)"
# A class of its own, which `fit` does not synchronise.
OWN = "type('OwnNorm', (nn.BatchNorm1d,), {})(16)"
NORM = {"INIT": f"self.norm = {OWN}", "FORWARD": "h = self.norm(h)"}
SYNC = "self.norm = lockstep.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(16))"
FROZEN = "self.norm = nn.BatchNorm1d(16).eval()\nself.norm.train = lambda mode=True: self.norm"
BOTH = f"h = self.norm(h)\n{DROPOUT}"
MASKS, NOISE, STATISTICS = "dropout masks", "random numbers in forward", "batch norm statistics"
RANDOM, NORMS, SUM = "random state", "BatchNorm statistics", "a loss that sums instead of averages"
SUMS = "return F.cross_entropy(out, y, reduction='sum')"
BY_WORLD = "return F.cross_entropy(out, y) / WORLD_SIZE"
TRIED = "Tried: with --reproducible 2, one process and the ranks are the same run, to the bit."


@pytest.fixture
def planted(tmp_path, ranks):
    """Return what verify finds in a task with some lines changed, and the number of experiments."""

    def verify(settings=None, **changes):
        found, reported = verify_on(ranks, plant(tmp_path, **changes), num_steps=2, **(settings or {}))
        return found, check_counts(reported)

    return verify


@pytest.mark.parametrize(
    ("apart", "found", "changes"),
    [
        ((MASKS,), [RANDOM], {"FORWARD": DROPOUT}),
        ((STATISTICS,), [NORMS], NORM),
        ((MASKS, STATISTICS), [RANDOM, NORMS], {**NORM, "FORWARD": BOTH}),
        ((NOISE,), [RANDOM], {"LOSS": "out = out + 0.1 * torch.randn_like(out)"}),
        ((MASKS,), [RANDOM], {"INIT": SYNC, "FORWARD": BOTH}),
        ((MASKS,), [RANDOM], {"INIT": FROZEN, "FORWARD": BOTH}),
        *soak([((NOISE,), [RANDOM], {"FORWARD": f"{DROPOUT}\nh = h + np.random.rand()"})]),
    ],
)
def test_what_differs_by_design_takes_two_experiments(planted, apart, found, changes):
    verification, num = planted(**changes)
    assert (verification.same, verification.apart_from) == (False, apart)
    assert causes(verification) == found
    assert verification.explained
    assert verification.verdict.startswith(f"The same training run, apart from {' and '.join(apart)}: without them, 2")
    assert not verification.comparison.same
    assert [row.same for row in verification.rows] == [True]
    assert num == 2


@pytest.mark.parametrize(
    ("found", "changes"),
    [
        ([RANDOM, SUM], {"FORWARD": DROPOUT, "LOSS": SUMS}),
        (["a forward pass that depends on the rank", RANDOM], {"FORWARD": DROPOUT, "LOSS": BY_WORLD}),
        ([NORMS, SUM], {**NORM, "LOSS": SUMS}),
        # The probability depends on the rank, though no mask is drawn in the experiment.
        ([RANDOM], {"FORWARD": "h = F.dropout(h, 0.2 + 0.2 * int(os.environ['RANK']), self.training)"}),
        *soak(
            [
                # Not helped by --reproducible.
                (
                    [RANDOM],
                    {
                        "INIT": "self.generator = torch.Generator().manual_seed(0)",
                        "FORWARD": "h = h * torch.rand(h.shape, generator=self.generator)",
                    },
                ),
                (["learning-rate rule", RANDOM], {"FORWARD": DROPOUT, "OPTIMIZER": "lr = 0.01 * WORLD_SIZE"}),
            ]
        ),
    ],
)
def test_a_fault_next_to_dropout_is_found(planted, found, changes):
    verification, num = planted(**changes)
    assert (verification.same, verification.apart_from) == (False, ())
    assert causes(verification) == found
    assert verification.verdict.startswith("Not the same training run: 2 ranks differ from one process, first in")
    assert 7 < num <= 24


def test_a_fix_that_is_proposed_was_tried_next_to_another_fault(planted):
    verification, _ = planted(FORWARD=f"{DROPOUT}\nself.buffer.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)")
    assert causes(verification) == [RANDOM, "buffers changed on one rank"]
    assert [finding.tried for finding in verification.findings] == [TRIED, TRIED]


def test_without_draws_the_ranks_run_one_experiment(planted):
    verification, num = planted(LOSS=SUMS)
    assert causes(verification) == [SUM]
    assert num == 6  # one process: draws turned off, whole, in shares, weights, right shares; and the ranks


def test_dropout_must_be_the_same_in_reproducible_mode(planted):
    verification, num = planted({"reproducible": 2}, FORWARD=DROPOUT)
    assert (verification.same, num) == (True, 0)
    private = "self.generator = torch.Generator().manual_seed(int(os.environ['RANK']))"
    noise = f"{DROPOUT}\nh = h + 0 * torch.rand(h.shape, generator=self.generator)"
    verification, _ = planted({"reproducible": 2}, FORWARD=noise.replace("0 *", "0.1 *"), INIT=private)
    assert (verification.same, verification.apart_from) == (False, ())
    assert causes(verification) == [RANDOM]


def test_an_example_names_what_was_compared(ranks):
    verification, reported = verify_on(ranks, FAULTS / "random_state.py")
    assert reported == [
        "one process, twice",
        "2 ranks",
        "experiment 1 of at most 24: one process, random state turned off",
        "experiment 2 of at most 24: 2 ranks, random state turned off",
    ]
    assert [(row.turned_off, row.compared, row.outcome) for row in verification.rows] == [
        ("random state", "one process, ranks", "the same")
    ]
    assert verification.findings[0].evidence == (
        "Forward draws random numbers (dropout of 0.2), and each part of the batch gets others than the whole."
    )
