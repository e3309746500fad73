"""What a live view shows in the room that there is, on a terminal and in a notebook."""

import os
import pty
import re
import select
import sys
import termios
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from lockstep.base.terminal import TerminalRegion
from lockstep.telemetry.figures import Snapshot
from lockstep.telemetry.live_view import Display, OwnTerminal, bar, open_terminal, picture
from lockstep.telemetry.record import Event
from tests.unit.telemetry.test_figures import ranks

# --- a terminal of a few commands, to see what a person would see after all that was written to it

_TOKEN = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+")


class Screen:
    """Keeps all rows, as a terminal that scrolls without end would; long lines go on in the next row."""

    def __init__(self, columns=100):
        self.columns = columns
        self._rows = [""]
        self._row = self._column = 0
        self.frames = []
        """The rows before each time that something was taken off."""

    def write(self, text):
        for match in _TOKEN.finditer(text):
            token = match.group()
            if token == "\r":
                self._column = 0
            elif token == "\n":
                self._go_down()
                self._column = 0
            elif match.group(2) == "A":
                self._row -= int(match.group(1) or 1)
                assert self._row >= 0, "above the first row"
            elif match.group(2) == "J":
                self.frames.append(self.rows)
                self._rows[self._row :] = [self._rows[self._row][: self._column]]
            elif not token.startswith("\x1b"):
                for character in token:
                    self._put(character)
        return len(text)

    def flush(self):
        pass

    @property
    def rows(self):
        """All that is to be seen, without what is empty at the end."""
        rows = [row.rstrip() for row in self._rows]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    @property
    def cursor(self):
        return self._row, self._column

    def resize(self, columns):
        """Become narrower or wider: lines that do not fit any more go on in the next row."""
        rows = []
        for number, row in enumerate(self._rows):
            if number == self._row:
                self._row = len(rows)
            rows += [row[start : start + columns] for start in range(0, len(row), columns)] or [""]
        self._rows, self.columns = rows, columns

    def _put(self, character):
        if self._column == self.columns:
            self._go_down()
            self._column = 0
        row = self._rows[self._row].ljust(self._column)
        self._rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
        self._column += 1

    def _go_down(self):
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append("")


def snapshot(*own_s, **changes):
    return Snapshot(
        **{
            "time": 0.0,
            "step": 250,
            "num_steps": 1000,
            "epoch": 1.5,
            "loss": 0.25,
            "learning_rate": 1e-3,
            "grad_norm": 2.5,
            "samples_per_s": 12345.6,
            "left_s": 75.0,
            "ranks": ranks(*own_s),
            "world_size": len(own_s),
            **changes,
        }
    )


EVENT = Event(event="remark", step=12, time=0.0, seconds=None, text="took 33 ms")


def texts(*arguments, **room):
    return [line.plain for line in picture(*arguments, **{"width": 100, "height": 40, **room})]


def test_all_there_is_to_see():
    shown = texts(snapshot(0.010, 0.019, num_skipped_steps=2), [EVENT])
    assert shown[0].startswith("step 250/1,000 ━━━━") and shown[0].endswith("  25%  1:15 min left")
    assert shown[1] == "loss 0.2500  12,346 samples/s  lr 0.001  grad norm 2.5  skipped 2"
    assert shown[2].startswith(" 20.0 ms a step DDDDDDDD")
    assert shown[3] == "  D data wait 10%  F forward 26%  B backward 26%  X exchange 5%  W waiting for ranks 22%  "
    assert shown[4] == "  O optimizer 10%  "
    assert shown[-3].startswith("rank 0   DD") and "works 10.0 ms  waits 10.0 ms" in shown[-3]
    assert shown[-2].endswith("works 19.0 ms  waits 1.00 ms  slowest") or shown[-2].endswith("slowest")
    assert shown[-1].endswith("step 12 remark: took 33 ms")


def test_before_the_first_step():
    shown = texts(Snapshot(time=0.0, step=0, num_steps=10), [])
    assert shown[0].startswith("step 0/10 ─") and shown[0].endswith("   0%")
    assert shown[1:] == ["the first steps take longest"]


@pytest.mark.parametrize("width", [20, 40, 59, 80, 100, 300])
@pytest.mark.parametrize("height", [3, 8, 12, 50])
def test_nothing_is_wider_or_higher_than_the_terminal(width, height):
    lines = picture(snapshot(*(0.010 + rank / 1e4 for rank in range(12))), [EVENT] * 3, width=width, height=height)
    assert all(line.cell_len < width for line in lines)
    assert 1 <= len(lines) <= height - 2


@pytest.mark.parametrize(("width", "num_letters"), [(80, 12), (100, 20)])
def test_the_last_column_is_whole(width, num_letters):
    shown = snapshot(0.010, 0.019)
    memory = {"gpu_percent": 99.0, "memory_bytes": 70 << 30}
    held = [replace(each, values={**each.values, **memory}) for each in shown.ranks]
    lines = [line for line in texts(replace(shown, ranks=held), [], width=width) if line.startswith("rank ")]
    assert lines[0].endswith(" 70.0 GiB")
    assert lines[1].endswith("  slowest")
    assert [len(re.search(r"[A-Z]{5,}", line)[0]) for line in lines] == [num_letters] * 2


def test_of_many_ranks_the_slowest_are_shown():
    own_s = [0.010] * 40
    own_s[7] = 0.020
    shown = texts(snapshot(*own_s), [])
    named = [line.split()[1] for line in shown if line.startswith("rank ")]
    assert "7" in named and len(named) == 6
    assert shown[-1] == "  and 34 ranks with less work"
    assert len([line for line in texts(snapshot(*own_s[:16]), []) if line.startswith("rank ")]) == 16


def test_the_bar_is_readable_without_colours():
    text = bar(ranks(0.010, 0.019), 40)
    assert text.plain == "DDDD" + "F" * 10 + "B" * 11 + "X" * 2 + "W" * 9 + "OOOO"
    assert len({span.style for span in text.spans}) == 6


def test_a_view_on_the_launchers_terminal_shares_it(tmp_path, monkeypatch):
    """Each view takes the place of the one before; a line that is not ended has the last row to itself."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 100))
    monkeypatch.setenv("LOCKSTEP_RUN_DIR", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    assert open_terminal() is None, "the launcher has no terminal"
    monkeypatch.setenv("LOCKSTEP_TERMINAL", os.ttyname(theirs))
    screen, region = Screen(100), TerminalRegion(tmp_path)

    def look():
        while select.select([ours], [], [], 0.1)[0]:
            screen.write(os.read(ours, 65536).decode().replace("\r\n", "\n"))
        with region.locked() as rows:
            return rows, screen.rows

    view = Display(silent=False)
    for step in (250, 251):
        view.update(snapshot(0.010, 0.019, step=step))
        rows, shown = look()
        assert (rows, len(shown), shown[0][:14]) == (7, 7, f"step {step}/1,000")
        assert screen.cursor == (7, 0), "a prompt would stand below it"
    with region.locked():
        region.set_rows(-1)
    view.update(snapshot(0.010, 0.019, step=252))
    assert look()[1][0].startswith("step 251/")
    with region.locked():
        region.set_rows(7)
    view.close()
    assert look() == (0, [])
    region.close()
    os.close(ours), os.close(theirs)


def test_a_notebook_shows_it_with_rich_and_ipywidgets(monkeypatch):
    monkeypatch.delenv("LOCKSTEP_RUN_DIR", raising=False)
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr("lockstep.telemetry.live_view.find_spec", {"ipywidgets": None}.get)
    assert open_terminal() is None
    monkeypatch.setattr("lockstep.telemetry.live_view.find_spec", {"ipywidgets": "it is installed"}.get)
    terminal = open_terminal()
    assert isinstance(terminal, OwnTerminal)
    terminal.show(picture(snapshot(0.010, 0.019), [], width=80, height=24))
    terminal.close()
    ipython.get_ipython = lambda: SimpleNamespace()
    assert open_terminal() is None
