"""What a command finds out about a task's file without torch: whether it has the task, and values for its parameters.

To import a file that has no task would run a whole script first; so its text is read before.
"""

import ast
import difflib
import inspect
import re
import symtable
import tokenize
import types
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from lockstep.errors import ConfigurationError

# Ways to bind a name that the text does not show; then only an import tells.
_HIDDEN = re.compile(
    r"import\s*\(?\s*\*|globals\(|locals\(|vars\(|exec\(|setattr\(|__getattr__|^\s+global ", re.MULTILINE
)
_MADE = re.compile(r"^(\w+)\s*(?::.*)?=.*\bTask\(", re.MULTILINE)


class TaskSpec(str):
    """``FILE.py`` or ``FILE.py:NAME``, with the texts of ``--set`` by parameter."""

    parameters: Mapping[str, str] = {}


def find_task(spec: str) -> tuple[Path, str]:
    """Return the file and the name that ``spec`` means: ``task`` of ``FILE.py``, or NAME of ``FILE.py:NAME``.

    Raises:
        ConfigurationError: There is no such file, or by its text it has no such name.
    """
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py"):
        file, name = spec, "task"
    path = Path(file)
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigurationError(f"{path} {kind}.\nName a Python file that has a lockstep.Task.")
    try:
        with tokenize.open(path) as text:  # in its own encoding
            source = text.read()
        symbols = symtable.symtable(source, str(path), "exec").get_symbols()
    except (SyntaxError, ValueError):
        return path, name  # the import shows the line
    bound = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    if name not in bound and not _HIDDEN.search(source):
        made = _MADE.findall(source)
        raise without_task(path, name, made or ["task"] * ("task" in bound))
    return path, name


def is_script(file: str) -> bool:
    """Return whether a file is a script that trains, rather than one with a task; false if it cannot be read.

    A script may call `fit`, with a task that it imports or that is not called ``task``.
    """
    try:
        with tokenize.open(file) as text, warnings.catch_warnings():  # in its own encoding
            warnings.simplefilter("ignore")  # the run shows them
            tree = ast.parse(text.read())
    except (OSError, SyntaxError, ValueError):
        return False
    nodes = list(ast.walk(tree))
    ours: dict[str, str] = {}  # what lockstep.Task and lockstep.fit are called in the file
    for node in nodes:
        match node:
            case ast.Import(names=names):
                modules = [a.asname or "lockstep" for a in names if a.name.split(".")[0] == "lockstep"]
                ours |= {f"{module}.{name}": name for module in modules for name in ("Task", "fit")}
            case ast.ImportFrom(module=module, names=names) if f"{module}.".startswith("lockstep."):
                ours |= {a.asname or a.name: a.name for a in names}
                ours |= {name: name for a in names if a.name == "*" for name in ("Task", "fit")}
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    called += [base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    used = {ours.get(ast.unparse(name)) for name in called}
    bound = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "fit" in used:
        assigned = {
            ast.unparse(target) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
        }
        return "task" not in bound | assigned
    bound |= {a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
    return "task" not in bound and "Task" not in used


def without_task(path: Path, name: str, others: list[str]) -> ConfigurationError:
    """Return the error about a file that has no such task, but ``others``."""
    hint = f"Define one: {name} = lockstep.Task(...). A script is run by: lockstep run {path}"
    return ConfigurationError(f"{path} has no {name!r}.\n{f'Name what it has: {path}:{others[0]}' if others else hint}")


def read_parameters(make: object, texts: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return the values of all parameters of ``make``, from its defaults and from ``texts``.

    Args:
        make: A task, or a function that returns one.
        texts: The values that were passed, by name of a parameter.
        where: The name of ``make``, for errors.

    Raises:
        ConfigurationError: A name is unknown, a text is no value of the parameter's type, or a value is missing.
    """
    try:
        declared = dict(inspect.signature(make, eval_str=True).parameters) if callable(make) else {}
    except (TypeError, ValueError):
        declared = {}
    declared = {name: p for name, p in declared.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    takes = f"It takes {', '.join(map(str, declared.values()))}."
    for name in texts:
        if not declared:
            advice = "Make it a function with parameters that returns the task, such as def task(lr=0.1)."
            raise ConfigurationError(f"{where} has no parameters, so --set {name} has no effect.\n{advice}")
        if name not in declared:
            near = difflib.get_close_matches(name, declared, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ConfigurationError(f"{where} has no parameter {name!r}.\n{hint}{takes}")
    values = {name: p.default for name, p in declared.items() if p.default is not p.empty}
    for name, text in texts.items():
        kind = declared[name].annotation
        if kind is inspect.Parameter.empty:
            kind = str if values.get(name) is None else type(values[name])
        try:
            values[name] = _read(text, kind)
        except ValueError:
            raise ConfigurationError(f"{where}: --set {name}={text} is not allowed.\n{takes}") from None
    if missing := [name for name in declared if name not in values]:
        raise ConfigurationError(f"{where} needs a value of {missing[0]}.\nGive --set {missing[0]}=VALUE. {takes}")
    return {name: values[name] for name in declared}


def _read(text: str, kind: Any) -> Any:
    """Return ``text`` as a value of type ``kind``; ValueError: it is none."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    fixed = {bool: (True, False), types.NoneType: (None,)}
    for choice in (choice for type_ in kinds for choice in fixed.get(type_, get_args(type_))):
        if text.lower() == str(choice).lower():
            return choice
    for type_ in kinds:
        if type_ in (int, float, str):
            with suppress(ValueError):
                return type_(text)
    raise ValueError(text)
