"""Files that a script writes and reads on all ranks."""

from __future__ import annotations

import ast

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.script.source import argument, constant, has_star, words
from lockstep.study.doctor.script.traits import ScriptFacts

_SAVERS = ("torch.save", "safetensors.torch.save_file", "safetensors.torch.save_model")


def look(facts: ScriptFacts) -> list[Finding]:
    """Return where ranks write the same file, or read one in a way that costs or risks something."""
    found = []
    for name, call in facts.script.calls:
        if name in _SAVERS and facts.is_distributed:
            found += _save(facts, call)
        elif name == "torch.load":
            found += _load(facts, call)
        elif constant(argument(call, "download")) is True and facts.is_distributed:
            found += _download(facts, call)
    return found


def _save(facts: ScriptFacts, call: ast.Call) -> list[Finding]:
    path = argument(call, "f", 1) or argument(call, "filename", 1)
    scope = facts.script.scope(call)
    is_unused = isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_reached(facts, scope)
    if is_unused or facts.ranks.is_guarded(call) or (path is not None and _names_rank(facts, path)):
        return []
    written = ast.unparse(path) if path is not None else "the file"
    return [
        Finding(
            Kind.SAVES_ON_ALL_RANKS,
            Severity.WRONG,
            f"{ast.unparse(call.func)} writes {written} on every rank.",
            "All ranks write the same file at the same time: what lies there afterwards may be damaged.",
            "Save on rank zero only, or with lockstep.save, which all ranks call and one writes whole.",
            f'if int(os.environ.get("RANK", 0)) == 0:\n    {ast.unparse(call)}',
            facts.script.where(call),
        )
    ]


def _download(facts: ScriptFacts, call: ast.Call) -> list[Finding]:
    # Such as `with world.rank_zero_first():` or `with accelerator.main_process_first():`.
    in_turn = any(
        "first" in word
        for _, parent in facts.script.ancestors(call)
        if isinstance(parent, ast.With)
        for item in parent.items
        for word in words(item.context_expr)
    )
    if in_turn or facts.ranks.is_guarded(call) or _follows_a_barrier(facts, call):
        return []
    return [
        Finding(
            Kind.DOWNLOADS_ON_ALL_RANKS,
            Severity.WRONG,
            f"{ast.unparse(call.func)}(download=True) is called on every rank at the same time.",
            "All ranks of a machine download to the same files: one reads what another is still writing.",
            "Let one rank of each machine go first; the others find the files there.",
            f"with world.rank_zero_first(local=True):  # of world = lockstep.init()\n    {ast.unparse(call)}",
            facts.script.where(call),
        )
    ]


def _follows_a_barrier(facts: ScriptFacts, call: ast.Call) -> bool:
    """Say whether the ranks are made to take turns before ``call``, in the same function."""
    barriers = [other for other in facts.script.calls_of("barrier") if other.lineno < call.lineno]
    return any(facts.script.scope(other) is facts.script.scope(call) for other in barriers)


def _is_reached(facts: ScriptFacts, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Say whether anything in the file calls a function, or hands it on as mp.spawn and launch get it."""
    if facts.script.callers(function):
        return True
    return (
        any(
            isinstance(node, ast.Name) and node.id == function.name and isinstance(node.ctx, ast.Load)
            for node in facts.script.nodes
        )
        or facts.script.functions.get(function.name) is not function
    )


def _names_rank(facts: ScriptFacts, path: ast.expr) -> bool:
    sources = [
        path,
        *(facts.script.values(facts.script.name(path)) if isinstance(path, (ast.Name, ast.Attribute)) else []),
    ]
    return any(facts.ranks.mentions(source) for source in sources)


def _load(facts: ScriptFacts, call: ast.Call) -> list[Finding]:
    if has_star(call):
        return []
    found = []
    weights_only = argument(call, "weights_only")
    if weights_only is None or constant(weights_only) is False:
        said = "without weights_only" if weights_only is None else "with weights_only=False"
        found.append(
            Finding(
                Kind.UNSAFE_LOAD,
                Severity.NOTE,
                f"{ast.unparse(call.func)} is called {said}.",
                "Whoever wrote the file can run code on every rank"
                + (", with torch before 2.6, which does not refuse." if weights_only is None else "."),
                "Say that only weights are to be read; what else there is goes into a file of its own.",
                _with(call, "weights_only", "True"),
                facts.script.where(call),
            )
        )
    place = argument(call, "map_location", 1)
    if (
        (place is None or constant(place) == "cuda:0")
        and facts.is_distributed
        and facts.uses_cuda
        and not facts.is_for_one(call)
    ):
        found.append(
            Finding(
                Kind.LOADS_ON_GPU_ZERO,
                Severity.SLOW,
                f"{ast.unparse(call.func)} has {'no map_location' if place is None else 'map_location=cuda:0'}.",
                "What was saved from GPU 0 is loaded there by every rank: as many copies as ranks on one GPU, each "
                "with a CUDA context.",
                "Load into host memory first.",
                _with(call, "map_location", "'cpu'"),
                facts.script.where(call),
            )
        )
    return found


def _with(call: ast.Call, name: str, value: str) -> str:
    """Return the call with one keyword set."""
    others = [keyword for keyword in call.keywords if keyword.arg != name]
    new = ast.keyword(name, ast.parse(value, mode="eval").body)
    return ast.unparse(ast.Call(call.func, call.args, [*others, new]))
