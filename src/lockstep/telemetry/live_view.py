"""A snapshot as text: a line for a pipe, or a view for a terminal; and the live view of rank zero."""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from lockstep.base.activity import format_bytes
from lockstep.base.rank_files import launcher_folder
from lockstep.base.terminal import TERMINAL, TerminalRegion, erase_rows
from lockstep.telemetry.figures import RankFigures, Snapshot, shares
from lockstep.telemetry.record import Event
from lockstep.telemetry.sinks import Subscriber
from lockstep.telemetry.step_times import PARTS, milliseconds

# --- as text: pure functions of the figures of the ranks --------------------------------------------------------------

_NAMED_SHARE = 0.03
# A rank is named as the slowest if its own work takes so much longer than the median.
_SLOWER = 0.05


def name_of(part: str, ranks: Sequence[RankFigures]) -> str:
    """Return the label of a part; backward includes the exchange if the engine does not measure that."""
    if part == "backward" and len(ranks) > 1 and all(rank["exposed_s"] is None for rank in ranks):
        return "backward and exchange"
    return PARTS[part].label


def largest(ranks: Sequence[RankFigures], count: int | None = None) -> str:
    """Return a text such as ``forward 41%, backward 38%``: the largest parts first, without small ones."""
    parts = sorted(shares(ranks).items(), key=lambda item: -item[1])
    named = [f"{name_of(part, ranks)} {share:.0%}" for part, share in parts if share >= _NAMED_SHARE]
    return ", ".join(named[:count])


def slowest_rank(snapshot: Snapshot) -> int | None:
    """Return the rank that the others wait for, if one is clearly slower than the median."""
    if (spread := snapshot.spread("own_s")) is None or len(snapshot.ranks) < 2 or not snapshot.known("exposed_s"):
        return None
    return spread.max_rank if spread.max > spread.median * (1 + _SLOWER) else None


def line(snapshot: Snapshot) -> str:
    """Return the progress of a run in one line, for a pipe."""
    total = "" if snapshot.num_steps is None else f"/{snapshot.num_steps}"
    left = "" if snapshot.left_s is None else f"{duration(snapshot.left_s)} left"
    slowest = "" if (rank := slowest_rank(snapshot)) is None else f"rank {rank} is slowest"
    begin = [f"step {snapshot.step}{total}", *_loss_and_rates(snapshot), left]
    return "  ".join(filter(None, [*begin, largest(snapshot.ranks, 3), slowest, slowest_link(snapshot)]))


def _loss_and_rates(snapshot: Snapshot) -> list[str]:
    words = [] if snapshot.loss is None else [f"loss {snapshot.loss:.4f}"]
    words += [f"{name} {value:.4g}" for name, value in snapshot.logged.items()]
    rates = (("samples", snapshot.samples_per_s), (snapshot.counts, snapshot.tokens_per_s))
    # 0 where no sample was counted, as in a script without a loader.
    return words + [f"{rate(per_s)} {what}/s" for what, per_s in rates if per_s]


def slowest_link(snapshot: Snapshot) -> str:
    """Return the rate of the slowest link between machines, and its use; empty if it is unknown."""
    links = [(per_s, rank.rank, rank) for rank in snapshot.ranks if (per_s := rank["link_bytes_per_s"])]
    if not links:
        return ""
    per_s, _, slowest = min(links)
    a_step = f", {sent / 1e6:.3g} MB a step" if (sent := slowest["step_sent_bytes"]) else ""
    return f"slowest link: rank {slowest.rank} to {slowest.link_peer}, {per_s / 1e6:.3g} MB/s{a_step}"


def summary(snapshot: Snapshot) -> str | None:
    """Return the parts of a step, and the slowest rank; None if unknown.

    Args:
        snapshot: With means over the whole run.
    """
    step_s, spread = snapshot.mean("step_s"), snapshot.spread("own_s")
    if step_s is None:
        return None
    text = f"a step took {milliseconds(step_s)}: {largest(snapshot.ranks)}"
    # A rank that took the place of a lost one has other steps than the others, or none yet.
    are_alike = len({rank.num_steps for rank in snapshot.ranks}) == 1 and bool(snapshot.known("exposed_s"))
    if spread is None or spread.min_rank == spread.max_rank or not are_alike:
        return text
    slow = f"rank {spread.max_rank} ({milliseconds(spread.max)} of work in a step)"
    return f"{text}; slowest was {slow}, fastest rank {spread.min_rank} ({milliseconds(spread.min)})"


def rate(per_s: float) -> str:
    """Return a rate with at least three digits."""
    return f"{per_s:,.0f}" if per_s >= 99.95 else f"{per_s:.3g}"


def duration(seconds: float) -> str:
    """Return a time such as ``45 s``, ``3:20 min`` or ``2:05 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    large, small = divmod(whole if whole < 3600 else whole // 60, 60)
    return f"{large}:{small:02d} {'min' if whole < 3600 else 'h'}"


# --- as lines for a terminal: pure functions of a snapshot and of the size of the terminal ----------------------------

# With more ranks, only the ranks with the most work are shown.
MOST_RANKS = 16
_NUM_SLOWEST = 6

_MOST_EVENTS = 3
_WIDE = 100
_STALE_S = 10.0


def picture(snapshot: Snapshot, events: Iterable[Event], *, width: int, height: int) -> list[Text]:
    """Return the lines of a view.

    Args:
        snapshot: The snapshot to show.
        events: The last events of the run, oldest first; `_MOST_EVENTS` at most.
        width: Columns of the terminal; the maximum length of a line.
        height: Rows of the terminal; more than the number of lines.
    """
    width = min(width, _WIDE) - 1  # some terminals wrap after the last column
    lines = [_progress(snapshot, width), _metrics_line(snapshot)]
    if shares(snapshot.ranks):
        step = Text(f"{milliseconds(snapshot.mean('step_s') or 0.0):>8} a step ")
        lines += [step.append_text(bar(snapshot.ranks, max(8, width - len(step)))), *_legend(snapshot, width)]
    if link := slowest_link(snapshot):
        lines.append(Text(link))
    tail = [_event(event) for event in events]
    room = height - 2 - len(lines) - len(tail)
    if room > 0 and snapshot.ranks:
        lines += _ranks(snapshot, width, room)
    lines = [*lines, *tail][: max(1, height - 2)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _progress(snapshot: Snapshot, width: int) -> Text:
    step, num_steps = snapshot.step, snapshot.num_steps
    if num_steps is None:  # of a script
        return Text(f"step {step:,}  for {duration(snapshot.elapsed_s)}", "bold")
    done = min(1.0, step / max(1, num_steps))
    left = "" if snapshot.left_s is None else f"  {duration(snapshot.left_s)} left"
    before, after = f"step {step:,}/{num_steps:,} ", f" {done:4.0%}{left}"
    room = max(4, width - len(before) - len(after))
    filled = round(done * room)
    return Text.assemble((before, "bold"), ("━" * filled, "#0072B2"), ("─" * (room - filled), "dim"), after)


def _metrics_line(snapshot: Snapshot) -> Text:
    numbers = {"lr": snapshot.learning_rate, "grad norm": snapshot.grad_norm}
    words = _loss_and_rates(snapshot) + [f"{name} {value:.3g}" for name, value in numbers.items() if value is not None]
    if snapshot.num_skipped_steps:
        words.append(f"skipped {snapshot.num_skipped_steps}")
    return Text("  ".join(words) or "the first steps take longest")


def bar(ranks: Iterable[RankFigures], width: int) -> Text:
    """Return the parts of a step as a bar of colored letters."""
    text = Text()
    reached = 0.0
    for part, share in shares(ranks).items():
        reached += share
        # Rounded cumulatively, so that the bar has the full length.
        text.append_text(_letters(part, min(width, round(reached * width)) - len(text)))
    return text


def _letters(part: str, count: int) -> Text:
    return Text(PARTS[part].letter * count, style=f"{PARTS[part].ink} on {PARTS[part].color}")


def _legend(snapshot: Snapshot, width: int) -> list[Text]:
    """Return the legend of the letters, as one or more lines."""
    lines = [Text("  ")]
    for part, share in shares(snapshot.ranks).items():
        words = f" {name_of(part, snapshot.ranks)} {share:.0%}  "
        if len(lines[-1]) > 2 and len(lines[-1]) + 1 + len(words) > width:
            lines.append(Text("  "))
        lines[-1].append_text(_letters(part, 1)).append(words)
    return lines


def _ranks(snapshot: Snapshot, width: int, room: int) -> list[Text]:
    shown, slowest = list(snapshot.ranks), slowest_rank(snapshot)
    if len(shown) > min(room, MOST_RANKS):
        by_work = sorted(shown, key=lambda rank: (-(rank["own_s"] or 0.0), rank.rank))
        shown = sorted(by_work[: max(1, min(room - 1, _NUM_SLOWEST))], key=lambda rank: rank.rank)
    words = [_rank(rank, is_slowest=rank.rank == slowest) for rank in shown]
    bar_width = min(20, width - max(map(len, words)) - 10)  # the remaining space, equal for all ranks
    lines = [
        Text.assemble((f"rank {rank.rank:<3} ", text.style), bar([rank], bar_width), " ", text)
        for rank, text in zip(shown, words, strict=True)
    ]
    if missing := len(snapshot.ranks) - len(shown):
        lines.append(Text(f"  and {missing} ranks with less work", style="dim"))
    return lines[:room]


def _rank(rank: RankFigures, *, is_slowest: bool) -> Text:
    own_s, wait_s, age_s = rank["own_s"], rank["exposed_s"], rank["age_s"] or 0.0
    words = ["no step done yet" if own_s is None else f"works {milliseconds(own_s):>7}"]
    if wait_s is not None:
        words.append(f"waits {milliseconds(wait_s):>7}")
    device = "CPU" if rank["gpu_percent"] is None else "GPU"
    if (percent := rank[f"{device.lower()}_percent"]) is not None:
        words.append(f"{device} {percent:3.0f}%")
    held = rank["rss_bytes"] if rank["memory_bytes"] is None else rank["memory_bytes"]
    if held is not None:
        words.append(format_bytes(held))
    text = Text("  ".join([*words, *["slowest"] * is_slowest]), style="bold" if is_slowest else "")
    return text.append(f"  no report for {duration(age_s)}", style="bold") if age_s > _STALE_S else text


def _event(event: Event) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    return Text(f"{clock} step {event.step:,} {event.event}: {event.text}".replace("\n", " "), style="dim")


# --- where a view is drawn --------------------------------------------------------------------------------------------


@final
class OwnTerminal:
    """The terminal of this process, or the output of a notebook cell; output appears above the view."""

    def __init__(self) -> None:
        self._streams = sys.stdout, sys.stderr
        # Without rich's refresh thread, as the view changes only with a snapshot, once a second.
        self._live = Live(console=Console(), auto_refresh=False, transient=True)
        self._live.start()
        self._live.console.show_cursor(True)  # otherwise it stays hidden if this process is killed
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def size(self) -> tuple[int, int]:
        """Return columns and rows to use."""
        return self._live.console.size

    def show(self, lines: Sequence[Text]) -> None:
        """Replace the lines shown by ``lines``."""
        self._live.update(Group(*lines), refresh=True)

    def close(self) -> None:
        """Remove the view."""
        self._live.stop()

    def _leave_to_parent(self) -> None:
        """In a forked child, such as a loader process: restore the streams, as the parent draws the view."""
        if self._live.is_started:
            sys.stdout, sys.stderr = self._streams


@final
class LauncherTerminal:
    """The terminal of the launcher of this rank, which also prints there; see `TerminalRegion`.

    Args:
        folder: The launcher's folder.
        terminal: The path of the terminal.
    """

    def __init__(self, folder: Path, terminal: str) -> None:
        self._file = open(terminal, "w")  # noqa: SIM115 - open as long as the view
        self._region = TerminalRegion(folder)
        self._console = Console(file=self._file, force_terminal=True)

    def size(self) -> tuple[int, int]:
        """Return columns and rows to use."""
        columns, rows = os.get_terminal_size(self._file.fileno())
        return columns or 80, rows or 25

    def show(self, lines: Sequence[Text]) -> None:
        """Replace the lines shown by ``lines``."""
        with self._console.capture() as capture:
            for line in lines:
                self._console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)
        with self._region.locked() as rows:
            if rows >= 0:  # otherwise the last row holds an unfinished line of output
                self._file.write(erase_rows(rows) + capture.get())
                self._file.flush()
                self._region.set_rows(len(lines))

    def close(self) -> None:
        """Remove the view. May be called again, as after an error."""
        if not self._file.closed:
            with suppress(OSError):
                self.show([])
            self._file.close()
            self._region.close()


def open_terminal() -> OwnTerminal | LauncherTerminal | None:
    """Return where a live view can be drawn; None without a terminal or notebook."""
    folder, terminal = launcher_folder(), os.environ.get(TERMINAL)
    if folder is not None:
        with suppress(OSError):  # the terminal is closed, or belongs to another user
            return None if terminal is None else LauncherTerminal(folder, terminal)
        return None
    is_terminal = sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    return OwnTerminal() if is_terminal or _is_notebook() else None


def _is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook that can redraw a view; rich needs ipywidgets for it."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None and find_spec("ipywidgets") is not None


# --- a display --------------------------------------------------------------------------------------------------------

# Seconds between two lines of progress.
_LINE_S = 10.0

# Events that are printed as permanent lines, and so are not shown in the view.
PRINTED_EVENTS = ("evaluation", "skipped", "straggler", "remark")


@final
class Display(Subscriber):
    """Displays a run: a live view on a terminal or in a notebook, otherwise periodic lines; and log lines.

    Args:
        view: The display of progress; "auto" selects it by the kind of output.
        silent: Whether to print nothing at all.
    """

    def __init__(self, view: str = "auto", *, silent: bool) -> None:
        self._silent = silent
        # The log of a CI service would contain every frame of a live view.
        may_draw = not silent and (view == "live" or (view == "auto" and "CI" not in os.environ))
        self._terminal = open_terminal() if may_draw else None
        self._events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self._shown_at = math.inf if silent or view == "none" else time.perf_counter()

    def log(self, text: str) -> None:
        """Print a log line."""
        if not self._silent:
            print(f"{text}\n", end="", flush=True)  # one write, because other threads print as well

    def event(self, event: Event) -> None:
        """Show an event in the view from now on."""
        if event.event not in PRINTED_EVENTS:
            self._events.append(event)

    def update(self, snapshot: Snapshot) -> None:
        """Draw the view again, or print a line if the last one is old enough."""
        # The loss of a script may be unknown.
        is_known = snapshot.loss is not None or (snapshot.num_steps is None and snapshot.step > 0)
        if self._terminal is not None:
            width, height = self._terminal.size()
            self._terminal.show(picture(snapshot, self._events, width=width, height=height))
        elif is_known and not snapshot.is_last and time.perf_counter() >= self._shown_at + _LINE_S:
            self._shown_at = time.perf_counter()
            self.log(line(snapshot))

    def close(self) -> None:
        """Remove the view."""
        if self._terminal is not None:
            self._terminal.close()
