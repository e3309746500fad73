"""Ranks' output, forwarded line by line."""

import json
import sys
import time

from lockstep.launcher.output import LogSettings, forwarded, is_shared_with_children, path_of


def write(path, data):
    with path.open("ab") as file:
        file.write(data)


def wait_for_output(capsys, text):
    seen = ""
    deadline = time.monotonic() + 10
    while text not in seen:
        assert time.monotonic() < deadline, seen
        time.sleep(0.01)
        seen += capsys.readouterr().out
    return seen


def test_lines_appear_as_they_come_with_their_rank(tmp_path, capsys):
    with forwarded(tmp_path, 2, LogSettings()):
        write(path_of(tmp_path, "stdout", 1), b"first\nsec")
        assert wait_for_output(capsys, "first") == "[rank 1] first\n"
        write(path_of(tmp_path, "stdout", 1), b"ond\n")
        assert wait_for_output(capsys, "second") == "[rank 1] second\n"


def test_everything_is_shown_at_the_end(tmp_path, capsys):
    with forwarded(tmp_path, 2, LogSettings()):
        write(path_of(tmp_path, "stdout", 0), "50%\r100%\r\ndone ü".encode())
        write(path_of(tmp_path, "stderr", 1), b"\xff oops")
    out, err = capsys.readouterr()
    assert out == "[rank 0] 50%\n[rank 0] 100%\n[rank 0] done ü\n"
    assert err == "[rank 1] \ufffd oops\n"


def test_lines_are_kept_whatever_is_shown(tmp_path, capsys):
    with forwarded(
        tmp_path, 2, LogSettings(folder=tmp_path / "logs", json_file=tmp_path / "all.jsonl", level="warning")
    ):
        write(path_of(tmp_path, "stdout", 0), b"fine\n")
        write(path_of(tmp_path, "stderr", 1), b"careful\nand more")
    assert capsys.readouterr() == ("", "[rank 1] careful\n[rank 1] and more\n")
    kept = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert kept == {"rank-0.log": "fine\n", "rank-1.log": "careful\nand more\n"}
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [(line["rank"], line["stream"], line["text"]) for line in lines] == [
        (0, "stdout", "fine"),
        (1, "stderr", "careful"),
        (1, "stderr", "and more"),
    ]


def test_a_replaced_stdout_is_not_shared(monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not is_shared_with_children()
