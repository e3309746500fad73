"""Run a job with faults, read what it logs, and judge whether each fault was noticed."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lockstep.errors import ConfigurationError
from lockstep.launcher.bootstrap import RANK_SETUP, end_with_process
from lockstep.launcher.reaper import Reaper
from lockstep.study.rehearse import fault_rules
from lockstep.study.rehearse.fault_rules import Note, Rule

# Run a command and note when it says what, while its output passes on line by line.

_FAREWELL_S = 60.0
"""How long the launcher may take to end its ranks after Ctrl-C; it gives them half a minute."""


class Line(NamedTuple):
    """One line of what the command said, and when, in nanoseconds since the epoch."""

    time_ns: int
    text: str


def observe(command: Sequence[str], environ: Mapping[str, str], *, shows: bool) -> tuple[int, list[Line], float]:
    """Run ``command`` to its end; return its exit code, what it said, and how many seconds it took.

    Blocks as long as it runs. Ctrl-C reaches it as well, and its end is waited for.
    """
    lines: list[Line] = []
    began = time.monotonic()
    with subprocess.Popen(
        command,
        env=environ,
        preexec_fn=partial(end_with_process, os.getpid()),  # a rehearsal that is killed leaves no job behind
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        threads = [
            threading.Thread(target=_follow, args=(stream, shown if shows else None, lines), daemon=True)
            for stream, shown in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        ]
        for thread in threads:
            thread.start()
        try:
            code = process.wait()
        except BaseException:
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(_FAREWELL_S)
            process.kill()  # its guardian ends the ranks
            raise
        for thread in threads:
            thread.join(_FAREWELL_S)
    return code, sorted(lines), time.monotonic() - began


def _follow(stream: IO[str], shown: IO[str] | None, lines: list[Line]) -> None:
    for text in stream:
        lines.append(Line(time.time_ns(), text.rstrip("\n")))
        if shown is not None:
            shown.write(text)
            shown.flush()


# What became of a fault: pure functions of when it struck, what the job said, and how it ended.

_SPEAKS_OF = {
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
"""What a line must say, or one just before it, to be about a fault of this kind."""

_HEADLINES = 4
"""A report may take so many lines between its subject and the rank."""

_RANKS = re.compile(r"\branks? ((?:\d+(?:-\d+)?(?:, | and )?)+)|\brank(\d+)\b", re.IGNORECASE)
_RESTART = re.compile(r"restart \d+ of \d+|ranks are started again")
_OWN = re.compile(r"(\[ranks? [\d, -]+\] )?rehearse: ")
"""How lines begin that the rehearsal itself says: they are no report."""


@dataclass(frozen=True)
class FaultOutcome:
    """What became of one fault.

    Attributes:
        note: When and where it struck; ``None`` if it did not.
        noticed_s: Seconds until it was reported, by name; ``None`` if it was not.
        said: The line that reported it.
        outcome: In words.
        is_good: Whether it struck and was reported, or survived where no harm is done silently.
    """

    rule: Rule
    note: Note | None
    noticed_s: float | None
    said: str
    outcome: str
    is_good: bool


def judge_all(
    rules: Sequence[Rule], struck: Sequence[Note | None], lines: Sequence[Line], exit_code: int
) -> tuple[FaultOutcome, ...]:
    """Say what became of each fault; see `judge`. One that a job does survive is not blamed for another's end."""
    found = [judge(rule, note, lines, exit_code) for rule, note in zip(rules, struck, strict=True)]
    is_explained = any(finding.noticed_s is not None for finding in found)
    until = f"survived, until the job ended with code {exit_code}"
    return tuple(
        replace(finding, outcome=until, is_good=True)
        if is_explained
        and finding.note is not None
        and not finding.is_good
        and finding.rule.kind in ("slowlink", "drop")
        else finding
        for finding in found
    )


def judge(rule: Rule, note: Note | None, lines: Sequence[Line], exit_code: int) -> FaultOutcome:
    """Say what became of a fault.

    Args:
        rule: The fault.
        note: When it struck.
        lines: What the job said, in time order.
        exit_code: How the job ended.
    """
    if note is None:
        outcome = _never(rule) if exit_code == 0 else f"did not strike: the job had ended with code {exit_code}"
        return FaultOutcome(rule, None, None, "", outcome, is_good=False)
    after = [line for line in lines if line.time_ns >= note.time_ns and not _OWN.match(line.text)]
    report = find_report(rule, after)
    noticed_s = None if report is None else (report.time_ns - note.time_ns) / 1e9
    said = "" if report is None else _tidy(report.text)
    if exit_code != 0:
        outcome = f"ended with code {exit_code}"
        if report is None:
            outcome += f", without naming {_subject(rule)}"
        return FaultOutcome(rule, note, noticed_s, said, outcome, is_good=report is not None)
    if any(_RESTART.search(line.text) for line in after):
        return FaultOutcome(rule, note, noticed_s, said, "recovered by a restart", is_good=True)
    if report is not None:
        return FaultOutcome(rule, note, noticed_s, said, "reported, the run went on", is_good=True)
    if rule.is_silent:
        return FaultOutcome(rule, note, None, "", "not noticed", is_good=False)
    return FaultOutcome(rule, note, None, "", "survived", is_good=True)


def find_report(rule: Rule, lines: Sequence[Line]) -> Line | None:
    """Return the first line that tells of the fault and names its rank."""
    about = re.compile(_SPEAKS_OF[rule.kind], re.IGNORECASE)
    for number, line in enumerate(lines):
        if rule.rank is not None and rule.rank not in ranks_in(line.text):
            continue
        before = lines[max(0, number - _HEADLINES) : number + 1] if rule.rank is not None else [line]
        if any(about.search(found.text) for found in before):
            return line
    return None


def ranks_in(text: str) -> set[int]:
    """Return the ranks that a line names, as in ``rank 3``, ``ranks 0-2, 5`` or ``[rank1]``."""
    found: set[int] = set()
    for many, one in _RANKS.findall(text):
        for part in re.findall(r"\d+(?:-\d+)?", many or one):
            low, _, high = part.partition("-")
            found.update(range(int(low), int(high or low) + 1))
    return found


def _never(rule: Rule) -> str:
    where = f"never came to {rule.place} in step {rule.step}" if rule.place else f"never wrote from step {rule.step} on"
    return f"did not strike: rank {rule.rank} {where}" if rule.rank is not None else f"did not strike: ranks {where}"


def _subject(rule: Rule) -> str:
    return "it" if rule.rank is None else f"rank {rule.rank}"


def _tidy(text: str) -> str:
    return text.strip().removeprefix("lockstep: ")


# Run a job with faults in it, and find out what became of each.

_HIDES_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@dataclass(frozen=True)
class Rehearsal:
    """What came of a rehearsal.

    Attributes:
        findings: For each rule.
        exit_code: Of the job.
        seconds: How long the job took.
    """

    findings: tuple[FaultOutcome, ...]
    exit_code: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every fault struck, and was reported or survived."""
        return all(finding.is_good for finding in self.findings)


def rehearse(command: Sequence[str], rules: Sequence[Rule], *, shows: bool = True) -> Rehearsal:
    """Run ``command``, in whose ranks the faults strike, on the CPU, to its end.

    Args:
        command: Starts the job: ``lockstep run`` or ``lockstep train`` in a process of its own.
        rules: The faults.
        shows: Whether what the job says is passed on.
    """
    with Reaper() as guard:  # clears its folder away, however this process ends
        orders = json.dumps({"folder": str(guard.run_dir), "rules": [asdict(rule) for rule in rules]})
        # Each rank calls that before its program.
        setup = json.dumps([["lockstep.study.rehearse.injection:activate", orders]])
        environ = {**os.environ, RANK_SETUP: setup, **dict.fromkeys(_HIDES_GPUS, "")}
        code, lines, seconds = observe(command, environ, shows=shows)
        struck = [fault_rules.read(guard.run_dir, number) for number in range(len(rules))]
    return Rehearsal(judge_all(rules, struck, lines, code), code, seconds)


def is_task(file: str) -> bool:
    """Say whether a file describes a task for ``lockstep train``, rather than being a script, without running it.

    ``FILE.py:NAME`` does, and so does a file that makes a ``Task`` and has something named ``task``.

    Raises:
        ConfigurationError: It cannot be read.
    """
    path, _, name = file.rpartition(".py:")
    if path and name.isidentifier():
        return True
    try:
        tree = ast.parse(Path(file).read_bytes(), file)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}.\nCheck the path.") from None
    except SyntaxError:
        return False  # whoever runs it will say what is wrong
    bound = {found for node in tree.body for found in _names_bound(node)}
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    makes_task = any(ast.unparse(called).rpartition(".")[2] == "Task" for called in calls)
    return "task" in bound and makes_task


def _names_bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


# The table at the end of a rehearsal.

_NO_LINK = (
    "slowlink and drop hold up what the ranks hand to the transport; no packet is touched. A collective first waits as "
    "long as such a link would take, and so overlaps with nothing: exposed communication is at its worst."
)


def render(rehearsal: Rehearsal) -> RenderableType:
    """Return the table, with a verdict of one line below."""
    table = Table(title="Rehearsal", title_justify="left", expand=False)
    for heading in ("injected", "noticed after", "said", "outcome"):
        table.add_column(heading, overflow="fold")
    for finding in rehearsal.findings:
        table.add_row(_injected(finding), _after(finding), Text(finding.said), _outcome(finding))
    lines: list[RenderableType] = [table, Text(verdict(rehearsal))]
    if any(finding.rule.kind in ("slowlink", "drop") for finding in rehearsal.findings):
        lines.append(Text(_NO_LINK, style="dim"))
    return Group(*lines)


def verdict(rehearsal: Rehearsal) -> str:
    """Return the whole in one sentence."""
    bad = [finding.rule.text for finding in rehearsal.findings if not finding.is_good]
    end = f"the job ended with code {rehearsal.exit_code} after {rehearsal.seconds:.1f} s"
    if bad:
        return f"Not noticed or not injected: {', '.join(bad)}; {end}."
    count = len(rehearsal.findings)
    return f"{'The fault was' if count == 1 else f'All {count} faults were'} noticed or survived; {end}."


def console() -> Console:
    """Return the terminal; where there is none, as wide as lines in a log may be."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)


def _injected(finding: FaultOutcome) -> Text:
    note = finding.note
    where = "" if note is None else f"\nrank {note.rank}, step {note.step}"
    return Text(f"{finding.rule.text}{where}")


def _after(finding: FaultOutcome) -> Text:
    return Text("-" if finding.noticed_s is None else f"{finding.noticed_s:.1f} s")


def _outcome(finding: FaultOutcome) -> Text:
    return Text(finding.outcome, style="" if finding.is_good else "bold red")
