"""Seeds: are they the same on all ranks?"""

from __future__ import annotations

import ast
import re

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.script.source import words
from lockstep.study.doctor.script.traits import ScriptFacts

SEEDERS = ("manual_seed", "manual_seed_all", "seed_everything", "set_seed", "seed_all")
_HELPER = re.compile(r"(^|_)seeds?(_|$)")
"""In the name of a function of another file that sets seeds, as far as one can tell."""

_CHANCE = {"time", "time_ns", "getpid", "urandom", "uuid4", "token_bytes", "randbits", "perf_counter"}
"""Names in a seed that make it another one in every process."""


def look(facts: ScriptFacts) -> list[Finding]:
    """Return the seeds that differ between ranks."""
    found = []
    for call in _seedings(facts):
        seed = ", ".join(ast.unparse(value) for value in call.args)
        if _by_rank(facts, call):
            why = f"{ast.unparse(call.func)}({seed}) gives each rank another seed"
        elif _by_chance(call):
            why = f"{ast.unparse(call.func)}({seed}) is another seed in every process"
        else:
            continue
        if not (facts.is_distributed or facts.uses_task):
            continue
        found.append(
            Finding(
                Kind.SEED_BY_RANK,
                Severity.WRONG if facts.uses_task else Severity.NOTE,
                f"{why}.",
                "fit sets the seeds itself, for every rank and sample; this undoes it, and the run can't be repeated."
                if facts.uses_task
                else "Wanted for dropout and augmentation; wrong for all that ranks must choose alike: splits, "
                "mixtures of data sets, layers that are dropped, weights that DDP does not wrap.",
                "Leave the seed to fit." if facts.uses_task else "Seed alike, build everything, and only then by rank.",
                "lockstep train TASK.py --seed 0"
                if facts.uses_task
                else "torch.manual_seed(seed)  # before data and model; torch.manual_seed(seed + rank) behind them",
                facts.script.where(call),
            )
        )
    return found


def is_seeded_alike(facts: ScriptFacts, draw: ast.Call) -> bool:
    """Say whether what is drawn by ``draw`` comes from a seed that is the same on all ranks, as far as lines tell."""
    helpers = [call for name, call in facts.script.calls if _HELPER.search(name.rpartition(".")[2])]
    seedings = sorted([*_seedings(facts), *helpers], key=lambda call: call.lineno)
    before = [call for call in seedings if call.lineno < draw.lineno][-1:] or seedings
    return bool(before) and not any(_by_rank(facts, call) or _by_chance(call) for call in before)


def _seedings(facts: ScriptFacts) -> list[ast.Call]:
    """Return the calls that seed a generator that the whole process draws from."""
    found = []
    for name, call in facts.script.calls:
        base, _, last = name.rpartition(".")
        # torch.Generator().manual_seed(...) seeds that generator only.
        is_global = last in SEEDERS and not base.endswith(("?", "generator", "Generator", "rng", "gen"))
        if call.args and (is_global or name in ("random.seed", "numpy.random.seed")):
            found.append(call)
    return found


def _by_rank(facts: ScriptFacts, call: ast.Call) -> bool:
    return any(facts.ranks.mentions(value) for value in call.args)


def _by_chance(call: ast.Call) -> bool:
    return any(words(value) & _CHANCE for value in call.args)
