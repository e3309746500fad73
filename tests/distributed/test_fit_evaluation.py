"""Evaluation counts every sample exactly once, on any number of ranks."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.comm import fully_shard
from lockstep.errors import ConfigurationError
from lockstep.train.evaluate import Evaluator, Inference
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.training import make_task, samples, token_loss

NUM_EVAL = 7


def numbered(size):
    """Return samples whose number tells which were counted: each weighs twice as much as all before it."""
    inputs, targets, lengths = samples().tensors
    return TensorDataset(inputs[:size], targets[:size], lengths[:size], 2 ** torch.arange(size))


def loss(model, batch):
    """Return the mean over the samples."""
    return (model(batch[0]) - batch[1]).square().mean()


def metrics(model, batch):
    """Return one value for each sample, and a sum over outputs."""
    return {"number": batch[3], "tokens": token_loss(model, batch[:3])}


def evaluate(world, strategy="ddp", size=NUM_EVAL, **changes):
    fields = {"loss": loss, "metrics": metrics, "eval_dataset": lambda: numbered(size), **changes}
    task = make_task(**fields)
    devices = [torch.device("cpu")] * (2 if strategy == "dp" else 1)
    loop = Trainer(task, Settings(), world, strategy=strategy, devices=devices)
    return Evaluator(task, partial(Inference.of, loop), task.eval_dataset()).run()


def expected(size=NUM_EVAL):
    """Return what one pass over all samples at once gives."""
    loop = Trainer(make_task(), Settings(), None, strategy="single", devices=[torch.device("cpu")])
    batch = numbered(size).tensors
    tokens = token_loss(loop.model, batch[:3])
    return {
        "loss": loss(loop.model, batch).item(),
        "number": (2**size - 1) / size,
        "tokens": (tokens.total / tokens.count).item(),
    }


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_sample_counts_once(ranks, num_ranks):
    for size in (NUM_EVAL, 2):  # of 2 samples, some ranks have none
        results = ranks(num_ranks)(evaluate, "ddp", size)
        assert all(result == results[0] for result in results)
        assert list(results[0]) == ["loss", "number", "tokens"]
        assert results[0] == pytest.approx(expected(size), rel=1e-12)
        assert results[0]["number"] == expected(size)["number"]


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_in_one_process_too(strategy):
    assert evaluate(None, strategy) == pytest.approx(expected(), rel=1e-12)


def test_all_ranks_evaluate_with_the_batch_statistics_of_rank_zero_in_evaluation_mode(ranks):
    def run(world):
        task = make_task(
            model=lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)).double(),
            loss=loss,
            eval_dataset=lambda: numbered(NUM_EVAL),
        )
        loop = Trainer(task, Settings(sync_batchnorm=False), world, strategy="ddp", devices=[world.device])
        for _ in range(2):
            loop.step()
        before = loop.model[0].running_mean.clone()
        found = Evaluator(task, partial(Inference.of, loop), task.eval_dataset()).run()["loss"]
        assert loop.model.training
        alone = loop.model.eval()
        with torch.no_grad():
            return found, loss(alone, numbered(NUM_EVAL).tensors).item(), before

    (zero, zero_alone, zero_mean), (one, one_alone, one_mean) = ranks(2)(run)
    assert not torch.equal(zero_mean, one_mean)
    assert zero == one == pytest.approx(zero_alone, rel=1e-12)
    assert one_alone == zero_alone


class Merging(nn.Linear):
    """A layer that merges weights for evaluation, and takes them apart for training, as LoRA's do."""

    is_merged = False

    def train(self, mode=True):
        self.is_merged = not mode
        return super().train(mode)


def frozen_network():
    frozen = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5)).double().requires_grad_(False).eval()
    return nn.Sequential(frozen, nn.Dropout(0.5), Merging(6, 4).double())


def test_every_module_keeps_the_mode_that_the_task_has_set():
    for strategy in ("single", "dp"):
        check_modes(None, strategy)


def test_every_module_keeps_its_mode_on_several_ranks_too(ranks):
    ranks(2)(lambda world: [check_modes(world, name) for name in ("ddp", "ddp-zero1", "fsdp", "local-sgd")])


def check_modes(world, strategy):
    fails = [False]

    def measure(model, batch):
        assert not any(module.training for module in model.modules())
        model.train()  # a metric may leave another mode
        model[0](batch[0])
        model.eval()
        model[0].train()
        assert not fails[0], "on purpose"
        model[0].eval()
        return {"number": batch[3]}

    task = make_task(model=frozen_network, loss=loss, metrics=measure, eval_dataset=lambda: numbered(NUM_EVAL))
    devices = [torch.device("cpu")] * (2 if strategy == "dp" else 1)
    loop = Trainer(task, Settings(), world, strategy=strategy, devices=devices)
    built, mean = loop._model, frozen_network()[0][0].running_mean
    evaluator = Evaluator(task, partial(Inference.of, loop), task.eval_dataset())
    for fails[0] in (False, True, False):
        loop.step()
        modes = [module.training for module in built.modules()]
        assert modes == [True, False, False, False, True, True]
        assert fully_shard.whole(dict(built.named_buffers())["0.0.running_mean"]).equal(mean)
        with pytest.raises(AssertionError, match="on purpose") if fails[0] else contextlib.nullcontext():
            evaluator.run()
        assert [module.training for module in built.modules()] == modes
        assert not built[2].is_merged


def test_a_model_in_evaluation_mode_is_trained_in_it_with_a_warning():
    task = make_task(model=lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4)).double().eval())
    with pytest.warns(UserWarning, match=r"^All modules of the model are in evaluation mode, as from_pretrained\(\)"):
        loop = Trainer(task, Settings(), None, strategy="single", devices=[torch.device("cpu")])
    loop.step()
    assert not loop.model.training
    assert loop.model[0].num_batches_tracked == 0


def test_a_metric_of_another_shape_is_refused():
    with pytest.raises(ConfigurationError) as error:
        evaluate(None, "single", metrics=lambda model, batch: {"accuracy": torch.ones(())})
    assert str(error.value) == (
        "The metric 'accuracy' of a batch of 7 samples is a shape ().\n"
        "Return a tensor of shape (7,), one value for each sample, a Loss(total, count), or a metric of torchmetrics "
        "that was updated."
    )


def test_fit_evaluates_when_asked_each_epoch_otherwise_and_always_at_the_end(ranks):
    def run(world, **settings):
        task = make_task(
            loss=loss, metrics=metrics, eval_dataset=lambda: numbered(NUM_EVAL), dataset=lambda: numbered(50)
        )
        result = lockstep.fit(task, strategy="ddp", quiet=True, **settings)
        assert result.metrics == result.evaluations[-1].metrics
        assert result.best.metrics["loss"] == min(found.metrics["loss"] for found in result.evaluations)
        return [evaluation.step for evaluation in result.evaluations]

    def both(world):
        return run(world, epochs=2), run(world, steps=5), run(world, steps=5, eval_every=2)

    assert ranks(2)(both)[0] == ([3, 6], [3, 5], [2, 4, 5])
