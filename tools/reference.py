"""The tables of the reference that are read from the source: settings, messages, error hints, names, findings."""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from lockstep import errors
from lockstep.base.setting import settings_of
from lockstep.launcher.failure_report import ERROR_HINTS
from lockstep.study.doctor import examine  # noqa: F401  # its imports fill the table of checks
from lockstep.study.doctor.findings import CHECKS
from lockstep.telemetry import record
from lockstep.telemetry.figures import ALL_METRICS
from lockstep.train.settings import FitSettings

PACKAGE = Path(__file__).parents[1] / "src" / "lockstep"

ERROR_NAMES = frozenset(
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.LockstepError)
)
# What Markdown or HTML would take for its own.
_ESCAPED = {character: f"&#{ord(character)};" for character in "&<|*_`[\\"} | {"\n": "<br>"}


def fill(markdown: str) -> str:
    """Replace the markers of a page by their tables."""
    for name, table in TABLES.items():
        marker = f"<!-- {name}: from the source -->"
        if marker in markdown:
            markdown = markdown.replace(marker, table())
    return markdown


def settings_table() -> str:
    """Return a row for each setting of `fit`."""
    words = {"choice": None, "bool": "`True`, `False`", "int": "whole number", "float": "number", "numbers": "numbers"}
    rows = []
    for setting in settings_of(FitSettings):
        kind = words.get(setting.kind, setting.kind)
        values = ", ".join([*([kind] if kind else []), *(f'`"{choice}"`' for choice in setting.choices)])
        rows.append([f"`{setting.name}`", values, f"`{setting.default!r}`", setting.help])
    return _table(["keyword", "may be", "default", "what it is"], rows)


def hints_table() -> str:
    """Return a row for each error of a library that the launcher explains."""
    rows = [[", ".join(f"`{mark}`" for mark in marks), *hint.split("\n")] for marks, hint in ERROR_HINTS.items()]
    return _table(["in the error", "what it means", "what to do"], rows)


def events_table() -> str:
    """Return a row for each event in the lines of a run folder."""
    return _table(["event", "meaning"], [[f"`{name}`", text] for name, text in record.EVENTS.items()])


def metrics_table() -> str:
    """Return a row for each metric that sinks get."""
    rows = [[f"`{metric.name}`", f"`{metric.prometheus}`", metric.meaning] for metric in ALL_METRICS]
    return _table(["name", "in Prometheus", "meaning"], rows)


def findings_sections() -> str:
    """Return a heading for each part of the machine, and under it one for each finding of the doctor."""
    lines: list[str] = []
    for section, checks in groupby(CHECKS, lambda check: check.function.__module__.rpartition(".")[2].capitalize()):
        lines += [f"## {section}", ""]
        for check in checks:
            lines += [f"### {check.finding.kind}", check.explanation, ""]
    return "\n".join(lines)


# --- every error message: the cause is its first line, the cure what follows ------------------------------------------


@dataclass(frozen=True)
class Message:
    """One message; what is filled in when it is raised stands as ``{name}``."""

    error: str
    text: str
    file: str


def messages(package: Path) -> list[Message]:
    """Return all messages that are written where an error of Lockstep's is made, by error and text."""
    found = set()
    for path in sorted(package.rglob("*.py")):
        for error, text in _in_tree(ast.parse(path.read_text())):
            found.add(Message(error, text, path.relative_to(package).as_posix()))
    return sorted(found, key=lambda message: (message.error, message.text, message.file))


def _in_tree(tree: ast.Module) -> Iterator[tuple[str, str]]:
    constants = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if text := _template(value, {}):
                constants[name] = text
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute) and node.args:
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            text = _template(node.args[0], constants)
            # Without a word of its own, the message is made elsewhere and only passed on here.
            if name in ERROR_NAMES and text is not None and any(word.isalpha() for word in text.split()):
                yield name, text


def _template(node: ast.expr, constants: Mapping[str, str]) -> str | None:
    """Return the text of a string or f-string, with the source of what is filled in; None if it is neither."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_template(part, constants) or "" for part in parts)
        case ast.FormattedValue(value=ast.Name(id=name)) | ast.Name(id=name) if name in constants:
            return constants[name]
        case ast.FormattedValue(value=value):
            return "{" + ast.unparse(value).replace("\n", " ") + "}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (_template(left, constants) or "{...}") + (_template(right, constants) or "{...}")
    return None


def messages_sections(package: Path = PACKAGE) -> str:
    """Return what each error class is for, from its docstring, and its messages."""
    found, lines = messages(package), []
    for error in sorted(ERROR_NAMES):
        meaning = (getattr(errors, error).__doc__ or "").partition("\n\n")[0].replace("``", "`")
        rows = [message for message in found if message.error == error]
        lines += ["", f"## {error}", "", meaning, ""]
        if rows:
            cells = [[_cell(part) for part in (*row.text.partition("\n")[::2], row.file)] for row in rows]
            lines.append(_table(["cause", "what to do", "raised in"], cells))
    return "\n".join(lines)


def _cell(text: str) -> str:
    return "".join(_ESCAPED.get(character, character) for character in text)


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "error hints": hints_table,
    "record events": events_table,
    "metric names": metrics_table,
    "findings": findings_sections,
    "messages": messages_sections,
}
