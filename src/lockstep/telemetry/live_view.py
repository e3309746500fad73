"""A snapshot as text, a view for a terminal or a line for a pipe; and the live view, which rank zero draws."""

import os
import sys
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from typing_extensions import override

from lockstep.run_folder import TERMINAL, TerminalRegion, current_run_folder, erase_rows
from lockstep.telemetry.metrics import EventFigures, RankFigures, Snapshot, SnapshotSink, shares
from lockstep.telemetry.rank_state import format_bytes

# --- in words: pure functions of the ranks' figures -------------------------------------------------------------------

# Name, letter and colours of each part of a step.
#
# The colours are those of Okabe and Ito, which people distinguish however they see colours; by the letters the bar can
# be read without any.
STYLES = {
    "data_wait_s": ("data wait", "D", "#000000 on #E69F00"),
    "forward_s": ("forward", "F", "#000000 on #56B4E9"),
    "backward_s": ("backward", "B", "#FFFFFF on #0072B2"),
    "wire_s": ("exchange", "X", "#000000 on #009E73"),
    "peers_s": ("waiting for ranks", "W", "#000000 on #D55E00"),
    "optimizer_s": ("optimizer", "O", "#000000 on #CC79A7"),
}

_NAMED_SHARE = 0.03
# A rank is called the slowest if its own work takes so much longer than that of the middle one.
_SLOWER = 0.05


def name_of(part: str, ranks: Sequence[RankFigures]) -> str:
    """Return what a part is called; backward may hold the exchange, if the engine does not measure that."""
    if part == "backward_s" and len(ranks) > 1 and all(each.exposed_s is None for each in ranks):
        return "backward and exchange"
    return STYLES[part][0]


def largest(ranks: Sequence[RankFigures], count: int | None = None) -> str:
    """Return such as ``forward 41%, backward 38%``, the largest parts first; small ones are left out."""
    found = sorted(shares(ranks).items(), key=lambda item: -item[1])
    named = [f"{name_of(part, ranks)} {share:.0%}" for part, share in found if share >= _NAMED_SHARE]
    return ", ".join(named[:count])


def slowest_rank(snapshot: Snapshot) -> int | None:
    """Return the rank that the others wait for, if one is clearly slower than the middle one."""
    spread = snapshot.spread("own_s")
    if spread is None or len(snapshot.ranks) < 2 or not snapshot.known("exposed_s"):
        return None
    return spread.max_rank if spread.max > spread.median * (1 + _SLOWER) else None


def line(snapshot: Snapshot) -> str:
    """Return the progress of a run in one line, for a pipe."""
    words = [f"step {snapshot.step}/{snapshot.num_steps}", *_loss_and_rates(snapshot)]
    if snapshot.left_s is not None:
        words.append(f"{duration(snapshot.left_s)} left")
    if where := largest(snapshot.ranks, 3):
        words.append(where)
    if (slowest := slowest_rank(snapshot)) is not None:
        words.append(f"rank {slowest} is slowest")
    if (link := slowest_link(snapshot)) is not None:
        words.append(link)
    return "  ".join(words)


def _loss_and_rates(snapshot: Snapshot) -> list[str]:
    words = [] if snapshot.loss is None else [f"loss {snapshot.loss:.4f}"]
    if snapshot.samples_per_s is not None:
        words.append(f"{rate(snapshot.samples_per_s)} samples/s")
    if snapshot.tokens_per_s is not None:
        words.append(f"{rate(snapshot.tokens_per_s)} {snapshot.counts}/s")
    return words


def slowest_link(snapshot: Snapshot) -> str | None:
    """Return what a rank sends over the slowest link between machines, and how fast; None if none carries much."""
    known = [each for each in snapshot.ranks if each.link_bytes_per_s]
    if not known:
        return None
    slowest = min(known, key=lambda each: each.link_bytes_per_s or 0.0)
    a_step = f", {slowest.step_sent_bytes / 1e6:.3g} MB a step" if slowest.step_sent_bytes else ""
    to = f"rank {slowest.rank} to {slowest.link_peer}"
    return f"slowest link: {to}, {(slowest.link_bytes_per_s or 0.0) / 1e6:.3g} MB/s{a_step}"


def summary(snapshot: Snapshot) -> str | None:
    """Return where the time of a step went, and which rank was slowest; None if that is not known.

    Args:
        snapshot: With means over the whole run.
    """
    step_s, spread = snapshot.mean("step_s"), snapshot.spread("own_s")
    if step_s is None:
        return None
    text = f"a step took {milliseconds(step_s)}: {largest(snapshot.ranks)}"
    if len(snapshot.ranks) < 2 or spread is None or not snapshot.known("exposed_s"):
        return text
    slow = f"rank {spread.max_rank} ({milliseconds(spread.max)} of work in a step)"
    return f"{text}; slowest was {slow}, fastest rank {spread.min_rank} ({milliseconds(spread.min)})"


def rate(per_s: float) -> str:
    """Return a rate with three figures at least."""
    return f"{per_s:,.0f}" if per_s >= 99.95 else f"{per_s:.3g}"


def milliseconds(seconds: float) -> str:
    """Return a short time with its unit."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.{1 if seconds >= 0.001 else 2}f} ms"


def duration(seconds: float) -> str:
    """Return such as ``45 s``, ``3:20 min`` or ``2:05 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


# --- as lines for a terminal: pure functions of a snapshot and of the room there is ----------------------------------

# With more ranks, only those with the most work of their own have a line.
MOST_RANKS = 16
_NUM_SLOWEST = 6

_MOST_EVENTS = 3
_NARROW, _WIDE = 60, 100
_STALE_S = 10.0


def picture(snapshot: Snapshot, events: Sequence[EventFigures], *, width: int, height: int) -> list[Text]:
    """Return the lines of a view.

    Args:
        snapshot: What is shown.
        events: The last ones of the run, oldest first.
        width: Of the terminal, in columns; no line is longer.
        height: Of the terminal; the lines are fewer.
    """
    width = min(width, _WIDE) - 1  # what ends in the last column would wrap on some terminals
    lines = [_progress(snapshot, width), _metrics_line(snapshot)]
    if shares(snapshot.ranks):
        step = Text(f"{milliseconds(snapshot.mean('step_s') or 0.0):>8} a step ")
        lines += [step.append_text(bar(snapshot.ranks, max(8, width - len(step)))), *_legend(snapshot, width)]
    if (link := slowest_link(snapshot)) is not None:
        lines.append(Text(link))
    tail = [_event(event) for event in events[-_MOST_EVENTS:]]
    room = height - 2 - len(lines) - len(tail)
    if room > 0 and snapshot.ranks:
        lines += _ranks(snapshot, width, room)
    lines = [*lines, *tail][: max(1, height - 2)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _progress(snapshot: Snapshot, width: int) -> Text:
    step, num_steps = snapshot.step, max(1, snapshot.num_steps)
    done = min(1.0, step / num_steps)
    left = "" if snapshot.left_s is None else f"  {duration(snapshot.left_s)} left"
    before, after = f"step {step:,}/{snapshot.num_steps:,} ", f" {done:4.0%}{left}"
    room = max(4, width - len(before) - len(after))
    filled = round(done * room)
    text = Text(before, style="bold")
    text.append("━" * filled, style="#0072B2")
    text.append("─" * (room - filled), style="dim")
    text.append(after)
    return text


def _metrics_line(snapshot: Snapshot) -> Text:
    words = _loss_and_rates(snapshot)
    if snapshot.learning_rate is not None:
        words.append(f"lr {snapshot.learning_rate:.3g}")
    if snapshot.grad_norm is not None:
        words.append(f"grad norm {snapshot.grad_norm:.3g}")
    if snapshot.num_skipped_steps:
        words.append(f"skipped {snapshot.num_skipped_steps}")
    return Text("  ".join(words) or "the first steps take longest")


def bar(ranks: Iterable[RankFigures], width: int) -> Text:
    """Return where the time of a step goes, as a bar of letters, each on its colour."""
    text = Text()
    reached = 0.0
    for part, share in shares(ranks).items():
        reached += share
        _, letter, colours = STYLES[part]
        # Up to where the parts so far end: rounding each by itself would make the bar longer or shorter.
        text.append(letter * (min(width, round(reached * width)) - len(text)), style=colours)
    return text


def _legend(snapshot: Snapshot, width: int) -> list[Text]:
    """Return what the letters mean, on as many lines as that takes."""
    lines = [Text("  ")]
    for part, share in shares(snapshot.ranks).items():
        if share < 0.005 and part != "data_wait_s":
            continue
        _, letter, colours = STYLES[part]
        words = f" {name_of(part, snapshot.ranks)} {share:.0%}  "
        if len(lines[-1]) > 2 and len(lines[-1]) + 1 + len(words) > width:
            lines.append(Text("  "))
        lines[-1].append(letter, style=colours)
        lines[-1].append(words)
    return lines


def _ranks(snapshot: Snapshot, width: int, room: int) -> list[Text]:
    shown, slowest = list(snapshot.ranks), slowest_rank(snapshot)
    if len(shown) > min(room, MOST_RANKS):
        by_work = sorted(shown, key=lambda each: (-(each.own_s or 0.0), each.rank))
        shown = sorted(by_work[: max(1, min(room - 1, _NUM_SLOWEST))], key=lambda each: each.rank)
    lines = [_rank(each, width, is_slowest=each.rank == slowest) for each in shown]
    if missing := len(snapshot.ranks) - len(shown):
        lines.append(Text(f"  and {missing} ranks whose own work takes no longer", style="dim"))
    return lines[:room]


def _rank(each: RankFigures, width: int, *, is_slowest: bool) -> Text:
    text = Text(f"rank {each.rank:<3} ", style="bold" if is_slowest else "")
    if width >= _NARROW and each.step_s:
        text.append_text(bar([each], 20)).append(" ")
    words = ["no step done yet" if each.own_s is None else f"works {milliseconds(each.own_s):>7}"]
    if each.own_s is not None and each.exposed_s is not None:
        words.append(f"waits {milliseconds(each.exposed_s):>7}")
    if each.gpu_percent is not None:
        words.append(f"GPU {each.gpu_percent:3.0f}%")
    elif each.cpu_percent is not None:
        words.append(f"CPU {each.cpu_percent:3.0f}%")
    if each.memory_bytes is not None:
        words.append(f"{format_bytes(each.memory_bytes)} (peak {format_bytes(each.memory_peak_bytes or 0)})")
    elif each.rss_bytes is not None:
        words.append(format_bytes(each.rss_bytes))
    text.append("  ".join([*words, *["slowest"] * is_slowest]))
    if each.age_s > _STALE_S:
        text.append(f"  silent for {duration(each.age_s)}", style="bold")
    return text


def _event(event: EventFigures) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    return Text(f"{clock} step {event.step:,} {event.event}: {event.text}".replace("\n", " "), style="dim")


# --- drawn again and again --------------------------------------------------------------------------------------------

# Events that whoever shows a run prints as lines that stay; they have no place in the view.
PRINTED_EVENTS = ("evaluation", "skipped", "straggler", "remark")


class LiveView(SnapshotSink):
    """Shows the last snapshot and the last events in a place of their own."""

    def __init__(self) -> None:
        self._events: deque[EventFigures] = deque(maxlen=_MOST_EVENTS)

    @override
    def update(self, snapshot: Snapshot) -> None:
        self._events += [event for event in snapshot.events if event.event not in PRINTED_EVENTS]
        width, height = self._size()
        self._show(picture(snapshot, list(self._events), width=width, height=height))

    @abstractmethod
    def _size(self) -> tuple[int, int]:
        """Return columns and rows to use."""

    @abstractmethod
    def _show(self, lines: Sequence[Text]) -> None:
        """Show ``lines`` instead of those before."""


@final
class OwnTerminalView(LiveView):
    """On the terminal of this process, or in the output of a notebook's cell; what it prints appears above."""

    def __init__(self) -> None:
        super().__init__()
        self._streams = sys.stdout, sys.stderr
        # No thread of rich's own: a snapshot comes once a second, and nothing moves between two.
        self._live = Live(console=Console(), auto_refresh=False, transient=True)
        self._live.start()
        if not self._live.console.is_jupyter:
            self._live.console.show_cursor(True)  # whoever kills this process would be left without one
        os.register_at_fork(after_in_child=self._leave_to_parent)

    @override
    def close(self) -> None:
        self._live.stop()

    @override
    def _size(self) -> tuple[int, int]:
        return self._live.console.size

    @override
    def _show(self, lines: Sequence[Text]) -> None:
        self._live.update(Group(*lines), refresh=True)

    def _leave_to_parent(self) -> None:
        """In a forked child, such as a loader process: print as if there were no view, which the parent draws."""
        if self._live.is_started:
            sys.stdout, sys.stderr = self._streams


@final
class LauncherTerminalView(LiveView):
    """On the terminal of the launcher of this rank, which prints there as well; see `TerminalRegion`.

    Args:
        folder: Of the launcher's run.
        terminal: The device.
    """

    def __init__(self, folder: Path, terminal: str) -> None:
        super().__init__()
        self._file = open(terminal, "w")  # noqa: SIM115 - open as long as the view
        self._region = TerminalRegion(folder)
        self._console = Console(file=self._file, force_terminal=True)

    @override
    def close(self) -> None:
        if self._file.closed:  # by the thread that draws; the run closes its display again, also after an error
            return
        with suppress(OSError):
            self._show([])
        self._file.close()
        self._region.close()

    @override
    def _size(self) -> tuple[int, int]:
        columns, rows = os.get_terminal_size(self._file.fileno())
        return columns or 80, rows or 25

    @override
    def _show(self, lines: Sequence[Text]) -> None:
        with self._console.capture() as capture:
            for each in lines:
                self._console.print(each, no_wrap=True, overflow="ignore", crop=False, highlight=False)
        with self._region.locked() as rows:
            if rows < 0:  # a line that somebody has begun and not ended has the last row to itself
                return
            self._file.write(erase_rows(rows) + capture.get())
            self._file.flush()
            self._region.rows = len(lines)


def open_live_view() -> LiveView | None:
    """Return a live view, if there is where to show one."""
    folder, terminal = current_run_folder(), os.environ.get(TERMINAL)
    if folder is not None:
        with suppress(OSError):  # the terminal is gone, or the launcher is another user's
            return None if terminal is None else LauncherTerminalView(folder, terminal)
        return None
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    return OwnTerminalView() if is_terminal or _is_notebook() else None


def _is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
