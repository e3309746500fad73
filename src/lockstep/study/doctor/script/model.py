"""The model: layers that look at the whole batch, and how it is wrapped."""

from __future__ import annotations

import ast
import re

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.quantities import plural
from lockstep.study.doctor.script.source import argument, constant
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

_FEW = 16


def look(facts: ScriptFacts) -> list[Finding]:
    """Return what is wrong with the model, or with how it is wrapped."""
    return [*_batchnorm(facts), *_unused(facts), *_data_parallel(facts)]


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
