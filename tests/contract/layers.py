"""The layers of the package, and the imports of a file that break them."""

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

LAYERS = [
    {"errors"},
    {"base"},
    {"comm"},
    {"telemetry"},
    {"health"},
    {"parallel", "data", "launcher"},
    {"checkpoints"},
    {"loop"},
    {"train"},
    {"study"},
    {"cli", "ray"},
    {"__main__"},
]
"""Lowest first. A part imports from layers below its own; parts of one layer do not import each other."""

RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

TORCH_DISTRIBUTED = {
    "comm": ["torch.distributed"],
    "base": ["torch.distributed"],
    "checkpoints": ["torch.distributed.checkpoint"],
    "launcher": ["torch.distributed.run", "torch.distributed.launcher", "torch.distributed.elastic"],
}
"""What each part may use of torch.distributed; parts that are not named may use nothing of it."""


def part_of(path: Path, package: Path) -> str:
    """The part that a file belongs to: as a rule the first folder or file name below the package."""
    return path.relative_to(package).parts[0].removesuffix(".py")


def violations(source: str, part: str) -> list[str]:
    """What a file of ``part`` imports that it must not, each as "line N: reason"."""
    found = []
    for line, name in imported_names(ast.parse(source)):
        reason = wrong_layer(name, part) or wrong_torch(name, part)
        if reason:
            found.append(f"line {line}: {reason}")
    return found


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Full names that a file imports or reaches through ``torch.``; ``from a import b`` counts as ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"


def wrong_layer(name: str, part: str) -> str | None:
    """Why ``part`` must not import ``name``, or None."""
    if name != "lockstep" and not name.startswith("lockstep."):
        return None
    target = name.split(".")[1] if "." in name else ""
    if target not in RANK:
        # The package itself holds the public names, which sit on top of everything.
        return None if part == "cli" else f"{part} imports {name}: only cli uses the public names"
    if target == part or RANK[target] < RANK[part]:
        return None
    return f"{part} imports {name}: {target} is not below {part}"


def wrong_torch(name: str, part: str) -> str | None:
    """Why ``part`` must not use ``name`` of torch.distributed, or None."""
    if name != "torch.distributed" and not name.startswith("torch.distributed."):
        return None
    allowed = TORCH_DISTRIBUTED.get(part, [])
    if any(name == prefix or name.startswith(prefix + ".") for prefix in allowed):
        return None
    return f"{part} uses {name}: it may use {allowed or 'nothing'} of torch.distributed; take it from lockstep.comm"


def module_of(path: Path, package: Path) -> str:
    """The dotted name of a file's module."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, name: str, modules: Collection[str]) -> set[str]:
    """Which of ``modules`` the module ``name`` imports, in functions and for type checkers, too."""
    names = {found for _, found in imported_names(ast.parse(source))}
    return {each if each in modules else each.rpartition(".")[0] for each in names} & set(modules) - {name, "lockstep"}


def circle(graph: Mapping[str, set[str]]) -> list[str] | None:
    """Return a circle of imports, its first module once more at the end, or None."""
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> list[str] | None:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return None
        for other in sorted(graph[name]):
            if found := visit(other, [*way, name]):
                return found
        done.add(name)
        return None

    return next((found for name in sorted(graph) if (found := visit(name, []))), None)
