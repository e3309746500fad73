"""What all benchmarks of a session share: rounds in a rotating order, a progress bar, options, and the JSON record."""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.study.common import Spread, paired_ratio
from lockstep.telemetry.provenance import gather

Rounds = dict[str, list[float]]
"""Seconds by contender, one a round."""

SECTION_TIMEOUT_S = 900.0
"""No launch of a benchmark takes this long; one that does is ended."""


def order_of_round(names: Sequence[str], index: int) -> list[str]:
    """Return who goes when: the first moves on every other round, and every second round runs backwards."""
    shift = index // 2 % len(names)
    rotated = [*names[shift:], *names[:shift]]
    return rotated[::-1] if index % 2 else rotated


def run_rounds(turns: Mapping[str, Callable[[], float]], num_rounds: int, title: str, *, shown: bool = True) -> Rounds:
    """Give every contender one turn a round, and return what the turns returned."""
    seconds: Rounds = {name: [] for name in turns}
    for index in progress(range(num_rounds), f"{title}, rounds", shown=shown):
        for name in order_of_round(list(turns), index):
            seconds[name].append(turns[name]())
    return seconds


def progress(items: Sequence[Any], title: str, *, shown: bool = True) -> Iterator[Any]:
    """Yield ``items`` with a bar on the terminal's error stream; without a terminal there is no bar."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        yield from bar.track(items, description=title)


def slowest(seconds: float, group: dist.ProcessGroup | None = None) -> float:
    """Return the largest of all ranks' ``seconds``. Collective: every rank; also lets them leave together.

    It goes over a group of Gloo's, as the default one is in the benchmarks on CPUs: who waits there sleeps, and takes
    no core.
    """
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return float(value)


def timed(work: Callable[[], object], count: int) -> float:
    """Return the seconds of one of ``count`` calls."""
    start = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - start) / count


def summarize(seconds: Rounds) -> dict[str, Any]:
    """Return the medians with their spread, and the rounds themselves."""
    return {"seconds": {name: asdict(Spread.of(values)) for name, values in seconds.items()}, "rounds_s": seconds}


def parser(doc: str | None, rounds: int, *, meaning: str = "turns of each contender") -> argparse.ArgumentParser:
    """Return a parser of the options that every benchmark has."""
    made = argparse.ArgumentParser(
        description=doc, usage="%(prog)s [options]", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=positive, default=rounds, help=f"{meaning} ({rounds})")
    made.add_argument("--quick", action="store_true", help="few short rounds, to see that the script runs")
    made.add_argument("--json", type=Path, help="write the figures to this file")
    return made


def positive(text: str) -> int:
    """Return a number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def record(path: Path | None, measure: Callable[[], dict[str, Any]]) -> None:
    """Run ``measure``, and write what it returns with what a reader needs to measure again; Ctrl-C returns 130."""
    provenance = gather()
    machine = provenance.machine
    print(f"torch {torch.__version__}; load of the machine before: {machine['load']} on {machine['cores']} cores")
    try:
        figures = measure()
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        sys.exit(130)
    if path is not None:
        command = shlex.join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
        made = {"command": command, "provenance": asdict(provenance), **figures}
        path.write_text(json.dumps(made, indent=1) + "\n")


def show(title: str, seconds: Rounds, baselines: Iterable[str]) -> None:
    """Print the median of each contender, and its time divided by each baseline's, with the range of the median."""
    present = [baseline for baseline in baselines if baseline in seconds]
    print(f"\n{title}\n  {'':<14}{'ms':>10}" + "".join(f"   {'over ' + baseline:<21}" for baseline in present))
    for name, values in seconds.items():
        line = f"  {name:<14}{Spread.of(values).median * 1e3:>10.3f}"
        for baseline in present:
            ratio = paired_ratio(values, seconds[baseline])
            line += f"   {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        print(line, flush=True)
