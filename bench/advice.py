"""Does the first advice of `lockstep report` give what it promises? Runs with a planted cause, before and after.

Each run has one cause that is known: slow storage, slow decoding, other programs, a quota, a model that is too small,
an optimizer that every rank repeats, checkpoints, a slow rank, a slow link. `lockstep report` reads the run's record,
its first advice is applied as a user would (a flag; what else runs is stopped; the slow rank is mended), and the same
steps are run again. The gain is that of the throughput from the sixth step on, pauses included. "None" is advised
where nothing promises more than 3 %. Both are run in turns, each when a core is idle or after some seconds, and the
faster one of each counts.

Usage: python -m bench.advice [NAME ...]  (the slow links and the quota need root, the links also iproute2)
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep
from bench.predict import limit, machines, run_job
from lockstep.study.report.view import View, view_run
from lockstep.telemetry.provenance import gather

# --- the tasks --------------------------------------------------------------------------------------------------------

SLOW_RANK = "BENCH_SLOW_RANK"


class Samples(Dataset[Tensor]):
    """Vectors, each of which takes its time to load: waiting for storage, or computing."""

    def __init__(self, width: int, waits_s: float = 0.0, computes_s: float = 0.0) -> None:
        self.samples = torch.randn(512, width, generator=torch.Generator().manual_seed(0))
        self.waits_s, self.computes_s = waits_s, computes_s

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        if self.waits_s:
            time.sleep(self.waits_s)
        ends_at = time.thread_time() + self.computes_s
        while self.computes_s and time.thread_time() < ends_at:
            pass
        return self.samples[index]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return a mean; on the rank that the environment names, 10 ms later."""
    if os.environ.get(SLOW_RANK) == os.environ.get("RANK"):
        time.sleep(0.010)
    return model(batch).square().mean()  # type: ignore[no-any-return]


def task_of(name: str, width: int, num_layers: int, batch: int, **loading: float) -> lockstep.Task:
    """Return a stack of linear layers with Adam as a task."""
    return lockstep.Task(
        name=name,
        model=lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers))),
        dataset=lambda: Samples(width, **loading),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
        global_batch_size=batch,
    )


storage = task_of("storage", 512, 4, 64, waits_s=4e-4)
decoding = task_of("decoding", 512, 4, 64, computes_s=4e-4)
computing = task_of("computing", 512, 4, 256)
small = task_of("small", 16, 2, 16)
optimizer = task_of("optimizer", 2048, 2, 16)
link = task_of("link", 512, 4, 64)

# --- the causes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cause:
    """A cause, and how it is planted.

    Attributes:
        task: Of the ones above.
        flags: Of ``lockstep train``.
        num_steps: Of a run.
        num_others: Programs that compute beside the run, with precedence over it.
        quota: Cores that a control group allows; 0 for no limit.
        slow_rank: A rank that is late in each step.
        rate: Of the link between two machines with a rank each; empty for one machine with two ranks.
    """

    task: str
    flags: tuple[str, ...] = ()
    num_steps: int = 60
    num_others: int = 0
    quota: float = 0.0
    slow_rank: str = ""
    rate: str = ""


CAUSES = {
    "nothing": Cause("computing"),
    "slow storage": Cause("storage"),
    "slow decoding": Cause("decoding"),
    "other programs": Cause("computing", num_others=6, num_steps=40),
    "quota of half a core": Cause("computing", quota=0.5, num_steps=40),
    "too small a model": Cause("small", num_steps=400),
    "repeated optimizer": Cause("optimizer", num_steps=60),
    "checkpoints": Cause("optimizer", ("--checkpoint-every", "4", "--checkpoint-blocking"), num_steps=60),
    "slow rank": Cause("computing", slow_rank="1"),
    "slow link, 100 Mb/s": Cause("link", num_steps=15, rate="100Mb"),
    "link of 1 Gb/s": Cause("optimizer", num_steps=20, rate="1Gb"),
}

TIMEOUT_S = 60.0


@contextmanager
def others(count: int) -> Iterator[None]:
    """Keep the cores busy with so many programs."""
    programs = [subprocess.Popen(["nice", "-n", "-5", "sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


@contextmanager
def control_group(quota: float) -> Iterator[list[str]]:
    """Yield what is to stand before a command so that it gets so many cores; needs root. Without a quota nothing."""
    if not quota:
        yield []
        return
    first = Path("/sys/fs/cgroup/cpu")  # of the first version of control groups
    folder = (first if first.exists() else first.parent) / f"lockstep-bench-{os.getpid()}"
    folder.mkdir()
    try:
        file, text = ("cpu.cfs_quota_us", "") if first.exists() else ("cpu.max", " 100000")
        (folder / file).write_text(f"{round(quota * 100_000)}{text}")
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh"]
    finally:
        folder.rmdir()


def train(cause: Cause, folder: Path, names: Sequence[str], flags: Sequence[str], *, is_planted: bool) -> View:
    """Run the steps, and return the record; without what ``is_planted`` if that is not to be."""
    run = folder / f"run{time.monotonic_ns()}"
    words = [f"{__file__}:{cause.task}", "--steps", str(cause.num_steps), "--view", "none", "--run-dir", str(run)]
    words += [*cause.flags, *flags]
    if "--checkpoint-every" in cause.flags:
        words += ["--checkpoint", str(run / "checkpoints")]
    with ExitStack() as planted:
        if is_planted:
            planted.enter_context(others(cause.num_others))
        is_alone, quota = "--devices" in flags, cause.quota if is_planted else 0.0
        if cause.rate and not is_alone:
            limit(names, cause.rate)
            run_job(names, "train", *words)
        else:
            environ = {**os.environ, SLOW_RANK: cause.slow_rank if is_planted else ""}
            # A machine of the job has one core.
            where = ["taskset", "-c", "0"] if cause.rate else planted.enter_context(control_group(quota))
            devices = [] if is_alone else ["--devices", "2"]
            command = [*where, sys.executable, "-m", "lockstep", "train", *words, *devices]
            subprocess.run(command, env=environ, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
    return view_run(run)


def rate(view: View) -> float:
    """Return the samples per second from the sixth step on, pauses included."""
    steps = view.run.zero.steps[5:]
    return sum(step.samples for step in steps) / (steps[-1].time + steps[-1].times.total_s - steps[0].time)


def flags_of(change: str, cause: Cause) -> list[str]:
    """Return the first flags that an advice names, with its numbers in place of what it leaves to the user."""
    found = re.search(r"\((--[^)]*)\)", change)
    words = found[1].split(" with ")[0].split() if found else []
    if "STEPS" in words:  # half as often
        words[words.index("STEPS")] = str(2 * int(cause.flags[cause.flags.index(words[0]) + 1]))
    return words


def wait_for_calm(most_s: float = 4.0) -> float:
    """Block until other programs leave a core idle, or so long; return how many cores they use."""
    ends_at = time.monotonic() + most_s
    while (busy := psutil.cpu_percent(1.0) / 100 * (psutil.cpu_count() or 1)) > 0.3 and time.monotonic() < ends_at:
        pass
    return busy


def measure(name: str, folder: Path, names: Sequence[str], rounds: int) -> None:
    """Plant a cause, apply the first advice, and print what it promised and gave."""
    cause, busy = CAUSES[name], [wait_for_calm()]
    before = train(cause, folder, names, [], is_planted=True)
    if not before.advice:
        print(f"{name:<20}{rate(before):>9.1f}  none  (cores busy before: {busy[0]:.1f})", flush=True)
        return
    first = before.advice[0]
    is_starved = first.cause.startswith("The ranks wait for a core")
    if is_starved and not (cause.num_others or cause.quota):
        print(f"{name:<20}{rate(before):>9.1f}  the machine is too busy to tell: {first.cause}", flush=True)
        return
    # The flags of an advice that names what is outside of the run are its second choice.
    is_outside = bool(cause.num_others or cause.quota or cause.slow_rank)
    flags = [] if is_outside else flags_of(first.change, cause)
    slow, fast = [rate(before)], [0.0]
    for turn in range(rounds):
        busy.append(wait_for_calm())
        fast.append(rate(train(cause, folder, names, flags, is_planted=not is_outside)))
        if turn < rounds - 1:
            busy.append(wait_for_calm())
            slow.append(rate(train(cause, folder, names, [], is_planted=True)))
    gain = max(fast) / max(slow)
    promised = f"{first.bound} {first.gain:.2f}"
    print(f"{name:<20}{max(slow):>9.1f}  {promised:>12}{gain:>9.2f}{gain / first.gain:>7.2f}  ", end="")
    print(f"{first.cause}: {first.change}  (cores busy before: {median(busy):.1f})", flush=True)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CAUSES)}; all if none is given")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    chosen = options.names or list(CAUSES)
    for name, text in gather().facts():
        print(f"{name:16} {text}")
    print(f"\n{'planted':<20}{'samples/s':>9}  {'predicted':>12}{'measured':>9}{'ratio':>7}  first advice", flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        names = stack.enter_context(machines())[:2] if any(CAUSES[name].rate for name in chosen) else []
        for name in chosen:
            measure(name, Path(folder), names, options.rounds)


if __name__ == "__main__":
    main()
