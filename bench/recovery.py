"""What does a lost rank cost? Kills at random moments, seconds until all go on, and work done under a row of failures.

    kills       Ranks of `lockstep.fit` on 2 to 4 ranks, over shared memory and over Gloo, with and without checkpoints,
                are killed (SIGKILL) at random moments, many in each run, also during recoveries and two at once; then
                on two machines, which are network namespaces. Each run must end with exit status 0 and the weights of
                the undisturbed run, bit for bit; each kill may cost one step; nothing may be left behind. Of the ranks
                that hold the state of the run one is always spared, and in two steps at most two are killed: else a
                restart is right. With --pauses, all processes of one of two machines are stopped (SIGSTOP) for 4 to 8 s
                at random moments instead: each time both must train together again within 60 s. If they do not, the
                Python stacks of all launchers and ranks are printed.
    seconds     From a death (SIGKILL) until all ranks have done a new step together, on the whole batch: in place, by
                restart from a checkpoint (each 10 steps), with torchrun, and with torchft; in turns. The others of
                torchft train on meanwhile with their part of the batch: a line says after which time, and another one
                how long a new interpreter takes. Then with a model that takes 20 s to build; these jobs run beside each
                other, 5 s apart, as they mostly wait.
    schedule    A failure every 60 s and every 15 s at steps of 0.25 s on 4 ranks, torchft's published schedules in the
                small: completed steps over possible ones, and whether the weights are those of the undisturbed run.
                Four jobs run at a time: each needs a tenth of a core, and more when processes start.

What the ranks run is in bench/recovery_loops.py, and how they are started in bench/recovery_jobs.py. torchft has a
heartbeat timeout of 1 s, not its usual 5 s. All parts take about 25 minutes on two cores.

Usage: python -m bench.recovery [kills] [seconds] [schedule] [--quick] [--kills N] [--pauses N] [--seed N] ...
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
    SLOW,
    STOP,
    TIMEOUT_S,
    WHOLE,
    Contender,
    Event,
    Job,
    job,
    present,
    whole_steps,
)
from bench.recovery_loops import MACHINE, MOST_PIDS
from lockstep.comm.shm.communicator import library
from lockstep.study.common import Spread, paired_ratio

# --- kills ------------------------------------------------------------------------------------------------------------

KILLS_OF_A_RUN, STEPS_OF_A_RUN, STEP_S, SHARE_OF_PAIRS = 25, 500, 0.01, 0.25
OUTPUT_LINES, LEFT_S = 40, 3.0
GAPS_S = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)
INSIDE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]  # machines share no pids, and no shared memory


def rank_processes(job: Job) -> list[tuple[psutil.Process, int]]:
    """Return the ranks' processes with their numbers in the log."""
    found = []
    for machine, launcher in enumerate(job.processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(launcher.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError):
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    inner = int(re.findall(r"^NSpid:.*?(\d+)$", status, re.MULTILINE)[0])
                    if re.match(r"lockstep: rank (\d+) of", " ".join(process.cmdline())):
                        found.append((process, machine * MOST_PIDS + inner))
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
        have_state = {event.pid for event in done} & {identity for _, identity in running}
        # Two at once at times, or one; of those that have the state one is left.
        num_recent = sum(step >= newest - 1 for step in killed_in)
        is_pair = choice.random() < SHARE_OF_PAIRS and num_recent == 0 and most - len(killed_in) > 1
        found = choice.sample(running, min(2 if is_pair else 1, len(running)))
        if found and num_recent < 2 and have_state - {identity for _, identity in found}:
            for process, _ in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
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
    """Kill ranks of `fit` on one machine and on two; print a line for each run."""
    total, runs = 4 if options.quick else options.kills, list[dict[str, Any]]()
    if options.pauses:
        with machines() as names:
            return {"runs": pauses_of(options.pauses, options.seed, names[:2])}
    if options.machines != 2:
        runs += kills_of(total, options.seed, [])
    if options.machines != 1:
        with contextlib.ExitStack() as stack:
            try:
                names = stack.enter_context(machines())[:2]
            except (subprocess.SubprocessError, OSError) as error:
                print(f"\nkills on two machines are left out: there are no network namespaces here ({error})")
            else:
                runs += kills_of(total if options.machines == 2 else max(total // 5, 4), options.seed, names)
    return {"runs": runs}


def missing() -> str | None:
    """Return why ranks cannot communicate over shared memory here; None if they can."""
    return found if isinstance(found := library(), str) else None


def files_of(pids: set[int], paths: Iterable[str]) -> list[str]:
    """Return the files with the number of one of these processes in their names, as torch names shared memory."""
    return sorted(path for path in paths if pids & {int(number) for number in re.findall(r"\d+", Path(path).name)})


def kills_of(total: int, seed: int, names: list[str]) -> list[dict[str, Any]]:
    """Kill ranks on these machines, or on this one, until there are so many kills."""
    choice, runs = random.Random(seed), list[dict[str, Any]]()
    expected: dict[tuple[int, str], bytes] = {}
    where = "on two machines (network namespaces)" if names else "on one machine"
    print(f"\n{total} kills of ranks of lockstep.fit {where}, seed {seed}")
    # All kinds in turns, so that each has its part of the kills.
    backends = ("shm", "gloo") if missing() is None else ("gloo",)
    kinds = [(2, "gloo"), (4, "gloo")] if names else [*itertools.product((2, 3, 4), backends)]
    for number in itertools.count():
        most = min(KILLS_OF_A_RUN, total - sum(run["kills"] for run in runs))
        if most <= 0:
            break
        ranks, backend = kinds[number % len(kinds)]
        if (ranks, backend) not in expected:
            found = run_fit(ranks, backend, names, random.Random(0), 0, has_checkpoints=False)
            if not found["weights"]:
                print(f"kills {where} are left out: the launcher refuses:\n{found['output'][-2000:]}")
                break
            expected[ranks, backend] = found["weights"]
        run = run_fit(ranks, backend, names, choice, most, has_checkpoints=number // len(kinds) % 2 == 1)
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
            print("    " + "\n    ".join(output.splitlines()[-OUTPUT_LINES:]), flush=True)
            with tempfile.NamedTemporaryFile("w", prefix="bench-recovery-", suffix=".txt", delete=False) as file:
                file.write(output)
            print(f"    All output: {file.name}", flush=True)
        runs.append(run)
        if run["kills"] == 0 and run["code"]:
            break
    good, count = sum(run["is_good"] for run in runs), sum(run["kills"] for run in runs)
    again = max((run["in_vain"] / max(run["kills"], 1) for run in runs), default=0.0)
    for backend in dict.fromkeys(run["backend"] for run in runs):
        print(f"  {sum(run['kills'] for run in runs if run['backend'] == backend)} of them over {backend}")
    print(
        f"  {count} kills in {len(runs)} runs, {good} of them as they must be; at most {again:.2f} steps again a kill"
    )
    return runs


def on_machines(names: list[str], words: list[str]) -> list[list[str]]:
    """Return the commands of a job's launchers on these machines."""
    commands = []
    for index, name in enumerate(names):
        inside = ["ip", "netns", "exec", name, *INSIDE, "env", f"{MACHINE}={index}"]
        commands.append([*inside, *LOCKSTEP, "--node-rank", str(index), "--master-addr", "10.79.0.1", *words])
    return commands


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
            commands = on_machines(names, ["--nnodes", str(len(names)), "--devices", str(ranks // len(names)), *script])
        job = Job(commands, folder, **environ)
        try:
            number = kill_some(job, choice, most)
            with contextlib.suppress(subprocess.TimeoutExpired):
                for process in job.processes:
                    process.wait(TIMEOUT_S)
            codes = [process.poll() for process in job.processes]
            in_vain, redone = steps_done_again(job.read())

            def left_now() -> list[str]:
                found = left_behind(mark) + sorted(str(path) for path in temporary.glob("lockstep-*"))
                pids = {process.pid for process in job.processes} | {event.pid % MOST_PIDS for event in job.read()}
                return found + files_of(pids, in_shared_memory() - before)

            deadline = time.monotonic() + LEFT_S
            while (left := left_now()) and time.monotonic() < deadline:
                time.sleep(0.1)
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


PAUSES_OF_A_RUN, PAUSE_S, MEET_S, SETTLE_S, NUM_STEPS = 4, (4.0, 8.0), 60.0, 12.0, 5


def pauses_of(total: int, seed: int, names: list[str]) -> list[dict[str, Any]]:
    """Stop all processes of one of two machines for some seconds, so many times; print a line for each run."""
    choice, runs = random.Random(seed), list[dict[str, Any]]()
    print(f"\n{total} pauses of {PAUSE_S[0]:g} to {PAUSE_S[1]:g} s of one of two machines, seed {seed}")
    while (most := total - sum(run["pauses"] for run in runs)) > 0:
        nnodes, devices = ("2", "1:2")[len(runs) % 2], 1 + len(runs) // 2 % 2
        with tempfile.TemporaryDirectory(prefix="bench-recovery-") as name:
            script = [str(LOOPS), "fit", name, "--pause", str(STEP_S), "--backend", "gloo"]
            commands = on_machines(names, ["--nnodes", nnodes, "--devices", str(devices), *script])
            job, pauses, is_good = Job(commands, Path(name), PYTHONFAULTHANDLER="1"), list[str](), False
            try:
                pause_some(job, choice, min(most, PAUSES_OF_A_RUN), pauses)
                is_good = True
            except RuntimeError:  # for the stacks, which faulthandler prints
                for process in processes_of(job, 0) + processes_of(job, 1):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGABRT)
                time.sleep(1)
            finally:
                job.end()
            print(f"  --nnodes {nnodes}, {devices} a machine: {', '.join(pauses)}", flush=True)
            if not is_good:
                with tempfile.NamedTemporaryFile("w", prefix="bench-recovery-", suffix=".txt", delete=False) as file:
                    file.write(job.output)
                print(f"    NOT TOGETHER AGAIN. All output, with stacks: {file.name}", flush=True)
            runs.append({"pauses": max(len(pauses), 1), "is_good": is_good})
    print(f"  {sum(run['is_good'] for run in runs)} of {len(runs)} runs as they must be")
    return runs


def pause_some(job: Job, choice: random.Random, most: int, pauses: list[str]) -> None:
    """Stop machines at random moments; add each pause, and how long it took until they trained together, to a list."""
    await_both(job)
    for _ in range(most):
        job.sleep(choice.random() * SETTLE_S)
        index, pause_s = choice.randrange(2), choice.uniform(*PAUSE_S)
        pauses.append(f"{index} for {pause_s:.1f}")
        pause(job, index, pause_s)
        pauses[-1] += f": {await_both(job):.1f} s"


def await_both(job: Job) -> float:
    """Wait until ranks of both machines have done some steps together from now on; return how long that took."""
    began = time.monotonic()

    def have_met() -> bool:
        shares, where = defaultdict[int, float](float), defaultdict[int, set[int]](set)
        for event in reversed(job.read()):
            if event.at_s < began:
                break
            if event.what == "done":
                shares[event.step] += event.share
                where[event.step].add(event.pid // MOST_PIDS)
        return sum(shares[step] > WHOLE and len(where[step]) == 2 for step in shares) > NUM_STEPS

    job.wait(have_met, MEET_S)
    return time.monotonic() - began


def processes_of(job: Job, index: int) -> list[psutil.Process]:
    """Return all processes of a machine, its launcher first."""
    try:
        return psutil.Process(job.processes[index].pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def pause(job: Job, index: int, seconds: float) -> None:
    """Stop all processes of a machine for so long."""
    stopped = processes_of(job, index)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        time.sleep(seconds if number == signal.SIGSTOP else 0)


# --- seconds ----------------------------------------------------------------------------------------------------------

PACE_S, WARM_UP_S, APART_S = 0.02, 4.0, 5.0
IMPORTS = "import torch, torchft"
SLOW_PACE_S = 0.1
Cost = tuple[float, float, int]


def deaths_of(contender: Contender, choice: random.Random, most: int, pace_s: float) -> list[Cost]:
    """Run a job, and kill some of its ranks, one after the other; return what each death cost."""
    costs = []
    with job(contender, contender.ranks, pause_s=pace_s) as made:
        made.wait(made.newest)
        ready = contender.ranks + contender.spares if contender.spares else 0
        made.wait(lambda: sum(event.what == "built" for event in made.read()) >= ready)
        made.sleep(WARM_UP_S)
        for _ in range(min(most, contender.deaths)):
            costs.append(one_death(made, choice, pace_s))
    return costs


def one_death(job: Job, choice: random.Random, pace_s: float) -> Cost:
    """Kill a rank; return seconds until all did a new step, those that others stood still, and steps repeated."""
    wanted = job.newest() + 5
    job.wait(lambda: job.newest() >= wanted)
    job.sleep(choice.random() * 5 * pace_s)
    alive = job.alive()
    victim = choice.choice(sorted(alive))
    died_at_s = time.monotonic()
    psutil.Process(alive[victim]).kill()
    time.sleep(POLL_S)

    def found() -> Cost | None:
        return cost_of_death(job.read(), victim, died_at_s)

    newest = job.newest()
    job.wait(lambda: job.newest() > newest)  # quicker to find
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
    wanted = options.contender or [*CONTENDERS, *SLOW]
    rounds, most = (1, 1) if options.quick else (options.rounds, 3)
    contenders = present(CONTENDERS, wanted)
    small: dict[str, list[list[Cost]]] = {name: [] for name in contenders}
    imports_s: list[float] = []
    for index in progress(range(rounds), "seconds, rounds"):
        for name in order_of_round(list(contenders), index):
            try:
                choice = random.Random(f"{options.seed} {name} {index}")
                small[name].append(deaths_of(contenders[name], choice, most, PACE_S))
            except (RuntimeError, psutil.Error) as error:
                print(f"  {name}, round {index}: {error}", flush=True)
        if "torchft" in contenders:
            began_s = time.monotonic()
            subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True)
            imports_s.append(time.monotonic() - began_s)
    print_costs("seconds from the death of one of 2 ranks, small model, steps of 20 ms", small)
    print_parts(small.get("torchft", []), imports_s)
    found = {"small": small, "imports_s": imports_s}
    if options.quick and not options.contender:
        return found

    def slow_deaths(number: int, contender: Contender) -> list[Cost]:
        time.sleep(number * APART_S)
        return deaths_of(contender, random.Random(f"{options.seed} slow {number}"), most, SLOW_PACE_S)

    turns = {name: [contender] for name, contender in present(SLOW, wanted).items()}
    slow = {
        name: [[cost] for cost in found[0]] for name, found in at_once(turns, slow_deaths).items() if found and found[0]
    }
    print_costs("seconds from the death of one of 2 ranks, model that takes 20 s to build, steps of 100 ms", slow)
    return found | {"slow": slow}


def at_once(
    turns: Mapping[str, list[Any]], measure: Callable[[int, Any], Any], width: int | None = None
) -> dict[str, list[Any]]:
    """Measure all beside each other, or so many at a time; return what was measured, and print what failed."""
    found: dict[str, list[Any]] = {name: [] for name in turns}
    items = [(name, turn) for name, of_name in turns.items() for turn in of_name]
    with ThreadPoolExecutor(width or max(len(items), 1)) as pool:
        try:
            made: list[Future[Any]] = [pool.submit(measure, index, turn) for index, (_, turn) in enumerate(items)]
            for (name, _), future in zip(items, made, strict=True):
                try:
                    found[name].append(future.result())
                except (RuntimeError, psutil.Error) as error:
                    print(f"  {name}: {error}", flush=True)
        except BaseException:
            STOP.set()
            raise
    return found


def print_costs(title: str, costs: Mapping[str, list[list[Cost]]]) -> None:
    """Print a table; the ratio is that of the turns' medians, over those of the first contender."""
    print(f"\n{title}\n  {'':<22}{'deaths':>6}   {'all, whole batch':<24}{'the others stood':<24}repeated  ratio")
    base = next(iter(costs.values()), [])
    for name, turns in costs.items():
        rows = [row for turn in turns for row in turn]
        if not rows:
            continue
        whole, stood, again = ([float(row[index]) for row in rows] for index in range(3))
        num_pairs = min(len(turns), len(base))
        medians, of_base = ([statistics.median(row[0] for row in turn) for turn in of] for of in (turns, base))
        ratio = spread(paired_ratio(medians[:num_pairs], of_base[:num_pairs])) if num_pairs else ""
        print(
            f"  {name:<22}{len(rows):>6}   {spread(Spread.of(whole)):<24}{spread(Spread.of(stood)):<24}"
            f"{statistics.median(again):<10g}{ratio}",
            flush=True,
        )


def print_parts(turns: list[list[Cost]], imports_s: Sequence[float]) -> None:
    """Print what the seconds of torchft are made of, below its row."""
    rows = [row for turn in turns for row in turn]
    if rows and imports_s:
        which = "of torchft's seconds: a new interpreter"
        print(f"  {IMPORTS:<22}{len(imports_s):>6}   {spread(Spread.of(imports_s)):<24}{which}")
        stood_s = statistics.median(row[1] for row in rows)
        print(f"  torchft's others go on after {stood_s:.2f} s, with their part of the batch until the new one is back")


def spread(of: Spread) -> str:
    return f"{of.median:.2f} ({of.low:.2f} to {of.high:.2f})"


# --- schedule ---------------------------------------------------------------------------------------------------------

SCHEDULED = ("ours, script", "ours, restart", "torchrun, restart", "torchft")
RANKS, PERIODS_S, SLOW_STEP_S, JOBS_AT_ONCE = 4, (60.0, 15.0), 0.25, 4


def digests(folder: Path) -> dict[int, set[str]]:
    """Return the digests of the weights that the ranks have written, by step."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in folder.glob("weights-*[0-9]"):
        found[int(path.name.split("-")[1])].add(path.read_text())
    return found


def run_undisturbed(contender: Contender, steps: int) -> dict[int, set[str]]:
    """Train quickly; return the digests of the weights."""
    # Without any pause, torchft's groups wait 30 s for the state of the first one, which has gone on, again and again.
    with job(contender, RANKS, "--digests", pause_s=PACE_S) as made:
        made.wait(lambda: made.newest() > steps)
        return digests(made.folder)


def run_schedule(contender: Contender, total_s: float, every_s: float, choice: random.Random) -> dict[str, Any]:
    """Train for so many seconds with a failure every so many seconds, the first after half of that."""
    num_failures = 0
    with job(contender, RANKS, "--digests", pause_s=SLOW_STEP_S) as made:
        made.wait(made.newest)
        began_s = time.monotonic()
        while (at_s := (num_failures + 0.5) * every_s) < total_s:
            made.sleep(began_s + at_s - time.monotonic())
            if alive := made.alive():
                psutil.Process(alive[choice.choice(sorted(alive))]).kill()
            num_failures += 1
        made.sleep(began_s + total_s - time.monotonic())
        ended_s = time.monotonic()
        found = digests(made.folder)
        events = [event for event in made.read() if event.what == "done" and began_s < event.at_s <= ended_s]
    return progress_of(events, ended_s - began_s) | {"failures": num_failures, "digests": found}


def progress_of(events: Iterable[Event], total_s: float) -> dict[str, float]:
    """Return which part of the possible steps and samples was done; possible is the pace between failures."""
    shares: dict[int, dict[int, float]] = defaultdict(dict)
    for event in events:
        shares[event.step][event.rank] = event.share
    whole = whole_steps(events)
    pace_s = statistics.median(whole[step + 1] - at_s for step, at_s in whole.items() if step + 1 in whole)
    # What a rank did alone counts as a step, but with its part of the samples.
    sums = [min(1.0, sum(of_step.values())) for of_step in shares.values()]
    possible = total_s / pace_s
    return {"pace_s": pace_s, "steps": len(sums) / possible, "samples": sum(sums) / possible}


def schedule(options: argparse.Namespace) -> dict[str, Any]:
    """Measure how much each contender gets done under failures; print a table."""
    minutes, periods_s = (0.3, (6.0,)) if options.quick else (options.minutes, PERIODS_S)
    total_s = 60 * minutes
    contenders = present(CONTENDERS, SCHEDULED)
    expected = at_once(
        {name: [contender] for name, contender in contenders.items()},
        lambda _, contender: run_undisturbed(contender, round(total_s / SLOW_STEP_S)),
        2,
    )
    turns = {name: [(contender, every_s) for every_s in periods_s] for name, contender in contenders.items()}

    def measure(number: int, turn: tuple[Contender, float]) -> dict[str, Any]:
        time.sleep(number % JOBS_AT_ONCE * APART_S)
        return run_schedule(turn[0], total_s, turn[1], random.Random(f"{options.seed} {turn[1]}"))

    rows = at_once(turns, measure, JOBS_AT_ONCE)
    print(f"\n{minutes:g} minutes of steps of {SLOW_STEP_S:g} s on {RANKS} ranks: completed over possible")
    print(f"  {'':<20}{'a failure every':<17}{'failures':<10}{'ms a step':<11}{'steps':<8}{'samples':<9}weights")
    for name, of_name in rows.items():
        for (_, every_s), row in zip(turns[name], of_name, strict=False):
            undisturbed = expected[name][0] if expected[name] else {}
            common = [step for step in row.pop("digests").items() if step[0] in undisturbed]
            same = [step for step, found in common if found == undisturbed[step]]
            row |= {"every_s": every_s, "compared": len(common), "same": len(same)}
            print(
                f"  {name:<20}{every_s:<17g}{row['failures']:<10}{1e3 * row['pace_s']:<11.0f}{row['steps']:<8.3f}"
                f"{row['samples']:<9.3f}as undisturbed in {len(same)} of {len(common)} comparisons",
                flush=True,
            )
    return {"rows": rows}


# ----------------------------------------------------------------------------------------------------------------------

PARTS = {"kills": kills, "seconds": seconds, "schedule": schedule}


def main() -> None:
    """Measure what the options ask for; exit with 1 if a run with kills did not end as it must."""
    made = parser(__doc__, rounds=3, meaning="jobs of each contender with a small model, in seconds")
    made.add_argument("parts", nargs="*", metavar="PART", help="kills, seconds, schedule (all)")
    made.add_argument("--kills", type=positive, default=300, help="in all runs together (300)")
    made.add_argument("--machines", type=int, choices=(1, 2), help="of kills (one, then two with a fifth)")
    made.add_argument("--pauses", type=positive, help="of kills: instead of kills, stop a machine so many times")
    made.add_argument("--minutes", type=float, default=3.0, help="of each row of schedule (3)")
    names = tuple({**CONTENDERS, **SLOW})
    made.add_argument("--contender", action="append", choices=names, help="of seconds; may be given again")
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that jobs and namespaces are ended
    if unknown := set(options.parts) - set(PARTS):
        made.error(f"there is no part {sorted(unknown)[0]}; there are {', '.join(PARTS)}")
    if importlib.util.find_spec("torchft") is not None:
        print(f"torchft {version('torchft')}; ", end="")
    if why := missing():
        print(f"Ranks communicate over Gloo instead of shared memory: {why}")
    found: dict[str, Any] = {}

    def measure() -> dict[str, Any]:
        found.update({part: PARTS[part](options) for part in options.parts or PARTS})
        return found

    record(options.json, measure)
    if not all(run["is_good"] for run in found.get("kills", {}).get("runs", ())):
        sys.exit(1)


if __name__ == "__main__":
    main()
