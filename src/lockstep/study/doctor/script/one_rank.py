"""What all ranks must do together, and only some come to."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.script.model import has_batchnorm
from lockstep.study.doctor.script.ranks import Guard
from lockstep.study.doctor.script.source import Function, argument, constant
from lockstep.study.doctor.script.traits import ScriptFacts

_COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast", "broadcast_object_list"),
    *("barrier", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "gather", "gather_object"),
    *("scatter", "scatter_object_list", "all_to_all", "all_to_all_single", "new_group"),
}
_OF_THESE = ("torch.distributed.", "dist.", "distributed.", "c10d.")
_WHOLE_NAMES = {
    *("lockstep.save", "lockstep.load", "torch.distributed.checkpoint.save", "torch.distributed.checkpoint.load"),
    *("torch.distributed.checkpoint.save_state_dict", "torch.distributed.checkpoint.load_state_dict"),
}
_METHODS = {"consolidate_state_dict", "wait_for_everyone"}
_DEPTH = 5

Wrapped = dict[str, list[ast.AST]]
"""Names of wrapped models, each with the functions that wrap them."""


def look(facts: ScriptFacts) -> list[Finding]:
    """Return the collectives, and the forwards of the wrapped model, that only some ranks come to."""
    if not facts.is_distributed:
        return []
    found: dict[tuple[Kind, int], Finding] = {}
    wrapped = _wrapped_names(facts)
    for _, call in facts.script.calls:
        guards = facts.ranks.guards(call)
        if not guards:
            continue
        for finding in (*_collectives(facts, call, guards[0]), *_models(facts, call, guards[0], wrapped)):
            found.setdefault((finding.kind, call.lineno), finding)
    return list(found.values())


def is_collective(facts: ScriptFacts, call: ast.Call) -> bool:
    """Say whether all ranks must make this call."""
    name = facts.script.name(call.func)
    last = name.rpartition(".")[2]
    if name in _WHOLE_NAMES or last in _METHODS:
        return True
    if last not in _COLLECTIVES:
        return False
    return name.startswith(_OF_THESE) or name == "world.barrier"


def _collectives(facts: ScriptFacts, call: ast.Call, guard: Guard) -> Iterator[Finding]:
    """Yield what is wrong with a call that stands behind ``guard``."""
    reached = call if is_collective(facts, call) else _reach(facts, call, _DEPTH)
    if reached is None or _is_balanced(facts, call):
        return
    text = ast.unparse(reached.func)
    way = "" if reached is call else f", by way of {ast.unparse(call.func)}() in line {call.lineno}"
    yield Finding(
        Kind.COLLECTIVE_ON_ONE_RANK,
        Severity.HANG,
        f"{text} is for all ranks, but only those with `{guard.describe()}` come to it{way}.",
        "They wait for the others until time is up, 10 to 30 minutes; or it meets another collective and mixes data.",
        "Let all ranks come to it, and only print or save on one.",
        f"{ast.unparse(reached)}  # on every rank, outside of `if {ast.unparse(guard.test)}:`",
        facts.script.where(reached),
    )


def _reach(facts: ScriptFacts, call: ast.Call, depth: int) -> ast.Call | None:
    """Return the first collective that a function of this file makes when it is called, if it does."""
    function = facts.script.function_of(call)
    if function is None or depth == 0:
        return None
    for inner in _calls_in(function):
        if is_collective(facts, inner):
            return inner
        found = _reach(facts, inner, depth - 1)
        if found is not None:
            return found
    return None


def _calls_in(function: Function) -> list[ast.Call]:
    """Return the calls that run when ``function`` is called."""
    found: list[ast.Call] = []
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(node, ast.Call):
            found.append(node)
        waiting += ast.iter_child_nodes(node)
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def _is_balanced(facts: ScriptFacts, call: ast.Call) -> bool:
    """Say whether the other ranks make the same call behind the opposite condition, as when one goes first.

    The first call that rank zero passes to belongs to the first that it does not pass to, and so on.
    """
    name, scope = facts.script.name(call.func), facts.script.scope(call)
    sides: dict[bool, list[ast.Call]] = {True: [], False: []}
    for other_name, other in facts.script.calls:
        guards = facts.ranks.guards(other) if other_name == name and facts.script.scope(other) is scope else []
        if guards:
            sides[facts.ranks.lets_zero_pass(guards[0])].append(other)
    return any(call in pair for pair in zip(sides[True], sides[False], strict=False))


def _models(facts: ScriptFacts, call: ast.Call, guard: Guard, wrapped: Wrapped) -> Iterator[Finding]:
    """Yield a forward of the wrapped model behind ``guard``, here or in a function that it is passed to."""
    name = facts.script.name(call.func)
    scope = facts.script.scope(call)
    reached: ast.Call | None = None
    if _is_wrapped(facts, name, scope, wrapped):
        reached = call
    else:
        function = facts.script.function_of(call)
        given = [facts.script.name(value) for value in call.args]
        for position, value in enumerate(given):
            if function is not None and _is_wrapped(facts, value, scope, wrapped):
                reached = reached or _forward_in(facts, function, position, call)
    if reached is None:
        return
    way = "" if reached is call else f" ({ast.unparse(call)} in line {call.lineno})"
    has_buffers = any(has_batchnorm(made) or "SyncBatchNorm" in made for made, _ in facts.script.calls)
    yield Finding(
        Kind.MODEL_ON_ONE_RANK,
        Severity.HANG if has_buffers else Severity.NOTE,
        f"The wrapped model is called where only ranks with `{guard.describe()}` come{way}.",
        "Its forward broadcasts buffers, such as BatchNorm's: that rank waits for the others, and they for it."
        if has_buffers
        else "If the model has buffers, such as BatchNorm's, its forward broadcasts them, and the ranks wait for each "
        "other; no layer that has some was seen in this file.",
        "Call the bare model there, or evaluate on all ranks, each its part.",
        f"{ast.unparse(reached.func)}.module(...)  # instead of {ast.unparse(reached.func)}(...)"
        if reached is call
        else f"{_unwrapped(facts, call, wrapped, scope)}  # instead of {ast.unparse(call)}",
        facts.script.where(reached),
    )


def _wrapped_names(facts: ScriptFacts) -> Wrapped:
    """Return the names that wrapped models are assigned to, each with the scopes; not if they are unwrapped again."""
    names: Wrapped = {}
    for call in facts.wrappings:
        if constant(argument(call, "broadcast_buffers")) is False:
            continue
        for name in facts.script.targets(call):
            bare = any(
                isinstance(value, ast.Attribute) and value.attr == "module" for value in facts.script.values(name)
            )
            if not bare:
                names.setdefault(name, []).append(facts.script.scope(call))
    return names


def _is_wrapped(facts: ScriptFacts, name: str, scope: ast.AST, wrapped: Wrapped) -> bool:
    if name not in wrapped:
        return False
    if "." in name:  # such as self.model, in any method
        return True
    if scope in wrapped[name]:
        return True
    is_own = isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) and name in _parameters(scope)
    return facts.script.tree in wrapped[name] and not is_own


def _parameters(function: Function) -> list[str]:
    return [given.arg for given in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def _forward_in(facts: ScriptFacts, function: Function, position: int, call: ast.Call) -> ast.Call | None:
    """Return the call of the parameter that gets the argument at ``position``."""
    parameters = _parameters(function)
    if isinstance(call.func, ast.Attribute) and parameters[:1] == ["self"]:
        parameters = parameters[1:]
    if position >= len(parameters):
        return None
    name = parameters[position]
    return next((inner for inner in _calls_in(function) if facts.script.name(inner.func) == name), None)


def _unwrapped(facts: ScriptFacts, call: ast.Call, wrapped: Wrapped, scope: ast.AST) -> str:
    """Return the call with the wrapped model's bare one in its place."""
    arguments: list[ast.expr] = [
        ast.Attribute(value, "module", ast.Load())
        if _is_wrapped(facts, facts.script.name(value), scope, wrapped)
        else value
        for value in call.args
    ]
    return ast.unparse(ast.Call(call.func, arguments, call.keywords))
