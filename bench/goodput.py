"""Is the goodput true that `lockstep predict --mtbf` predicts? Runs with kills at random, beside the prediction.

    restart     2 ranks over the loopback, steps of 0.1 s, and checkpoints that take 0.5 s. Ranks are killed (SIGKILL)
                after exponential times, and all start again from the last checkpoint: with a checkpoint every 1.2 s,
                every 4.2 s (the best interval by Daly for a failure each 20 s), and every 10 s.
    in-place    The same without checkpoints, in place: each new rank gets the state from the other one. Of the ranks
                that have the state, one is always spared, as there are only two.
    spare       The same with spare processes.
    published   What torchft has published (Llama 3 of 1B parameters, 300 L40S): https://pytorch.org/blog/fault-tolerant-
                llama-training-with-2000-synthetic-failures-every-15-seconds-and-no-checkpoints-on-crusoe-l40s/. A step
                that fails there ends all the same before it is discarded: so a failure also costs the rest of its step,
                which is half a step on average.

Step, checkpoint and the time from a death until the ranks work again are measured before, in a job of its own with
a few deaths. The measured goodput is the steps that were done and not lost, times the median step, over the time; the
predicted one is `lockstep.study.goodput.share_of_time` for the failures that there were.

A row takes less than 4 minutes. Usage: python -m bench.goodput [PART ...] [--quick] [--rounds N] [--seconds N] ...
"""

import itertools
import math
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from bench.harness import parser, record
from bench.recovery_jobs import CONTENDERS, Contender, Event, Job, job, whole_steps
from lockstep.study.goodput import share_of_time

STEP_S, SAVE_S, RANKS, NUM_DEATHS, APART_S = 0.1, 0.5, 2, 3, 1.0


@dataclass(frozen=True)
class Row:
    """A run with failures: who, seconds between failures on average, and steps between checkpoints if there are any."""

    contender: str
    mtbf_s: float
    every: int = 0

    @property
    def flags(self) -> list[str]:
        """Of the loop."""
        return ["--every", str(self.every), "--save", str(SAVE_S)] if self.every else []


PARTS: Mapping[str, list[Row]] = {
    "restart": [Row("ours, restart", 20.0, every) for every in (12, 42, 100)],
    "in-place": [Row("ours, script", 20.0), Row("ours, script", 5.0)],
    "spare": [Row("ours, a spare", 5.0)],
}


@dataclass(frozen=True)
class Measured:
    """Seconds of a step, of a checkpoint, and from a death until the ranks work again."""

    step_s: float
    save_s: float
    down_s: float


def measure(contender: Contender, row: Row) -> Measured:
    """Train with a few deaths, far from each other; return the medians."""
    choice, deaths, killed = random.Random(0), list[float](), set[int]()
    with job(contender, RANKS, *row.flags, pause_s=STEP_S) as made:
        made.wait(made.newest)
        # A checkpoint first, and spares that are ready.
        made.sleep(max(3.0, 1.5 * row.every * STEP_S) + 3.0 * contender.spares)
        for _ in range(NUM_DEATHS):
            made.sleep(APART_S + choice.random() * STEP_S)
            deaths.append(kill(made, choice, killed))
            made.wait(lambda: any(at_s > deaths[-1] for at_s in whole_steps(after(made, deaths[-1])).values()))
            made.sleep(3.0 * bool(contender.spares))
        whole = whole_steps(made.read())
        step_s, save_s = pace(whole, row.every)
        down_s = [min(whole_steps(after(made, died_s)).values()) - died_s - step_s for died_s in deaths]
        return Measured(step_s, save_s, statistics.median(down_s))


def pace(whole: Mapping[int, float], every: int) -> tuple[float, float]:
    """Return the median seconds of a step, and of a checkpoint, from when the steps were done."""
    gaps = {step: whole[step] - whole[step - 1] for step in whole if step - 1 in whole}
    # A checkpoint is written after its step, while the next one waits.
    plain = [gap for step, gap in gaps.items() if not every or (step - 1) % every]
    saves = [gap for step, gap in gaps.items() if every and (step - 1) % every == 0 and 0 < gap < 10 * SAVE_S]
    step_s = statistics.median(plain)
    return step_s, statistics.median(saves) - step_s if saves else 0.0


def after(made: Job, died_s: float) -> list[Event]:
    return [event for event in made.read() if event.at_s > died_s and event.what == "done"]


def kill(made: Job, choice: random.Random, killed: set[int]) -> float:
    """Kill one of the ranks that are not in ``killed``; return when, or NaN if none may be killed."""
    alive = set(made.alive().values()) - killed  # one that was killed just now is there until the launcher sees it
    have_state = {event.pid for event in made.events if event.what == "done"} & alive
    # Not the only one that has the state: without checkpoints, the job would begin again.
    if not (found := sorted(alive - have_state if len(have_state) == 1 else alive)):
        return math.nan
    died_s, pid = time.monotonic(), choice.choice(found)
    psutil.Process(pid).kill()
    killed.add(pid)
    return died_s


def run(contender: Contender, row: Row, seconds: float, choice: random.Random) -> tuple[int, float, float]:
    """Train with failures; return how many there were, the steps that were done and not lost, and the seconds."""
    killed: set[int] = set()
    with job(contender, RANKS, *row.flags, pause_s=STEP_S) as made:
        made.wait(made.newest)
        made.sleep(3.0 * contender.spares)
        # In the middle between two checkpoints, as it is at the end on average: then what is not saved cancels out.
        begin = made.newest() + row.every // 2
        made.wait(lambda: made.newest() >= begin)
        began_s, begin = time.monotonic(), made.newest()
        at_s = began_s + choice.expovariate(1 / row.mtbf_s)
        while at_s < began_s + seconds:
            made.sleep(at_s - time.monotonic())
            kill(made, choice, killed)
            at_s += choice.expovariate(1 / row.mtbf_s)
        made.sleep(began_s + seconds - time.monotonic())
        took_s = time.monotonic() - began_s
        done = [event for event in made.read() if event.what == "done"]
        # Steps that were lost were done again, or will be: the newest of the ranks that run is what is left.
        return len(killed), done[-1].step - begin, took_s


def show(name: str, every_s: float, mtbf_s: float, measured: float, predicted: float, more: str = "") -> None:
    """Print a row of the table."""
    every = f"{every_s:.1f}" if every_s else "-"
    print(
        f"  {name:<24}{every:>10}{mtbf_s:>10.1f}{measured:>10.3f}{predicted:>10.3f}"
        f"{predicted / measured - 1:>+9.1%}  {more}",
        flush=True,
    )


def measure_parts(options: Namespace) -> dict[str, Any]:
    """Run the parts; print a table, and return its rows."""
    seconds = 20.0 if options.quick else options.seconds
    print(f"\n  {'':<24}{'checkpoint':>10}{'failure':>10}{'goodput':>10}{'goodput':>10}")
    print(f"  {'':<24}{'every s':>10}{'every s':>10}{'measured':>10}{'predicted':>10}{'error':>9}")
    found = []
    for row in itertools.chain.from_iterable(PARTS.get(part, []) for part in options.parts or PARTS):
        contender = CONTENDERS[row.contender]
        if why := contender.absent():
            print(f"  {row.contender} is left out: {why}")
            continue
        times = measure(contender, row)
        for index in range(options.rounds):
            choice = random.Random(f"{options.seed} {index} {row}")
            failures, steps, took_s = run(contender, row, seconds, choice)
            measured, mtbf_s = steps * times.step_s / took_s, took_s / max(failures, 1)
            work_s = times.step_s * max(row.every, 1)
            predicted = share_of_time(mtbf_s, work_s, times.save_s, times.down_s)
            more = f"{failures} failures; step {times.step_s:.3f}, save {times.save_s:.2f}, down {times.down_s:.2f} s"
            show(row.contender, row.every * times.step_s, mtbf_s, measured, predicted, more)
            found.append({"row": vars(row), "times": vars(times), "measured": measured, "predicted": predicted})
    if not options.parts or "published" in options.parts:
        show("torchft, run 1", 0.0, 60.0, 5145 / 6249, share_of_time(60.0, 10.9, 0.0, 10.9 / 2), "step 10.9 s")
        show("torchft, run 2", 0.0, 15.0, 268 / 888, share_of_time(15.0, 15.46, 0.0, 15.46 / 2), "step 15.46 s")
    return {"rows": found}


def main() -> None:
    """Measure what the options ask for."""
    made = parser(__doc__, rounds=1, meaning="runs with failures of each row")
    made.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, published (all)")
    made.add_argument("--seconds", type=float, default=180.0, help="of each run with failures (180)")
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    if unknown := set(options.parts) - {*PARTS, "published"}:
        made.error(f"there is no part {sorted(unknown)[0]}; there are {', '.join(PARTS)}, published")
    record(options.json, lambda: measure_parts(options))


if __name__ == "__main__":
    main()
