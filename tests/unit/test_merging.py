"""What the terminal shows of what several ranks say, and what goes into files."""

import json

import pytest

from lockstep.launcher.output import HOLD_S, LogDeduplicator, LogFiles, RotatingFile, label


@pytest.fixture
def merger():
    return LogDeduplicator("stdout", range(4), set())


def texts(shown):
    return [line.text for line in shown]


def test_what_all_say_is_shown_once_whoever_is_first(merger):
    assert texts(merger.add(2, "hello", 0.0)) == []
    assert texts(merger.add(0, "hello", 0.1)) == ["hello"]
    for rank in (1, 3):
        assert texts(merger.add(rank, "hello", 9.0)) == []
    assert texts(merger.due(99.0, final=True)) == []


def test_what_differs_has_its_rank_after_a_moment(merger):
    assert texts(merger.add(0, "loss 0.5", 0.0)) == ["loss 0.5"]
    for rank in (1, 3):
        assert texts(merger.add(rank, "loss 0.6", 0.0)) == []
    assert texts(merger.due(HOLD_S - 0.01)) == []
    assert texts(merger.due(HOLD_S)) == ["[ranks 1, 3] loss 0.6"]


def test_as_often_as_the_first_rank_said_it(merger):
    for _ in range(2):
        merger.add(0, "again", 0.0)
    for _ in range(3):
        merger.add(1, "again", 0.0)
    assert texts(merger.due(0.0, final=True)) == ["[rank 1] again"]


def test_the_lines_of_a_rank_stay_in_order(merger):
    merger.add(1, "mine", 0.0)
    merger.add(1, "everybody's", 0.1)
    merger.add(0, "everybody's", 0.2)
    assert texts(merger.due(1.0)) == ["[rank 1] mine"]
    merger.add(1, "last", 1.1)
    assert texts(merger.due(0.0, final=True)) == ["[rank 1] last"]


def test_a_warning_is_shown_once_with_its_source(merger):
    assert texts(merger.add(0, "x.py:3: UserWarning: old", 0.0)) == ["x.py:3: UserWarning: old"]
    assert texts(merger.add(0, "  call()", 0.0)) == ["  call()"]
    for rank in (0, 1):
        for text in ("x.py:3: UserWarning: old", "  call()"):
            assert texts(merger.add(rank, text, 1.0)) == []
    assert texts(merger.add(0, "  call()", 1.0)) == ["  call()"]  # no warning stands before it
    other = "[rank1]:[W1121 08:02:07.113245638 socket.cpp:207] Warning: no name"
    merger.add(1, other, 1.0)
    assert texts(merger.due(2.0)) == [f"[rank 1] {other}"]
    assert texts(merger.add(0, "[W1122 09:00:00.1 socket.cpp:207] Warning: no name", 3.0)) == []


def test_lines_of_another_machine_have_their_rank_always():
    merger = LogDeduplicator("stdout", range(8, 10), set())
    assert texts(merger.add(8, "hello", 0.0)) == ["[rank 8] hello"]
    assert texts(merger.add(9, "hello", 0.0)) == []


def test_label():
    assert (label([3]), label([1, 2, 3, 5])) == ("[rank 3]", "[ranks 1-3, 5]")


def test_a_file_stays_below_its_bound_and_keeps_whole_lines(tmp_path):
    file = RotatingFile(tmp_path / "a.log", max_bytes=100)
    for number in range(50):
        file.write(f"line {number:2}\n".encode())
    file.close()
    old, new = file.older.read_text(), (tmp_path / "a.log").read_text()
    assert (old + new).splitlines() == [f"line {number:2}" for number in range(42, 50)]
    assert len(old) + len(new) <= 100


def test_a_file_that_cannot_be_written_any_more_ends_no_job(tmp_path):
    (tmp_path / "logs").mkdir()
    file = RotatingFile(tmp_path / "logs" / "a.log", max_bytes=20)
    file.write(b"first line\n")
    (tmp_path / "logs" / "a.log").unlink()
    for _ in range(3):
        file.write(b"another\n")
    file.close()
    assert not (tmp_path / "logs" / "a.log").exists()


def test_files_hold_every_line(tmp_path):
    files = LogFiles(tmp_path, tmp_path / "all.jsonl", 10**6)
    files.line(1, "stderr", "größer")
    files.line(0, "stdout", "x")
    files.close()
    assert (tmp_path / "rank-1.log").read_text() == "größer\n"
    entries = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [entry.pop("time") > 1.7e9 for entry in entries] == [True, True]
    assert entries == [
        {"rank": 1, "stream": "stderr", "text": "größer"},
        {"rank": 0, "stream": "stdout", "text": "x"},
    ]
