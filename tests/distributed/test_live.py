"""What rank zero sees of all ranks while they train, and what is left on a terminal afterwards."""

import os
import pty
import re
import select
import signal
import termios
import time
from pathlib import Path

import pytest

import lockstep
from lockstep.comm.store import StatusKeys
from tests.distributed import commands
from tests.training import make_task, mean_loss
from tests.unit.telemetry.test_live_view import Screen

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"


def test_a_board_has_each_ranks_last_note(ranks):
    def use(world):
        board, empty = StatusKeys(world.rank, world.world_size), StatusKeys(world.rank, 1)
        before = board.read() if world.rank == 0 else {}
        world.barrier()
        for number in range(2):
            board.post({"rank": world.rank, "number": number})
            empty.post("nothing")
        world.barrier()
        found = board.read(), empty.read()
        world.barrier()
        return before, found

    for rank, (before, found) in enumerate(ranks(3)(use)):
        assert before == {}
        notes = {other: {"rank": other, "number": 1} for other in range(3) if other != rank}
        assert found == (notes, {})


def test_rank_zero_sees_all_ranks_and_which_is_slowest(ranks):
    def train(world):
        from lockstep.telemetry import live_view as view
        from lockstep.telemetry.sinks import Subscriber

        class Display(Subscriber):
            def __init__(self):
                self.snapshots, self.events, self.said = [], [], []

            def event(self, event):
                self.events.append(event.event)

            def update(self, snapshot):
                self.snapshots.append(snapshot)

            def log(self, text):
                self.said.append(text)

            def close(self):
                pass

        def loss(model, batch):
            time.sleep(0.03 if world.rank == 1 else 0.01)
            return mean_loss(model, batch)

        display = Display()
        before, view.Display = view.Display, lambda *_, **__: display
        try:
            lockstep.fit(make_task(loss=loss), strategy="ddp", steps=60, check_replicas=0)
        finally:
            view.Display = before
        return display.snapshots, display.said, display.events

    (snapshots, said, events), (none, *_) = ranks(2)(train)
    assert none == []
    last = snapshots[-1]
    assert (last.step, last.num_steps, last.is_last, last.world_size) == (60, 60, True, 2)
    *_, whole = [each for each in snapshots if len(each.ranks) == 2 and all(rank.num_steps for rank in each.ranks)]
    assert whole.samples_per_s == pytest.approx(24 / whole.ranks[0]["step_s"], rel=0.5)
    zero, one = whole.ranks
    assert one["forward_s"] > 0.03 > zero["forward_s"] > 0.01
    assert zero["peers_s"] > 0.01 > one["peers_s"]
    assert whole.spread("own_s").max_rank == 1
    assert min(zero["rss_bytes"], one["rss_bytes"]) > 2**24
    assert events[-1] == "end"
    (where,) = [text for text in said if text.startswith("a step took ")]
    assert re.search(r"forward \d\d%.* slowest was rank 1 \(\d+\.\d ms of work in a step\), fastest rank 0 \(", where)


class Session:
    """A command of `lockstep` on a terminal of its own."""

    def __init__(self, *command, columns=100):
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, columns))
        environment = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
        path = os.pathsep.join([str(DIGITS.parents[1]), os.environ.get("PYTHONPATH", "")])
        environment |= {"TERM": "xterm-256color", "PYTHONPATH": path}
        with open(theirs, "wb") as terminal:
            self.process = commands.start(
                *command, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
            )
        self._file, self.screen, self.text = ours, Screen(columns), ""

    def read_until(self, pattern=None, limit_s=120.0):
        """Read until ``pattern`` was written, or all is over."""
        deadline = time.monotonic() + limit_s
        while pattern is None or not re.search(pattern, self.text):
            assert time.monotonic() < deadline, self.text[-2000:]
            if not select.select([self._file], [], [], 0.2)[0]:
                continue
            try:
                data = os.read(self._file, 65536).decode(errors="replace")
            except OSError:  # nobody has the terminal open any more
                break
            self.text += data
            self.screen.write(data.replace("\r\n", "\n"))

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._file)


@pytest.fixture
def session():
    opened = []

    def start(*command, **options):
        opened.append(Session(*command, **options))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def view_rows(rows):
    """What of the rows belongs to a view."""
    return [row for row in rows if re.match(r"step [\d,]+/[\d,]+ [━─]|rank \d+ +[A-Z]| +\d.*ms a step ", row)]


def test_the_terminal_is_clean_after_a_run_that_is_stopped(session, tmp_path):
    num_devices = 2
    command = ["train", str(DIGITS), "--devices", str(num_devices), "--steps", "1000000"]
    running = session(*command, "--checkpoint", str(tmp_path), "--eval-every", "1000000", "--check-replicas", "0")
    running.read_until(r"a step .*\n[^\n]*rank 0|ms a step[\s\S]*rank 0 ")
    running.read_until(r"lr \d")
    if num_devices == 2:
        running.read_until(r"rank 1 [^\n]*works")  # at first it has no step done yet
    seen = [view_rows(rows) for rows in [*running.screen.frames, running.screen.rows]]
    assert max(map(len, seen)) == 2 + num_devices, "and never two views at once"
    row, column = running.screen.cursor
    if num_devices > 1:  # drawn beside the launcher; in one process, rich rests in the last row
        assert column == 0 and row >= len(running.screen.rows), "a prompt would stand below it, if all were killed now"
    os.kill(running.process.pid, signal.SIGINT)
    running.read_until(limit_s=40.0)
    assert running.process.wait(20.0) == 130, running.screen.rows
    rows = running.screen.rows
    assert view_rows(rows) == []
    assert rows[0].startswith("digits: strategy ddp on ")
    assert any(row == "lockstep: stopping after this step; Ctrl-C again stops at once" for row in rows)
    assert any(row.startswith("a step took ") for row in rows)
    assert "\x1b[?25l" not in running.text, "the cursor is never hidden"
