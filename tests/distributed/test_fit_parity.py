"""The gradient of every step equals that of one process on the whole global batch, however unevenly it is divided."""

import pytest
import torch

from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.training import make_task, mean_loss, relative_error, token_loss, train, whole_batch

# 50 samples in global batches of 24: the third holds 2, so that of 3 and 4 ranks some have none.
NUM_STEPS = 6


def check(found, expected):
    assert found["counts"] == expected["counts"] == [24, 24, 2, 24, 24, 2]
    for step in range(NUM_STEPS):
        assert relative_error(found["grads"][step], expected["grads"][step]) < 1e-12
        assert found["losses"][step] == pytest.approx(expected["losses"][step], rel=1e-12)
    assert relative_error(found["weights"], expected["weights"]) < 1e-12


MORE = {"accumulate": 2, "clip": 0.3}


@pytest.mark.parametrize(
    ("num_ranks", "settings", "loss"),
    [(1, {}, mean_loss), (2, {}, token_loss), (3, MORE, mean_loss), (4, MORE, token_loss)],
)
def test_gradients_are_those_of_the_whole_batch(ranks, num_ranks, settings, loss):
    task = make_task(loss=loss)
    expected = whole_batch(task, NUM_STEPS, **settings)

    def both(world):
        return [train(world, task, strategy, NUM_STEPS, **settings) for strategy in ("ddp", "torch-ddp")]

    results = ranks(num_ranks)(both)
    for ours, torchs in results:
        check(ours, expected)
        check(torchs, expected)
        assert torch.equal(ours["weights"], results[0][0]["weights"])
        assert torch.equal(torchs["weights"], results[0][1]["weights"])


@pytest.mark.parametrize("accumulate", [2])
def test_ranks_without_samples_keep_up_with_the_exchange_of_buffers(ranks, accumulate):
    """Batch norm cannot train on the single samples of the third step, so it is in evaluation mode there."""

    def network_with_buffers():
        norm = torch.nn.BatchNorm1d(6, dtype=torch.float64)
        return torch.nn.Sequential(norm, torch.nn.Linear(6, 4, dtype=torch.float64))

    def loss(model, batch):
        model[0].train(len(batch[0]) > 1)
        return mean_loss(model, batch)

    task = make_task(model=network_with_buffers, loss=loss)

    def run(world):
        devices = [world.device]
        means = []
        for strategy in ("ddp", "torch-ddp"):
            settings = Settings(accumulate=accumulate, sync_batchnorm=False)
            loop = Trainer(task, settings, world, strategy=strategy, devices=devices)
            for _ in range(4):
                loop.step()
            means.append((loop.model[0].running_mean.clone(), loop.model[0].num_batches_tracked.item()))
        return means

    results = ranks(4)(run)
    for ours, torchs in results:
        assert relative_error(ours[0], torchs[0]) < 1e-12
        assert ours[1] == torchs[1] > 0


@pytest.mark.parametrize(("settings", "loss"), [({}, mean_loss), (MORE, token_loss)])
@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_one_process_does_too(strategy, settings, loss):
    task = make_task(loss=loss)
    check(train(None, task, strategy, NUM_STEPS, **settings), whole_batch(task, NUM_STEPS, **settings))
