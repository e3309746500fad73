"""Is it the same run? Small trainings on several CPU ranks with Lockstep and others, against one plain process.

Each row is a question, each column a project, whose training (bench/conformance_peers/) is written as its documentation
says. A cell says what came out: the same weights, other weights, an error, or a hang. A line of a cell is the default,
or a switch that the documentation offers. All of it comes from runs, which bench/results/conformance.json holds;
docs/comparison.md is written from that file alone.

Usage: python -m bench.conformance [--only ROW] [--peer NAME] [--again] [--page]

Without flags it runs what is missing in the file, for the projects that are installed, then writes the page.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.conformance_page import write
from bench.conformance_peers import shared
from bench.conformance_peers.shared import BATCH, Case
from bench.harness import progress
from lockstep.telemetry.provenance import gather

REPO = Path(__file__).parent.parent
RESULTS = REPO / "bench" / "results" / "conformance.json"
PEERS = {
    "lockstep_prepare": "Lockstep, `prepare`",
    "lockstep_script": "Lockstep, drop-in",
    "lockstep_fit": "Lockstep, `fit`",
    "torch_ddp": "torch DDP",
    "accelerate_script": "Accelerate",
    "fabric_script": "Fabric",
    "lightning_trainer": "Lightning",
    "transformers_trainer": "Transformers",
    "fsdp2": "FSDP2",
    "deepspeed_script": "DeepSpeed",
    "ray_train": "Ray Train",
    "torchft_script": "torchft",
}
"""By file, the name in the page."""
ONLY = {"torchft_script": ("killed",)}
"""Peers that are asked some questions only."""
FORKS_DEADLINE_S = 60
DEADLINE_S = 100
"""A job that has not ended by then hangs; Lockstep's own watchdog waits 60 s."""
SIZES = {"53 samples": 53, "53 and 26 samples": 53}
"""Of lines that train on another number of samples than the row."""
EXACT = {"float64": 1e-12, "float32": 1e-5}
ENDS_WELL = (0, 75)
"""Exit codes; 75 is that of a run of Lockstep that was stopped and has saved."""
NUM_RANKS = (2, 3)
KILLS = 3
"""Runs that lose a rank, for each number of ranks: what a lost rank does to the others is a race."""
RANKING = ("hangs", "refused", "not offered", "off", "equal", "same")
"""Kinds of findings of them, the worst first."""


@dataclass(frozen=True)
class Row:
    """A question.

    Args:
        key: Its name.
        title: What the row is about.
        question: What is done, and what it is compared with.
        case: The training.
        against: What the weights are compared with: ``plain`` one process; ``one`` the same program on one rank;
            ``without`` the same program on as many ranks, without what the case asks.
        kind: How it is run and judged: ``train``, ``resume``, ``killed``, ``metrics`` or ``misuse``.
    """

    key: str
    title: str
    question: str
    case: Case
    against: str = "plain"
    kind: str = "train"


ROWS = (
    Row("gradients", "Gradients and weights",
        "48 samples in batches of 12, two epochs. The weights after the first and the last step are compared with "
        "those of one plain process.", Case()),
    Row("uneven", "Data that do not divide",
        "53 samples in batches of 12; compared with one plain process, whose last batch has 5.", Case(num_samples=53)),
    Row("tokens", "A mean over tokens",
        "Samples have 1 to 7 tokens, and padding. The loss is the mean over the tokens of the whole batch; compared "
        "with one plain process.", Case(model="tokens")),
    Row("accumulate", "Uneven accumulation",
        "Two micro-batches a step; the last step of an epoch has one. Compared with one plain process without "
        "accumulation.", Case(num_samples=54, accumulate=2)),
    Row("clip", "Clipping by the global norm", "Compared with one plain process.", Case(clip=0.05)),
    Row("schedule", "A schedule by steps",
        "StepLR halves the rate after every 3 steps. Compared with one plain process.", Case(schedule=True)),
    Row("batchnorm", "Batch norm",
        "Weights and running statistics are compared with those of one plain process. torch's SyncBatchNorm runs on "
        "GPUs only: its errors here say nothing of it.", Case(model="batchnorm")),
    Row("shuffle", "Shuffling", "A shuffled run is compared with the same program on one rank.",
        Case(shuffle=True), "one"),
    Row("dropout", "Dropout", "Compared with the same program on one rank. The scripts seed all ranks alike; "
        "a line of their own has a seed for each rank.", Case(model="dropout"), "one"),
    Row("unfreeze", "Unfreezing in mid-training",
        "The first layer is frozen before the model is wrapped, with `find_unused_parameters` behind it, and unfrozen "
        "as the second epoch begins. Compared with one plain process.", Case(unfreezes=True)),
    Row("second", "Two loaders",
        "A second loader, without labels and with batches of 6, gives the loss another term: its mean over 6 samples. "
        "Compared with one plain process.", Case(second=True)),
    Row("ahead", "A loop that reads ahead",
        "The loop fetches the next batch before each step. Compared with one plain process.", Case(ahead=True)),
    Row("divided", "A stream that is already divided",
        "The data set is an IterableDataset that gives each rank every n-th sample. Compared with one plain process.",
        Case(divided=True)),
    Row("first", "A first evaluation",
        "An evaluation with a loader of its own precedes a shuffled training. Compared with the same program on one "
        "rank: there, the loader of an evaluation may draw a number from the generator that shuffles.",
        Case(shuffle=True, evaluates_first=True), "one"),
    Row("look", "A look at one batch on one rank",
        "Rank 0 alone calls next(iter(loader)) before a shuffled training. Compared with the program that does not.",
        Case(shuffle=True, looks=True), "without"),
    Row("edit", "Edited gradients",
        "The script doubles the gradient of one parameter between backward and step. Compared with one plain process.",
        Case(edits=True)),
    Row("resume", "Stop and resume",
        "A shuffled run is saved after step 6 of 8, in the middle of the second epoch, and resumed on the same or "
        "another number of ranks. Compared with the run that did not stop.", Case(shuffle=True), "without", "resume"),
    Row("metrics", "Metrics of uneven data", "Mean loss and accuracy of 53 samples, compared with one plain process.",
        Case(num_samples=53, evaluates=True), kind="metrics"),
    Row("killed", "A killed rank",
        "Rank 1 is killed by SIGKILL in step 7 of 16, the third of its epoch. One restart is allowed; scripts that "
        "need a checkpoint save one after each epoch. Three runs; if they differ, the worst, and another. "
        "The seconds are those until its successor has done a step, or "
        "until the job ends. The weights at the end are compared with those of one plain process. Over NCCL, torchrun "
        "has another fault: its store outlives a restart (seen with torch 2.13), and so does the key `exception_dump` "
        "that NCCL's watchdog sets after an error; by torch's source, it aborts the new ranks after 8 minutes. "
        "`lockstep.init` deletes it.",
        Case(epochs=4, kill_at=7), kind="killed"),
    Row("diverges", "Replicas that differ",
        "After step 3 of 8, rank 1 adds 1 to a parameter, by mistake. An error is what a user needs; the seconds count "
        "from the first step.", Case(diverges=True), kind="misuse"),
    Row("fewer", "One batch less on one rank",
        "The loader of rank 1 ends one batch before the others', by mistake. An error is what a user needs; the "
        "seconds count from the first step.", Case(fewer=True), kind="misuse"),
    Row("alone", "A collective on one rank",
        "After the first epoch, rank 0 alone calls a collective, by mistake. An error is what a user needs; the "
        "seconds count from the first step.", Case(alone=True), kind="misuse"),
)  # fmt: skip
STOPS_AT = 6  # of 8 steps, in the middle of the second epoch


@dataclass(frozen=True)
class Finding:
    """What came out of one training.

    Args:
        kind: ``same`` (bit for bit), ``equal``, ``off``, ``refused``, ``hangs``, ``absent`` or ``not offered``.
        text: What the cell says.
        note: The error.
    """

    kind: str
    text: str
    note: str = ""


# --- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A training that has ended.

    Args:
        records: Of all processes, in the order of time.
        seconds: How long it took from its first rank's start.
        hangs: Whether it had to be killed.
        code: Its exit code.
        output: The end of what it printed.
    """

    records: list[dict[str, Any]]
    seconds: float
    hangs: bool
    code: int
    output: str

    def of(self, what: str, rank: int | None = None) -> list[dict[str, Any]]:
        """Return the records of a kind."""
        return [each for each in self.records if each["what"] == what and rank in (None, each["rank"])]

    @property
    def error(self) -> str:
        """What the first rank that failed raised, or the last line that names an error."""
        if failed := self.of("failed"):
            return str(failed[0]["error"])
        named = re.search(r"what\(\): .*|lockstep: .*|Signal \d+ \(\w+\)|exitcode +: .*|\w+Error: .*", self.output)
        return named[0] if named else f"exit code {self.code}"

    @property
    def is_done(self) -> bool:
        """Whether all ranks came to the end of the script; one may have crashed as its interpreter ended."""
        return 0 < len(self.of("start")) == len(self.of("done"))


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": os.pathsep.join([str(REPO / "src"), str(REPO)]),
}


@cache
def server_of(peer: str) -> subprocess.Popen[str]:
    """Return a process that has imported ``peer`` and forks its ranks; it ends with this one."""
    command = [sys.executable, shared.SCRIPT, "--serve", peer]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def run_job(peer: str, case: Case, num_ranks: int, *, restarts: int = 0, forks: bool = True) -> Job:
    """Run a training of ``peer`` to its end, or to the deadline; with ``forks``, by its server if that is no matter."""
    module = importlib.import_module(f"bench.conformance_peers.{peer}")
    fields = {name: value for name, value in asdict(case).items() if value != getattr(Case, name)}
    forks = forks and not (restarts or case.fewer or case.alone) and getattr(module, "FORKS", True)
    with tempfile.TemporaryDirectory() as out, (Path(out) / "output").open("w+") as output:
        code: int | None
        if not forks:
            environment = {**os.environ, **ENVIRONMENT, "CONFORMANCE_OUT": out}
            command = [*module.command(num_ranks, restarts), peer, json.dumps(fields)]
            started = subprocess.Popen(
                command, cwd=case.folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                code = started.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                code = None
                end(started.pid)
                started.wait()
        else:
            server = server_of(peer)
            assert server.stdin is not None and server.stdout is not None
            job = {"num_ranks": num_ranks, "case": fields, "folder": case.folder, "deadline_s": FORKS_DEADLINE_S}
            job |= {"output": output.name, "environment": {"CONFORMANCE_OUT": out}}
            print(json.dumps(job), file=server.stdin, flush=True)
            code = json.loads(server.stdout.readline())
            if code is None:  # it may be the fork that hangs
                return run_job(peer, case, num_ranks, forks=False)
        hangs, code = code is None, -9 if code is None else code
        ended = time.monotonic()
        records = []
        for file in Path(out).glob("*.jsonl"):
            records += [{**json.loads(line), "pid": int(file.stem)} for line in file.read_text().splitlines()]
        records.sort(key=lambda each: float(each["t"]))
        output.seek(0)
        text = output.read()[-20_000:]
    return Job(records, ended - (records[0]["t"] if records else ended), hangs, code, text)


def end(pid: int) -> None:
    """Kill a process that this one has started, and all that it has started."""
    family = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    for process in family:
        process.kill()
    psutil.wait_procs(family, 10)


# --- judgement --------------------------------------------------------------------------------------------------------


def distance(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the norm of the difference over the norm of what is wanted."""
    first, second = (torch.tensor(each, dtype=torch.float64) for each in (found, wanted))
    return float((first - second).norm() / second.norm()) if len(first) == len(second) else float("inf")


def of_distance(far: float, case: Case, extra: str = "") -> Finding:
    """Return the finding of a relative difference."""
    if far == 0:
        return Finding("same", f"equal, bit for bit{extra}")
    limit = EXACT[case.dtype]
    return (
        Finding("equal", f"equal to {limit:g}{extra}") if far <= limit else Finding("off", f"off by {far:.1e}{extra}")
    )


def failure(job: Job) -> Finding | None:
    """Return the finding of a job that did not end well."""
    if offered := job.of("not offered"):
        return Finding("not offered", "not offered", offered[0]["error"])
    if job.hangs:
        return Finding("hangs", "hangs", f"It had not ended after {DEADLINE_S} s.")
    if job.code not in ENDS_WELL and not job.is_done:
        warned = re.search(r"UserWarning: (.*)", job.output)
        return Finding("refused", "error", head(job.error) + (f" It warned: {warned[1]}" if warned else ""))
    return None


def head(error: str) -> str:
    """Return the beginning of an error, without what is of this run only."""
    line = " ".join(part for part in error.split("\n")[:2] if part).strip()
    line = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", line)
    line = re.sub(r"\[[\w:.]+\]:\d+|\b\d+\.\d+\.\d+\.\d+(:\d+)?", "ADDRESS", line)
    return line if len(line) <= 300 else line[:297] + "..."


def samples_of(job: Job, case: Case) -> str:
    """Return what was not trained on exactly once an epoch, as words."""
    counted = Counter(index for each in job.of("samples") for index in each["indices"])
    missing = sum(max(0, case.epochs - counted[index]) for index in range(case.num_samples))
    again = sum(max(0, counted[index] - case.epochs) for index in range(case.num_samples))
    words = [f"{again} samples again"] * bool(again) + [f"{missing} samples left out"] * bool(missing)
    words += ["a rank crashed after its end"] * (job.code not in ENDS_WELL)
    return f" ({', '.join(words)})" if words else ""


def order_of(job: Job, case: Case) -> list[list[int]]:
    """Return the samples of each epoch in the order of one rank."""
    indices = [index for each in job.of("samples") for index in each["indices"]]
    return [indices[start : start + case.num_samples] for start in range(0, len(indices), case.num_samples)]


def weights_of(job: Job) -> list[float]:
    return list(job.of("end")[-1]["weights"])


def differ(job: Job) -> str:
    """Return words if the ranks do not have the same weights at the end."""
    ends = [each["weights"] for each in job.of("end")]
    return ", ranks differ" if any(each != ends[0] for each in ends) else ""


class Lab:
    """The runs of one peer, of which some serve several cells.

    Args:
        peer: Its file.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._known: dict[tuple[Case, int], Job] = {}

    @cached_property
    def module(self) -> Any:
        """The file of the peer; without the project it cannot be imported."""
        return importlib.import_module(f"bench.conformance_peers.{self.peer}")

    def reference(self, case: Case, num_ranks: int) -> Job:
        """Return a run to compare with."""
        if (case, num_ranks) not in self._known:
            with tempfile.TemporaryDirectory() as folder:
                self._known[case, num_ranks] = run_job(self.peer, replace(case, folder=folder), num_ranks)
        return self._known[case, num_ranks]

    def plain(self, case: Case) -> tuple[list[list[float]], list[float]]:
        """Return the weights of one plain process after each step, and at the end."""
        order = [list(range(case.num_samples))] * case.epochs
        if getattr(self.module, "SHUFFLES_ALWAYS", False):
            alone = self.reference(
                replace(case, kill_at=None, model="mlp", switch="", diverges=False, unfreezes=False), 1
            )
            if problem := failure(alone):
                raise RuntimeError(f"{self.peer} on one rank: {problem.note}")
            order = order_of(alone, case)
            assert all(sorted(epoch) == list(range(case.num_samples)) for epoch in order)
        return shared.plain(case, order)

    def lines(self, row: Row) -> list[dict[str, Any]]:
        """Run a row: a line for the default, and one for each switch."""
        return [
            {"switch": switch, "findings": {name: asdict(found) for name, found in self.findings(row, switch).items()}}
            for switch in ("", *self.module.SWITCHES.get(row.key, ()))
        ]

    def findings(self, row: Row, switch: str) -> dict[str, Finding]:
        """Return what came out, by number of ranks."""
        dtype = switch if switch in EXACT else getattr(self.module, "DTYPE", "float64")
        case = replace(row.case, switch=switch, dtype=dtype, num_samples=SIZES.get(switch, row.case.num_samples))
        judge = getattr(self, row.kind)
        if row.kind == "resume":
            moves = ((2, 2), (2, 3), (3, 2))
            return {f"{first} to {then}": self.resume(case, first, then) for first, then in moves}
        return {str(number): judge(row, case, number) for number in NUM_RANKS}

    def job(self, case: Case, num_ranks: int, restarts: int = 0) -> Job:
        """Run a training in a folder of its own."""
        with tempfile.TemporaryDirectory() as folder:
            return run_job(self.peer, replace(case, folder=folder), num_ranks, restarts=restarts)

    def train(self, row: Row, case: Case, num_ranks: int) -> Finding:
        """Compare the weights."""
        job = self.job(case, num_ranks)
        if problem := failure(job):
            return problem
        if row.against == "plain":
            steps, final = self.plain(case)
            far, first = distance(weights_of(job), final), job.of("step")[0]["weights"]
            if len(first) == len(steps[0]):  # else the optimizer has a part of the weights
                far = max(far, distance(first, steps[0]))
        else:
            without = self.reference(replace(case, looks=False), 1 if row.against == "one" else num_ranks)
            if problem := failure(without):
                return problem
            far = distance(weights_of(job), weights_of(without))
        extra = samples_of(job, case) + differ(job)
        if case.model == "dropout" and len({each["digest"] for each in job.of("dropped")[:num_ranks]}) == 1:
            extra += " (the same mask on all ranks)"
        return of_distance(far, case, extra)

    def metrics(self, _row: Row, case: Case, num_ranks: int) -> Finding:
        """Compare the metrics."""
        job = self.job(case, num_ranks)
        if problem := failure(job):
            return problem
        found, wanted = job.of("metrics")[0], shared.plain_metrics(case)
        return of_distance(max(abs(found[name] - value) / value for name, value in wanted.items()), case)

    def resume(self, case: Case, num_first: int, num_then: int) -> Finding:
        """Stop and go on, and compare the weights with those of a run that did not stop."""
        whole = self.reference(case, 2)
        with tempfile.TemporaryDirectory() as folder:
            kept = replace(case, folder=folder)
            first = run_job(self.peer, replace(kept, stop_at=STOPS_AT), num_first)
            then = first if failure(first) else run_job(self.peer, replace(kept, resumes=True), num_then)
        if problem := failure(whole) or failure(then):
            return problem
        both = replace(then, records=[*first.records, *then.records])
        return of_distance(distance(weights_of(then), weights_of(whole)), case, samples_of(both, case) + differ(then))

    def killed(self, _row: Row, case: Case, num_ranks: int) -> Finding:
        """Lose a rank several times; if the runs do not end alike, say how many did what."""
        found = [self.killed_once(case, num_ranks) for _ in range(KILLS)]
        worst = min(found, key=lambda each: RANKING.index(each.kind))
        alike = [each for each in found if each.kind == worst.kind]
        some = f" ({len(alike)} of {KILLS} runs)" if len(alike) < KILLS else ""
        others = [f"; {each.text}" for each in found if each.kind != worst.kind]
        return replace(worst, text=worst.text + some + "".join(others[:1]))

    def killed_once(self, case: Case, num_ranks: int) -> Finding:
        """Say how long it took until the training went on, what was done again, and compare the weights."""
        job = self.job(case, num_ranks, restarts=1)
        if not job.of("killed"):
            return failure(job) or Finding("refused", "error", "Nothing was killed.")
        killed = job.of("killed")[0]
        if problem := failure(job):
            seconds = job.records[0]["t"] + job.seconds - killed["t"]
            if problem.kind == "refused":  # the last error is that of the second start
                last = job.of("failed")[-1]["error"] if job.of("failed") else job.error
                problem = replace(problem, text=f"{problem.text} after {seconds:.0f} s", note=head(last))
            return problem
        new = [each for each in job.of("step") if each["pid"] not in self.pids(job, killed)]
        seconds = next((each["t"] - killed["t"] for each in new if each["t"] > killed["t"]), float("nan"))
        num_again = len(job.of("step")) // num_ranks - case.epochs * (case.num_samples // BATCH)
        found = of_distance(distance(weights_of(job), self.plain(case)[1]), case, differ(job))
        return replace(found, text=f"goes on after {seconds:.1f} s, {num_again} steps again; {found.text}")

    @staticmethod
    def pids(job: Job, killed: dict[str, Any]) -> set[int]:
        """Return the processes of the victim's rank that were there before the kill."""
        before = {each["pid"] for each in job.records if each["t"] <= killed["t"]}
        others = {each["pid"] for each in job.records if each["rank"] != killed["rank"]}
        return before | others

    def misuse(self, row: Row, case: Case, num_ranks: int) -> Finding:
        """Say how the job ended; the right weights are those of one process, of a run that ends well."""
        job = self.job(case, num_ranks)
        if problem := failure(job):
            first = job.of("step")[0]["t"] if job.of("step") else job.records[0]["t"] if job.records else 0.0
            since = job.records[0]["t"] + job.seconds - first if job.records else job.seconds
            after = f" after {since:.0f} s" if problem.kind == "refused" else ""
            return replace(problem, text=problem.text + after)
        ends = {tuple(each["weights"]) for each in job.of("end")}
        if row.key == "fewer" and len(ends) == 1:
            return Finding("equal", f"ends, ranks equal{samples_of(job, case)}")
        if len(ends) > 1:
            left = samples_of(job, case) if row.key == "fewer" else ""
            return Finding("off", f"ends with {len(ends)} different models{left}")
        return of_distance(distance(weights_of(job), self.plain(case)[1]), case, differ(job))


# --- results ----------------------------------------------------------------------------------------------------------


def read() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {"rows": {}}


def versions_of(module: Any) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in module.PACKAGES}


def measure(row: Row, lab: Lab, command: str) -> None:
    """Run a cell, and add it to the file."""
    try:
        versions, lines = versions_of(lab.module), lab.lines(row)
    except ImportError as error:
        absent = asdict(Finding("absent", "not installed", str(error)))
        versions, lines = {}, [{"switch": "", "findings": {str(number): absent for number in NUM_RANKS}}]
    provenance = gather()
    cell = {"lines": lines, "versions": versions, "command": command, "provenance": asdict(provenance)}
    results = read()
    results["rows"].setdefault(row.key, {})[lab.peer] = cell
    new = RESULTS.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    new.replace(RESULTS)  # several may run at the same time
    for line in lines:
        for ranks, found in line["findings"].items():
            print(f"{row.key} {lab.peer} [{line['switch']}] {ranks}: {found['text']} {found['note']}", flush=True)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", choices=[row.key for row in ROWS], nargs="+", help="rows to run")
    made.add_argument("--peer", choices=list(PEERS), nargs="+", help="projects to run")
    made.add_argument("--again", action="store_true", help="run also what the file has")
    made.add_argument("--page", action="store_true", help="only write the page")
    options = made.parse_args()
    if not options.page:
        done = read()["rows"]
        todo = [
            (row, peer)
            for peer in options.peer or PEERS
            for row in ROWS
            if row.key in (options.only or [row.key])
            and row.key in ONLY.get(peer, [row.key])
            and (options.again or peer not in done.get(row.key, {}))
        ]
        labs = {peer: Lab(peer) for _, peer in todo}
        for row, peer in progress(todo, "cells"):
            measure(row, labs[peer], f"python -m bench.conformance --only {row.key} --peer {peer}")
    write(read(), ROWS, PEERS, ONLY, DEADLINE_S)


if __name__ == "__main__":
    main()
