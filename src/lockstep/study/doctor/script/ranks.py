"""Which parts of a script run on some ranks only."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.study.doctor.script.source import Script, constant, names

_RANK = re.compile(r"(^|_)rank(_?0|_zero(_only|_first)?|_id)?$", re.IGNORECASE)
_OTHER = re.compile(r"(lora|low|full|matrix|max|min|svd|adapter|tensor|page|item|doc)_rank$", re.IGNORECASE)
"""Names of ranks that are no process's."""

_MAIN = re.compile(r"main_process|master_process|world_master|process_zero|global_zero", re.IGNORECASE)
_FLAG = re.compile(r"^(is|am)_(main|master|chief|primary|root|leader)$", re.IGNORECASE)
_INDEX = {"gpu_id", "gpu", "process_index", "device_id", "local_process_index"}
"""Names that stand for a rank where they are compared with a number."""

_LEAVING = (ast.Return, ast.Continue, ast.Break)
"""Not raising: that is how arguments are checked, and it ends the run."""

_LEAVING_CALLS = ("exit", "_exit", "quit")


@dataclass(frozen=True)
class Guard:
    """A condition that only some ranks pass.

    Attributes:
        test: The condition.
        branch: ``True`` for what runs where it holds.
    """

    test: ast.expr
    branch: bool

    def describe(self) -> str:
        """Return the condition as it is written, with ``not`` in front for the other branch."""
        text = ast.unparse(self.test)
        return text if self.branch else f"not ({text})"


class Ranks:
    """Finds the conditions of a script that depend on the rank."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._flags: set[str] = set()
        self._guarded: dict[ast.AST, bool] = {}
        # Twice, as one flag may be made from another.
        for _ in range(2):
            for node in script.nodes:
                if not isinstance(node, ast.Assign):
                    continue
                is_condition = isinstance(node.value, (ast.Compare, ast.BoolOp, ast.UnaryOp))
                if is_condition and self.depends(node.value):
                    self._flags |= {script.name(target).rpartition(".")[2] for target in node.targets}

    def mentions(self, node: ast.AST) -> bool:
        """Say whether an expression names a rank."""
        return any(_is_rank(name) for name in names(node))

    def depends(self, test: ast.expr) -> bool:
        """Say whether ranks may differ in what ``test`` is; not so for asking whether there are ranks at all."""
        if isinstance(test, ast.BoolOp):
            return any(self.depends(part) for part in test.values)
        if isinstance(test, ast.UnaryOp):
            return self.depends(test.operand)
        if isinstance(test, ast.Compare):
            return self._differs(test)
        named = names(test)
        if named & {"environ", "getenv"}:
            return False  # whether the variable is set: whether this is a distributed run
        return bool(named & self._flags) or any(_is_rank(name) or _FLAG.search(name) for name in named)

    def _differs(self, test: ast.Compare) -> bool:
        parts = [test.left, *test.comparators]
        values = [constant(part) for part in parts]
        if isinstance(test.ops[0], (ast.In, ast.NotIn)) and isinstance(
            test.comparators[0], (ast.List, ast.Tuple, ast.Set)
        ):
            return self.mentions(test.left)  # rank not in (-1, 0)
        asks_for_being = (ast.Is, ast.IsNot, ast.In, ast.NotIn)
        if any(value == -1 for value in values) or any(isinstance(op, asks_for_being) for op in test.ops):
            return False  # rank != -1, rank is not None, "RANK" in os.environ: whether this is a distributed run
        if isinstance(test.ops[0], ast.GtE) and constant(test.comparators[0]) == 0:
            return False  # likewise
        named = set().union(*(names(part) for part in parts))
        is_index = bool(named & _INDEX) and any(isinstance(value, int) for value in values)
        return is_index or bool(named & self._flags) or any(_is_rank(name) for name in named)

    def lets_zero_pass(self, guard: Guard) -> bool:
        """Say whether rank zero is among those that pass; of what cannot be told, it is."""
        return self._holds_for_zero(guard.test) == guard.branch

    def _holds_for_zero(self, test: ast.expr) -> bool:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return not self._holds_for_zero(test.operand)
        if isinstance(test, ast.BoolOp):
            return all(self._holds_for_zero(part) for part in test.values if self.depends(part))
        if isinstance(test, ast.Compare):
            right, is_in = test.comparators[0], isinstance(test.ops[0], (ast.In, ast.Eq, ast.LtE, ast.Lt))
            items = right.elts if isinstance(right, (ast.List, ast.Tuple, ast.Set)) else [right]
            has_zero = any(constant(item) == 0 for item in items)
            return is_in == has_zero
        # A bare number is true for all but rank zero; a flag or a function such as is_main_process() is for zero.
        return not (
            isinstance(test, (ast.Name, ast.Attribute)) and ast.unparse(test).rpartition(".")[2].endswith("rank")
        )

    def guards(self, node: ast.AST) -> list[Guard]:
        """Return the conditions on the rank that lead to ``node`` within its function, innermost first."""
        found: list[Guard] = []
        for child, parent in self._script.ancestors(node):
            if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test and self.depends(parent.test):
                body = parent.body if isinstance(parent, ast.If) else [parent.body]
                found.append(Guard(parent.test, child in body))
            if isinstance(parent, ast.BoolOp):
                before = parent.values[: parent.values.index(child)] if child in parent.values else []
                found += [Guard(test, isinstance(parent.op, ast.And)) for test in before if self.depends(test)]
            found += self._early_exits(child, parent)
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                break
        return found

    def _early_exits(self, child: ast.AST, parent: ast.AST) -> list[Guard]:
        """Return the conditions before ``child`` on which a rank leaves the block."""
        found = []
        for field in ("body", "orelse", "finalbody"):
            block: object = getattr(parent, field, None)
            if isinstance(block, list) and child in block:
                for statement in block[: block.index(child)]:
                    if isinstance(statement, ast.If) and self.depends(statement.test) and _leaves(statement.body):
                        found.append(Guard(statement.test, False))
        return found

    def is_guarded(self, node: ast.AST, depth: int = 4) -> bool:
        """Say whether only some ranks come to ``node``, by its own conditions or those of all callers."""
        if self.guards(node):
            return True
        scope = self._script.scope(node)
        if scope not in self._guarded:
            self._guarded[scope] = False  # what calls itself is not guarded by that
            self._guarded[scope] = self._is_function_guarded(scope, depth)
        return self._guarded[scope]

    def _is_function_guarded(self, scope: ast.AST, depth: int) -> bool:
        if depth == 0 or not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        if any(_is_rank(name) for decorator in scope.decorator_list for name in names(decorator)):
            return True  # such as @rank_zero_only
        if _is_rank(scope.name) or "on_master" in scope.name:
            return True
        callers = self._script.callers(scope)
        return bool(callers) and all(self.is_guarded(call, depth - 1) for call in callers)


def _is_rank(name: str) -> bool:
    return bool(_MAIN.search(name) or (_RANK.search(name) and not _OTHER.search(name)))


def _leaves(block: Sequence[ast.stmt]) -> bool:
    last = block[-1]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        func = last.value.func
        return (func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")) in _LEAVING_CALLS
    return isinstance(last, _LEAVING)
