"""Steps that are put together from what hooks see: what belongs to which, in whatever order loops do things."""

import json
from types import SimpleNamespace

import pytest
import torch

from lockstep.loop import steps as module
from lockstep.loop.monitor import complete
from lockstep.loop.steps import Steps, num_samples
from lockstep.telemetry import recorder
from lockstep.telemetry.record import StepLine, Timeline, to_json

MAIN, OTHER = 1, 2


class Loop:
    """A loop whose parts take as long as they are told, on a clock that stands still otherwise."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        clock = SimpleNamespace(perf_counter=lambda: self.now, time=lambda: 1000.0 + self.now)
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(recorder, "time", clock)
        monkeypatch.setattr(recorder.activity, "core_use", lambda: b"0 0 0")  # nobody waits for a core on this clock
        self.done_steps, self.evaluations = [], []
        self.steps = Steps(torch.device("cpu"), self.done_steps.append, self.evaluated)

    def evaluated(self, num_steps, wall_s, seconds):
        self.evaluations.append((num_steps, wall_s, seconds))

    def rest(self, seconds):
        self.now += seconds

    def fetch(self, seconds=1.0, samples=8):
        asked = recorder.moment(torch.device("cpu"))
        self.rest(seconds)
        self.steps.batch(asked, samples)

    def forward(self, seconds=2.0, loss=0.5, inputs=8):
        self.steps.forward_begins(is_training=True)
        self.rest(seconds)
        self.steps.forward_ends(inputs)
        self.rest(loss)

    def backward(self, seconds=4.0, waits=1.0):
        self.steps.backward_begins()
        self.rest(seconds)
        self.steps.own_work_done()
        self.rest(waits)
        self.steps.backward_ends(None)

    def update(self, key=MAIN, seconds=0.25, **how):
        self.steps.optimizer_begins(key)
        self.rest(seconds)
        self.steps.optimizer_ends(key, 0.1, **how)

    def look(self, seconds=3.0, is_training=False):
        with torch.no_grad():
            self.steps.forward_begins(is_training=is_training)
        self.rest(seconds)
        with torch.no_grad():
            self.steps.forward_ends(8)

    def step(self):
        self.fetch()
        self.forward()
        self.backward()
        self.update()

    def lines(self, kind="torch-ddp", num_ranks=2):
        self.steps.close()
        return [line_of(step, kind, num_ranks) for step in self.done_steps]


def line_of(step, kind, num_ranks=1):
    complete(step, kind)
    own_samples, step.samples = step.samples, step.samples * num_ranks
    try:
        return StepLine.of(step, 0.0).to_line()
    finally:
        step.samples = own_samples


@pytest.fixture
def loop(monkeypatch):
    return Loop(monkeypatch)


def parts(line):
    return [line[name] for name in ("data_wait_s", "forward_s", "backward_s", "exposed_s", "optimizer_s", "total_s")]


def test_a_plain_loop(loop):
    loop.step()
    loop.rest(10.0)  # logging
    loop.step()
    first, second = loop.lines()
    assert parts(first) == parts(second) == [1.0, 2.5, 4.0, 1.0, 0.25, 8.75]
    assert (first["interval_s"], second["interval_s"]) == (18.75, None)
    assert (first["samples"], first["samples_per_s"], first["step"], second["step"]) == (16, 0.8533333, 0, 1)
    assert first["learning_rate"] == 0.1
    assert json.loads(to_json(Timeline.of(loop.done_steps[0], 5.0).to_line())) == {
        "kind": "timeline",
        "step": 0,
        "time": 5.0,
        "spans": [
            ["data_wait", 0.0, 1.0],
            ["forward", 1.0, 3.0],
            ["forward", 3.0, 3.5],
            ["backward", 3.5, 8.5],
            ["optimizer", 8.5, 8.75],
        ],
        "buckets": [],
        "waited_from": 7.5,
        "waited_until": 8.5,
    }


def test_what_an_engine_does_not_tell_is_null(loop):
    loop.step()
    (line,) = loop.lines("unknown")
    assert parts(line) == [1.0, 2.5, 5.0, None, 0.25, 8.75]
    assert line_of(loop.done_steps[0], "single")["exposed_s"] == 0.0


def test_micro_batches_are_one_step(loop):
    for _ in range(3):
        loop.fetch()
        loop.forward()
        loop.backward()
    loop.update()
    (line,) = loop.lines()
    assert parts(line) == [3.0, 7.5, 12.0, 3.0, 0.25, 25.75]
    assert line["samples"] == 48


def test_an_evaluation_between_steps_is_an_event_and_no_step(loop):
    loop.step()
    loop.rest(1.0)
    for _ in range(3):
        loop.fetch(0.5)
        loop.look()
    loop.step()
    first, second = loop.lines()
    assert parts(second) == [1.0, 2.5, 4.0, 1.0, 0.25, 8.75]
    assert (first["interval_s"], second["samples"]) == (9.75, 16)
    assert loop.evaluations == [(1, 1109.75, 10.5)]


def test_an_evaluation_at_the_end_lasts_as_long_as_its_forwards(loop):
    loop.step()
    loop.look()
    loop.rest(60.0)
    loop.steps.close()
    assert [seconds for _, _, seconds in loop.evaluations] == [3.0]


def test_one_look_at_a_batch_that_is_then_trained_on_is_no_evaluation(loop):
    loop.step()
    loop.fetch()
    loop.look(is_training=True)
    loop.forward()
    loop.backward()
    loop.update()
    _, line = loop.lines()
    assert (line["data_wait_s"], line["total_s"], line["samples"]) == (1.0, 11.75, 16)
    assert loop.evaluations == []


def test_a_model_that_is_trained_in_evaluation_mode_is_found_out(loop):
    assert not loop.steps.trains_in_eval
    loop.fetch()
    loop.look()
    loop.backward()
    loop.update()
    assert loop.steps.trains_in_eval
    loop.step()
    first, second = loop.lines()
    assert (first["forward_s"], first["backward_s"], first["samples"]) == (None, 4.0, 16)
    assert parts(second) == [1.0, 2.5, 4.0, 1.0, 0.25, 8.75]
    assert loop.evaluations == []


def test_optimizers_behind_the_lead_belong_to_its_step(loop):
    for _ in range(2):
        loop.fetch()
        loop.forward()
        loop.backward()
        loop.update(MAIN)
        loop.update(OTHER, 0.75)
    assert [line["optimizer_s"] for line in loop.lines()] == [1.0, 1.0]


def test_two_models_that_are_updated_in_turn_are_one_step_a_batch(loop):
    for _ in range(4):
        loop.fetch()
        loop.forward()
        loop.backward()
        loop.update(MAIN)
        loop.forward()
        loop.backward()
        loop.update(OTHER)
    lines = loop.lines()
    assert [line["samples"] for line in lines] == [16] * 4
    assert [line["forward_s"] for line in lines] == [2.5, 5.0, 5.0, 5.0]


def test_another_optimizer_takes_the_lead_when_the_first_has_gone(loop):
    loop.step()
    for _ in range(12):
        loop.fetch()
        loop.forward()
        loop.backward()
        loop.update(OTHER)
    assert [line["samples"] // 16 for line in loop.lines()] == [1, 9, 1, 1, 1]


def test_a_closure_of_the_optimizer_is_no_optimizer_time(loop):
    loop.fetch()
    loop.steps.optimizer_begins(MAIN)
    for _ in range(2):
        loop.rest(0.125)
        loop.forward()
        loop.backward()
    loop.rest(0.25)
    loop.steps.optimizer_ends(MAIN, None)
    (line,) = loop.lines()
    assert parts(line) == [1.0, 5.0, 8.0, 2.0, 0.5, 16.5]


def test_an_optimizer_within_another_is_counted_once(loop):
    loop.fetch()
    loop.forward()
    loop.backward()
    loop.steps.optimizer_begins(MAIN)
    loop.update(MAIN)
    loop.update(OTHER)
    loop.steps.optimizer_ends(MAIN, 0.1)
    (line,) = loop.lines()
    assert line["optimizer_s"] == 0.5


def test_an_optimizer_that_steps_within_backward_ends_the_step_with_it(loop):
    for _ in range(2):
        loop.fetch()
        loop.forward()
        loop.steps.backward_begins()
        for _ in range(3):  # a bucket each
            loop.rest(1.0)
            loop.steps.optimizer_within(0.3)
        loop.steps.own_work_done()
        loop.steps.backward_ends(None)
    lines = loop.lines()
    assert [parts(line) for line in lines] == [[1.0, 2.5, 3.0, 0.0, 0, 6.5]] * 2
    assert [line["learning_rate"] for line in lines] == [0.3, 0.3]


def test_a_batch_that_is_fetched_ahead_counts_where_it_is_used(loop):
    loop.fetch()
    loop.fetch()
    for _ in range(3):
        loop.forward()
        loop.fetch()
        loop.backward()
        loop.update()
    lines = loop.lines()
    assert [line["samples"] for line in lines] == [32, 16, 16]
    assert [line["data_wait_s"] for line in lines] == [3.0, 1.0, 1.0]
    assert [line["forward_s"] for line in lines] == [2.5] * 3


def test_without_a_loader_samples_are_what_forwards_get(loop):
    loop.forward(inputs=5)
    loop.backward()
    loop.update()
    (line,) = loop.lines()
    assert (line["samples"], line["data_wait_s"]) == (10, None)


def test_what_is_computed_unseen_leaves_nulls(loop):
    for _ in range(2):
        loop.fetch()
        loop.rest(5.0)
        loop.update()
    lines = loop.lines()
    assert [parts(line) for line in lines] == [[1.0, None, None, None, 0.25, 6.25]] * 2
    assert [line["samples"] for line in lines] == [16, 16]


def test_an_exception_in_a_step_leaves_the_next_ones_whole(loop):
    loop.fetch()
    loop.steps.forward_begins(is_training=True)
    loop.rest(1.0)  # an out-of-memory error, say, that the script survives
    loop.step()
    loop.fetch()
    loop.forward()
    loop.backward()
    loop.steps.optimizer_begins(MAIN)
    loop.rest(1.0)
    loop.step()
    loop.step()
    lines = loop.lines()
    assert len(lines) == 3
    assert parts(lines[2]) == [1.0, 2.5, 4.0, 1.0, 0.25, 8.75]


def test_the_length_of_a_batch():
    images, labels = torch.zeros(6, 3, 2), torch.zeros(6)
    assert num_samples((images, labels)) == 6
    assert num_samples({"input_ids": images, "labels": labels}) == 6
    assert num_samples([torch.zeros(3, 2)] * 4, batch_size=4) == 4  # a list of samples
    assert num_samples([torch.zeros(4, 2), torch.zeros(4)], batch_size=4) == 4
    assert num_samples(([torch.zeros(3, 2)] * 5, [{}] * 5)) == 5  # as for detection
    assert num_samples((torch.tensor(1.0), labels)) == 6
    assert (num_samples([]), num_samples("text"), num_samples({})) == (0, 0, 0)
