"""Metrics of torchmetrics, streams for evaluation, `evaluate` and `predict`: each sample counts once, on any ranks."""

import os
import random

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassConfusionMatrix

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.train.evaluate import Evaluator
from tests.distributed.commands import lockstep as run_lockstep
from tests.training import make_task

NUM_CLASSES = 3


def data(size):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs[:size], torch.randint(NUM_CLASSES, (40,), generator=generator)[:size])


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, NUM_CLASSES)).double()


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


METRICS = {
    "accuracy": MulticlassAccuracy(NUM_CLASSES, average="micro"),
    "macro": MulticlassAccuracy(NUM_CLASSES, average="macro"),
    "auroc": BinaryAUROC(),
    "pearson": torchmetrics.PearsonCorrCoef(),
    "mean": torchmetrics.MeanMetric(),
    "worst": torchmetrics.MaxMetric(),
}
COLLECTION = torchmetrics.MetricCollection({"mse": torchmetrics.MeanSquaredError(), "r2": torchmetrics.R2Score()})


def update(scores, labels):
    for name in ("accuracy", "macro"):
        METRICS[name].update(scores, labels)
    METRICS["auroc"].update(scores.softmax(1)[:, 0], labels == 0)
    METRICS["pearson"].update(scores[:, 1], labels.double())
    METRICS["mean"].update(scores[:, 2])
    METRICS["worst"].update(scores[:, 2])
    COLLECTION.update(scores[:, 1], labels.double())


def metrics(model, batch):
    update(model(batch[0]), batch[1])
    return {**METRICS, "both": COLLECTION}


def task_of(size, **changes):
    fields = {
        "model": network,
        "dataset": lambda: data(24),
        "eval_dataset": lambda: data(size),
        "loss": loss,
        "metrics": metrics,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "global_batch_size": 8,
    }
    return make_task(**{**fields, **changes})


def at_once(model, size):
    """Return what torchmetrics computes from all samples in one update."""
    model.eval()
    with torch.no_grad():
        inputs, labels = data(size).tensors
        scores = model(inputs)
        update(scores, labels)
        found = {name: float(metric.compute()) for name, metric in METRICS.items()}
        found |= {name: float(value) for name, value in COLLECTION.compute().items()}
        found["loss"] = float(F.cross_entropy(scores, labels))
    for metric in (*METRICS.values(), COLLECTION):
        metric.reset()
    return found


@pytest.mark.parametrize(("num_ranks", "size"), [(1, 31), (2, 31), (3, 10)])
def test_metrics_of_torchmetrics_are_those_of_all_samples(ranks, num_ranks, size):
    def run(world):
        result = lockstep.fit(task_of(size), steps=4, eval_every=2, quiet=True)
        return result.metrics, result.evaluations[0].metrics, at_once(result.model, size)

    for last, first, expected in ranks(num_ranks, warnings="ignore")(run):
        assert last == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert first != last


def test_they_have_the_same_bits_on_any_number_of_devices_if_reproducible(ranks):
    def run(world):
        return [each.metrics for each in lockstep.fit(task_of(31), epochs=2, reproducible=4, quiet=True).evaluations]

    expected = ranks(1, warnings="ignore")(run)[0]
    assert len(expected[0]) == 9
    for found in ranks(2, warnings="ignore")(run):
        assert found == expected


def test_a_rank_without_samples_knows_the_metrics(ranks):
    def run(world):
        result = lockstep.fit(task_of(3, metrics=accuracy_alone), steps=2, quiet=True)
        return result.metrics, at_once(result.model, 3)

    for found, expected in ranks(4, warnings="ignore")(run):
        assert found == pytest.approx({name: expected[name] for name in ("loss", "accuracy")}, rel=1e-6)


def right(model, batch):
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double()}


def accuracy_alone(model, batch):
    METRICS["accuracy"].update(model(batch[0]), batch[1])
    return {"accuracy": METRICS["accuracy"]}


def confusion(model, batch):
    metric = MulticlassConfusionMatrix(NUM_CLASSES)
    metric.update(model(batch[0]), batch[1])
    return {"confusion": metric}


def wrapped(model, batch):
    metric = torchmetrics.MinMaxMetric(METRICS["accuracy"])
    metric.update(model(batch[0]), batch[1])
    return {"range": metric}


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (
            confusion,
            "The metric 'confusion' is a MulticlassConfusionMatrix with more than one number.\n"
            'Choose a mean, such as average="macro", or return one metric for each number.',
        ),
        (
            wrapped,
            "The metric 'range' is a MinMaxMetric, which keeps its states in other metrics.\nReturn these by name.",
        ),
        (
            lambda model, batch: {"mean": model(batch[0]).mean()},
            "The metric 'mean' of a batch of 8 samples is a shape ().\n"
            "Return a tensor of shape (8,), one value for each sample, a Loss(total, count), or a metric of "
            "torchmetrics that was updated.",
        ),
    ],
)
def test_what_is_no_metric_is_found_before_the_first_step(metrics, text):
    steps = []

    def counted(model, batch):
        steps.append(model.training)
        return loss(model, batch)

    with pytest.raises(ConfigurationError) as error:
        lockstep.fit(task_of(31, metrics=metrics, loss=counted), steps=4, quiet=True)
    assert str(error.value) == text
    assert not any(steps), "nothing was trained"


@pytest.mark.parametrize(
    "wanted",
    [
        {"keep_best": "acuracy:max", "checkpoint": "run"},
        {"early_stopping": "acuracy:max"},
        {"callbacks": [lockstep.EarlyStopping("acuracy:max")]},
    ],
)
def test_a_metric_that_there_is_not_is_found_before_the_first_step(wanted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as error:
        lockstep.fit(task_of(31, metrics=accuracy_alone), steps=4, quiet=True, **wanted)
    assert str(error.value) == "The evaluation has no metric 'acuracy'.\nName one of those it has: accuracy, loss."


def test_without_a_best_evaluation_the_last_weights_are_named(tmp_path, capsys):
    def never(model, batch):
        return {"never": torch.full((len(batch[0]),), float("nan"))}

    how = {"steps": 4, "eval_every": 2, "load_best": True, "checkpoint": tmp_path, "view": "lines"}
    result = lockstep.fit(task_of(31, metrics=never), keep_best="never", **how)
    assert "never was never a number: the weights are those of the last step\n" in capsys.readouterr().out
    assert lockstep.evaluate(task_of(31), model=result.model)["loss"] == pytest.approx(result.metrics["loss"])


def test_the_trial_changes_nothing_of_the_run():
    def weights(**changes):
        model = lockstep.fit(task_of(31, model=dropping, metrics=None, **changes), steps=4, quiet=True).model
        return model.state_dict()

    def dropping():
        return nn.Sequential(nn.Dropout(0.3), network())

    tried, not_tried = weights(), weights(eval_dataset=None)
    assert all(torch.equal(value, not_tried[name]) for name, value in tried.items())


def test_the_trial_leaves_the_random_state(monkeypatch):
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    def watched(self):
        before = states()
        try_out(self)
        kept.append(states() == before)

    kept, try_out = [], Evaluator.try_out
    monkeypatch.setattr(Evaluator, "try_out", watched)
    lockstep.fit(task_of(31, metrics=None), steps=1, quiet=True)
    assert kept == [True]


class OwnMean(torchmetrics.Metric):
    """A state that torchmetrics averages over processes: it is a mean over the samples of each."""

    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values):
        total = self.mean * self.count + values.sum()
        self.count = self.count + len(values)
        self.mean = total / self.count

    def compute(self):
        return self.mean


@pytest.mark.parametrize("reproducible", [None, 4])
def test_a_mean_over_parts_is_weighted_by_their_samples(ranks, reproducible):
    def run(world):
        own, usual = OwnMean(), torchmetrics.MeanMetric()

        def measure(model, batch):
            for metric in (own, usual):
                metric.update(batch[0][:, 0])
            return {"own": own, "usual": usual}

        return lockstep.fit(task_of(10, metrics=measure), steps=1, reproducible=reproducible, quiet=True).metrics

    expected = data(10).tensors[0][:, 0].mean().item()
    for found in ranks(3, warnings="ignore")(run):
        assert found["own"] == pytest.approx(expected, rel=1e-5)
        assert found["usual"] == pytest.approx(expected, rel=1e-5)


def test_a_metric_that_needs_more_samples_than_a_batch_is_taken():
    r2 = torchmetrics.R2Score()

    def measure(model, batch):
        r2.update(model(batch[0])[:, 0], batch[1].double())
        return {"r2": r2}

    task = task_of(10, metrics=measure, model=lambda: nn.Linear(6, NUM_CLASSES, dtype=torch.float64))
    result = lockstep.fit(task, steps=1, global_batch_size=1, quiet=True)
    assert list(result.metrics) == ["loss", "r2"]


class Elsewhere(torchmetrics.SumMetric):
    """A metric that seems to be on another device until it is moved."""

    place = "meta"

    @property
    def device(self):
        return torch.device(self.place)

    def to(self, device):
        self.place = device.type
        return self

    def update(self, values):
        if self.place != "cpu":
            raise RuntimeError("Expected all tensors to be on the same device")
        super().update(values)


@pytest.mark.parametrize("tries", [True, False])  # a rank that takes the place of a lost one tries it out later
def test_metrics_move_to_the_device(monkeypatch, tries):
    here, there, others = torchmetrics.SumMetric(), Elsewhere(), torchmetrics.MetricCollection([Elsewhere()])

    def measure(model, batch):
        for metric in (here, there, others):
            metric.update(torch.ones(len(batch[0])))
        return {"here": here, "there": there, "others": others}

    if not tries:
        try_out = Evaluator.try_out
        monkeypatch.setattr(Evaluator, "try_out", lambda self: try_out(self) if is_running else None)
    is_running, run = [], Evaluator.run
    monkeypatch.setattr(Evaluator, "run", lambda self: is_running.append(1) or run(self))
    metrics = lockstep.fit(task_of(31, metrics=measure), steps=1, quiet=True).metrics
    assert (metrics["here"], metrics["there"], metrics["Elsewhere"]) == (31, 31, 31)


def test_an_error_of_the_metrics_is_raised():
    def fail(model, batch):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match=r"^on purpose$"):
        lockstep.fit(task_of(31, metrics=fail), steps=1, quiet=True)


class Stream(IterableDataset):
    """A stream that would skip samples in loader processes, as many do."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        yield from list(data(self.size))[info.id if info else 0 :: info.num_workers if info else 1]


@pytest.mark.parametrize(("num_ranks", "workers"), [(1, 0), (3, 0), (2, 2)])
def test_a_stream_is_evaluated_once_on_any_number_of_ranks(ranks, num_ranks, workers):
    def run(world):
        task = task_of(31, eval_dataset=lambda: Stream(31), metrics=accuracy_alone)
        result = lockstep.fit(task, steps=4, eval_every=2, workers=workers, quiet=True)
        return result.metrics, len(result.evaluations), at_once(result.model, 31)

    for found, number, expected in ranks(num_ranks, warnings="ignore")(run):
        assert number == 2
        assert found == pytest.approx({name: expected[name] for name in ("loss", "accuracy")}, rel=1e-6)


def test_a_stream_has_the_same_bits_on_any_number_of_devices_if_reproducible(ranks):
    def run(world):
        task = task_of(31, eval_dataset=lambda: Stream(31))
        return [each.metrics for each in lockstep.fit(task, epochs=2, reproducible=4, quiet=True).evaluations]

    expected = ranks(1, warnings="ignore")(run)[0]
    for found in ranks(2, warnings="ignore")(run):
        assert found == expected


class Counting(nn.Linear):
    """A model that depends on how often it was called."""

    def __init__(self):
        super().__init__(6, NUM_CLASSES, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs) * self.calls


def test_buffers_that_an_evaluation_changes_leave_the_bits_of_a_stream_alone(ranks):
    def run(world):
        task = task_of(31, eval_dataset=lambda: Stream(31), model=Counting, metrics=accuracy_alone)
        return lockstep.fit(task, steps=1, reproducible=3, quiet=True).metrics

    (alone,) = ranks(1, warnings="ignore")(run)
    assert ranks(3, warnings="ignore")(run) == [alone] * 3  # each has one of the shards, which take turns on one


def test_ranks_with_different_streams_raise_an_error(ranks):
    def run(world):
        with pytest.raises(ConfigurationError) as error:
            lockstep.fit(task_of(31, eval_dataset=lambda: Stream(30 + world.rank)), steps=1, quiet=True)
        return str(error.value).splitlines()[0]

    text = "Task.eval_dataset gave different samples on rank 1 than on rank 0, in step 0."
    assert ranks(2, warnings="ignore")(run) == [text] * 2


def test_an_empty_stream_is_named():
    with pytest.raises(ConfigurationError) as error:
        lockstep.fit(task_of(31, eval_dataset=lambda: Stream(0)), steps=4, quiet=True)
    assert str(error.value) == (
        "The stream of Task.eval_dataset ended before the first global batch.\nCheck where it reads its samples from."
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_predictions_have_the_order_of_the_data_set(ranks, num_ranks):
    model = network().eval()
    inputs = data(31).tensors[0]

    def run(world, size, **how):
        task = task_of(31)
        plain = lockstep.predict(task, data(size), model=model, workers=how.get("workers", 0))
        both = lockstep.predict(task, data(size), model=model, forward=pair)
        return plain, both, lockstep.evaluate(task, model=model)

    def pair(model, batch):
        scores = model(batch[0])
        return {"class": scores.argmax(1), "scores": [scores]}

    for size in (31, 2):
        expected = model(inputs[:size]).detach()
        for plain, both, evaluated in ranks(num_ranks, warnings="ignore")(run, size):
            assert torch.allclose(plain, expected, rtol=1e-13, atol=1e-15)  # rounded sums of terms of size 1
            assert torch.equal(both["class"], expected.argmax(1)) and torch.equal(both["scores"][0], plain)
            assert evaluated == pytest.approx(at_once(model, 31), rel=1e-6, abs=1e-6)
    assert model.training is False


def test_ranks_are_started_for_a_result(tmp_path):
    folder = tmp_path / "run"
    task = task_of(31, metrics=right)  # not of torchmetrics, which each new rank would import
    result = lockstep.fit(task, devices=2, epochs=2, checkpoint=folder, keep_best="accuracy:max", quiet=True)
    for model, devices in ((result.model, 2), (folder, 2), (result.checkpoint, 1)):
        assert lockstep.evaluate(task, model=model, devices=devices) == pytest.approx(result.metrics, rel=1e-12)
    best = lockstep.evaluate(task, model=folder, best=True)
    assert best == pytest.approx(result.best.metrics, rel=1e-12)
    found = lockstep.predict(task, data(31), model=result.model, devices=2)
    assert torch.allclose(found, result.model.eval()(data(31).tensors[0]).detach(), rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (
            lambda: lockstep.predict(task_of(3), Stream(3), model=network()),
            "predict needs a data set with samples, len() and [], as outputs have its order.\n"
            "Give one, or list(...) of the samples of a stream.",
        ),
        (
            lambda: lockstep.predict(task_of(3), data(3), model=network(), forward=lambda model, batch: batch[0].sum()),
            "An output for 1 samples has the shape ().\n"
            "Return one row for each sample from the model, or give forward=..., which does.",
        ),
        (
            lambda: lockstep.evaluate(task_of(3, eval_dataset=None), model=network()),
            "evaluate needs eval_dataset.\nAdd eval_dataset=... to the task.",
        ),
        (
            lambda: lockstep.evaluate(task_of(3), model="nowhere.safetensors"),
            "nowhere.safetensors does not exist.\nName a file that --export has written.",
        ),
        (
            lambda: lockstep.evaluate(task_of(3), model=lockstep.fit(task_of(3), steps=1, quiet=True)),
            "model is a FitResult, not a module or a path.\nGive the model of the result: model=result.model.",
        ),
        (
            lambda: lockstep.evaluate(task_of(3), model="weights.safetensors", best=True),
            "best needs the folder of a run.\nName one, or omit best (--best).",
        ),
        (
            lambda: lockstep.predict(task_of(3), data(3), model=network(), forward="x"),
            "forward='x' is not a function.\nGive one of (model, batch), or omit it.",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_named(act, text):
    with pytest.raises(ConfigurationError) as error:
        act()
    assert str(error.value) == text


def test_weights_of_another_model_are_named():
    with pytest.raises(ConfigurationError) as error:
        lockstep.evaluate(task_of(3), model=nn.Linear(2, 2))
    first, *_, last = str(error.value).splitlines()
    assert first.startswith("The weights do not fit the model of the task: ")
    assert last == "Give those of a model that Task.model returns."


MINE = """\
from tests.distributed.test_inference import accuracy_alone, task_of
task = task_of(31, metrics=accuracy_alone)
"""


@pytest.mark.timeout(120)
def test_the_command_prints_the_metrics(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    folder, mine = tmp_path / "run", tmp_path / "mine.py"
    how = ["--epochs", "2", "--checkpoint", str(folder), "--export", str(tmp_path / "mine.safetensors")]
    done = run_lockstep("train", mine, *how, env=os.environ)
    assert done.code == 0, done.err
    last = [line for line in done.out.splitlines() if "evaluation: " in line][-1].partition("evaluation: ")[2]
    files = (folder, ["--devices", "2"], " after step 6"), (tmp_path / "mine.safetensors", [], "")
    for checkpoint, flags, after in files:
        done = run_lockstep("evaluate", checkpoint, mine, *flags, env=os.environ)
        assert (done.code, done.out) == (0, f"mine{after}: {last}\n"), done.err
    for arguments, text in (
        (
            [mine, folder],
            f"{mine} is not a checkpoint.\nName the checkpoint first: lockstep evaluate CHECKPOINT {mine}",
        ),
        (["nowhere", mine], "nowhere does not exist.\nName the folder of a run, or a file of --export."),
    ):
        done = run_lockstep("evaluate", *arguments, env=os.environ)
        assert (done.code, done.err) == (2, f"lockstep: {text}\n")
