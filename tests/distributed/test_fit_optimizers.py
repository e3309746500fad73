"""Optimizers of names or of the model, and schedulers of torch: with every strategy, and after a resume."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.train.run import Run
from lockstep.train.settings import Settings
from lockstep.train.task import build_optimizer
from lockstep.train.trainer import Trainer
from tests.training import make_task, read_state, relative_error, samples

NUM_STEPS = 9


def by_name(named_parameters):
    """Return an AdamW without decay of biases."""
    named = list(named_parameters)
    decayed = [each for each in named if not each[0].endswith("bias")]
    others = [each for each in named if each[0].endswith("bias")]
    return AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01, weight_decay=0.5)


def of_model(model):
    """Return an SGD with another rate for the last layer."""
    head = [*model[-1].parameters()]
    rest = [each for each in model.parameters() if all(each is not own for own in head)]
    return SGD([{"params": rest}, {"params": head, "lr": 0.02}], lr=0.1, momentum=0.9)


def one_cycle(optimizer, num_steps):
    """Return a scheduler that cycles the momentum, too."""
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=num_steps)


def in_parts(optimizer, num_steps):
    """Return a scheduler of others, one of which has a Counter in its state."""
    parts = [LinearLR(optimizer, 0.1, total_iters=3), torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])]
    return SequentialLR(optimizer, parts, milestones=[3])


def on_plateau(optimizer):
    """Return a scheduler that halves the rate after each evaluation that is not far better."""
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


class Decaying(torch.optim.lr_scheduler.LRScheduler):
    """Multiplies what is there: the rates, as torch's own do, and weight decay."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 1.3
        return [group["lr"] * 0.9 for group in self.optimizer.param_groups]


class Lowers(AdamW):
    """Lowers its own rate in a step, and counts."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            if group["k"] % 2:
                group["lr"] *= 0.7
        return loss


def make_loop(world, strategy, task, **settings):
    return Trainer(task, Settings(**settings), world, strategy=strategy, devices=[torch.device("cpu")])


def train(world, strategy, task, num_steps=NUM_STEPS, **settings):
    """Return the weights after some steps, and the rates and the momentum of each."""
    loop, used = make_loop(world, strategy, task, steps=num_steps, **settings), []
    for _ in range(num_steps):
        loop.step()
        group = loop.optimizer.param_groups[0]
        used.append((group["lr"], group["momentum"] if "momentum" in group else group["betas"][0]))
    loop.close()
    weights = torch.cat([parameter.detach().flatten() for parameter in loop.strategy.whole(loop.model).parameters()])
    return weights, used, loop


@pytest.mark.parametrize("make", [by_name, of_model])
def test_an_optimizer_of_names_or_of_the_model_is_the_same_with_every_strategy(ranks, make):
    def run(world):
        names = ("ddp", "ddp-zero1", "fsdp", "local-sgd")
        found = [
            train(world, name, make_task(optimizer=make, drop_last=True), sync_every=n)
            for name, n in zip(names, (None, None, None, 1), strict=True)
        ]
        return [(weights, loop.optimizer.param_groups[0].get("param_names")) for weights, _, loop in found]

    expected = train(None, "single", make_task(optimizer=make, drop_last=True))[0]
    for result in ranks(2)(run):
        for weights, names in result[:3]:
            assert relative_error(weights, expected) < 1e-12
            assert names == (["0.weight", "2.weight", "5.weight"] if make is by_name else None)


def test_names_have_no_wrappers_also_of_compiled_models():
    seen = []

    def make(named):
        seen.extend(name for name, _ in named)
        return SGD(named, lr=0.1)

    def whole(model):
        seen.append(type(model).__name__)
        return SGD(model.parameters(), lr=0.1)

    plain = torch.nn.Sequential(torch.nn.Linear(2, 1))
    plain[0].bias.requires_grad_(False)
    model = torch.compile(plain, backend="eager")
    build_optimizer(make_task(optimizer=make), model)
    build_optimizer(make_task(optimizer=whole), model)
    assert seen == ["0.weight", "Sequential"]


@pytest.mark.parametrize("strategy", ["ddp", "ddp-zero1", "fsdp", "local-sgd", "overlap"])
def test_a_scheduler_of_torch_is_stepped_for_each_update(ranks, strategy):
    how = {"overlap_optimizer": True} if strategy == "overlap" else {"sync_every": 1} if strategy == "local-sgd" else {}
    task = make_task(schedule=one_cycle, drop_last=True, optimizer=partial(SGD, lr=1.0, momentum=0.9))
    model = torch.nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler, expected = one_cycle(optimizer, NUM_STEPS), []
    for _ in range(NUM_STEPS):
        expected.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step()
    assert len(set(expected)) == NUM_STEPS

    def run(world):
        return train(world, "ddp" if strategy == "overlap" else strategy, task, **how)[:2]

    weights, used = train(None, "single", task)[:2]
    assert used == expected
    for got, found in ranks(2)(run):
        assert found == expected
        assert strategy == "local-sgd" or relative_error(got, weights) < 1e-12


@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [
        ("ddp", one_cycle),
        ("ddp", in_parts),
        ("ddp", on_plateau),
        ("ddp-zero1", one_cycle),
        ("ddp-zero1", Decaying),
        ("local-sgd", one_cycle),
    ],
)
def test_a_run_that_is_resumed_ends_in_the_same_bits(ranks, tmp_path, strategy, schedule):
    class Break(Exception):
        """Stands for a kill."""

    def fit(world, folder, steps=NUM_STEPS, stop=99):
        kept = {}
        task = make_task(
            schedule=schedule, eval_dataset=samples, optimizer=by_name, after=lambda m: kept.update(m.state_dict())
        )
        step, calls = Run.step, []

        def stopping(run):
            if len(calls) == stop:
                raise Break
            calls.append(1)
            step(run)
            rates.append(run.trainer.optimizer.param_groups[0]["lr"])

        rates, Run.step = [], stopping
        try:
            how = {"checkpoint": tmp_path / folder, "checkpoint_every": 3, "eval_every": 2, "quiet": True}
            lockstep.fit(task, strategy=strategy, steps=steps, **how)
        except Break:
            pass
        finally:
            Run.step = step
        return rates, kept

    def both(world):
        whole, broken = fit(world, "whole"), fit(world, "broken", stop=4)
        return whole, broken, fit(world, "broken")

    whole, broken, resumed = ranks(2)(both)[0]
    assert len(set(whole[0])) > 2
    assert broken[0] == whole[0][:4]
    assert resumed[0] == whole[0][3:]
    assert all(torch.equal(value, whole[1][name]) for name, value in resumed[1].items())
    assert resumed[1].keys() == whole[1].keys() != set()
    state = read_state(tmp_path / "broken" / f"step-{NUM_STEPS:010d}")
    assert list(state["scheduler"][1]) == ([2, 4, 6, 8, 9] if schedule is on_plateau else [])


@pytest.mark.parametrize("schedule", [Decaying, None])
@pytest.mark.parametrize("strategy", ["ddp", "ddp-zero1"])
def test_what_an_optimizer_sets_itself_holds_also_over_a_resume(ranks, tmp_path, strategy, schedule):
    task = make_task(schedule=schedule, optimizer=partial(Lowers, lr=0.02, weight_decay=0.1))
    plain = make_loop(None, "single", task)
    optimizer, data, expected = task.optimizer(plain.model.parameters()), samples(), []
    scheduler = Decaying(optimizer) if schedule is not None else None
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        task.loss(plain.model, tuple(tensor[plain.plan.order.batch(step)] for tensor in data.tensors)).backward()
        optimizer.step()
        expected.append([optimizer.param_groups[0][name] for name in ("lr", "weight_decay", "k")])
        if scheduler is not None:
            scheduler.step()

    class Notes:
        def on_step_end(self, run):
            used.append([run.optimizer.param_groups[0][name] for name in ("lr", "weight_decay", "k")])
            if run.step == 2:
                run.stop()

    used = []

    def run(world):
        used.clear()
        for end in (4, NUM_STEPS):
            how = {"steps": NUM_STEPS, "checkpoint": tmp_path, "quiet": True}
            result = lockstep.fit(task, strategy=strategy, callbacks=[Notes()], **how)
            assert result.num_steps == end
        return used, result.model.state_dict()

    for used, weights in ranks(2)(run):
        assert used == [pytest.approx(each, rel=1e-12) for each in expected]
        assert all(relative_error(value, weights[name]) < 1e-12 for name, value in plain.model.state_dict().items())


def test_more_steps_follow_the_new_plan_and_not_the_loaded_one(tmp_path):
    def fit(folder, *all_steps):
        rates = []
        step = Run.step

        def noting(run):
            step(run)
            rates.append(run.trainer.optimizer.param_groups[0]["lr"])

        Run.step = noting
        try:
            for steps in all_steps:
                task = make_task(schedule=one_cycle)
                lockstep.fit(task, strategy="single", steps=steps, checkpoint=tmp_path / folder, quiet=True)
        finally:
            Run.step = step
        return rates

    assert fit("longer", 4, 8)[4:] == fit("whole", 8)[4:]


def test_skipped_steps_do_not_count():
    calls = []

    def scheduled(model, batch):
        calls.append(1)
        value = (model(batch[0]) - batch[1]).square().mean()
        return value * float("nan") if len(calls) == 2 else value

    task = make_task(loss=scheduled, schedule=lambda optimizer: StepLR(optimizer, 1, gamma=0.5))
    loop, rates = make_loop(None, "single", task, on_nan="skip"), []
    for _ in range(4):
        loop.step()
        rates.append(loop.optimizer.param_groups[0]["lr"])
    assert rates == [0.1, 0.05, 0.05, 0.025]


def test_the_rates_are_scaled_before_and_other_settings_go_first():
    task = make_task(schedule=lambda optimizer: StepLR(optimizer, 2, gamma=0.5))
    used = train(None, "single", task, num_steps=3, lr_scaling="linear", base_batch_size=12)[1]
    assert [rate for rate, _ in used] == [0.2, 0.2, 0.1]
    used = train(None, "single", task, num_steps=2, schedule="linear")[1]
    assert [rate for rate, _ in used] == [0.1, 0.05]
    used = train(None, "single", make_task(schedule=torch.optim.lr_scheduler.CosineAnnealingLR), num_steps=2)[1]
    assert [rate for rate, _ in used] == pytest.approx([0.1, 0.05])


def message(function, *args, **kwargs):
    with pytest.raises(ConfigurationError) as error:
        function(*args, **kwargs)
    return str(error.value)


def test_what_does_not_go_together(ranks):
    assert message(lockstep.fit, make_task(schedule=one_cycle), strategy="single", warmup=3, quiet=True) == (
        "warmup cannot be combined with a scheduler of torch.\n"
        "Omit warmup; in Task.schedule, let a LinearLR come first, in a SequentialLR."
    )
    none, factor = make_task(schedule=on_plateau), make_task(schedule=lambda optimizer: 0.5)

    def run(world):
        return [message(make_loop, world, "ddp", task) for task in (none, factor)]

    for texts in ranks(2)(run):
        assert texts == [
            "Task.schedule returned a ReduceLROnPlateau, which needs the loss of evaluations.\n"
            "Add eval_dataset=... to the task, or use another scheduler.",
            "Task.schedule, which takes the optimizer, returned a float, not a scheduler.\n"
            "Return a torch.optim.lr_scheduler.LRScheduler or ReduceLROnPlateau.",
        ]


def test_a_scheduler_that_the_optimizer_makes_and_several_optimizers_are_refused_on_all(ranks):
    def scheduled(params):
        optimizer = SGD(params, lr=0.1)
        OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
        return optimizer

    def pair(params):
        optimizer = SGD(params, lr=0.1)
        return optimizer, StepLR(optimizer, 1)

    def several(params):
        return {"generator": SGD(params[:1], lr=0.1), "critic": SGD(params[1:], lr=0.1)}

    def run(world):
        return [message(make_loop, world, "ddp", make_task(optimizer=make)) for make in (scheduled, pair, several)]

    for one, two, three in ranks(2)(run):
        assert (
            one
            == two
            == (
                "Task.optimizer has made a learning-rate scheduler, which would have no effect: it is never stepped.\n"
                "Return it from Task.schedule: schedule=lambda optimizer, num_steps: OneCycleLR(optimizer, "
                "total_steps=num_steps, ...)."
            )
        )
        assert three == (
            "Task.optimizer returned several objects, but a task has one loss and one optimizer.\n"
            "For several optimizers, as of a GAN, write a script with lockstep.init and "
            "lockstep.DistributedDataParallel, such as examples/recovery_gan.py."
        )
