"""How far the race is: a bar on rank zero's terminal, lines in a pipe, nothing for those who want quiet."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.study.compare.table import console


def say(text: str) -> None:
    """Print a line about what is being done now, apart from the results."""
    console(stderr=True).print(text, style="dim")


class RaceProgress:
    """Counts turns, the warm-up's among them; a context manager that leaves the terminal as it was.

    Args:
        num_turns: Turns of all contenders in all rounds.
        turns_per_round: Contenders.
        shown: Whether to show anything; false on all ranks but zero.
        console: Where to.
    """

    def __init__(self, num_turns: int, turns_per_round: int, *, shown: bool, console: Console) -> None:
        self._num_turns, self._turns_per_round = num_turns, turns_per_round
        self._shown, self._console = shown, console
        self._num_done, self._first_at = 0, 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("turns,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task("warm-up", total=num_turns)

    def __enter__(self) -> "RaceProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Say what is being done now."""
        self._bar.update(self._task, description=text)
        if self._shown and not self._console.is_terminal:
            self._console.print(text)

    def start(self) -> None:
        """Begin to count: the rounds start now, which is when the time left can be estimated from."""
        self._first_at = time.monotonic()
        self._bar.reset(self._task, description="rounds")

    def advance(self) -> None:
        """Count a turn."""
        self._num_done += 1
        self._bar.advance(self._task)
        num_rounds, rest = divmod(self._num_done, self._turns_per_round)
        if self._shown and not self._console.is_terminal and rest == 0:
            per_turn_s = (time.monotonic() - self._first_at) / self._num_done
            left_s = per_turn_s * (self._num_turns - self._num_done)
            self._console.print(f"round {num_rounds}/{self._num_turns // self._turns_per_round}, {left_s:.0f} s left")
