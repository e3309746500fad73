"""`Script`: the syntax tree of a training script, with the full names of what it calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
Function = ast.FunctionDef | ast.AsyncFunctionDef

UNKNOWN = "?"
"""Stands for what has no name, such as the result of a call."""


class Script:
    """One file, parsed.

    Args:
        text: Its source.
        path: As the user named it.

    Raises:
        SyntaxError: It is no Python.
    """

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.tree = ast.parse(text, path)
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._imported = dict(_imports(self.tree))

    def where(self, node: ast.expr | ast.stmt) -> str:
        """Return ``FILE:LINE``."""
        return f"{self.path}:{node.lineno}"

    def name(self, node: ast.AST) -> str:
        """Return the full name of a dotted expression, such as ``torch.nn.Linear`` for ``nn.Linear``."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        first = node.id if isinstance(node, ast.Name) else UNKNOWN
        return ".".join([self._imported.get(first, first), *reversed(parts)])

    @cached_property
    def calls(self) -> list[tuple[str, ast.Call]]:
        """All calls in the order of their lines, each with the full name of what is called."""
        found = [(self.name(node.func), node) for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        return sorted(found, key=lambda item: (item[1].lineno, item[1].col_offset))

    def calls_of(self, *last_names: str) -> list[ast.Call]:
        """Return the calls of what is named so, wherever it comes from."""
        return [call for name, call in self.calls if name.rpartition(".")[2] in last_names]

    def imports(self, *packages: str) -> bool:
        """Say whether the script imports one of ``packages``, or from one."""
        return any(name.partition(".")[0] in packages for name in self._imported.values())

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield pairs of a child and its parent, from ``node`` to the module."""
        while node in self._parents:
            parent = self._parents[node]
            yield node, parent
            node = parent

    def scope(self, node: ast.AST) -> Scope:
        """Return the function, or else the module, that ``node`` runs in."""
        for _, parent in self.ancestors(node):
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)):
                return parent
        return self.tree

    def statement(self, node: ast.AST) -> ast.AST:
        """Return the statement that ``node`` is part of."""
        while not isinstance(node, ast.stmt) and node in self._parents:
            node = self._parents[node]
        return node

    @cached_property
    def functions(self) -> dict[str, Function]:
        """The functions and methods by name; those that share a name are left out, as a call does not tell which."""
        found: dict[str, list[Function]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.setdefault(node.name, []).append(node)
        return {name: nodes[0] for name, nodes in found.items() if len(nodes) == 1}

    def function_of(self, call: ast.Call) -> Function | None:
        """Return the function of this file that is called, if it is one."""
        if isinstance(call.func, ast.Name) and call.func.id not in self._imported:
            return self.functions.get(call.func.id)
        if isinstance(call.func, ast.Attribute):
            function = self.functions.get(call.func.attr)
            # A method, of whatever object: functions outside classes are not called through a dot.
            if function is not None and isinstance(self._parents[function], ast.ClassDef):
                return function
        return None

    def callers(self, function: Function) -> list[ast.Call]:
        """Return the calls of a function of this file."""
        return [call for _, call in self.calls if self.function_of(call) is function]

    def targets(self, call: ast.AST) -> list[str]:
        """Return the names that the statement with ``call`` assigns to, such as ``self.loader``."""
        statement = self.statement(call)
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
        return [self.name(target) for target in flat]

    def values(self, name: str) -> list[ast.expr]:
        """Return what is assigned to ``name`` anywhere."""
        found = []
        for node in ast.walk(self.tree):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                found += [node.value for target in targets if self.name(target) == name]
        return found


def argument(call: ast.Call, keyword: str, position: int | None = None) -> ast.expr | None:
    """Return an argument by keyword or position, if it is given."""
    for given in call.keywords:
        if given.arg == keyword:
            return given.value
    if position is not None and position < len(call.args) and not has_star(call):
        return call.args[position]
    return None


def has_star(call: ast.Call) -> bool:
    """Say whether arguments are passed that the syntax does not show."""
    return any(isinstance(given, ast.Starred) for given in call.args) or any(
        given.arg is None for given in call.keywords
    )


def constant(node: ast.expr | None) -> object:
    """Return the value of a literal; ``None`` for everything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = constant(node.operand)
        return -value if isinstance(value, (int, float)) else None
    return node.value if isinstance(node, ast.Constant) else None


def words(node: ast.AST) -> set[str]:
    """Return the names, attributes and texts in an expression."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.add(part.value)
    return found


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
