"""The model: layers that look at the whole batch, and how it is wrapped."""

from __future__ import annotations

import ast
import re

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.quantities import plural
from lockstep.study.doctor.script.source import argument, constant, words
from lockstep.study.doctor.script.traits import ScriptFacts

_BATCHNORM = re.compile(r"^(Lazy)?BatchNorm[123]d$")
_MODELS = (
    "resnet",
    "resnext",
    "wide_resnet",
    "densenet",
    "mobilenet",
    "efficientnet",
    "regnet",
    "shufflenet",
    "mnasnet",
)
_MORE_MODELS = ("googlenet", "inception", "deeplab", "fcn_", "lraspp", "r3d", "mc3", "r2plus1d")
"""How the functions of torchvision begin whose models have BatchNorm."""

_ACCUMULATION = re.compile(r"accum|(^|_)acc_steps|update_freq|micro_?(step|batch)", re.IGNORECASE)
"""In the name of a number of micro-batches."""

_FEW = 16


def look(facts: ScriptFacts) -> list[Finding]:
    """Return what is wrong with the model, or with how it is wrapped."""
    return [*_batchnorm(facts), *_unused(facts), *_accumulation(facts), *_data_parallel(facts)]


def _batchnorm(facts: ScriptFacts) -> list[Finding]:
    if not facts.wrappings or facts.script.calls_of("convert_sync_batchnorm", "SyncBatchNorm"):
        return []
    layers = [call for name, call in facts.script.calls if has_batchnorm(name)]
    if not layers:
        return []
    batch = facts.smallest_batch
    is_small = batch is not None and batch < _FEW
    samples = f"the {plural(batch, 'sample')}" if batch is not None else "the samples"
    first = ast.unparse(layers[0].func)
    return [
        Finding(
            Kind.BATCHNORM_NOT_SYNCHRONISED,
            Severity.WRONG if is_small else Severity.NOTE,
            f"BatchNorm ({first}{f' and {len(layers) - 1} more' if len(layers) > 1 else ''}) will normalise with "
            f"{samples} of its own rank.",
            "It is another run than on one device"
            + (", and statistics of so few samples cost accuracy." if is_small else "."),
            "Synchronise it, before the model is wrapped and the optimizer made.",
            "model = lockstep.SyncBatchNorm.convert_sync_batchnorm(model)",
            facts.script.where(layers[0]),
        )
    ]


def has_batchnorm(name: str) -> bool:
    """Say whether a call of this name makes BatchNorm layers, as far as the name tells."""
    module, _, last = name.rpartition(".")
    is_torchvision = module.startswith("torchvision.models") or module.endswith("models")
    return bool(_BATCHNORM.match(last)) or (
        is_torchvision and (last.startswith((*_MODELS, *_MORE_MODELS)) or last.endswith("_bn"))
    )


def _unused(facts: ScriptFacts) -> list[Finding]:
    return [
        Finding(
            Kind.UNUSED_PARAMETERS_SEARCH,
            Severity.SLOW,
            "DistributedDataParallel(find_unused_parameters=True) walks the whole graph after every forward.",
            "It delays the start of backward in each step; models that use all parameters gain nothing.",
            "Leave it out if all parameters are used; otherwise take lockstep's engine, which needs no search.",
            f"lockstep run {facts.script.path} --devices {facts.devices} --adopt",
            facts.script.where(call),
        )
        for call in facts.wrappings
        if not facts.is_ours(call) and constant(argument(call, "find_unused_parameters")) is True
    ]


def _accumulation(facts: ScriptFacts) -> list[Finding]:
    """Find an optimizer that steps after several backwards, each of which averages the gradients of all ranks."""
    has_no_sync = any(
        isinstance(node, ast.Attribute) and node.attr in ("no_sync", "require_backward_grad_sync")
        for node in facts.script.nodes
    )
    if not facts.wrappings or has_no_sync:
        return []
    for call in facts.script.calls_of("step"):
        for child, parent in facts.script.ancestors(call):
            if isinstance(parent, ast.If) and child is not parent.test and _counts_micro_batches(parent.test):
                return [_accumulates(facts, parent)]
    return []


def _accumulates(facts: ScriptFacts, condition: ast.If) -> Finding:
    text = ast.unparse(condition.test)
    return Finding(
        Kind.ACCUMULATION_WITH_SYNC,
        Severity.SLOW,
        f"Gradients are accumulated (`if {text}`), and each backward averages them over all ranks.",
        "All but the last of these exchanges are of no use: as many times the communication as micro-batches.",
        "Leave the exchange out until the last micro-batch before a step.",
        "with model.no_sync():  # around forward and backward of all micro-batches but the last\n    loss.backward()",
        facts.script.where(condition),
    )


def _counts_micro_batches(test: ast.expr) -> bool:
    has_modulo = any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in ast.walk(test))
    return has_modulo and any(_ACCUMULATION.search(word) for word in words(test))


def _data_parallel(facts: ScriptFacts) -> list[Finding]:
    if facts.wrappings:
        return []
    return [
        Finding(
            Kind.DATA_PARALLEL,
            Severity.SLOW,
            "The model is wrapped in torch's DataParallel.",
            "Each step copies the model to all GPUs and gathers outputs on the first, under one interpreter lock.",
            "Take lockstep.DataParallel, which keeps its replicas, or a process for each device.",
            f"lockstep run {facts.script.path} --devices 1 --adopt  # or: model = lockstep.DataParallel(model)",
            facts.script.where(call),
        )
        for name, call in facts.script.calls
        if name.rpartition(".")[2] == "DataParallel" and not name.startswith("lockstep.")
    ]
