"""Reading a record: what is missing or broken is told, and nothing that is broken gets further."""

import json

import pytest

from lockstep.errors import ConfigurationError
from lockstep.telemetry.record import read_run
from tests.unit.report_planted import START, event_line, session, step_line, steps, timeline_line, write_run


def test_a_whole_record_has_no_gaps(tmp_path):
    run = read_run(write_run(tmp_path / "run", [steps(3), steps(3)]))
    assert run.gaps == []
    assert {rank: len(record.steps) for rank, record in run.ranks.items()} == {0: 3, 1: 3}
    assert (run.ranks[1].host, run.ranks[1].device) == ("here", "cpu")
    assert run.ranks[0].steps[2].loss == pytest.approx(2 / 3)


def test_no_record_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError) as error:
        read_run(tmp_path / "nothing")
    assert (
        str(error.value) == f"There is no folder {tmp_path}/nothing.\nName the folder given as --run-dir or --monitor."
    )
    with pytest.raises(ConfigurationError) as error:
        read_run(tmp_path)
    assert str(error.value) == (
        f"No run was recorded in {tmp_path}: it holds no run.json and no rank-*.jsonl.\n"
        "Record one with lockstep train TASK.py --run-dir DIR, or lockstep run --monitor DIR SCRIPT.py."
    )


def test_another_version_is_an_error(tmp_path):
    folder = write_run(tmp_path / "run", [steps(3)])
    (folder / "run.json").write_text(json.dumps({"version": 2, "sessions": []}))
    with pytest.raises(ConfigurationError) as error:
        read_run(folder)
    assert str(error.value) == (
        f"{folder}/run.json was written by another version of Lockstep (format 2, this one reads 1).\n"
        "Use the version that recorded the run."
    )


def test_broken_lines_are_left_out_and_told(tmp_path):
    folder = write_run(tmp_path / "run", [steps(3), steps(3)])
    bad = [
        "[1, 2]",
        json.dumps({"kind": "surprise"}),
        json.dumps(step_line(3, loss="<script>")),
        json.dumps(step_line(4, total_s=-1)),
        json.dumps(step_line(5, time=None) | {"time": "now"}),
        json.dumps(event_line("explosion", "boom")),
        json.dumps(timeline_line(4, START) | {"spans": [["<b>", 0, 1]]}),
        json.dumps(timeline_line(4, START) | {"buckets": [[0, 1]]}),
        '{"kind": "step", "st',
    ]
    with (folder / "rank-1.jsonl").open("a") as file:
        file.write("\n".join(bad))
    with (folder / "rank-0.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n" + b"[" * 100_000)
    run = read_run(folder)
    assert [len(record.steps) for record in run.ranks.values()] == [3, 3]
    assert run.gaps == [
        "rank-0.jsonl: 2 lines cannot be read; the first is line 5.",
        "rank-1.jsonl: 9 lines cannot be read; the first is line 5.",
    ]


def test_missing_files_are_told(tmp_path):
    folder = write_run(tmp_path / "run", [steps(3), steps(3), steps(3)])
    (folder / "rank-1.jsonl").unlink()
    assert read_run(folder).gaps == [
        "There is no record of rank 1: its file is missing, or belongs to another run.",
    ]
    (folder / "run.json").write_text("{")
    run = read_run(folder)
    assert run.gaps[0] == "run.json is missing or broken: settings and machine are unknown."
    assert list(run.ranks) == [0, 2]


def test_a_rank_that_was_lost_on_the_way_does_not_hide_the_steps_after_that(tmp_path):
    folder = write_run(tmp_path / "run", [steps(9), steps(9), steps(4)], [session(3), session(2)])
    run = read_run(folder)
    assert (list(run.ranks), run.gaps) == ([0, 1], ["Rank 2 took part in earlier sessions only, and is not included."])


def test_lines_of_another_run_in_the_folder_are_left_out(tmp_path):
    folder = write_run(tmp_path / "run", [steps(3), steps(5)], [session(2, run="other")])
    text = (folder / "rank-0.jsonl").read_text().replace('"run": "r"', '"run": "other"')
    (folder / "rank-0.jsonl").write_text(text)
    run = read_run(folder)
    assert list(run.ranks) == [0]
    assert len(run.gaps) == 1


def test_steps_that_were_done_again_after_a_restart_count_once(tmp_path):
    again = [step_line(1, loss=0.5), step_line(2, loss=0.25)]
    run = read_run(write_run(tmp_path / "run", [[*steps(3), *again]]))
    assert [(step.step, step.loss) for step in run.ranks[0].steps] == [(0, 2.0), (1, 0.5), (2, 0.25)]


def test_losses_that_are_not_finite_stay_what_they_are(tmp_path):
    run = read_run(write_run(tmp_path / "run", [[step_line(0), step_line(1, loss="nan"), step_line(2, loss="inf")]]))
    assert [str(step.loss) for step in run.ranks[0].steps] == ["2.0", "nan", "inf"]


def test_ranks_of_another_machine_are_aligned_where_all_leave_a_reduction(tmp_path):
    begins = {4: 10.0, 5: 20.0, 68: 90.0}
    lines = [timeline_line(step, START + at, own_s=3.0, wait_s=1.0) for step, at in begins.items()]
    # Its clock is ahead by 2 s, later by 3 s; and it begins a second later, so it waits less.
    ahead = {4: 2.0, 5: 2.0, 68: 3.0}
    late = [timeline_line(step, START + at + ahead[step] + 1, own_s=2.5, wait_s=0.5) for step, at in begins.items()]
    mine = [step_line(step, time=START + at) for step, at in ((0, 0.0), (60, 50.0), (80, 200.0))]
    start = {"kind": "start", "run": "r", "rank": 1, "device": "cpu"}
    ranks = [[*mine, *lines], [start | {"host": "there"}, *mine, *late]]
    run = read_run(write_run(tmp_path / "run", ranks, [session(2)]))
    assert [step.time - START for step in run.ranks[0].steps] == [0, 50, 200]
    assert [step.time - START for step in run.ranks[1].steps] == pytest.approx([-2.0, 48.0, 197.0])
    assert [each.time - START for each in run.ranks[1].timelines] == pytest.approx([11.0, 21.0, 91.0])
    # Ranks of one machine have one clock.
    ranks = [[*mine, *lines], [start | {"host": "here"}, *mine, *late]]
    run = read_run(write_run(tmp_path / "alike", ranks, [session(2)]))
    assert [step.time - START for step in run.ranks[1].steps] == [0, 50, 200]


def test_events_of_all_ranks_are_told_once(tmp_path):
    mine = [event_line("checkpoint", "saved", 5), event_line("error", "RuntimeError: mine", 9)]
    theirs = [event_line("checkpoint", "saved", 5), event_line("error", "theirs", 9)]
    run = read_run(write_run(tmp_path / "run", [[*steps(3), *mine], [*steps(3), *theirs]]))
    assert [(event.event, event.text) for event in run.events] == [
        ("checkpoint", "saved"),
        ("error", "RuntimeError: mine"),
    ]


def test_a_record_brings_no_control_characters_to_the_terminal(tmp_path):
    nasty = "\x1b]0;title\x07\x9b2J\x7f saved\nhere"
    lines = [*steps(3), {**event_line("remark", 2), "text": nasty}]
    run = read_run(write_run(tmp_path / "run", [lines], sessions=[{**session(1), "task": nasty, nasty: [nasty]}]))
    clean = "\ufffd]0;title\ufffd\ufffd2J\ufffd saved\nhere"
    assert [event.text for event in run.ranks[0].events] == [clean]
    assert run.last["task"] == clean and run.last[clean] == [clean]
