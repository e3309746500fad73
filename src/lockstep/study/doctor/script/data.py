"""Samplers and splits: does each rank get its own part of the data, and the right one?"""

from __future__ import annotations

import ast
import re

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.script.seeds import is_seeded_alike
from lockstep.study.doctor.script.source import argument, constant, has_star, words
from lockstep.study.doctor.script.traits import ScriptFacts

_EVALUATION = re.compile(r"(^|_)(val|valid|validation|test|testing|eval|evaluation|dev|infer|predict)", re.IGNORECASE)

_SAMPLER_LINES = (
    "sampler = lockstep.DistributedSampler(dataset)\n"
    "loader = DataLoader(dataset, batch_size=..., sampler=sampler)  # without shuffle"
)


def look(facts: ScriptFacts) -> list[Finding]:
    """Return where data is not divided, or not in the same way on all ranks."""
    if not facts.is_distributed or facts.manager is not None:
        return []
    found = []
    for call in facts.script.calls_of("DataLoader"):
        found += _loader(facts, call)
    samplers = facts.script.calls_of("DistributedSampler")
    if not facts.script.calls_of("set_epoch"):
        found += [finding for call in samplers for finding in _set_epoch(facts, call)]
    return [*found, *(finding for call in samplers for finding in _sampler_seed(facts, call)), *_splits(facts)]


def _is_for_evaluation(facts: ScriptFacts, call: ast.Call) -> bool:
    names = [*facts.script.targets(call), *(words(call.args[0]) if call.args else ())]
    given = argument(call, "dataset")
    names += words(given) if given is not None else ()
    if any(_is_not_train(source) for source in _sources(facts, call)):
        return True
    scope = facts.script.scope(call)
    names += [scope.name] if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
    return any(_EVALUATION.search(part) for name in names for part in name.split("."))


def _loader(facts: ScriptFacts, call: ast.Call) -> list[Finding]:
    given = [argument(call, "sampler", 3), argument(call, "batch_sampler", 4)]
    if has_star(call) or any(value is not None and not _is_none(value) for value in given):
        return []
    if _is_for_evaluation(facts, call) or _is_divided(facts, call) or facts.ranks.is_guarded(call):
        return []
    shuffle = argument(call, "shuffle", 2)
    where = facts.script.where(call)
    if shuffle is not None and constant(shuffle) is not False:
        return [
            Finding(
                Kind.SHUFFLE_WITHOUT_SAMPLER,
                Severity.WRONG,
                f"DataLoader(shuffle={ast.unparse(shuffle)}) has no sampler that knows of ranks.",
                f"Each rank goes through the whole data set in an order of its own: {facts.devices} ranks make "
                f"{facts.devices} passes in an epoch, and with equal seeds all train on the same samples.",
                "Give the loader a DistributedSampler, which shuffles, too.",
                _SAMPLER_LINES,
                where,
            )
        ]
    return [
        Finding(
            Kind.SAMPLER_MISSING,
            Severity.WRONG,
            "DataLoader has no sampler that knows of ranks.",
            f"All {facts.devices} ranks train on the same samples: as much work as {facts.devices} devices can do, for "
            "the progress of one.",
            "Give the loader a DistributedSampler.",
            _SAMPLER_LINES,
            where,
        )
    ]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _sources(facts: ScriptFacts, call: ast.Call) -> list[ast.expr]:
    """Return the data set of a loader, and what was assigned to its name."""
    dataset = argument(call, "dataset", 0)
    if isinstance(dataset, (ast.Name, ast.Attribute)):
        return [dataset, *facts.script.values(facts.script.name(dataset))]
    return [] if dataset is None else [dataset]


def _is_not_train(node: ast.expr) -> bool:
    """Say whether a data set is made with ``train=False``."""
    return isinstance(node, ast.Call) and constant(argument(node, "train")) is False


def _is_divided(facts: ScriptFacts, call: ast.Call) -> bool:
    """Say whether the data set is a rank's part already, or a stream, or unknown."""
    sources = _sources(facts, call)
    if not sources:
        return True
    if any(facts.ranks.mentions(source) or "split_dataset_by_node" in words(source) for source in sources):
        return True
    made = {name for source in sources for name in words(source)}
    return any(
        isinstance(node, ast.ClassDef)
        and node.name in made
        and any("Iterable" in word for base in node.bases for word in words(base))
        for node in facts.script.nodes
    ) or any("Iterable" in name or "WebDataset" in name for name in made)


def _set_epoch(facts: ScriptFacts, call: ast.Call) -> list[Finding]:
    shuffles = argument(call, "shuffle", 3)
    if facts.is_ours(call) or constant(shuffles) is False or _is_for_evaluation(facts, call) or has_star(call):
        return []
    name = next(iter(facts.script.targets(call)), "sampler")
    if any(isinstance(parent, ast.Call) for _, parent in facts.script.ancestors(call)):
        name = f"{name}.sampler"  # made within the call of the loader that has the name
    return [
        Finding(
            Kind.SET_EPOCH_MISSING,
            Severity.WRONG,
            f"{name} is a DistributedSampler that shuffles, and nothing calls set_epoch.",
            "Every epoch has the same order of samples and the same batches.",
            "Tell the sampler the epoch, or use lockstep.DistributedSampler, which moves on by itself.",
            f"{name}.set_epoch(epoch)  # first line of the loop over epochs",
            facts.script.where(call),
        )
    ]


def _sampler_seed(facts: ScriptFacts, call: ast.Call) -> list[Finding]:
    seed = argument(call, "seed", 4)
    if seed is None or not facts.ranks.mentions(seed):
        return []
    return [
        Finding(
            Kind.SAMPLER_SEED_BY_RANK,
            Severity.WRONG,
            f"DistributedSampler(seed={ast.unparse(seed)}) has another seed on each rank.",
            "The ranks take their parts from different orders: some samples come several times, others never.",
            "Give all ranks the same seed.",
            "DistributedSampler(dataset, seed=0)",
            facts.script.where(call),
        )
    ]


def _splits(facts: ScriptFacts) -> list[Finding]:
    found = []
    for name, keyword, position in (("random_split", "generator", 2), ("train_test_split", "random_state", None)):
        for call in facts.script.calls_of(name):
            given = argument(call, keyword, position)
            if has_star(call) or is_seeded_alike(facts, call):
                continue
            if given is not None and not facts.ranks.mentions(given) and not _is_none(given):
                continue
            value = "torch.Generator().manual_seed(0)" if keyword == "generator" else "0"
            found.append(
                Finding(
                    Kind.SPLIT_BY_CHANCE,
                    Severity.WRONG,
                    f"{name} draws the parts at random, and the ranks' seeds are not the same.",
                    "Each rank has another split: one trains on what another keeps for validation.",
                    "Draw from a seed that is the same on all ranks.",
                    f"{name}(..., {keyword}={value})",
                    facts.script.where(call),
                )
            )
    return found
