"""What does a lost rank cost? Kills at random moments, seconds until all go on, and work done under a row of failures.

    kills       Ranks of `lockstep.fit` on 2 to 4 ranks, over shared memory and over Gloo, with and without checkpoints,
                are killed (SIGKILL) at random moments, many in each run. Each run must end with exit status 0 and the
                weights of the undisturbed run, bit for bit; each kill may cost one step; nothing may be left behind.
                Of the ranks that hold the state of the run one is always spared, and in two steps at most two are
                killed: else a restart is right. With ``--machines 2`` on two machines, which are network namespaces.
    seconds     From a death (SIGKILL) until all ranks have done a new step together, on the whole batch: in place, by
                restart from a checkpoint (each 10 steps of 20 ms), with torchrun, and with torchft; in turns.
    schedule    A failure every 60 s and every 15 s at steps of 0.25 s on 4 ranks, torchft's published schedules in the
                small: completed steps over possible ones, and whether the weights are those of the undisturbed run.

What the ranks run is in bench/recovery_loops.py, and how they are started in bench/recovery_jobs.py. torchft has a
heartbeat timeout of 1 s, not its usual 5 s.

Usage: python -m bench.recovery [kills] [seconds] [schedule] [--quick] [--kills N] [--seed N] [--machines 2] ...
"""

import argparse
import contextlib
import importlib.util
import itertools
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from bench.chaos import MARK, in_shared_memory, left_behind
from bench.harness import order_of_round, parser, positive, progress, record
from bench.predict import machines
from bench.recovery_jobs import (
    CONTENDERS,
    LOCKSTEP,
    LOOPS,
    POLL_S,
    TIMEOUT_S,
    Contender,
    Event,
    Job,
    job,
    present,
    whole_steps,
)
from lockstep.study.common import Spread, paired_ratio

# --- kills ------------------------------------------------------------------------------------------------------------

KILLS_OF_A_RUN, STEPS_OF_A_RUN, STEP_S = 15, 250, 0.01
GAPS_S = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)
INSIDE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]  # machines share no pids, and no shared memory


def rank_processes(job: Job) -> list[tuple[psutil.Process, tuple[int, int]]]:
    """Return the ranks' processes with their rank and their pid as they see it."""
    found = []
    for launcher in job.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(launcher.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError):
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    inner = int(re.findall(r"^NSpid:.*?(\d+)$", status, re.MULTILINE)[0])
                    if match := re.match(r"lockstep: rank (\d+) of", " ".join(process.cmdline())):
                        found.append((process, (int(match[1]), inner)))
    return found


def kill_some(job: Job, choice: random.Random, most: int) -> int:
    """Kill random ranks of a run at random moments until it ends; return how many."""
    killed_in: list[int] = []  # the newest step at each kill
    deadline = time.monotonic() + TIMEOUT_S
    while len(killed_in) < most and all(process.poll() is None for process in job.processes):
        if time.monotonic() > deadline:
            break
        time.sleep(choice.choice(GAPS_S) + choice.random() * STEP_S)
        done = [event for event in job.read() if event.what == "done"]
        newest = max((event.step for event in done), default=0)
        running = rank_processes(job)
        have_state = {(event.rank, event.pid) for event in done} & {identity for _, identity in running}
        may_die = [process for process, identity in running if have_state - {identity}]
        if may_die and sum(step >= newest - 1 for step in killed_in) < 2:
            with contextlib.suppress(psutil.NoSuchProcess):
                choice.choice(may_die).kill()
                killed_in.append(newest)
    return len(killed_in)


def steps_done_again(events: Iterable[Event]) -> tuple[int, int]:
    """Return how many attempts at a step a process has made in vain at most, and how many completed steps it redid."""
    begun, done, redone = defaultdict[int, int](int), defaultdict[int, list[int]](list), 0
    for event in events:
        if event.what == "begin":
            begun[event.pid] += 1
        elif event.what == "done":
            redone += event.step <= max(done[event.pid], default=0)
            done[event.pid].append(event.step)
    return max((number - len(done[pid]) for pid, number in begun.items()), default=0), redone


def kills(options: argparse.Namespace) -> dict[str, Any]:
    """Kill ranks of `fit`; print a line for each run."""
    total = 4 if options.quick else options.kills
    choice, runs = random.Random(options.seed), list[dict[str, Any]]()
    expected: dict[tuple[int, str], bytes] = {}
    with contextlib.ExitStack() as stack:
        names = []
        if options.machines == 2:
            try:
                names = stack.enter_context(machines())[:2]
            except (subprocess.SubprocessError, OSError) as error:
                print(f"\nkills on two machines are left out: there are no network namespaces here ({error})")
                return {}
        where = "on two machines (network namespaces)" if names else "on one machine"
        print(f"\n{total} kills of ranks of lockstep.fit {where}, seed {options.seed}")
        while sum(run["kills"] for run in runs) < total:
            ranks = choice.choice((2, 4) if names else (2, 3, 4))
            backend = "gloo" if names else choice.choice(("shm", "gloo"))
            if (ranks, backend) not in expected:
                found = run_fit(ranks, backend, names, random.Random(0), 0, has_checkpoints=False)
                if not found["weights"]:
                    print(f"kills {where} are left out: the launcher refuses:\n{found['output'][-2000:]}")
                    return {}
                expected[ranks, backend] = found["weights"]
            most = min(KILLS_OF_A_RUN, total - sum(run["kills"] for run in runs))
            run = run_fit(ranks, backend, names, choice, most, has_checkpoints=choice.random() < 0.5)
            run["is_same"] = run.pop("weights") == expected[ranks, backend]
            is_good = run["code"] == 0 and run["is_same"] and not run["left"] and not run["redone"]
            run["is_good"] = is_good = is_good and run["in_vain"] <= run["kills"] and not run["restarts"]
            print(
                f"  {ranks} ranks, {backend + ',':<6}{run['kills']:3} kills in {run['seconds']:5.1f} s: exit status "
                f"{run['code']}, {'the same bits' if run['is_same'] else 'OTHER WEIGHTS'}, {run['in_vain']} steps done "
                f"again, {run['redone']} completed ones; {run['restarts']} restarts; left {run['left'] or 'nothing'}",
                flush=True,
            )
            output = run.pop("output")
            if not is_good:
                print("    " + "\n    ".join(output[-3000:].splitlines()), flush=True)
            runs.append(run)
            if run["kills"] == 0 and run["code"]:
                break
    good, count = sum(run["is_good"] for run in runs), sum(run["kills"] for run in runs)
    again = max(run["in_vain"] / max(run["kills"], 1) for run in runs)
    print(
        f"  {count} kills in {len(runs)} runs, {good} of them as they must be; at most {again:.2f} steps again a kill"
    )
    return {"runs": runs}


def run_fit(
    ranks: int, backend: str, names: list[str], choice: random.Random, most: int, *, has_checkpoints: bool
) -> dict[str, Any]:
    """Run `fit` once with at most so many kills; return what became of it and what it has left."""
    mark, before, began = uuid.uuid4().hex, in_shared_memory(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as name:
        folder, temporary = Path(name), Path(name, "tmp")
        temporary.mkdir()
        environ = {MARK: mark, "TMPDIR": str(temporary)}
        script = [str(LOOPS), "fit", name, "--steps", str(STEPS_OF_A_RUN), "--pause", str(STEP_S), "--backend", backend]
        script += ["--checkpoints"] if has_checkpoints else []
        commands = [[*LOCKSTEP, "--devices", str(ranks), *script]]
        if names:
            nodes = ["--nnodes", str(len(names)), "--master-addr", "10.79.0.1", "--devices", str(ranks // len(names))]
            commands = [
                ["ip", "netns", "exec", machine, *INSIDE, *LOCKSTEP, *nodes, "--node-rank", str(index), *script]
                for index, machine in enumerate(names)
            ]
        job = Job(commands, folder, **environ)
        try:
            number = kill_some(job, choice, most)
            with contextlib.suppress(subprocess.TimeoutExpired):
                for process in job.processes:
                    process.wait(TIMEOUT_S)
            codes = [process.poll() for process in job.processes]
            in_vain, redone = steps_done_again(job.read())
            time.sleep(0.5)
            left = left_behind(mark) + sorted(str(path) for path in temporary.glob("lockstep-*"))
            left += sorted(in_shared_memory() - before)
        finally:
            job.end()
        weights = folder / "weights.safetensors"
        return {
            "ranks": ranks,
            "backend": backend,
            "kills": number,
            "seconds": time.monotonic() - began,
            "code": next((code for code in codes if code != 0), 0),
            "weights": weights.read_bytes() if weights.exists() else b"",
            "in_vain": in_vain,
            "redone": redone,
            "restarts": len(re.findall(r"restart \d+ of \d+", job.output)),
            "left": left,
            "output": job.output,
        }


# --- seconds ----------------------------------------------------------------------------------------------------------

DEATHS_OF_A_JOB, PACE_S = 3, 0.02
Cost = tuple[float, float, int]


def one_death(job: Job, choice: random.Random) -> Cost:
    """Kill a rank; return seconds until all did a new step, those that others stood still, and steps repeated."""
    wanted = job.newest() + 5
    job.wait(lambda: job.newest() >= wanted)
    time.sleep(choice.random() * 5 * PACE_S)
    alive = job.alive()
    victim = choice.choice(sorted(alive))
    died_at_s = time.monotonic()
    psutil.Process(alive[victim]).kill()
    time.sleep(POLL_S)

    def found() -> Cost | None:
        return cost_of_death(job.read(), victim, died_at_s)

    cost: Cost = job.wait(found)
    return cost


def cost_of_death(events: list[Event], victim: int, died_at_s: float) -> Cost | None:
    """Return what `one_death` returns, once all have done a new step."""
    newest = max(whole_steps(event for event in events if event.at_s <= died_at_s), default=0)
    after = [event for event in events if event.at_s > died_at_s and event.what == "done" and event.share]
    ends = [at_s for step, at_s in whole_steps(after).items() if step > newest]
    if not ends:
        return None
    others = [event for event in events if event.what == "done" and event.rank != victim and event.at_s <= min(ends)]
    stood_s = 0.0
    for rank in {event.rank for event in others}:
        times = [event.at_s for event in others if event.rank == rank]
        stood_s = max(stood_s, *(b - a for a, b in itertools.pairwise(times) if b > died_at_s), 0.0)
    return min(ends) - died_at_s, stood_s, max(0, newest + 1 - min(event.step for event in after))


def seconds(options: argparse.Namespace) -> dict[str, Any]:
    """Measure how long each contender takes to go on, in turns; print a table."""
    print("\nseconds from the death of a rank, small model, steps of 20 ms")
    choice, rounds = random.Random(options.seed), 1 if options.quick else options.rounds
    names = present(options.contender or CONTENDERS)
    deaths: dict[str, list[Cost]] = {name: [] for name in names}
    for index in progress(range(rounds), "seconds, rounds"):
        for name in order_of_round(names, index):
            contender = CONTENDERS[name]
            try:
                with job(contender, contender.ranks, steps=1_000_000, pause_s=PACE_S) as made:
                    for _ in range(1 if options.quick else DEATHS_OF_A_JOB):
                        deaths[name].append(one_death(made, choice))
            except RuntimeError as error:
                print(f"  {name}, round {index}: {error}", flush=True)
    base = deaths.get("lockstep, in place")
    print(f"  {'':<26}{'deaths':>6}   {'all, whole batch':<24}{'the others stood':<24}{'repeated':<10}over in place")
    for name, rows in deaths.items():
        if not rows:
            continue
        whole, stood, again = ([float(row[index]) for row in rows] for index in range(3))
        ratio = spread(paired_ratio(whole, [row[0] for row in base])) if base and len(base) == len(rows) else ""
        print(
            f"  {name:<26}{len(rows):>6}   {spread(Spread.of(whole)):<24}{spread(Spread.of(stood)):<24}"
            f"{statistics.median(again):<10g}{ratio}"
        )
    return {"deaths": deaths}


def spread(of: Spread) -> str:
    return f"{of.median:.2f} ({of.low:.2f} to {of.high:.2f})"


# --- schedule ---------------------------------------------------------------------------------------------------------

SCHEDULED = ("lockstep, in place", "lockstep, restart", "torchrun, restart", "torchft")
RANKS, PERIODS_S, SLOW_STEP_S, QUIET_S = 4, (60.0, 15.0), 0.25, 8.0


def run_schedule(contender: Contender, steps: int, pause_s: float, every_s: float, seed: int) -> dict[str, Any]:
    """Train so many steps with a failure every so many seconds; return how it went."""
    choice, num_failures = random.Random(seed), 0
    with job(contender, RANKS, steps=steps, pause_s=pause_s) as made:
        began_s = min(made.wait(lambda: list(whole_steps(made.read()).values())))
        # A failure in the last seconds would start a rank that finds nobody any more.
        last = steps - QUIET_S / SLOW_STEP_S
        for number in itertools.count(1):
            until_s = began_s + number * every_s
            limit_s = 5 * steps * SLOW_STEP_S + TIMEOUT_S
            made.wait(lambda: made.newest() >= last or time.monotonic() > until_s, limit_s)  # noqa: B023
            if made.newest() >= last or time.monotonic() > began_s + limit_s:
                break
            if alive := made.alive():
                psutil.Process(alive[choice.choice(sorted(alive))]).kill()
                num_failures += 1
        weights = made.wait(lambda: [path.read_text() for path in made.folder.glob("weights-*")], TIMEOUT_S)
        done = [event for event in made.read() if event.what == "done"]
    by_step: Mapping[int, dict[int, float]] = defaultdict(dict)
    for event in done:
        by_step[event.step][event.rank] = event.share
    possible = (max(event.at_s for event in done) - began_s) / SLOW_STEP_S + 1
    samples = sum(min(1.0, sum(shares.values())) for shares in by_step.values())
    return {
        "failures": num_failures,
        "steps": len(by_step) / possible,
        "samples": samples / possible,
        "weights": weights[0],
    }


def schedule(options: argparse.Namespace) -> dict[str, Any]:
    """Measure how much each contender gets done under failures; print a table."""
    minutes, periods_s = (0.3, (6.0,)) if options.quick else (options.minutes, PERIODS_S)
    steps = round(60 * minutes / SLOW_STEP_S)
    print(f"\n{steps} steps of {SLOW_STEP_S:g} s ({minutes:g} minutes) on {RANKS} ranks: completed over possible")
    names = present(SCHEDULED)
    print(f"  {'':<22}{'a failure every':<18}{'failures':<10}{'steps':<9}{'samples':<9}weights at the end")
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        expected = run_schedule(CONTENDERS[name], steps, 0.0, float("inf"), 0)["weights"]
        for every_s in periods_s:
            row = run_schedule(CONTENDERS[name], steps, SLOW_STEP_S, every_s, options.seed)
            row["is_same"] = row["weights"] == expected
            rows.setdefault(name, []).append(row | {"every_s": every_s})
            print(
                f"  {name:<22}{every_s:<18g}{row['failures']:<10}{row['steps']:<9.3f}{row['samples']:<9.3f}"
                f"{'the same bits' if row['is_same'] else 'other than undisturbed'}",
                flush=True,
            )
    return {"rows": rows}


# ----------------------------------------------------------------------------------------------------------------------

PARTS = {"kills": kills, "seconds": seconds, "schedule": schedule}


def main() -> None:
    """Measure what the options ask for; exit with 1 if a run with kills did not end as it must."""
    made = parser(__doc__, rounds=3, meaning=f"jobs of each contender, with {DEATHS_OF_A_JOB} deaths each, in seconds")
    made.add_argument("parts", nargs="*", metavar="PART", help="kills, seconds, schedule (all)")
    made.add_argument("--kills", type=positive, default=300, help="in all runs together (300)")
    made.add_argument("--machines", type=int, choices=(1, 2), default=1, help="on which the ranks of kills run (1)")
    made.add_argument("--minutes", type=float, default=2.0, help="of each row of schedule (2)")
    made.add_argument("--contender", action="append", choices=tuple(CONTENDERS), help="of seconds; may be given again")
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that jobs and namespaces are ended
    if unknown := set(options.parts) - set(PARTS):
        made.error(f"there is no part {sorted(unknown)[0]}; there are {', '.join(PARTS)}")
    if importlib.util.find_spec("torchft") is not None:
        print(f"torchft {version('torchft')}; ", end="")
    found: dict[str, Any] = {}

    def measure() -> dict[str, Any]:
        found.update({part: PARTS[part](options) for part in options.parts or PARTS})
        return found

    record(options.json, measure)
    if not all(run["is_good"] for run in found.get("kills", {}).get("runs", ())):
        sys.exit(1)


if __name__ == "__main__":
    main()
