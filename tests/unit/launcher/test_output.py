"""What the terminal shows of what several ranks write, and what goes into files."""

import os
import re
import sys
import time

import pytest

from lockstep.base.rank_files import rank_file
from lockstep.base.terminal import TerminalRegion, erase_rows
from lockstep.errors import ConfigurationError
from lockstep.launcher.output import HOLD_S, LogDeduplicator, LogSettings, LogTail


@pytest.fixture
def merged():
    return LogDeduplicator(range(4))


def test_what_all_write_is_shown_once_whoever_is_first(merged):
    assert merged.add(2, "hello", 0.0) == []
    assert merged.add(0, "hello", 0.1) == ["hello"]
    for rank in (1, 3):
        assert merged.add(rank, "hello", 9.0) == []
    assert merged.due(99.0, final=True) == []


def test_what_differs_has_its_rank_after_a_moment(merged):
    assert merged.add(0, "loss 0.5", 0.0) == ["loss 0.5"]
    for rank in (1, 3):
        assert merged.add(rank, "loss 0.6", 0.0) == []
    assert merged.due(HOLD_S - 0.01) == []
    assert merged.due(HOLD_S) == ["[ranks 1, 3] loss 0.6"]


def test_as_often_as_the_first_rank_wrote_it(merged):
    for _ in range(2):
        merged.add(0, "again", 0.0)
    for _ in range(3):
        merged.add(1, "again", 0.0)
    assert merged.due(0.0, final=True) == ["[rank 1] again"]


def test_the_lines_of_a_rank_stay_in_order(merged):
    merged.add(1, "mine", 0.0)
    merged.add(1, "everybody's", 0.1)
    merged.add(0, "everybody's", 0.2)
    assert merged.due(1.0) == ["[rank 1] mine"]
    merged.add(1, "last", 1.1)
    assert merged.due(0.0, final=True) == ["[rank 1] last"]


def test_torchs_own_prefixes_and_times_make_no_difference(merged):
    merged.add(0, "[rank0]:[W1121 08:02:07.113245638 socket.cpp:207] Warning: no name", 0.0)
    merged.add(1, "[rank1]:[W1121 08:02:09.9 socket.cpp:207] Warning: no name", 0.0)
    assert merged.due(0.0, final=True) == []


def test_lines_of_another_machine_have_their_rank_always():
    merged = LogDeduplicator(range(8, 10))
    assert merged.add(8, "hello", 0.0) == ["[rank 8] hello"]
    assert merged.add(9, "hello", 0.0) == []


def write(folder, stream, rank, data):
    descriptor = os.open(rank_file(folder, stream, rank), os.O_WRONLY)
    os.write(descriptor, data)
    os.close(descriptor)


def wait_for_output(capsys, text):
    seen = ""
    deadline = time.monotonic() + 20
    while text not in seen:
        assert time.monotonic() < deadline, seen
        time.sleep(0.01)
        seen += capsys.readouterr().out
    return seen


def test_lines_appear_as_they_come_and_the_last_at_the_end(tmp_path, capsys):
    with LogTail(tmp_path, 2, LogSettings()):
        write(tmp_path, "stdout", 1, b"first\nsec")
        assert wait_for_output(capsys, "first") == "[rank 1] first\n"
        write(tmp_path, "stdout", 1, b"ond\n")
        assert wait_for_output(capsys, "second") == "[rank 1] second\n"
        write(tmp_path, "stderr", 1, b"\xff oops")
    assert capsys.readouterr().err == "[rank 1] \ufffd oops\n"


def test_a_prompt_and_a_progress_bar_of_rank_zero_are_shown_before_their_end(tmp_path, capsys):
    with LogTail(tmp_path, 2, LogSettings(folder=tmp_path / "logs")):
        write(tmp_path, "stdout", 0, b"prompt> ")
        assert wait_for_output(capsys, "prompt> ") == "prompt> "
        write(tmp_path, "stdout", 0, b"answered\n")
        assert wait_for_output(capsys, "\n") == "answered\n"
        for percent in (b" 1%", b" 2%"):
            write(tmp_path, "stdout", 0, b"\r" + percent)
            wait_for_output(capsys, percent.decode())
        write(tmp_path, "stdout", 1, b"else\n")
        assert wait_for_output(capsys, "else\n") == "\n[rank 1] else\n"
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "prompt> answered\n 2%\n"


def test_lines_are_kept_whatever_is_shown(tmp_path, capsys):
    with LogTail(tmp_path, 2, LogSettings(folder=tmp_path / "logs", level="warning")) as log_tail:
        write(tmp_path, "stdout", 0, b"fine\n")
        write(tmp_path, "stderr", 1, b"careful\nand more")
        log_tail.print("lockstep: of the launcher\n")
    out, err = capsys.readouterr()
    assert (out, sorted(err.splitlines())) == (
        "", ["[rank 1] and more", "[rank 1] careful", "lockstep: of the launcher"],
    )  # fmt: skip
    kept = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert kept == {"rank-0.log": "fine\n", "rank-1.log": "careful\nand more\n"}


def test_a_traceback_may_name_a_file_whose_name_is_no_text(tmp_path):
    with LogTail(tmp_path, 1, LogSettings(folder=tmp_path / "logs")) as log_tail:
        log_tail.settle({0: 'File "t\udce4sk.py", line 1'})
    assert (tmp_path / "logs" / "rank-0.log").read_text() == 'File "t\\udce4sk.py", line 1\n'


def test_the_launcher_erases_the_live_view_before_it_prints(tmp_path, capsys, monkeypatch):
    ours, theirs = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LOCKSTEP_TERMINAL", "")  # to be restored
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with LogTail(tmp_path, 2, LogSettings()):
            assert os.environ["LOCKSTEP_TERMINAL"] == os.ttyname(theirs)
            region = TerminalRegion(tmp_path)
            with region.locked() as rows:
                assert rows == 0
                region.set_rows(3)  # as rank zero does after drawing
            write(tmp_path, "stdout", 0, b"hello\n")
            text = b""
            while b"hello" not in text:
                text += os.read(ours, 1024)
        assert text.decode() == f"{erase_rows(3)}hello\r\n"
        with region.locked() as rows:
            assert rows == 0
        region.close()
        monkeypatch.undo()
    os.close(ours)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": "debug"}, "There is no log level 'debug'.\nPass one of info, warning, error."),
        (
            {"folder": "/proc/nowhere"},
            "/proc/nowhere cannot be written: No such file or directory.\nName another place with --log-dir.",
        ),
        (
            {"folder": "s3://bucket/logs"},
            "--log-dir s3://bucket/logs is not a local folder.\nName one; logs cannot be in an object store.",
        ),
    ],
)
def test_what_cannot_be(settings, message, tmp_path):
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        LogTail(tmp_path, 2, LogSettings(**settings))
