"""What a run refuses as a callback, and when `EarlyStopping` ends it."""

from types import SimpleNamespace

import pytest
import torch

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.train.callbacks import Callbacks
from tests.training import make_task


def with_methods(*names):
    return type("Mine", (), {name: lambda self, run: None for name in names})()


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (with_methods("on_end").__class__, "The callback Mine is a class.\nGive an object: callbacks=[Mine()]."),
        (
            with_methods("state_dict"),
            "The callback Mine has none of the methods on_start, on_step_end, on_evaluation, on_checkpoint, on_end.\n"
            "Define one.",
        ),
        (
            with_methods("on_start", "on_train_batch_end"),
            "No run calls on_train_batch_end of the callback Mine.\n"
            "There are on_start, on_step_end, on_evaluation, on_checkpoint, on_end.",
        ),
        (
            with_methods("on_evaluatoin"),
            "No run calls on_evaluatoin of the callback Mine.\n"
            "There are on_start, on_step_end, on_evaluation, on_checkpoint, on_end.",
        ),
    ],
)
def test_what_no_run_calls_is_refused(callback, text):
    for give in (lambda: make_task(callbacks=[callback]), lambda: lockstep.fit(make_task(), callbacks=[callback])):
        with pytest.raises(ConfigurationError) as error:
            give()
        assert str(error.value) == text


def test_one_that_is_not_in_a_list_is_refused():
    for give in (lambda mine: make_task(callbacks=mine), lambda mine: lockstep.fit(make_task(), callbacks=mine)):
        with pytest.raises(ConfigurationError) as error:
            give(with_methods("on_end"))
        assert str(error.value) == "callbacks is not a list.\nGive one: callbacks=[MyCallback()]."


@pytest.mark.parametrize(("name", "value"), [("name", "text"), ("name", torch.ones(3)), (3, 1.0), ("name", None)])
def test_only_numbers_are_logged(name, value):
    class Logging:
        def on_step_end(self, run):
            run.log(name, value)

    with pytest.raises(ConfigurationError) as error:
        lockstep.fit(make_task(), steps=1, quiet=True, callbacks=[Logging()])
    assert str(error.value) == (
        f"run.log({name!r}, {value!r}) is not a name and a number.\nGive a number, or a tensor with one element."
    )


def test_an_error_says_whose_it_is():
    class Broken:
        def on_evaluation(self, run):
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom") as error:
        Callbacks([Broken()]).call("on_evaluation", SimpleNamespace(rank=1, step=7))
    assert error.value.__notes__ == ["Broken.on_evaluation raised it, on rank 1 after step 7."]


def test_two_callbacks_of_a_class_keep_their_own_state():
    one, two = lockstep.EarlyStopping(), lockstep.EarlyStopping()
    two.load_state_dict({"best": 1.0, "at": 2, "num_since": 3})
    state = Callbacks([one, with_methods("on_end"), two]).state_dict()
    assert list(state) == ["EarlyStopping", "EarlyStopping 2"]
    others = lockstep.EarlyStopping(), lockstep.EarlyStopping()
    Callbacks(others).load_state_dict(state)
    assert [each.state_dict() for each in others] == [one.state_dict(), two.state_dict()]


@pytest.mark.parametrize(
    ("metric", "values", "stopped"),
    [
        ("loss", [5, 4, 4, 4.5, 3], {3: "no better than loss 4.0000 after step 1 in 2 evaluations"}),
        ("loss", [5, float("nan"), float("nan"), 1], {2: "no better than loss 5.0000 after step 0 in 2 evaluations"}),
        ("accuracy:max", [0.1, 0.3, 0.2, 0.3], {3: "no better than accuracy 0.3000 after step 1 in 2 evaluations"}),
        ("accuracy:max", [0.1, 0.2, 0.3], {}),
    ],
)
def test_it_stops_after_so_many_evaluations_without_a_new_best(metric, values, stopped):
    stopping, reasons = lockstep.EarlyStopping(metric, patience=2), {}
    for step, value in enumerate(values):
        run = SimpleNamespace(step=step, metrics={metric.partition(":")[0]: value})
        run.stop = lambda why, step=step: reasons.setdefault(step, why)
        if not reasons:
            stopping.on_evaluation(run)
            resumed = lockstep.EarlyStopping(metric, patience=2)
            resumed.load_state_dict(stopping.state_dict())
            stopping = resumed
    assert reasons == stopped
    again = []
    stopping.on_start(SimpleNamespace(stop=again.append))
    assert again == [*stopped.values()], "also at once after a resume"


def test_a_metric_that_is_not_there_is_named():
    with pytest.raises(ConfigurationError) as error:
        lockstep.EarlyStopping("acc:max").on_evaluation(SimpleNamespace(metrics={"loss": 1.0, "accuracy": 0.5}))
    assert str(error.value) == "The evaluation has no metric 'acc'.\nName one of those it has: loss, accuracy."
    with pytest.raises(ConfigurationError) as error:
        lockstep.EarlyStopping("acc:best")
    assert str(error.value) == (
        "'acc:best' is not a metric.\nGive its name, such as loss, or accuracy:max if more of it is better."
    )
