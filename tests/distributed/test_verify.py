"""verify names the fault that was planted in a task, and calls sound ones the same run."""

import contextlib

import pytest

from tests.models import soak
from tests.pool import Pool
from tests.verifying import FAULTS, causes, check_counts, verify_on


@pytest.fixture(scope="module")
def verified(ranks):
    """Return what verify finds in a file of tests/faults, and what it reported; once for all tests that ask."""
    known = {}

    def verify(file):
        if file == "scientific.py" and file not in known:
            # Among processes that are new, as those of verify: SciPy draws from the generator that NumPy had when it
            # was imported, so what it draws is not seen where another test has imported it.
            with contextlib.closing(Pool()) as pool:
                known[file] = verify_on(pool.ranks, FAULTS / file)
        if file not in known:
            known[file] = verify_on(ranks, FAULTS / file)
        return known[file]

    return verify


@pytest.mark.parametrize(
    ("file", "cause", "first", "advice"),
    [
        ("sample_weighting.py", "sample weighting", ("loss", 0), "Return lockstep.Loss(total, count)"),
        ("random_state.py", "random state", ("loss", 0), "Train with --reproducible 2"),
        ("batchnorm_statistics.py", "BatchNorm statistics", ("loss", 0), "Use lockstep.SyncBatchNorm.convert_sync"),
        (
            "buffers_on_one_rank.py",
            "buffers changed on one rank",
            ("loss", 0),
            "Change buffers and parameters in the same way",
        ),
        ("valid_mean.py", "sample weighting", ("loss", 2), "Return lockstep.Loss(total, count)"),
        ("regulariser_by_batch.py", "a regulariser scaled by the local batch", ("loss", 0), "Scale such a term by a"),
        ("plain_attribute.py", "state in a plain attribute", ("loss", 0), "Keep what forward remembers"),
        ("parameter_in_forward.py", "parameters changed in forward", ("loss", 0), "Keep what forward computes"),
        ("scientific.py", "random state", ("loss", 0), "Train with --reproducible 2"),
        # Also among the faults of several.py.
        *soak(
            [
                ("data_order.py", "data order", ("sample", 0), "Make the data set the same on every rank"),
                ("learning_rate_rule.py", "learning-rate rule", ("learning rate", 0), "Let the learning rate depend"),
                ("loss_sums.py", "a loss that sums instead of averages", ("loss", 0), "Return the mean over the batch"),
            ]
        ),
    ],
)
def test_a_planted_fault_is_named(verified, file, cause, first, advice):
    verification, _ = verified(file)
    assert not verification.same
    assert causes(verification) == [cause]
    assert verification.explained
    assert verification.repeatable
    assert (verification.comparison.first.kind, verification.comparison.first.step) == first
    assert verification.findings[0].fix.startswith(advice)
    assert verification.setup.precision == "float64"


def test_a_sum_in_no_fixed_order_is_named_though_it_is_rounding_only(ranks):
    verification, _ = verify_on(ranks, FAULTS / "not_deterministic.py", num_steps=6)
    assert not verification.same
    assert not verification.repeatable
    assert causes(verification) == ["non-deterministic operator"]
    assert max(verification.comparison.worst.values()) < 1e-12


def test_five_faults_at_once_are_all_found_though_a_rank_cannot_train_on_the_last_batch(ranks):
    verification, reported = verify_on(ranks, FAULTS / "several.py", global_batch_size=6)
    assert causes(verification) == [
        "data order",
        "learning-rate rule",
        "random state",
        "BatchNorm statistics",
        "a loss that sums instead of averages",
    ]
    assert verification.explained
    fixes = {finding.cause: finding.fix for finding in verification.findings}
    assert fixes["data order"].startswith("Make the data set the same on every rank")
    assert fixes["learning-rate rule"].startswith("Let the learning rate depend")
    assert fixes["a loss that sums instead of averages"].startswith("Return the mean over the batch")
    assert reported[:6] == [
        "one process, twice",
        "2 ranks",
        "the ranks cannot train on the epoch's last batch; without it",
        "one process, twice",
        "2 ranks",
        "experiment 1 of at most 24: one process, random state, BatchNorm statistics turned off",
    ]
    assert check_counts(reported) == 24  # none are left out if all kinds of causes are found
    assert verification.setup.steps == (0, 1, 2)
    assert verification.remark == (
        "Without the epoch's last batch, on which the ranks fail (A batch of 3 samples leaves this rank one in step "
        "8, on which batch norm cannot train: Expected more than 1 value per channel when training, got input size "
        "torch.Size([1, 16])): consider Task.drop_last."
    )


@pytest.mark.parametrize("task", ["sound.py", "sound.py:gpt", "batchnorm_statistics.py:synchronised"])
def test_a_sound_task_is_the_same_run(verified, task):
    verification, reported = verified(task)
    assert verification.same
    assert verification.findings == ()
    worst = verification.comparison.worst
    assert worst["loss"] < 1e-12
    assert worst["gradient"] < 1e-12
    assert worst["parameter"] < 1e-9  # Adam makes steps of the rounding in gradients that should be zero
    assert all(worst[kind] == 0 for kind in ("size", "initial parameter", "initial buffer", "sample", "learning rate"))
    assert reported == ["one process, twice", "2 ranks"]


def test_a_global_batch_that_does_not_divide_by_the_ranks_is_the_same_run(ranks):
    verification, _ = verify_on(ranks, FAULTS / "sound.py", num_steps=2, global_batch_size=7)  # 4 + 3
    assert verification.same
    assert verification.comparison.worst["gradient"] < 1e-12


def test_the_last_batch_of_the_epoch_is_among_the_steps(verified):
    verification, _ = verified("sound.py")
    assert verification.setup.steps == (0, 1, 5)  # 45 samples by 8


def test_dropout_and_batch_norm_are_the_same_bits_in_reproducible_mode(ranks):
    for file in ("random_state.py", "batchnorm_statistics.py"):
        verification, _ = verify_on(ranks, FAULTS / file, reproducible=2)
        assert verification.same
        assert set(verification.comparison.worst.values()) == {0.0}


def test_the_evidence_names_the_step_that_differs_the_parameter_and_the_draw(verified):
    evidence = {
        file: verified(file)[0].findings[0].evidence
        for file in ("valid_mean.py", "parameter_in_forward.py", "scientific.py")
    }
    assert evidence == {
        "valid_mean.py": "At step 2 the parts of the batch (1 + 1 samples) count 0.5 : 0.5; the whole needs 1 : 0.",
        "parameter_in_forward.py": (
            "Forward changes the parameter centre by the part of the batch that a rank has, so each rank has another."
        ),
        "scientific.py": (
            "Forward draws random numbers (numpy.random.standard_normal), and each part of the batch gets others than "
            "the whole."
        ),
    }


def test_weights_are_named_as_they_were_measured(verified):
    verification, _ = verified("sample_weighting.py")
    evidence = verification.findings[0].evidence
    assert evidence.startswith("At step 0 the parts of the batch (4 + 4 samples) count 0.5 : 0.5; the whole needs 0.")
    wanted = [float(number) for number in evidence.rstrip(".").rpartition("needs ")[2].split(" : ")]
    assert sum(wanted) == pytest.approx(1, abs=2e-3)
    assert wanted[0] != 0.5
