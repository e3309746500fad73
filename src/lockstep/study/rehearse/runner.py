"""Run a job with faults, read what it logs, and judge whether each fault was noticed."""

import contextlib
import ctypes
import json
import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import IO, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from lockstep.errors import ConfigurationError
from lockstep.launcher.bootstrap import RANK_SETUP
from lockstep.launcher.reaper import Reaper
from lockstep.study.common import Table
from lockstep.study.rehearse import fault_rules
from lockstep.study.rehearse.fault_rules import Note, Rule
from lockstep.telemetry.figures import find_figures
from lockstep.telemetry.record import read_run

_HIDES_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

# How long the launcher may take to end its ranks after Ctrl-C; it gives them half a minute.
_SHUTDOWN_S = 60.0

# Of Linux's prctl.h.
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class FaultOutcome:
    """The outcome of one fault.

    Attributes:
        note: When and where it struck; ``None`` if it did not.
        noticed_s: Seconds until it was reported, by name; ``None`` if it was not.
        message: The line that reported it.
        outcome: In words.
        is_good: Whether it struck and was reported, or was survived if this kind does no silent harm.
    """

    rule: Rule
    note: Note | None
    noticed_s: float | None
    message: str
    outcome: str
    is_good: bool


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal.

    Attributes:
        findings: For each rule.
        exit_code: Of the job.
        seconds: How long the job took.
    """

    findings: tuple[FaultOutcome, ...]
    exit_code: int
    seconds: float

    @property
    def failed(self) -> list[str]:
        """The faults that did not strike, or that were neither reported nor survived."""
        return [finding.rule.text for finding in self.findings if not finding.is_good]


def rehearse(
    command: Sequence[str], rules: Sequence[Rule], *, num_ranks: int, records: bool, shows: bool = True
) -> Rehearsal:
    """Run ``command``, in whose ranks the faults strike, on the CPU, to its end.

    Args:
        command: Starts the job: ``lockstep run`` or ``lockstep train`` in a separate process.
        rules: The faults.
        num_ranks: How many ranks the job has.
        records: Whether to record the job, a script, and look for a slow rank in the record, as `fit` does by itself.
        shows: Whether what the job logs is passed on.
    """
    rules = [replace(rule, number=number) for number, rule in enumerate(rules)]
    with Reaper() as reaper:  # removes its folder, however this process ends
        # By environment, because the launcher passes nothing else to the ranks.
        arguments = [str(reaper.run_dir), [asdict(rule) for rule in rules]]
        setups, record = [["lockstep.study.rehearse.injection:FaultInjector", *arguments]], reaper.run_dir / "record"
        if records:
            setups.append(["lockstep.loop.monitor:attach", str(record)])
        environ = {**os.environ, RANK_SETUP: json.dumps(setups), **dict.fromkeys(_HIDES_GPUS, "")}
        began = time.monotonic()
        code, lines = _run(command, environ, shows=shows)
        seconds = time.monotonic() - began
        with contextlib.suppress(ConfigurationError):  # nothing was recorded
            if (slow := find_figures(read_run(record)).straggler) is not None:
                lines.append(Line(time.time_ns(), str(slow)))
        struck = [fault_rules.read(reaper.run_dir, rule) for rule in rules]
    # With a single rank, messages do not name it.
    judged = [replace(rule, rank=None) for rule in rules] if num_ranks == 1 else rules
    return Rehearsal(judge_all(judged, struck, lines, code), code, seconds)


class Line(NamedTuple):
    """One line of the command's log, and its time, in nanoseconds since the epoch."""

    time_ns: int
    text: str


def _run(command: Sequence[str], environ: Mapping[str, str], *, shows: bool) -> tuple[int, list[Line]]:
    """Run ``command`` to its end; return its exit code and its log, with the time of each line.

    Blocks as long as it runs. Ctrl-C also reaches the command, and this waits for its end.
    """
    lines: list[Line] = []

    def read(stream: IO[str]) -> None:
        for text in stream:
            lines.append(Line(time.time_ns(), text.rstrip("\n")))
            if shows:
                print(text, end="", flush=True)

    tied = partial(_end_with_process, os.getpid())  # a rehearsal that is killed leaves no job behind
    # One pipe, so that a report of several lines stays in order.
    with Popen(
        command, env=environ, preexec_fn=tied, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True, errors="replace"
    ) as process:
        # In a thread: child processes of a program may keep the pipe open after the job's end.
        reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            process.wait()
        finally:  # of an exception; otherwise it has ended
            with contextlib.suppress(TimeoutExpired, KeyboardInterrupt):
                process.wait(_SHUTDOWN_S)
            process.kill()  # its reaper ends the ranks
        reader.join(_SHUTDOWN_S)
    return process.returncode, lines


# The outcome of a fault: pure functions of the time when it struck, the job's log, and its exit code.

# What a line, or one just before it, must contain to be about a fault of this kind.
_SIGNS = {
    "kill": r"kill|SIGKILL|signal 9|is gone|whose process|has died|out of memory",
    "hang": r"hang|waits? |waited|stuck|does not answer|is in |no progress",
    "straggler": r"slow|straggl|behind|loses|late\b",
    "nan": r"\bnan\b|not finite|non-finite|infinit|not a number",
    "bitflip": r"differ|drift|diverg|unequal",
    "oom": r"out of memory|OutOfMemory",
    "slowlink": r"slow|bandwidth|communication",
    "drop": r"waits? |waited|hang|slow|drop|timed out|unreachable",
    "disk-full": r"No space left|disk is full|no room",
}
# What does harm without an error: a job that goes on has not survived it.
_SILENT = ("straggler", "nan", "bitflip")
# These reports name the ranks below their first line; this many lines may be in between.
_NUM_HEADLINES = {"hang": 4, "drop": 4, "bitflip": 4}

_RANKS = re.compile(r"\branks? ((?:\d+(?:-\d+)?(?:, | and )?)+)|\brank(\d+)\b", re.IGNORECASE)
_RESTART = re.compile(r"restart \d+ of \d+|ranks are started again")
_IN_PLACE = re.compile(r"^lockstep: .* is done again")
# The beginning of lines that the rehearsal itself logs, which are not reports.
_OWN = re.compile(r"(\[ranks? [\d, -]+\] )?rehearse: ")


def judge_all(
    rules: Sequence[Rule], struck: Sequence[Note | None], lines: Sequence[Line], exit_code: int
) -> tuple[FaultOutcome, ...]:
    """Return the outcome of each fault; see `judge`. A fault that a job survives is not blamed for the job's end."""
    outcomes = [judge(rule, note, lines, exit_code) for rule, note in zip(rules, struck, strict=True)]
    if any(finding.noticed_s is not None for finding in outcomes):
        until = f"survived, until the job ended with code {exit_code}"
        for number, finding in enumerate(outcomes):
            if finding.note is not None and not finding.is_good and finding.rule.kind in ("slowlink", "drop"):
                outcomes[number] = replace(finding, outcome=until, is_good=True)
    return tuple(outcomes)


def judge(rule: Rule, note: Note | None, lines: Sequence[Line], exit_code: int) -> FaultOutcome:
    """Return the outcome of a fault.

    Args:
        rule: The fault.
        note: When it struck.
        lines: The job's log, in time order.
        exit_code: Of the job.
    """
    if note is None:
        who = "ranks" if rule.rank is None else f"rank {rule.rank}"
        never = f"came to {rule.place} in step {rule.step}" if rule.place else f"wrote from step {rule.step} on"
        why = f"{who} never {never}" if exit_code == 0 else f"the job had ended with code {exit_code}"
        return FaultOutcome(rule, None, None, "", f"did not strike: {why}", is_good=False)
    # Lines before the fault cannot be about it.
    after = [line for line in lines if line.time_ns >= note.time_ns and not _OWN.match(line.text)]
    report, outcome, is_good = _find_report(rule, after), "reported, the run went on", True
    if report is None and rule.kind == "nan" and exit_code == 0:
        # Under fsdp a gradient is summed before it is checked: it is noticed, but its rank is unknown.
        report, outcome = _find_report(rule, after, by_name=False), "reported without its rank, the run went on"
    if exit_code != 0:
        outcome, is_good = f"ended with code {exit_code}", report is not None
        if report is None:
            outcome += f", without naming {'it' if rule.rank is None else f'rank {rule.rank}'}"
    elif any(_RESTART.search(line.text) for line in after):
        outcome = "recovered by a restart"
    elif any(_IN_PLACE.search(line.text) for line in after):
        outcome = "recovered in place"
    elif report is None:
        is_good = rule.kind not in _SILENT
        outcome = "survived" if is_good else "not noticed"
    noticed_s = None if report is None else (report.time_ns - note.time_ns) / 1e9
    message = "" if report is None else report.text.strip().removeprefix("lockstep: ")
    return FaultOutcome(rule, note, noticed_s, message, outcome, is_good)


def _find_report(rule: Rule, lines: Sequence[Line], *, by_name: bool = True) -> Line | None:
    """Return the first line that reports the fault and names its rank; without ``by_name``, one that names none."""
    signs = re.compile(_SIGNS[rule.kind], re.IGNORECASE)
    num_before = _NUM_HEADLINES.get(rule.kind, 0)
    for number, line in enumerate(lines):
        # Every run ends with a line about its slowest and fastest rank. Only a straggler is reported by the slowest.
        text, is_summary, _ = line.text.partition(", fastest rank")
        if is_summary and rule.kind != "straggler":
            continue
        ranks = ranks_in(text)
        is_about = rule.rank is None or (rule.rank in ranks if by_name else not ranks)
        if is_about and any(signs.search(line.text) for line in lines[max(0, number - num_before) : number + 1]):
            return line
    return None


def ranks_in(text: str) -> set[int]:
    """Return the ranks that a line names, as in ``rank 3``, ``ranks 0-2, 5`` or ``[rank1]``."""
    ranks: set[int] = set()
    for numbers in _RANKS.findall(text):
        for low, high in re.findall(r"(\d+)(?:-(\d+))?", " ".join(numbers)):
            ranks.update(range(int(low), int(high or low) + 1))
    return ranks


def render(rehearsal: Rehearsal) -> RenderableType:
    """Return the table at the end of a rehearsal, with a verdict of one line below."""
    rows: list[list[str | Text]] = []
    for finding in rehearsal.findings:
        where = "" if (note := finding.note) is None else f"\nrank {note.rank}, step {note.step}"
        after = "-" if finding.noticed_s is None else f"{finding.noticed_s:.1f} s"
        outcome = Text(finding.outcome, style="" if finding.is_good else "bold red")
        rule = finding.rule.text.replace(",in=", ",\nin=")  # long rules are not broken within a word
        rows.append([f"{rule}{where}", after, finding.message, outcome])
    count = len(rehearsal.findings)
    verdict = f"{'The fault was' if count == 1 else f'All {count} faults were'} noticed or survived"
    if rehearsal.failed:
        verdict = f"Not noticed or not injected: {', '.join(rehearsal.failed)}"
    end = f"the job ended with code {rehearsal.exit_code} after {rehearsal.seconds:.1f} s"
    table = Table("Rehearsal", ["injected", "noticed after", "message", "outcome"], rows)
    return Group(table.rich(), Text(f"{verdict}; {end}."))


def _end_with_process(pid: int) -> None:
    """Make the kernel end this process when its parent ``pid`` ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != pid:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)
