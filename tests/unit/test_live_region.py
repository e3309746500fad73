"""The region of a terminal that is drawn anew: what is printed stays above it, and nothing is left of it."""

import os
import sys

from rich.text import Text

from lockstep.telemetry.live import region as regions
from lockstep.telemetry.live.region import Region, say_at_once
from tests.screen import Screen


class Terminal(Screen):
    """Both streams of a process."""

    encoding = "utf-8"

    def isatty(self):
        return True

    def fileno(self):
        return 1


def on_a_terminal(monkeypatch):
    """Return what takes the place of both streams; to be called in the test, as pytest sets them before it."""
    screen = Terminal(40)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(regions.os, "get_terminal_size", lambda _: os.terminal_size((screen.columns, 20)))
    monkeypatch.setattr(regions, "_PAUSE_S", -1.0)
    return screen


def lines(*texts):
    return [Text(text) for text in texts]


def test_what_is_printed_stays_above(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    region = Region(terminal)
    region.show(lines("one", "two"))
    print("said")
    print("by stderr", file=sys.stderr)
    region.show(lines("three"))
    assert terminal.rows == ["said", "by stderr", "three"]
    assert terminal.cursor == (3, 0), "the next prompt of a shell stands below it, whenever the process is killed"
    region.close()
    print("after")
    assert terminal.rows == ["said", "by stderr", "after"]
    assert sys.stdout is terminal and sys.stderr is terminal
    region.show(lines("no more"))
    assert terminal.rows == ["said", "by stderr", "after"]


def test_a_line_that_is_not_ended_has_the_last_row_to_itself(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    region = Region(terminal)
    region.show(lines("view"))
    print("name? ", end="")
    region.show(lines("view"))
    assert terminal.rows == ["name?"]
    print("me")
    assert terminal.rows == ["name? me", "view"]
    region.close()
    assert terminal.rows == ["name? me"]


def test_a_terminal_that_becomes_narrow(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    region = Region(terminal)
    print("before")
    region.show(lines("x" * 39, "y" * 39))
    terminal.resize(15)
    region.show(lines("z" * 14))
    assert terminal.rows == ["before", "z" * 14]
    region.close()


def test_a_note_of_a_signal_handler_is_not_wiped_out(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    region = Region(terminal)
    region.show(lines("view", "of two"))
    terminal.write("^C")  # the terminal's own echo
    say_at_once(b"stopping\n")
    assert terminal.rows == ["view", "of two", "^C"]
    region.refresh()
    assert terminal.rows == ["stopping", "view", "of two"]
    region.close()
    assert terminal.rows == ["stopping"]


def test_lines_of_another_process_below_it_go_above(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    region = Region(terminal)
    region.show(lines("view", "of two"))
    terminal.write("^Cstopping\n")
    region.disturbed("stopping\n")
    region.show(lines("view"))
    assert terminal.rows == ["stopping", "view"]
    region.close()
    assert terminal.rows == ["stopping"]


def test_streams_that_somebody_else_has_replaced_are_left_alone(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    region = Region(terminal)
    ours, other = sys.stdout, Terminal()
    sys.stdout = other
    region.close()
    assert sys.stdout is other
    print("held on to", file=ours)
    assert terminal.rows == ["held on to"]


def test_a_terminal_without_colours_gets_none(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "xterm-256color")
    written = []
    monkeypatch.setattr(terminal, "write", lambda text: written.append(text))
    for variable, has_colours in (({}, True), ({"NO_COLOR": "1"}, False)):
        with monkeypatch.context() as patch:
            patch.delenv("NO_COLOR", raising=False)
            for name, value in variable.items():
                patch.setenv(name, value)
            region = Region(terminal)
            written.clear()
            region.show([Text("F", style="black on #56B4E9")])
            region.close()
            assert ("\x1b[30;48" in "".join(written)) == has_colours
