"""`Script`: the syntax tree of a training script, with the full names of what it calls."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
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
        self.nodes = list(ast.walk(self.tree))
        self._parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._imported = dict(_imports(self.nodes))

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
        found = [(self.name(node.func), node) for node in self.nodes if isinstance(node, ast.Call)]
        return sorted(found, key=lambda item: (item[1].lineno, item[1].col_offset))

    def calls_of(self, *last_names: str) -> list[ast.Call]:
        """Return the calls of what is named so, wherever it comes from."""
        return [call for name, call in self.calls if name.rpartition(".")[2] in last_names]

    def imports(self, *packages: str) -> bool:
        """Say whether the script imports one of ``packages``, or from one."""
        beginnings = tuple(f"{package}." for package in packages)
        return any(f"{name}.".startswith(beginnings) for name in self._imported.values())

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
        for node in self.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.setdefault(node.name, []).append(node)
        return {name: nodes[0] for name, nodes in found.items() if len(nodes) == 1}

    def function_of(self, call: ast.Call) -> Function | None:
        """Return the function of this file that is called, if it is one."""
        if isinstance(call.func, ast.Name) and call.func.id not in self._imported:
            return self.functions.get(call.func.id)
        if isinstance(call.func, ast.Attribute) and self._first(call.func) not in self._imported:
            function = self.functions.get(call.func.attr)
            # A method, of whatever object: functions outside classes are not called through a dot.
            if function is not None and isinstance(self._parents[function], ast.ClassDef):
                return function
        return None

    @staticmethod
    def _first(node: ast.AST) -> str:
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else UNKNOWN

    @cached_property
    def _callers(self) -> dict[Function, list[ast.Call]]:
        found: dict[Function, list[ast.Call]] = {}
        for _, call in self.calls:
            function = self.function_of(call)
            if function is not None:
                found.setdefault(function, []).append(call)
        return found

    def callers(self, function: Function) -> list[ast.Call]:
        """Return the calls of a function of this file."""
        return self._callers.get(function, [])

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

    @cached_property
    def _values(self) -> dict[str, list[ast.expr]]:
        found: dict[str, list[ast.expr]] = {}
        for node in self.nodes:
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                for target in targets:
                    found.setdefault(self.name(target), []).append(node.value)
        return found

    def values(self, name: str) -> list[ast.expr]:
        """Return what is assigned to ``name`` anywhere."""
        return self._values.get(name, [])


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
    return names(node) | set(_texts(node))


def names(node: ast.AST) -> set[str]:
    """Return the names and attributes in an expression, and texts in capitals, such as those of variables."""
    found = {text for text in _texts(node) if text.isupper()}
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
    return found


def _texts(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
                yield alias.name, alias.name  # as `imports` asks for it; no name in the program has a dot
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
