"""Devices: does each rank have its own?"""

from __future__ import annotations

import ast

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.quantities import plural
from lockstep.study.doctor.script.source import argument, constant
from lockstep.study.doctor.script.traits import ScriptFacts

_SETTERS = ("set_device", "set_device_index")


def look(facts: ScriptFacts) -> list[Finding]:
    """Return where ranks would share a GPU, or ask for one that is not there."""
    if not facts.is_distributed or facts.manager is not None:
        return []
    return [*_fixed(facts), *_not_set(facts), *_backend(facts)]


def _not_set(facts: ScriptFacts) -> list[Finding]:
    if facts.starts_elsewhere or facts.script.calls_of(*_SETTERS) or _chooses_visible(facts):
        return []
    found = next((node for node in _current_device(facts) if not facts.is_for_one(node)), None)
    if found is None:
        return []
    return [
        Finding(
            Kind.DEVICE_NOT_SET,
            Severity.HANG,
            f"{_short(found)} means the current GPU, and nothing makes each rank's own the current one.",
            "All ranks use GPU 0: it runs out of memory, and NCCL stops at a duplicate GPU or waits for ever.",
            "Choose the GPU first, or let lockstep.init() do it.",
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before anything uses CUDA',
            facts.script.where(found),
        )
    ]


def _current_device(facts: ScriptFacts) -> list[ast.Call]:
    """Return the calls that name CUDA without a number."""
    found = []
    for name, call in facts.script.calls:
        last = name.rpartition(".")[2]
        if last == "cuda" and not call.args and not call.keywords:
            found.append(call)
        elif last == "to" or name == "torch.device":
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            if any(constant(part) == "cuda" for value in given for part in _parts(value)):
                found.append(call)
    return found


def _parts(node: ast.expr) -> list[ast.expr]:
    """Return the values that an argument may have: both branches of a condition."""
    return [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]


def _chooses_visible(facts: ScriptFacts) -> bool:
    """Say whether the script sets CUDA_VISIBLE_DEVICES."""
    return any(
        isinstance(target, ast.Subscript) and constant(target.slice) == "CUDA_VISIBLE_DEVICES"
        for node in facts.script.nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
    )


def _fixed(facts: ScriptFacts) -> list[Finding]:
    found = []
    for name, call in facts.script.calls:
        last = name.rpartition(".")[2]
        first = call.args[0] if call.args else None
        is_index = last in ("cuda", *_SETTERS) and isinstance(constant(first), int)
        given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "device")]
        is_text = (last in ("to", *_SETTERS) or name == "torch.device") and any(_has_number(value) for value in given)
        ids = argument(call, "device_ids", 1) if call in facts.wrappings else None
        is_ids = isinstance(ids, ast.List) and any(isinstance(constant(item), int) for item in ids.elts)
        if (is_index or is_text or is_ids) and not facts.is_for_one(call):
            found.append(_fixed_finding(facts, call))
    return found


def _has_number(value: ast.expr) -> bool:
    texts = [constant(part) for part in _parts(value)]
    return any(isinstance(text, str) and text.startswith("cuda:") for text in texts)


def _fixed_finding(facts: ScriptFacts, call: ast.Call) -> Finding:
    return Finding(
        Kind.DEVICE_FIXED,
        Severity.HANG,
        f"{_short(call)} names the same GPU on every rank.",
        "All ranks use that one: it runs out of memory, and NCCL stops at a duplicate GPU or waits for ever.",
        "Take the number from the launcher.",
        'device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))',
        facts.script.where(call),
    )


def _short(call: ast.Call) -> str:
    """Return the text of a call, with its beginning left out if it is long, or else its arguments."""
    text = ast.unparse(call)
    if len(text) < 60:
        return text
    name = ast.unparse(call.func)
    return f"{name}(...)" if len(name) < 60 else f"...{name.rpartition('.')[2]}()"


def _backend(facts: ScriptFacts) -> list[Finding]:
    found = []
    for call in facts.script.calls_of("init_process_group"):
        backend = argument(call, "backend", 0)
        if constant(backend) != "nccl" or facts.num_gpus >= facts.devices:
            continue
        gpus = plural(facts.num_gpus, "GPU") if facts.num_gpus else "no GPU"
        found.append(
            Finding(
                Kind.BACKEND_WITHOUT_GPU,
                Severity.HANG,
                f'init_process_group("nccl") on {plural(facts.devices, "rank")}, but this machine has {gpus} for them.',
                "NCCL needs a GPU for each rank: the run fails at the start, or at its first collective.",
                "Choose the backend by what there is, or let lockstep.init() do it.",
                'dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")',
                facts.script.where(call),
            )
        )
    return found
