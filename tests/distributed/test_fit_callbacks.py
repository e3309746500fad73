"""Callbacks, early stopping, averaged weights and the weights at the end are alike on any number of devices."""

import os
import re
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.study.report.run_page import report
from lockstep.telemetry import figures, live_view
from lockstep.telemetry.figures import Snapshot
from lockstep.telemetry.record import read_run
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.distributed.commands import lockstep as run_lockstep
from tests.training import make_task, mean_loss, network, read_state, relative_error, samples

TASK = make_task(eval_dataset=samples)


class Notes:
    """Notes each call, and asks for something after a step."""

    def __init__(self, verb=None, at=None, rank=None):
        self.verb, self.at, self.only, self.calls = verb, at, rank, []

    def _note(self, point, run):
        self.calls.append((point, run.step, tuple(run.due)))
        if self.at == (point, run.step) and self.only in (None, run.rank):
            getattr(run, self.verb)()

    def on_start(self, run):
        self._note("start", run)

    def on_step_end(self, run):
        self._note("step", run)

    def on_evaluation(self, run):
        self._note("evaluation", run)

    def on_checkpoint(self, run):
        self._note(f"checkpoint {run.found['step']}", run)

    def on_end(self, run):
        self._note("end", run)

    def state_dict(self):
        return {"calls": [list(call) for call in self.calls]}

    def load_state_dict(self, state):
        self.calls = [tuple(call) for call in state["calls"]]


def noted(world, notes, folder, strategy="ddp", **settings):
    result = lockstep.fit(
        TASK, strategy=strategy, quiet=True, epochs=4, checkpoint=folder, callbacks=[notes], **settings
    )
    calls = [f"{point} {step}" for point, step, _ in notes.calls]
    return result.num_steps, [each.step for each in result.evaluations], calls


@pytest.mark.parametrize(
    ("strategy", "verb", "point", "num_steps", "evaluated", "saved"),
    [
        ("ddp", "stop", ("step", 4), 6, [3, 6], [3, 6]),
        ("ddp", "stop", ("evaluation", 6), 6, [3, 6], [3, 6]),
        ("ddp", "save", ("step", 7), 12, [3, 6, 9, 12], [3, 6, 9, 12]),
        ("ddp", "save", ("step", 5), 12, [3, 6, 9, 12], [3, 6, 7, 9, 12]),
        ("ddp", "stop", ("checkpoint 3", 6), 6, [3, 6], [3, 6]),
        ("ddp", "stop", ("start", 0), 0, [0], [0]),
        ("local-sgd", "stop", ("step", 7), 8, [3, 6, 8], [3, 6, 8]),
    ],
)
def test_what_one_rank_asks_for_all_do_after_the_same_step(
    ranks, tmp_path, strategy, verb, point, num_steps, evaluated, saved
):
    folders = iter("abcd")

    def run(world, num_ranks, folder):
        return noted(world, Notes(verb, point, rank=num_ranks - 1), tmp_path / folder, strategy)

    first = None
    for num_ranks in (1, 2):
        for found in ranks(num_ranks)(run, num_ranks, next(folders)):
            first = first or found
            assert found == first
    assert first[:2] == (num_steps, evaluated)
    assert [call for call in first[2] if call.startswith("checkpoint")] == [
        f"checkpoint {step} {min([other for other in saved if other > step], default=num_steps)}" for step in saved
    ]
    assert [call for call in first[2] if call.startswith("step")] == [f"step {n}" for n in range(1, num_steps + 1)]
    assert first[2][0] == "start 0" and first[2][-1] == f"end {num_steps}"


def test_a_callback_sees_what_follows_and_keeps_its_state_over_a_resume(ranks, tmp_path):
    def run(world, steps):
        notes = Notes()
        how = {"eval_every": 2, "checkpoint_every": 4, "checkpoint": tmp_path, "quiet": True}
        lockstep.fit(TASK, steps=steps, callbacks=[notes], **how)
        return notes.calls

    for num_ranks, steps in ((2, 4), (1, 6)):
        (calls, *_) = ranks(num_ranks)(run, steps)
    assert [call for call in calls if call[0] in ("start", "step")] == [
        ("start", 0, ("evaluate", "save")),
        ("step", 1, ()),
        ("step", 2, ("evaluate",)),
        ("step", 3, ()),
        ("step", 4, ("evaluate", "save")),
        ("start", 4, ("evaluate", "save")),
        ("step", 5, ()),
        ("step", 6, ("evaluate", "save")),
    ]


def test_a_save_without_a_folder_is_refused():
    with pytest.raises(ConfigurationError) as error:
        lockstep.fit(TASK, steps=3, quiet=True, callbacks=[Notes("save", ("step", 1))])
    assert str(error.value) == "A callback called save(), but there is no folder.\nGive checkpoint=DIR to fit."
    assert error.value.__notes__ == ["Notes.on_step_end raised it, on rank 0 after step 1."]


def stopping(world, folder, settings=None):
    how = {"early_stopping": "fit:max", "patience": 2, "keep_best": "fit:max", "load_best": True, "epochs": 30}
    task = make_task(
        eval_dataset=lambda: samples(31),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        metrics=lambda model, batch: {"fit": -(model(batch[0]) - batch[1]).abs().mean(1)},
        ema=0.8,
    )
    result = lockstep.fit(
        task, quiet=True, eval_every=2, checkpoint=folder, checkpoint_every=3, reproducible=4, **how | (settings or {})
    )
    weights = {name: value.clone() for name, value in result.model.state_dict().items()}
    return result.num_steps, result.first_step, result.best, weights


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def stopped_early(ranks, tmp_path_factory):
    """The folder and the outcome of a run of one device that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, ranks(1)(stopping, folder)[0]


def test_early_stopping_and_the_best_weights_are_the_same_on_any_number_of_devices(ranks, stopped_early, tmp_path):
    folder, whole = stopped_early
    assert 10 < whole[0] < 90 and whole[2].step == whole[0] - 4, "two evaluations after the best one"
    for found in ranks(2)(stopping, tmp_path / "two"):
        assert found[:3] == whole[:3]
        assert same(found[3], whole[3])
    again = ranks(1)(stopping, tmp_path / "two")[0]
    assert again[:2] == (whole[0], whole[0]), "the decision is kept: nothing is trained any more"
    assert same(again[3], whole[3])
    # The weights of the best evaluation, which was that of the averages.
    net = network()
    lockstep.load(folder, model=net, best=True)
    assert same(net.state_dict(), whole[3])
    state = read_state(folder / f"step-{whole[2].step:010d}")
    assert same(state["ema"], whole[3]) and not same(state["model"], whole[3])


def test_a_run_that_is_stopped_in_between_stops_early_at_the_same_step(ranks, stopped_early, tmp_path):
    _, whole = stopped_early
    for num_ranks, steps in ((2, 5), (1, 8)):  # also in the middle of an epoch, and on other numbers of ranks
        found = ranks(num_ranks)(stopping, tmp_path / "parts", {"epochs": None, "steps": steps, "load_best": False})
        assert found[0][0] == steps
    for found in ranks(2)(stopping, tmp_path / "parts"):
        assert found[1] == 8
        assert found[0] == whole[0] and found[2] == whole[2]
        assert same(found[3], whole[3])


def averaged_by_torch(task, num_steps, **settings):
    """Return torch's own average, of one process on the whole batch."""
    loop = Trainer(task, Settings(**settings), None, strategy="single", devices=[torch.device("cpu")])
    average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer, data = task.optimizer(list(loop.model.parameters())), samples()
    for step in range(num_steps):
        batch = tuple(tensor[loop.plan.order.batch(step)] for tensor in data.tensors)
        optimizer.zero_grad()
        task.loss(loop.model, batch).backward()
        optimizer.step()
        average.update_parameters(loop.model)
    return {name: value.clone() for name, value in average.module.state_dict().items()}


def averaged(world, strategy, settings):
    kept = {}
    task = make_task(ema=0.9, eval_dataset=samples, drop_last=strategy == "fsdp")
    task = make_task(**{**vars(task), "after": lambda model: kept.update(model.state_dict())})
    result = lockstep.fit(task, strategy=strategy, steps=7, eval_every=2, quiet=True, **settings)
    other = result.load(network()).state_dict()
    return {name: value.clone() for name, value in other.items()}, kept, result.evaluations


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "settings"),
    [
        ("single", 1, {}),
        ("dp", 1, {"devices": 2}),
        ("ddp", 2, {}),
        ("ddp", 2, {"overlap_optimizer": True}),
        ("ddp", 2, {"accumulate": 3}),
        ("ddp-zero1", 2, {}),
        ("fsdp", 2, {}),
    ],
)
def test_the_average_is_that_of_torch_under_each_strategy(ranks, strategy, num_ranks, settings):
    task = make_task(drop_last=strategy == "fsdp")
    expected = averaged_by_torch(task, 7)
    for rank, (found, kept, evaluations) in enumerate(ranks(num_ranks)(averaged, strategy, settings)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert relative_error(found[name], value) < 1e-13, name
        assert rank or same(kept, found), "Task.after gets the averages"
        net = network()
        net.load_state_dict(found)
        loss = task.loss(net, samples().tensors).item()
        assert evaluations[-1].metrics["loss"] == pytest.approx(loss, rel=1e-12), "they are what is evaluated"


@pytest.mark.parametrize("strategy", ["ddp-zero1", "fsdp"])
def test_averages_resume_on_another_number_of_ranks(ranks, tmp_path, strategy):
    def part(world, steps):
        task = make_task(ema=0.9, drop_last=True)
        how = {"checkpoint": tmp_path, "quiet": True, "export": tmp_path / "weights.safetensors"}
        return lockstep.fit(task, strategy=strategy, steps=steps, **how).num_steps

    ranks(2)(part, 4)
    ranks(1)(part, 7)
    expected = averaged_by_torch(make_task(drop_last=True), 7)
    for name, value in load_file(tmp_path / "weights.safetensors").items():
        assert relative_error(value, expected[name]) < 1e-13


class Sets:
    """Halves the rate in the warm-up, sets the weight decay of the later steps, and may end the run."""

    def __init__(self, end=None):
        self.end = end

    def on_step_end(self, run):
        for group in run.optimizer.param_groups:
            if run.step in (2, 7):
                group["lr"] *= 0.5
            group["weight_decay"] = 0.01 * run.step
        if run.step == self.end:
            run.stop()


def decayed(params):
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)


def with_numbers_set(num_steps):
    """Return the weights of a plain loop."""
    task = make_task(optimizer=decayed, drop_last=True)
    loop = Trainer(task, Settings(), None, strategy="single", devices=[torch.device("cpu")])
    optimizer, data, half = task.optimizer(list(loop.model.parameters())), samples(), 1.0
    for step in range(num_steps):
        warm = min(1.0, (step + 1) / 4)
        optimizer.param_groups[0].update(lr=0.1 * half * warm, weight_decay=0.01 * step if step else 0.1)
        optimizer.zero_grad()
        task.loss(loop.model, tuple(tensor[loop.plan.order.batch(step)] for tensor in data.tensors)).backward()
        optimizer.step()
        half *= 0.5 if step + 1 in (2, 7) else 1.0
    return loop.model.state_dict()


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("dp", {"devices": 2}),
        ("ddp", {"accumulate": 3}),
        ("ddp", {"overlap_optimizer": True}),
        ("ddp-zero1", {}),
        ("fsdp", {}),
    ],
)
def test_numbers_that_a_callback_sets_hold_with_warm_up_and_over_a_resume(ranks, tmp_path, strategy, settings):
    def run(world):
        def fit(folder, end=None):
            task = make_task(optimizer=decayed, drop_last=True, callbacks=[Sets(end)])
            how = {"steps": 10, "warmup": 4, "quiet": True, "checkpoint": tmp_path / folder}
            return lockstep.fit(task, strategy=strategy, **how, **settings)

        whole, part = fit("whole"), fit("parts", end=1)
        assert part.num_steps == 3
        return [result.load(network()).state_dict() for result in (whole, fit("parts"))]

    expected = with_numbers_set(10)
    for weights in ranks(1 if strategy == "dp" else 2)(run)[0]:
        assert all(relative_error(value, expected[name]) < 1e-12 for name, value in weights.items())


class Freezes:
    """Freezes or unfreezes the first layer after a step, and compares each evaluation with the model."""

    def __init__(self, trained, point, end=None):
        self.trained, self.point, self.end, self.errors = trained, point, end, []

    def _at(self, point, run):
        if (point, run.step) == (self.point, 4):
            run.model[0].requires_grad_(self.trained)
        if point == "step" and run.step == self.end:
            run.stop()

    def on_step_end(self, run):
        self._at("step", run)

    def on_evaluation(self, run):
        self._at("evaluation", run)
        with torch.no_grad():
            self.errors.append(abs(mean_loss(run.model, samples().tensors).item() - run.metrics["loss"]))


def partly_frozen():
    net = network()
    net[0].requires_grad_(False)
    return net


def averaged_while_switched(task, num_steps):
    """Return torch's average of a plain loop in which the first layer is frozen or unfrozen after step 4."""
    loop = Trainer(task, Settings(), None, strategy="single", devices=[torch.device("cpu")])
    average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    optimizer, data = task.optimizer(loop.model), samples()
    for step in range(num_steps):
        if step == 4:
            loop.model[0].requires_grad_(not loop.model[0].weight.requires_grad)
        optimizer.zero_grad()
        task.loss(loop.model, tuple(tensor[loop.plan.order.batch(step)] for tensor in data.tensors)).backward()
        optimizer.step()
        average.update_parameters(loop.model)
    return average.module.state_dict()


@pytest.mark.parametrize(("model", "point"), [(network, "step"), (partly_frozen, "evaluation")])
def test_the_average_of_layers_that_are_frozen_or_unfrozen_is_that_of_torch(tmp_path, model, point):
    def fit(folder, devices, end=None):
        switch = Freezes(model is partly_frozen, point, end)
        task = make_task(**made, ema=0.8, eval_dataset=samples, callbacks=[switch])
        how = {"steps": 12, "eval_every": 1, "quiet": True, "load_best": True, "early_stopping": "loss", "patience": 2}
        how |= {"strategy": "dp" if devices == 2 else "single", "devices": devices, "checkpoint": tmp_path / folder}
        result = lockstep.fit(task, keep_best="loss", **how)
        if devices == 1:
            assert len(switch.errors) == len(result.evaluations) and max(switch.errors) < 1e-12
        return result

    made = {"model": model, "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    expected = averaged_while_switched(make_task(**made), 6)
    assert fit("parts", 1, end=4).num_steps < 6
    for result in (fit("one", 1), fit("two", 2), fit("parts", 1)):
        assert (result.best.step, result.num_steps) == (6, 8)
        for name, value in result.model.state_dict().items():
            assert relative_error(value, expected[name]) < 1e-12, name


def test_averages_of_ranks_that_differ_are_refused():
    with pytest.raises(ConfigurationError) as error:
        lockstep.fit(make_task(ema=0.9), strategy="local-sgd", quiet=True)
    assert str(error.value) == (
        "Task.ema cannot be used with strategy local-sgd, whose ranks hold different weights.\n"
        "Omit ema, or use strategy ddp."
    )
    with pytest.raises(ConfigurationError) as error:
        make_task(ema=2)
    assert str(error.value) == "Task.ema is 2.\nGive a decay between 0 and 1, such as 0.999."


@pytest.mark.parametrize("devices", [1, 2])
def test_the_callers_own_objects_get_what_was_trained(devices):
    net, notes = network(), Notes()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    result = lockstep.fit(make_task(model=lambda: net), devices=devices, steps=3, quiet=True, callbacks=[notes])
    assert result.model is net
    assert not same(net.state_dict(), before)
    assert [call[:2] for call in notes.calls] == [("start", 0), ("step", 1), ("step", 2), ("step", 3), ("end", 3)]
    if devices == 2:
        alone = lockstep.fit(make_task(), devices=1, steps=3, quiet=True, seed=0).model
        changed = lockstep.fit(make_task(), devices=2, steps=3, quiet=True, seed=0).model
        for name, value in alone.state_dict().items():
            assert relative_error(changed.state_dict()[name], value) < 1e-12


class Interrupted(Notes):
    """Asks for the end after step 4, and gets a signal in a step."""

    def __init__(self, signal_at):
        super().__init__("stop", ("step", 4))
        self.signal_at = signal_at

    def on_step_end(self, run):
        super().on_step_end(run)
        if run.step == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("stopped_at", [4, 5, 6])
def test_a_run_that_is_stopped_before_it_has_ended_ends_at_the_same_step_when_resumed(tmp_path, stopped_at):
    stopped = noted(None, Interrupted(stopped_at), tmp_path, "single")
    resumed = noted(None, Notes(), tmp_path, "single")
    assert (stopped[:2], resumed[:2]) == ((stopped_at, [3]), (6, [6])), "as a run without the signal"
    assert noted(None, Notes(), tmp_path, "single")[0] == 12, "the end was that of the run before"


def test_a_run_may_be_resumed_with_another_metric_for_the_best(tmp_path):
    def best(keep_best, steps, **changes):
        task = make_task(eval_dataset=samples, **changes)
        how = {"eval_every": 2, "checkpoint": tmp_path, "keep_best": keep_best, "quiet": True}
        return lockstep.fit(task, steps=steps, **how).best.step

    assert best(True, 4) == 2
    fits = {"metrics": lambda model, batch: {"fit": (model(batch[0]) - batch[1]).square().mean(1)}}
    assert best("fit:max", 8, **fits) == 8, "the error increases, and the run before had no such metric"


LOST = """\
import os, pathlib, signal, torch
from torch import nn
import lockstep
from tests.training import samples, network, mean_loss

class Killer:
    def lose(self, place):
        once = pathlib.Path(os.environ["ONCE"])
        if os.environ.get("RANK") == "1" and place == os.environ["AT"] and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    def on_step_end(self, run):
        self.lose(f"step{run.step}")
        self.seen = getattr(self, "seen", 0) + 1
        if run.step == 4:
            run.model[0].requires_grad_(False)
            run.optimizer.param_groups[0]["lr"] *= 0.9
    def on_checkpoint(self, run):
        self.lose(f"checkpoint{run.step}")
        self.kept = [*getattr(self, "kept", []), run.found["step"]]
    def on_end(self, run):
        if run.is_rank_zero:
            print("seen", self.seen, run.step)
            print("kept", *self.kept)
    def state_dict(self):
        return {"seen": self.seen, "kept": getattr(self, "kept", [])}
    def load_state_dict(self, state):
        self.seen, self.kept = state["seen"], state["kept"]

class Decaying(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 1.1
        return [group["lr"] * 0.99 for group in self.optimizer.param_groups]

task = lockstep.Task(
    model=network, dataset=samples, schedule=Decaying,
    eval_dataset=lambda: samples(31), loss=mean_loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.3), global_batch_size=24, ema=0.8,
    callbacks=[Killer()],
)
"""


@pytest.mark.timeout(120)
def test_a_lost_rank_changes_nothing_of_averages_early_stopping_and_callbacks(tmp_path):
    (tmp_path / "mine.py").write_text(LOST)
    how = "--epochs 30 --eval-every 2 --early-stopping loss --patience 2 --reproducible 4 --max-restarts 3"
    seen = []
    for at in ("", "step1", "checkpoint6"):  # the first is that of one device, which has the same bits
        export = tmp_path / f"lost-{at}.safetensors"
        environ = {**os.environ, "ONCE": str(tmp_path / f"once-{at}"), "AT": at}
        kept = ["--checkpoint", tmp_path / f"kept-{at}", "--checkpoint-every", "3"]
        done = run_lockstep(
            "train",
            tmp_path / "mine.py",
            *how.split(),
            "--devices",
            "2" if at else "1",
            *kept,
            "--export",
            export,
            env=environ,
        )
        assert done.code == 0, done.err
        assert done.err.count("is back after") == bool(at) and "restart" not in done.err, done.err
        found = re.findall(r"seen (\d+) (\d+)", done.out)
        announced = re.findall(r"kept [\d ]+", done.out)
        seen.append((found, re.findall("stopped early: .*", done.out), announced, export.read_bytes()))
    assert seen[1:] == [seen[0]] * 2
    ((calls, steps),) = seen[0][0]
    assert calls == steps and 8 < int(steps) < 90
    assert len(seen[0][1]) == 1
    assert seen[0][2][0].startswith("kept 3 6 9 ")


BROKEN = """\
import lockstep
from tests.training import samples, network, mean_loss, make_task

class Broken:
    def on_evaluation(self, run):
        if run.rank == 1:
            raise ValueError("boom")

task = make_task(eval_dataset=samples, callbacks=[Broken()])
"""


@pytest.mark.timeout(90)
def test_an_error_on_one_rank_ends_all_with_the_callbacks_name(tmp_path):
    (tmp_path / "mine.py").write_text(BROKEN)
    done = run_lockstep("train", tmp_path / "mine.py", "--devices", "2", env=os.environ)
    assert done.code == 1
    assert "ValueError: boom" in done.err
    assert "Broken.on_evaluation raised it, on rank 1 after step 3." in done.err


class Logs:
    def on_step_end(self, run):
        run.log("twice the loss", 2 * run.last_step.loss)
        if run.step % 2 == 0:
            run.log("half", run.step / 2)

    def on_evaluation(self, run):
        run.log("bleu", 0.25 * run.step)


def test_what_a_callback_logs_is_in_the_record_its_report_and_the_sinks(ranks, tmp_path):
    def run(world):
        how = {"run_dir": tmp_path / "run", "log_to": f"tensorboard:{tmp_path / 'board'}", "view": "lines"}
        return lockstep.fit(TASK, epochs=8, callbacks=[Logs()], **how).losses

    losses = ranks(2)(run)[0]
    steps = read_run(tmp_path / "run").zero.steps
    assert [line.logged.get("twice the loss") for line in steps] == pytest.approx([2 * loss for loss in losses])
    assert [line.logged.get("half") for line in steps[:6]] == [None, 1.0, None, 2.0, None, 3.0]
    evaluations = [event.metrics for event in read_run(tmp_path / "run").zero.events if event.event == "evaluation"]
    assert evaluations[1] == {"bleu": 0.75} and evaluations[3] == {"bleu": 1.5}
    page = report(tmp_path / "run").page
    shown = [title for title in ("Logged: twice the loss", "Logged: half", "Evaluation: bleu") if title in page]
    assert len(shown) == 3, shown
    (board,) = (tmp_path / "board").iterdir()
    content = board.read_bytes()
    assert b"log/twice_the_loss" in content and b"log/half" in content and b"eval/bleu" in content


def test_the_live_view_shows_what_was_logged():
    assert "half 2.5" in live_view.line(Snapshot(step=5, loss=1.0, logged={"half": 2.5}))
    assert figures.scalars(Snapshot(logged={"a b": 2.0}))["log/a_b"] == 2.0


class Unfreezes:
    """Trains the first layer from step 3 on, apart from step 5."""

    def on_step_end(self, run):
        next(run.model.children()).requires_grad_(run.step >= 3 and run.step != 5)

    on_start = on_step_end


def frozen():
    model = network().double()
    next(model.children()).requires_grad_(False)
    return model


UNFREEZING = make_task(
    model=frozen, optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.1), callbacks=[Unfreezes()]
)


def unfreeze(world, strategy, folder, steps, **settings):
    result = lockstep.fit(
        UNFREEZING, strategy=strategy, quiet=True, clip=0.05, steps=steps, checkpoint=folder, **settings
    )
    return torch.cat([tensor.reshape(-1) for _, tensor in sorted(result.model.state_dict().items())])


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [("ddp", {"accumulate": 2}), ("ddp-zero1", {}), ("fsdp", {}), ("ddp", {"reproducible": 4})],
)
def test_layers_that_a_callback_unfreezes_train_as_on_one_device_also_after_a_resume(
    ranks, tmp_path, strategy, settings
):
    (expected,) = ranks(1)(unfreeze, "single", str(tmp_path / "one"), 8)
    ranks(2)(partial(unfreeze, **settings), strategy, str(tmp_path / "many"), 5)
    resumed = partial(unfreeze, **settings)
    outcomes = ranks(3)(resumed, strategy.replace("fsdp", "ddp"), str(tmp_path / "many"), 8)
    assert all(relative_error(weights, expected) < 1e-12 for weights in outcomes)
    start = torch.cat([tensor.reshape(-1) for _, tensor in sorted(frozen().state_dict().items())])
    assert bool((start != expected).all())


@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("ddp", 2), ("ddp-zero1", 2)])
def test_an_unfrozen_layer_that_the_optimizer_does_not_have_is_refused(ranks, strategy, num_ranks):
    def run(world):
        task = make_task(
            model=frozen, optimizer=lambda params: torch.optim.Adam(params, lr=0.1), callbacks=[Unfreezes()]
        )
        with pytest.raises(ConfigurationError, match="weight was unfrozen, but the optimizer does not have it"):
            lockstep.fit(task, strategy=strategy, quiet=True, steps=8)

    ranks(num_ranks)(run)
