"""From the steps of each rank to one snapshot of all, and what is said of it."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from lockstep.telemetry import recorder as module
from lockstep.telemetry.figures import (
    RankFigures,
    Snapshot,
    Spread,
    StragglerReporter,
    find_stragglers,
    pace_of,
    with_waits,
)
from lockstep.telemetry.live_view import duration, line, summary
from lockstep.telemetry.record import Event, StepLine
from lockstep.telemetry.recorder import Place, RankMeans, Recorder
from lockstep.telemetry.sinks import Delivery, Subscriber
from lockstep.telemetry.step_times import StepTimes, milliseconds
from lockstep.train.recording import window_of

STEP = StepTimes(
    total_s=0.012, data_wait_s=0.001, forward_s=0.003, backward_s=0.005, optimizer_s=0.001, exposed_s=0.002
)


def step(number, times=STEP, **fields):
    slowest = {"slowest_s": times.total_s, "slowest_step": number}
    return StepLine(step=number, time=0.0, times=times, **slowest, **fields)


def recorder_of(board=None, rank=0, display=None, **how):
    """Return the recorder of one of two ranks, and the means of that rank."""
    recorder = Recorder(Place(rank, 2), [torch.device("cpu")], Snapshot(num_steps=20), **how)
    recorder.subscribe(display)
    recorder.keys = board
    return recorder, recorder.means


def ranks(*own_s, core_wait_s=0.0):
    """Ranks of a run in which every step takes as long as the slowest rank's work, and a millisecond on the wire."""
    step_s = max(own_s) + 0.001
    found = []
    for rank, each in enumerate(own_s):
        values = {"step_s": step_s + core_wait_s, "exposed_s": step_s - each, "data_wait_s": 0.002}
        values |= {
            "own_s": each + core_wait_s,
            "optimizer_s": 0.002,
            **dict.fromkeys(("forward_s", "backward_s"), (each - 0.004) / 2),
        }
        values |= {"core_wait_s": core_wait_s} if core_wait_s else {}
        found.append(RankFigures(rank=rank, num_steps=5, values=values))
    return with_waits(found)


class Kept(Subscriber):
    """Keeps what it is given."""

    def __init__(self):
        self.snapshots, self.events, self.num_closed = [], [], 0

    def event(self, event):
        self.events.append(event.text)

    def update(self, snapshot):
        self.snapshots.append(snapshot)

    def give(self, snapshot, events=()):
        for event in events:
            self.event(event)
        self.update(snapshot)

    def close(self):
        self.num_closed += 1


class Notes:
    """A board whose other ranks are made up."""

    def __init__(self, others=None):
        self.mine, self.others = [], others or {}

    def post(self, note):
        self.mine.append(note)

    def read(self):
        return self.others


def test_a_recovery_while_the_store_is_read_counts_in_all_figures_from_then_on():
    shown = Kept()
    recorder, _ = recorder_of()
    recorder._deliveries = [shown]

    class Board(Notes):
        def read(self):
            if not shown.snapshots:  # the training thread recovers meanwhile
                recorder.go_on(Event(event="recovery", step=1), Place(0, 3))
            return super().read()

    recorder.keys = Board()
    for _ in range(2):
        recorder.report()
    assert [snapshot.world_size for snapshot in shown.snapshots] == [3, 3]


def test_means_over_the_steps_since_the_last_look():
    found = RankMeans(0, "cpu", first_step=7)
    for number, factor in ((7, 10.0), (8, 1.0), (9, 3.0)):
        took = StepTimes(**{name: None if value is None else factor * value for name, value in asdict(STEP).items()})
        loss = {7: None, 8: 0.5, 9: None}[number]
        of_step = {"samples": 8, "interval_s": 0.02}
        found.add(step(number, took, counts=None if loss is None else 100, loss=loss, **of_step))
        if number == 7:
            first, _ = found.read()
    found.machine({"kind": "machine", "time": 1.0, "rss_bytes": 5, "cpu_percent": 80.0})
    seen, interval = found.read()
    assert (first.step, first.num_steps, first["step_s"]) == (8, 1, pytest.approx(0.12))
    assert (seen.step, seen.num_steps, seen["rss_bytes"], seen["gpu_percent"]) == (10, 2, 5, None)
    assert seen["step_s"] == pytest.approx(0.024) and seen["slowest_s"] == pytest.approx(0.036)
    assert seen["exposed_s"] == pytest.approx(0.004) and seen["own_s"] == pytest.approx(0.02)
    assert (interval["samples_per_s"], interval["tokens_per_s"]) == (16 / 0.04, 200 / 0.04)
    assert interval["loss"] == 0.5
    assert found.whole_run()["step_s"] == pytest.approx(0.024), "the first step is left out"
    later = found.read()[0]
    assert (later["step_s"], later.num_steps) == (seen["step_s"], 0), "no step was done since"


def test_a_rank_that_knows_nothing_of_waiting_says_so():
    found = RankMeans(0, "cpu")
    found.add(step(0, replace(STEP, exposed_s=None), samples=1))
    assert found.read()[0]["exposed_s"] is None


def test_a_snapshot_of_all_ranks(monkeypatch):
    monkeypatch.setattr(module, "Delivery", lambda subscriber: subscriber)  # without a thread
    other = ranks(0.010, 0.014)[1]
    board, kept = Notes({1: [3, asdict(other)]}), Kept()
    recorder, mine = recorder_of(board, 0, kept, steps_per_epoch=4, num_skipped=lambda: 2)
    recorder.event(Event(event="checkpoint", text="kept", step=0, seconds=0.1))
    recorder.drain()
    mine.add(step(0, interval_s=0.02, samples=8, loss=0.25, learning_rate=0.1, grad_norm=1.5))
    recorder.report()
    recorder.report(is_last=True)
    first, second = kept.snapshots
    assert (first.step, first.epoch, first.loss, first.learning_rate, first.grad_norm) == (1, 0.25, 0.25, 0.1, 1.5)
    assert (first.samples_per_s, first.num_skipped_steps, first.is_last) == (400.0, 2, False)
    assert kept.events == ["kept"] and first.event_counts == second.event_counts == {"checkpoint": 1}
    # Rank 1 was exposed 1 ms, rank 0 2 ms: of which it waited one for rank 1.
    assert [each["peers_s"] for each in first.ranks] == [pytest.approx(0.001), 0.0]
    assert first.spread("own_s") == Spread(pytest.approx(0.010), 0, pytest.approx(0.012), pytest.approx(0.014), 1)
    assert (second.samples_per_s, second.ranks[0]["step_s"], second.ranks[0].num_steps, second.is_last) == (
        *(400.0, first.ranks[0]["step_s"], 0, True),
    )
    recorder.close()
    assert kept.num_closed == 1


def test_other_ranks_only_post():
    board = Notes()
    recorder, mine = recorder_of(board, 1)
    mine.add(step(0, interval_s=0.02, samples=8))
    recorder.report()
    recorder.report()
    (first, values), (second, _) = json.loads(json.dumps(board.mine))
    assert (first, second) == (1, 2)
    assert RankFigures(**values)["forward_s"] == 0.003


def test_a_recorder_that_fails_says_so_once_and_ends(capsys, monkeypatch):
    calls = []

    def read():
        calls.append(1)
        raise KeyError("gone")

    recorder, mine = recorder_of()
    monkeypatch.setattr(mine, "read", read)
    recorder.start()
    recorder.finish(waits=True)
    assert len(calls) == 1
    assert capsys.readouterr().err == "lockstep: this run is no longer recorded: KeyError: 'gone'\n"


def test_a_sink_that_raises_is_switched_off_with_one_warning(capsys):
    class Broken(Kept):
        def update(self, snapshot):
            super().update(snapshot)
            raise OSError("the disk\nis full")

    broken = Broken()
    delivery = Delivery(broken)
    snapshot = Snapshot(time=0.0, step=1, num_steps=2)
    delivery.give(snapshot)
    delivery.give(snapshot)
    delivery.close()
    assert (len(broken.snapshots), broken.num_closed) == (1, 1)
    assert capsys.readouterr().err == "lockstep: Broken gets no more figures of this run: OSError: the disk\n"


def test_a_slow_sink_misses_snapshots_and_no_events():
    import threading

    class Slow(Kept):
        is_in, may_go = threading.Event(), threading.Event()

        def update(self, snapshot):
            super().update(snapshot)
            self.is_in.set()
            assert self.may_go.wait(10.0)

    slow = Slow()
    delivery = Delivery(slow)
    event = [Event(event="remark", step=number, time=0.0, seconds=None, text=str(number)) for number in range(4)]
    snapshots = [Snapshot(time=0.0, step=number, num_steps=9) for number in range(4)]
    delivery.give(snapshots[0], event[:1])
    assert slow.is_in.wait(10.0)
    for number in (1, 2, 3):
        delivery.give(snapshots[number], event[number : number + 1])
    slow.may_go.set()
    delivery.close()
    assert [snapshot.step for snapshot in slow.snapshots] == [0, 3]
    assert slow.events == ["0", "1", "2", "3"]
    assert slow.num_closed == 1


def test_where_the_time_went_in_words():
    whole = Snapshot(time=0.0, step=9, num_steps=9, ranks=ranks(0.010, 0.019), world_size=2)
    assert summary(whole) == (
        "a step took 20.0 ms: forward 26%, backward 26%, waiting for ranks 22%, data wait 10%, optimizer 10%, "
        "exchange 5%; slowest was rank 1 (19.0 ms of work in a step), fastest rank 0 (10.0 ms)"
    )
    assert summary(Snapshot(time=0.0, step=9, num_steps=9)) is None
    # Rank 1 has taken the place of a lost one: it has done fewer steps, or none.
    text = summary(whole).partition("; slowest")[0]
    first, second = whole.ranks
    assert summary(replace(whole, ranks=(first, replace(second, num_steps=4)))) == text
    assert "slowest" not in summary(replace(whole, ranks=(first, RankFigures(rank=1))))
    assert "slowest" not in summary(replace(whole, ranks=(first, RankFigures(rank=1, num_steps=5))))
    alone = Snapshot(time=0.0, step=9, num_steps=9, ranks=ranks(0.010))
    assert summary(alone) == (
        "a step took 11.0 ms: forward 27%, backward 27%, data wait 18%, optimizer 18%, exchange 9%"
    )


def test_waiting_for_a_core_is_said_first_if_it_is_the_largest_part():
    starved = ranks(0.010, 0.010, core_wait_s=0.05)
    snapshot = Snapshot(time=0.0, step=9, num_steps=9, ranks=starved, world_size=2)
    assert summary(snapshot) == (  # and no rank is the slowest
        "a step took 61.0 ms: waiting for a core 82%, forward 5%, backward 5%, data wait 3%, optimizer 3%"
    )
    assert "waiting for a core 82%" in line(snapshot)


def test_progress_in_one_line():
    snapshot = Snapshot(
        time=0.0,
        step=120,
        num_steps=1000,
        loss=0.25,
        samples_per_s=1234.4,
        tokens_per_s=56789.0,
        counts="words",
        left_s=75.2,
        ranks=ranks(0.010, 0.010, 0.019),
        world_size=3,
    )
    assert line(snapshot) == (
        "step 120/1000  loss 0.2500  1,234 samples/s  56,789 words/s  1:15 min left  "
        "waiting for ranks 30%, forward 22%, backward 22%  rank 2 is slowest"
    )
    assert line(Snapshot(time=0.0, step=1, num_steps=2, loss=math.nan)) == "step 1/2  loss nan"


@pytest.mark.parametrize(
    ("seconds", "short", "long"),
    [(0.00042, "0.42 ms", "0 s"), (0.0123, "12.3 ms", "0 s"), (0.4, "400 ms", "0 s"), (7325, "7325.00 s", "2:02 h")],
)
def test_times(seconds, short, long):
    assert (milliseconds(seconds), duration(seconds)) == (short, long)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda note: 7,
        lambda note: {},
        lambda note: [note[0]],
        lambda note: [note[0], {**note[1], "unknown": 1}],
    ],
)
def test_a_wrong_note_stops_nothing(wrong, monkeypatch):
    """Of any type, too short, or with a name too many; those of other ranks are seen all the same."""
    _, one, two = ranks(0.010, 0.014, 0.012)
    kept = Kept()
    notes = Notes({1: wrong([3, asdict(one)]), 2: [3, asdict(two)]})
    monkeypatch.setattr(module, "Delivery", lambda subscriber: subscriber)
    recorder_of(notes, 0, kept)[0].report()
    assert [[each.rank for each in snapshot.ranks] for snapshot in kept.snapshots] == [[0, 2]]


# Which rank is slow, in which phase, and by how much; and when that is said.


PHASES = ("data_wait", "forward", "backward", "optimizer")
NOISE = (0.0, 0.001, 0.0, 0.002, 0.001)


def times(data_wait, forward, backward, optimizer, waits):
    parts = {"data_wait_s": data_wait, "forward_s": forward, "backward_s": backward, "optimizer_s": optimizer}
    return StepTimes(total_s=sum(parts.values()) + waits, exposed_s=waits, **parts)


def pace(*, slow=None, by_s=0.0, waits=0.002):
    usual = {"data_wait": 0.001, "forward": 0.01, "backward": 0.02, "optimizer": 0.002}
    steps = []
    for noise in NOISE:
        took = dict(usual, forward=0.01 + noise)
        if slow is not None:
            took[slow] += by_s
        steps.append(times(**took, waits=waits))
    return pace_of(steps)


@pytest.mark.parametrize("phase", PHASES)
def test_a_delay_is_of_the_rank_and_the_phase_that_it_was_put_into(phase):
    paces = {rank: pace(waits=0.052) for rank in range(3)} | {3: pace(slow=phase, by_s=0.05)}
    [found] = find_stragglers(paces)
    assert (found.rank, found.part) == (3, phase)
    assert found.lost_s == pytest.approx(0.05)
    assert found.step_s == pytest.approx(0.086)


@pytest.mark.parametrize(
    "paces",
    [
        {0: pace()},
        {rank: pace() for rank in range(4)},
        {0: pace(), 1: pace(slow="data_wait", by_s=0.002)},  # within what steps differ by anyway
        {rank: pace(slow="data_wait", by_s=0.05) for rank in range(3)} | {3: pace()},  # most are: one is quick
    ],
)
def test_nobody_is_slow(paces):
    assert find_stragglers(paces) == []


def test_single_slow_steps_are_not_persistent():
    steps = [times(0.001, 0.01, 0.02, 0.002, 0.002)] * 4 + [times(0.5, 0.01, 0.02, 0.002, 0.002)]
    assert find_stragglers({0: pace(), 1: pace_of(steps)}) == []


def test_nothing_is_compared_without_the_same_steps_as_after_a_recovery():
    reporter = StragglerReporter(pytest.fail)
    reporter.judge({0: pace_of([]), 1: pace_of([])})
    reporter.judge({0: pace_of([]), 1: pace(slow="backward", by_s=0.05)})


def test_what_is_said():
    [found] = find_stragglers({0: pace(waits=0.052), 1: pace(slow="backward", by_s=0.05)})
    assert str(found) == (
        "rank 1 is slow: it loses 50.0 ms in each step of 86.0 ms, in backward (70.0 ms, usual is 20.0 ms), "
        "and the others wait for it"
    )


def test_which_steps_are_looked_at():
    assert [step for step in range(120) if step in window_of(step)] == [*range(2, 22), *range(40, 50), *range(90, 100)]
    assert [step for step in range(120) if step == window_of(step)[-1]] == [11, 21, 49, 99]


def test_it_is_said_once_and_again_if_it_gets_worse():
    reported = []
    reporter = StragglerReporter(reported.append)
    for by_s in (0.05, 0.06, 0.2):
        reporter.judge({0: pace(), 1: pace(slow="data_wait", by_s=by_s)})
    assert [text.partition(" in each")[0] for text in reported] == [
        "rank 1 is slow: it loses 50.0 ms",
        "rank 1 is slow: it loses 200 ms",
    ]


def test_ranks_that_are_slow_in_turn_are_one_message():
    reported = []
    reporter = StragglerReporter(reported.append)
    for slow in (0, 0, 1, 0, 1):
        reporter.judge({rank: pace(slow="forward", by_s=0.05) if rank == slow else pace() for rank in range(2)})
    first, second = reported
    assert first.startswith("rank 0 is slow: it loses 50.0 ms")
    assert second == (
        "now rank 1 is slow, and rank 0 is not any more: ranks are slow in turn, as when other programs use the cores "
        "(lockstep doctor names them). Slow ranks are not reported any more"
    )


def test_nothing_is_said_after_a_rank_was_replaced_in_this_window():
    reported = []
    StragglerReporter(reported.append).judge({0: pace_of([]), 1: pace_of([])})
    assert reported == []
