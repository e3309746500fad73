"""A run that was stopped and resumed ends in the same bits as one that was not."""

import os
import socket
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep
from lockstep.checkpoints import checkpoint
from lockstep.checkpoints.checkpoint import Checkpoints
from lockstep.checkpoints.checkpoint_storage import read_manifest
from lockstep.errors import CheckpointError, ConfigurationError
from tests.object_store import folder_store
from tests.training import make_task, mean_loss, read_state, samples

NUM_STEPS = 11


class Augmented(Dataset):
    """24 samples with noise that is drawn when they are loaded."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 6, 6, generator=generator) + torch.randn(3, 6, 6), index % 4


def network():
    """Return a network with every kind of state: batch norm, dropout, parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4 * 16, 4)
    )


def loss(model, batch):
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


TASK = make_task(
    model=network,
    dataset=Augmented,
    eval_dataset=Augmented,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    global_batch_size=10,  # so that the third of each epoch holds 4
)


def fit(world, strategy, folder, steps, **settings):
    """Train, and return the result, the weights and buffers, and what the last checkpoint holds."""
    kept = {}
    how = {"schedule": "cosine", "warmup": 2, "clip": 1.0, "precision": "fp16"}
    task = make_task(**{**vars(TASK), "after": lambda model: kept.update(model.state_dict())})
    result = lockstep.fit(
        task,
        strategy=strategy,
        steps=steps,
        checkpoint=folder,
        checkpoint_every=4,
        eval_every=5,
        quiet=True,
        **{**how, **settings},
    )
    return result, kept, read_state(result.checkpoint)


def interrupted(world, strategy, folder, monkeypatch_after):
    """Train for NUM_STEPS with a break after step 6; the last checkpoint before it is that of step 4."""

    class Break(Exception):
        """Stands for a kill."""

    from lockstep.train.run import Run

    step, calls = Run.step, []

    def break_after(run):
        if len(calls) == monkeypatch_after:
            raise Break
        calls.append(run)
        step(run)

    Run.step = break_after
    try:
        fit(world, strategy, folder, NUM_STEPS)
    except Break:
        pass
    finally:
        Run.step = step
    return fit(world, strategy, folder, NUM_STEPS)


def assert_same_run(resumed, whole):
    (result, kept, state), (whole_result, whole_kept, whole_state) = resumed, whole
    assert (whole_result.first_step, result.first_step) == (0, 4)
    assert result.num_steps == whole_result.num_steps == NUM_STEPS
    assert result.losses == whole_result.losses[4:]
    assert [evaluation.step for evaluation in result.evaluations] == [5, 10, 11]
    assert result.evaluations == whole_result.evaluations
    assert result.best == whole_result.best
    assert same(kept, whole_kept)
    assert same(state, whole_state)


def same(ours, theirs):
    """Return whether two nested states hold the same bits."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


@pytest.mark.parametrize(
    ("strategy", "in_store"),
    [("ddp", False), ("ddp-zero1", True), pytest.param("torch-ddp", False, marks=pytest.mark.soak)],
)
def test_a_resumed_run_ends_in_the_same_bits(ranks, tmp_path, strategy, in_store):
    def both(world):
        whole = fit(world, strategy, tmp_path / "whole", NUM_STEPS)
        broken = folder_store(tmp_path / "broken") if in_store else tmp_path / "broken"
        return interrupted(world, strategy, broken, 6), whole

    results = ranks(2)(both)
    assert_same_run(*results[0])
    for resumed, whole in results:
        assert (resumed[0].losses, resumed[0].evaluations) == (whole[0].losses[4:], whole[0].evaluations)
        assert same(resumed[2], results[0][0][2])
    assert results[1][0][1] == {}, "only rank zero hands the model over"


def test_so_does_one_of_a_single_process_with_loader_processes(tmp_path):
    whole = fit(None, "single", tmp_path / "whole", NUM_STEPS)
    assert_same_run(interrupted(None, "single", tmp_path / "broken", 6), whole)
    again, _, state = fit(None, "single", tmp_path / "whole", NUM_STEPS, workers=1)
    assert (again.first_step, again.losses) == (NUM_STEPS, [])
    assert same(state, whole[2])
    longer, *_ = fit(None, "single", tmp_path / "whole", NUM_STEPS + 3, workers=1)
    assert (longer.first_step, longer.num_steps, len(longer.losses)) == (NUM_STEPS, NUM_STEPS + 3, 3)


@pytest.mark.parametrize(
    ("strategies", "in_store"), [(("ddp", "ddp", "ddp"), False), (("fsdp", "ddp-zero1", "fsdp"), True)]
)
def test_a_run_can_be_resumed_on_another_number_of_devices(ranks, tmp_path, strategies, in_store):
    # Without dropout and batch norm, which see a device's part of the batch only.
    task = make_task(drop_last=True)

    def plain(world, strategy, steps):
        place = folder_store(tmp_path) if in_store else tmp_path
        result = lockstep.fit(task, strategy=strategy, steps=steps, checkpoint=place, checkpoint_every=3, quiet=True)
        return result.losses, result.checkpoint

    whole = lockstep.fit(task, strategy="single", steps=9, quiet=True).losses
    losses = []
    for strategy, num_ranks, steps in zip(strategies, (2, 3, 1), (4, 7, 9), strict=True):
        found, newest = ranks(num_ranks)(plain, strategy, steps)[0]
        losses += found
        name = f"step-{steps:010d}"
        assert newest == (f"objects://{tmp_path}/{name}" if in_store else tmp_path / name)
    assert losses == pytest.approx(whole, rel=1e-12)


def test_a_resumed_run_says_what_its_plan_has_changed(tmp_path, capfd):
    def lines(rate=0.1, **settings):
        task = make_task(optimizer=lambda params: torch.optim.SGD(params, lr=rate))
        lockstep.fit(task, strategy="single", checkpoint=tmp_path, view="none", **settings)
        return [line for line in capfd.readouterr().out.splitlines() if line.startswith(("resumed", "nothing"))]

    assert lines(steps=2) == []
    assert lines(steps=2) == [
        "nothing left to do: all 2 steps are done; --epochs N or --steps N for more, or --no-resume for a new run"
    ]
    assert lines(steps=3, schedule="cosine", warmup=1) == [
        "resumed after step 2 of 3; changed: steps from 2 to 3, schedule from constant to cosine, warmup from 0 to 1"
    ]
    assert lines(0.025, steps=4, schedule="cosine", warmup=1) == [
        "resumed after step 3 of 4; changed: steps from 3 to 4, learning rate from 0.1 to 0.025"
    ]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    def fit_plain(**settings):
        return lockstep.fit(
            make_task(), strategy="single", **{"steps": 2, "checkpoint": tmp_path, "quiet": True, **settings}
        )

    fit_plain()
    for settings, text in (
        ({"seed": 1}, "The checkpoint is of a run with seed 0, this one has 1."),
        ({"global_batch_size": 48}, "The checkpoint is of a run with global batch 24, this one has 48."),
    ):
        with pytest.raises(ConfigurationError) as error:
            fit_plain(**settings)
        assert str(error.value) == (
            f"{text}\nResume with the same settings, or start a new run with resume=False (--no-resume)."
        )
    other = make_task(model=lambda: nn.Linear(6, 4, dtype=torch.float64))
    with pytest.raises(ConfigurationError, match="The checkpoint does not fit the task's model or optimizer: "):
        lockstep.fit(other, strategy="single", steps=2, checkpoint=tmp_path, quiet=True)
    assert fit_plain(seed=1, resume=False).first_step == 0
    assert fit_plain(seed=1, resume=True, steps=3).first_step == 2


@pytest.mark.parametrize(("strategy", "failing"), [("ddp", 0), ("ddp-zero1", 1)])
def test_a_write_that_fails_ends_the_run_on_all_ranks_and_leaves_the_one_before(ranks, tmp_path, strategy, failing):
    def run(world):
        fsync, calls = os.fsync, []

        def full(descriptor):
            if world.rank == failing and "step-0000000004" in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(28, "No space left on device")
            return fsync(descriptor)

        def loss(model, batch):
            calls.append(None)
            return mean_loss(model, batch)

        task = make_task(loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
        with patch("os.fsync", full), pytest.raises(CheckpointError) as caught:
            lockstep.fit(task, strategy=strategy, checkpoint=tmp_path, checkpoint_every=2, steps=50, quiet=True)
        return str(caught.value), len(calls)

    newest = tmp_path / "step-0000000004"
    text = f"Cannot write the checkpoint {newest}: No space left on device.\nEarlier checkpoints were not changed."
    outcomes = ranks(2)(run)
    found = [outcome[0].partition(" It needs ")[0] for outcome in outcomes]
    assert found == [f"Rank {failing}: {text}" if failing else text] * 2
    assert all(4 < outcome[1] < 50 for outcome in outcomes), "at one of the next steps, not at the end"
    again = lockstep.fit(
        make_task(optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        strategy="single",
        checkpoint=tmp_path,
        steps=3,
        quiet=True,
    )
    assert again.first_step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "step-0000000002", "step-0000000003"]


def test_folders_that_are_not_shared_are_noticed(ranks, tmp_path):
    def run(world, folder, patience_s):
        before, checkpoint.SHARED_TIMEOUT_S = checkpoint.SHARED_TIMEOUT_S, patience_s
        name = folder if world.is_rank_zero else folder.with_name(f"{folder.name}-elsewhere")
        try:
            Checkpoints(name, world).close()
        except ConfigurationError as error:
            return str(error)
        finally:
            checkpoint.SHARED_TIMEOUT_S = before

    host = socket.gethostname()
    assert ranks(2)(run, tmp_path / "run", 0.1) == [
        f"Rank 1 on {host} does not see the folder {tmp_path / 'run'} of rank 0 on {host}.\n"
        "Every rank reads checkpoints: name a folder on a drive that all machines share.",
        f"Rank 1 on {host} does not see the folder {tmp_path / 'run-elsewhere'} of rank 0 on {host}.\n"
        "Every rank reads checkpoints: name a folder on a drive that all machines share.",
    ]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


def test_a_rank_that_reads_a_stale_copy_is_refused(ranks, tmp_path):
    def run(world):
        def stale(folder):
            manifest = read_manifest(folder)
            return manifest if world.is_rank_zero else replace(manifest, digest="of another save")

        with Checkpoints(tmp_path, world) as checkpoints:
            checkpoints.save({"model": {"weight": torch.zeros(2)}}, step=1)
            checkpoints.finish()
        with (
            Checkpoints(tmp_path, world) as checkpoints,
            patch.object(checkpoint.storage, "read_manifest", stale),
            pytest.raises(CheckpointError) as caught,
        ):
            checkpoints.load(required=True)
        return str(caught.value)

    host, path = socket.gethostname(), tmp_path / "step-0000000001"
    why = f"\n{path.name}: Rank 1 on {host} reads another checkpoint {path} than rank 0 on {host}\n"
    assert all(why in message for message in ranks(2)(run))


def test_a_newest_one_that_is_damaged_is_passed_over_in_so_many_words(ranks, tmp_path, capfd):
    def run(world, steps):
        how = {"checkpoint": tmp_path, "checkpoint_every": 2, "steps": steps}
        return lockstep.fit(make_task(), **how).first_step

    assert ranks(2)(run, 4) == [0, 0]
    file = next((tmp_path / "step-0000000004").glob("shard-*"))
    file.write_bytes(file.read_bytes()[:-8])
    capfd.readouterr()
    result = lockstep.fit(make_task(), strategy="single", checkpoint=tmp_path, steps=5)
    assert result.first_step == 2
    size = file.stat().st_size if file.exists() else None
    out = capfd.readouterr().out
    assert "\nresumed after step 2 of 5; changed: steps from 4 to 5\n" in out
    assert f"\npassed over the checkpoint step-0000000004: {file.name} has " in out
    assert size is None, "it is replaced by one of the same step"


def test_the_best_is_saved_and_kept(tmp_path):
    task = make_task(eval_dataset=samples)
    result = lockstep.fit(
        task, strategy="single", checkpoint=tmp_path, checkpoint_every=5, eval_every=2, steps=6, keep=1, quiet=True
    )
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-0000000006"]
    found = [each.metrics["loss"] for each in result.evaluations]
    other = tmp_path / "best"
    lockstep.fit(
        task,
        strategy="single",
        checkpoint=other,
        checkpoint_every=5,
        eval_every=2,
        steps=6,
        keep=1,
        keep_best=True,
        quiet=True,
    )
    best = 2 * (1 + found.index(min(found)))
    assert sorted(path.name for path in other.glob("step-*")) == sorted({f"step-{best:010d}", "step-0000000006"})
