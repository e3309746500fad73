"""Gradients that are NaN or infinite: every rank sees them in the same step, does the same, and says where from."""

import math
from functools import partial

import pytest
import torch
from torch.utils.data import TensorDataset

import lockstep
from lockstep.data.order import GlobalOrder
from lockstep.errors import ConfigurationError, NonFiniteGradient
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.training import make_task, mean_loss, network, relative_error, samples

STEP, NUM_STEPS = 2, 6
ORDER = GlobalOrder(50, 8, 0)
BATCH = ORDER.batch(STEP).tolist()
BAD = BATCH[6]
"""Of the third step's eight samples, that which two ranks with two micro-batches have as the first of the last one."""


def with_nan(sample=BAD):
    data = samples()
    inputs = data.tensors[0].clone()
    inputs[sample, 3] = math.nan
    return TensorDataset(inputs, *data.tensors[1:])


def fit(world, strategy, **changes):
    """Train, and return the result and all weights."""
    kept = {}
    settings = {name: changes.pop(name) for name in list(changes) if name not in ("dataset", "loss", "model")}
    task = make_task(**{"dataset": with_nan, **changes}, after=lambda model: kept.update(model.state_dict()))
    defaults = {"steps": NUM_STEPS, "quiet": True, "global_batch_size": 8, "accumulate": 2}
    result = lockstep.fit(task, strategy=strategy, **{**defaults, **settings})
    return result, torch.cat([kept[name].flatten() for name in sorted(kept)]) if kept else None


HEAD = "The gradient is not finite on rank 1 (epoch 1, step 3): first that of parameter 0.weight.\n"
SAMPLES = f"Samples of that micro-batch 2 of 2 of rank 1: {BAD}, {BATCH[7]}.\nNot finite in the input: {BAD}.\n"
ADVICE = (
    "Check these samples, the learning rate and the parameter's layer; or skip and count such steps: "
    'on_nan="skip" (--on-nan skip).'
)
TRACED = "The loss was nan. The first module whose output is not finite is 0 (Linear).\n"


def test_every_rank_names_rank_parameter_module_step_and_samples(ranks):
    """Also where each rank has a part of the gradient."""

    def stop(world):
        texts = {}
        for strategy in ("ddp", "torch-ddp", "ddp-zero1"):
            with pytest.raises(NonFiniteGradient) as error:
                fit(world, strategy)
            texts[strategy] = str(error.value), error.value.step, error.value.ranks
        with pytest.raises(NonFiniteGradient) as error:
            fit(world, "ddp", reproducible=4, accumulate=1)
        return texts | {"reproducible": str(error.value)}

    expected = (HEAD + TRACED + SAMPLES + ADVICE, STEP, (1,))
    for found in ranks(2, warnings="ignore")(stop):
        whole = HEAD + TRACED + f"Samples of that batch of rank 1: {', '.join(map(str, BATCH[4:]))}.\n" + ADVICE
        assert found.pop("reproducible") == whole.replace(ADVICE, SAMPLES.splitlines(keepends=True)[1] + ADVICE)
        assert found == dict.fromkeys(("ddp", "torch-ddp", "ddp-zero1"), expected)


def test_the_rank_with_the_bad_input_is_named_though_batch_norm_passes_it_on(ranks):
    def stop(world):
        norm = lambda: torch.nn.Sequential(network(), torch.nn.BatchNorm1d(4)).double()  # noqa: E731
        with pytest.raises(NonFiniteGradient) as error:
            fit(world, "ddp", model=norm)
        return error.value.ranks, f"Not finite in the input: {BAD}.\n" in str(error.value)

    assert ranks(2, warnings="ignore")(stop) == [((1,), True)] * 2


def test_fsdp_goes_by_the_losses(ranks):
    """Its micro-batches cannot be computed again on their own, so the module is not known."""
    for outcome in ranks(2, warnings="ignore").each(fit, "fsdp"):
        assert isinstance(outcome.error, NonFiniteGradient)
        assert str(outcome.error) == HEAD + "The loss was nan.\n" + SAMPLES + ADVICE


def root_loss(model, batch):
    """Return a finite loss, whose gradient is not finite where an input is exactly zero."""
    inputs = batch[0]
    return ((model[-1].weight.sum() * inputs).abs().sqrt().mean() + mean_loss(model, batch)) / 2


def with_zero():
    data = samples()
    inputs = data.tensors[0].clone()
    inputs[BAD, 3] = 0.0
    return TensorDataset(inputs, *data.tensors[1:])


def test_a_gradient_that_goes_wrong_in_backward_is_traced_to_its_micro_batch(ranks):
    text = (
        "The gradient is not finite on rank 1 (epoch 1, step 3): first that of parameter 5.weight.\n"
        "The loss was finite: the error arose in backward.\n"
        f"Samples of that micro-batch 2 of 2 of rank 1: {BAD}, {BATCH[7]}.\n{ADVICE}"
    )
    for outcome in ranks(2).each(partial(fit, loss=root_loss, dataset=with_zero), "ddp"):
        assert isinstance(outcome.error, NonFiniteGradient)
        assert str(outcome.error) == text
    with pytest.raises(NonFiniteGradient) as error:
        fit(None, "dp", devices=2, loss=root_loss, dataset=with_zero, accumulate=1)
    assert str(error.value) == (
        "The gradient is not finite (epoch 1, step 3): first that of parameter 5.weight.\n"
        "The loss was finite: the error arose in backward.\n"
        f"Samples of that batch: {', '.join(map(str, BATCH))}.\n{ADVICE}"
    )


def test_virtual_shards_name_the_rank_too(ranks):
    """Where only the gradient goes wrong, and is summed in the tree before anybody looks at it."""
    run = partial(fit, loss=root_loss, dataset=with_zero, reproducible=4, accumulate=1)
    for outcome in ranks(2).each(run, "ddp"):
        assert isinstance(outcome.error, NonFiniteGradient)
        assert outcome.error.ranks == (1,)
        assert str(outcome.error) == (
            "The gradient is not finite on rank 1 (epoch 1, step 3): first that of parameter 5.weight.\n"
            "The loss was finite: the error arose in backward.\n"
            f"Samples of that batch of rank 1: {', '.join(map(str, BATCH[4:]))}.\n{ADVICE}"
        )


def oracle(model, steps, dataset=with_nan, clip=None):
    """Train on the whole batches of ``steps``; return the losses and the weights."""
    task, data, losses = make_task(), dataset().tensors, []
    optimizer = task.optimizer(list(model.parameters()))
    for step in steps:
        batch = tuple(tensor[ORDER.batch(step)] for tensor in data)
        loss = mean_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    state = model.state_dict()
    return losses, torch.cat([state[name].detach().flatten() for name in sorted(state)])


def first_model():
    loop = Trainer(make_task(), Settings(), None, strategy="single", devices=[torch.device("cpu")])
    return loop.model


def test_a_run_without_the_step_is_that_of_one_process_without_it(ranks):
    steps = [step for step in range(NUM_STEPS) if step != STEP]
    losses, weights = oracle(first_model(), steps, clip=0.5)

    def go_on(world):
        found = {}
        for strategy in ("ddp", "torch-ddp", "ddp-zero1", "fsdp"):
            found[strategy] = fit(world, strategy, on_nan="skip", clip=0.5)
        return found

    runs = ranks(2, warnings="ignore")(go_on)
    for strategy, (result, found) in runs[0].items():
        assert relative_error(found, weights) < 1e-12, strategy
        assert math.isnan(result.losses[STEP])
        assert result.losses[STEP + 1 :] == pytest.approx(losses[-3:], rel=1e-12)
        assert [(bad.step, bad.ranks, bad.first, bad.samples) for bad in result.not_finite] == [
            (STEP, (1,), "0.weight", [BAD])
        ]
        assert runs[1][strategy][0].not_finite == result.not_finite


class Normed(torch.nn.Module):
    """Running statistics, which a bad batch must not leave its traces in."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6, dtype=torch.float64)
        self.rest = network()

    def forward(self, inputs):
        return self.rest(self.norm(inputs))


HOWS = [{}, {"strategy": "dp", "devices": 2}, {"reproducible": 4}]


@pytest.mark.parametrize("how", HOWS)
def test_buffers_and_virtual_shards_go_back_too(how):
    """Without the bad step, the run on good data is the same, so its first steps and what follows must be."""
    run = partial(fit, None, how.get("strategy", "single"), on_nan="skip", model=Normed, accumulate=1)
    how = {name: value for name, value in how.items() if name != "strategy"}
    result, weights = run(**how)
    assert weights.isfinite().all()
    assert [bad.step for bad in result.not_finite] == [STEP]
    expected, _ = run(dataset=samples, **how)
    assert expected.not_finite == ()
    assert result.losses[:STEP] == expected.losses[:STEP]


def test_what_happened_is_shown(capfd):
    fit(None, "single", on_nan="skip", quiet=False, accumulate=1)
    headline = "The gradient is not finite (epoch 1, step 3): first that of parameter 0.weight."
    lines = capfd.readouterr().out.splitlines()
    assert f"step 3  skipped  {headline}" in lines
    assert "1 step skipped: the gradient was not finite" in lines


def always_nan(model, batch):
    return mean_loss(model, batch) * math.nan


def test_too_many_of_them_end_the_run(ranks):
    for outcome in ranks(2).each(partial(fit, loss=always_nan, dataset=samples, on_nan="skip", steps=20), "ddp"):
        assert isinstance(outcome.error, NonFiniteGradient)
        assert (outcome.error.step, outcome.error.ranks) == (5, (0, 1))
        lines = str(outcome.error).splitlines()
        assert lines[:3] == [
            "6 steps in a row had a gradient that is not finite, which is too many to skip.",
            "The last of them: The gradient is not finite on ranks 0, 1 (epoch 1, step 6): "
            "first that of parameter 0.weight.",
            "The loss was nan.",
        ]
        everything = ORDER.batch(5).tolist()
        assert lines[4] == (f"On rank 1 too: first parameter 0.weight, samples {', '.join(map(str, everything[4:6]))}.")
        assert lines[-1] == "Decrease the learning rate, clip the gradient (--clip), or correct the data or the loss."


def test_so_do_too_many_of_the_last_hundred():
    """Every seventh step has the bad sample: the eleventh of them ends the run."""
    with pytest.raises(NonFiniteGradient) as error:
        fit(None, "single", on_nan="skip", steps=300, accumulate=1)
    assert str(error.value).startswith("11 of the last ")
    assert " steps had a gradient that is not finite, which is too many to skip.\n" in str(error.value)


def test_a_verdict_that_is_looked_at_later_goes_by_the_losses(ranks):
    """As on CUDA, where no step waits for it: the error comes with the next step, or before anything is kept."""

    def stop(world, clip):
        settings = Settings(accumulate=2, global_batch_size=8, clip=clip)
        loop = Trainer(make_task(dataset=with_nan), settings, world, strategy="ddp", devices=[torch.device("cpu")])
        loop.updater.checks_later = True
        for _ in range(STEP + 1):
            assert loop.step().updated
        with pytest.raises(NonFiniteGradient) as error:
            loop.settle()
        return str(error.value)

    advice = SAMPLES.splitlines()[0] + "\n" + ADVICE  # the inputs are gone by then
    for clip in (None, 0.5):
        assert ranks(2)(stop, clip) == [HEAD + "The loss was nan.\n" + advice] * 2


def test_a_rank_that_was_looked_at_in_the_step_is_named_whatever_comes_later(ranks):
    """As on CUDA, where that costs nothing: the losses are finite, and nothing is computed again."""

    def stop(world):
        settings = Settings(global_batch_size=8)
        task = make_task(dataset=with_zero, loss=root_loss)
        loop = Trainer(task, settings, world, strategy="ddp", devices=[torch.device("cpu")])
        loop.updater.checks_later = True
        loop.strategy.part_was_bad = loop.strategy._module.monitor_local_gradients()
        for _ in range(STEP + 1):
            loop.step()
        with pytest.raises(NonFiniteGradient) as error:
            loop.settle()
        return str(error.value).splitlines()[:3], error.value.ranks

    lines = [
        "The gradient is not finite on rank 1 (epoch 1, step 3): first that of parameter 5.weight.",
        "The loss was finite: the error arose in backward.",
        f"Samples of that batch of rank 1: {', '.join(map(str, BATCH[4:]))}.",
    ]
    assert ranks(2)(stop) == [(lines, (1,))] * 2


def test_what_computes_to_something_finite_again_is_said_to(ranks):
    """As a faulty device does."""

    def flaky(world):
        calls = []

        def loss(model, batch):
            calls.append(1)
            return mean_loss(model, batch) * (math.inf if len(calls) == 2 and world.rank == 1 else 1.0)

        fit(world, "ddp", loss=loss, dataset=samples, accumulate=1)

    for outcome in ranks(2).each(flaky):
        assert str(outcome.error) == (
            "The gradient is not finite (epoch 1, step 2): first that of parameter 0.weight.\n"
            "Recomputed, the gradient was finite on every rank. The sum over the ranks overflowed "
            "(compression=fp16?), a "
            "kernel is not deterministic, or a device or its memory is faulty.\n" + ADVICE
        )


def test_with_an_optimizer_in_backward_no_step_can_be_skipped():
    with pytest.raises(ConfigurationError) as error:
        Settings(on_nan="skip", overlap_optimizer=True)
    assert str(error.value) == (
        "overlap_optimizer cannot be combined with on_nan=skip: parameters are updated before "
        "the whole gradient is known.\n"
        "Omit one of the two."
    )


def test_with_an_optimizer_in_backward_rank_parameter_and_samples_are_named_all_the_same(ranks):
    """Nothing can be computed again, as the parameters have been updated."""
    head = "The gradient is not finite on rank 1 (epoch 1, step 3): first that of parameter"
    arose = "The loss was finite: the error arose in backward.\n"
    all_samples = f"Samples of that step of rank 1: {', '.join(map(str, BATCH[4:]))}.\n"
    ways = {
        f"{head} 5.weight.\n{arose}{all_samples}{ADVICE}": {"loss": root_loss, "dataset": with_zero},
        f"{HEAD}The loss was nan.\n{SAMPLES}{ADVICE}": {},
    }
    for text, how in ways.items():
        for outcome in ranks(2).each(partial(fit, overlap_optimizer=True, **how), "ddp"):
            assert isinstance(outcome.error, NonFiniteGradient)
            assert str(outcome.error) == text


def test_in_fp16_the_loss_scale_is_lowered_first():
    """A NaN in the data is not mended by that: once the scale is 1, it is a bad step like any other."""

    def network32():
        return network().float()

    def loss(model, batch):
        return mean_loss(model, (batch[0].float(), batch[1].float(), None))

    task = make_task(model=network32, dataset=with_nan, loss=loss, global_batch_size=8)
    loop = Trainer(
        task, Settings(precision="fp16", on_nan="skip"), None, strategy="single", devices=[torch.device("cpu")]
    )
    updated = [loop.step().updated for _ in range(STEP + 1)]
    assert (updated, loop.updater.nonfinite.found, loop.state_dict()["scaler"]["scale"]) == (
        [True, True, False],
        [],
        2.0**15,
    )
    loop.updater.scaler.scale = 1.0
    for _ in range(7):
        loop.step()
    assert [bad.step for bad in loop.updater.nonfinite.found] == [ORDER.steps_per_epoch + next_step_of(BAD)]


def next_step_of(sample):
    """Return the step of the second epoch that has ``sample``."""
    epoch = [ORDER.batch(ORDER.steps_per_epoch + step).tolist() for step in range(ORDER.steps_per_epoch)]
    return next(step for step, batch in enumerate(epoch) if sample in batch)
