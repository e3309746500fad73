"""Run a job with faults in it, and find out what became of each."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.errors import ConfigurationError
from lockstep.launcher.guard import Guard
from lockstep.study.rehearse import notes
from lockstep.study.rehearse.observe import observe
from lockstep.study.rehearse.rules import Rule
from lockstep.study.rehearse.verdict import Finding, judge_all

ORDERS = "LOCKSTEP_REHEARSAL"
"""The variable of the environment with what the ranks are to do to themselves; their bootstrap looks for it."""

_HIDES_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@dataclass(frozen=True)
class Rehearsal:
    """What came of a rehearsal.

    Attributes:
        findings: For each rule.
        exit_code: Of the job.
        seconds: How long the job took.
    """

    findings: tuple[Finding, ...]
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
    with Guard() as guard:  # clears its folder away, however this process ends
        orders = json.dumps({"folder": str(guard.run_dir), "rules": [asdict(rule) for rule in rules]})
        environ = {**os.environ, ORDERS: orders, **dict.fromkeys(_HIDES_GPUS, "")}
        code, lines, seconds = observe(command, environ, shows=shows)
        struck = [notes.read(guard.run_dir, number) for number in range(len(rules))]
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
