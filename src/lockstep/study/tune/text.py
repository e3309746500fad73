"""What was found as a file of settings that can be read: each with what it gave, and what was left out as comments."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.study.common import Spread
from lockstep.study.tune.effects import Effect
from lockstep.study.tune.open_stage import Result
from lockstep.study.tune.outcome import Outcome
from lockstep.study.tune.values import value_of
from lockstep.train.settings import toml_line

FIRST_LINE = "# Written by lockstep tune"


def as_file(outcome: Outcome, *, task_file: str, file: str, facts: Mapping[str, str]) -> str:
    """Return the text of the file.

    Args:
        outcome: What was found.
        task_file: The task, as on the command line.
        file: The file's own name.
        facts: Of machine and versions.
    """
    lines = [
        f"{FIRST_LINE}: {outcome.task} on {outcome.num_devices} x {outcome.device}, global batch "
        f"{outcome.global_batch_size}.",
        *(f"# {name}: {value}" for name, value in facts.items()),
        f"# lockstep train {task_file} --settings {file}",
        "#",
        f"# {in_all(outcome)}",
        f"# {becomes(outcome.effect)}",
        "",
    ]
    values = {"devices": _devices(outcome), "strategy": value_of(outcome.found, "strategy"), **outcome.found}
    gave: dict[str, Result] = {}
    for result in outcome.kept:
        for name in result.candidate.changes:
            gave[name] = result
    for name, value in values.items():
        if value is None:
            continue
        if name in gave:
            result = gave[name]
            lines.append(f"# {result.candidate.name}: {times(result.ratio)}; training: {result.effect.words}")
        elif name in outcome.start:
            lines.append("# as tuning began")
        lines += [toml_line(name, value), ""]
    offered = [each for each in outcome.results if each.why.startswith("offered")]
    if offered:
        lines.append("# Faster, but not the same training:")
        for result in offered:
            lines.append(f"# {result.candidate.name}: {times(result.ratio)}; {result.why}")
            lines += [
                f"# {toml_line(name, value)}" for name, value in result.candidate.changes.items() if value is not None
            ]
    return "\n".join(lines).rstrip() + "\n"


def times(ratio: Spread | None) -> str:
    """Return a gain with its spread."""
    if ratio is None:
        return "not measured"
    return f"{ratio.median:.2f} times the samples/s ({ratio.low:.2f} to {ratio.high:.2f})"


def in_all(outcome: Outcome) -> str:
    """Say in one sentence what came of it."""
    if outcome.found == outcome.start:
        return "Nothing that was tried is faster than the settings that tuning began with."
    if outcome.total is None:
        return "How much all of it gives together was not measured: time was up."
    return f"All of it together: {times(outcome.total)} of the settings that tuning began with."


def becomes(effect: Effect) -> str:
    """Say in one sentence what becomes of the training."""
    return {
        Effect.BITS: "The training is the same, bit for bit.",
        Effect.ROUNDING: "The training is the same but for the rounding of sums: same global batches, order and loss.",
        Effect.DIVISION: "Same global batches and order, but layers see them divided otherwise: another training.",
        Effect.ARITHMETIC: "Same global batches and order, but another arithmetic: another training.",
        Effect.RUN: "Another training.",
    }[effect]


def _devices(outcome: Outcome) -> int:
    return 1 if value_of(outcome.found, "strategy") == "single" else outcome.num_devices
