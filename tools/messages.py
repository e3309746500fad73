"""Every error message of the package, read from its source: the cause is its first line, the cure what follows."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep import errors

MARKER = "<!-- messages: from the source -->"
ERROR_NAMES = frozenset(
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.LockstepError)
)
# What Markdown or HTML would take for its own.
_ESCAPED = {character: f"&#{ord(character)};" for character in "&<|*_`[\\"} | {"\n": "<br>"}


@dataclass(frozen=True)
class Message:
    """One message; what is filled in when it is raised stands as ``{name}``."""

    error: str
    text: str
    file: str

    @property
    def cause(self) -> str:
        """Its first line."""
        return self.text.partition("\n")[0]

    @property
    def cure(self) -> str:
        """The lines after the first."""
        return self.text.partition("\n")[2]


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


def as_table(package: Path) -> str:
    """Return all messages as Markdown, a table for each error."""
    found = messages(package)
    lines = []
    for error in sorted(ERROR_NAMES):
        rows = [message for message in found if message.error == error]
        if rows:
            lines += ["", f"## {error}", "", "| cause | what to do | raised in |", "|---|---|---|"]
            lines += [f"| {_cell(row.cause)} | {_cell(row.cure)} | {_cell(row.file)} |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return "".join(_ESCAPED.get(character, character) for character in text)
