"""Whether an exception that a thread has in hand will end the program: it is in a ``finally``, and nobody catches it.

[Note: an exception that nobody will catch]
An exception that has left a function may be held up for long: a ``finally`` runs first, which may hang. Nothing else
tells that the rank has failed. Whether it will be caught further out is read from the source of the functions that are
under way, from the inside out: each is at a line, and that line lies in blocks.

- In the body of a ``try`` with ``except``, it may be caught, whatever the classes are.
- In an ``except``, it has been caught.
- In the body of a ``with``, it depends on the object: those of `World` are known to let exceptions pass.
- In a ``finally`` with ``return``, ``break`` or ``continue``, or before one, it may be dropped.
- In any other ``finally``, and everywhere else, it passes.

It ends the program if it passes all the way out to our launcher's bootstrap. What is not certain is left alone.
Standard library only.
"""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator, Sequence, Set
from functools import lru_cache
from types import FrameType

_LAUNCHER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "launcher")
_OUTERMOST = (os.path.join(_LAUNCHER, "bootstrap.py"), os.path.join(_LAUNCHER, "call.py"))

_WITHOUT_BLOCKS = ("<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_LEAVES = (ast.Return, ast.Break, ast.Continue)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def ends_program(error: BaseException, frame: FrameType | None, *, passing: Set[tuple[str, int]]) -> bool:
    """Tell whether nobody will catch ``error``, as far as the source tells for certain.

    Args:
        error: What the thread is handling.
        frame: The innermost one of that thread.
        passing: File and line of objects of ``with`` that are known to let exceptions pass.
    """
    # It is handled in the outermost function that it has reached.
    while frame is not None and (error.__traceback__ is None or frame is not error.__traceback__.tb_frame):
        frame = frame.f_back
    is_first = True
    while frame is not None and frame.f_code.co_filename not in _OUTERMOST:
        code = frame.f_code
        found = _blocks(code.co_filename, code.co_name, code.co_firstlineno, frame.f_lineno or 0)
        lets_pass = {"finally"} | {f"with {line}" for file, line in passing if file == code.co_filename}
        if found is None or code.co_name == "__del__" or not set(found) <= lets_pass:
            return False
        if is_first and "finally" not in found:
            return False
        is_first, frame = False, frame.f_back
    return frame is not None and not is_first


@lru_cache(maxsize=256)
def _blocks(file: str, name: str, first_line: int, line: int) -> tuple[str, ...] | None:
    """Return in which blocks a line of a function lies that matter to an exception; ``None`` if that is not known.

    ``finally``, ``with LINE`` for each object of a ``with``, or ``catches``.
    """
    if name in _WITHOUT_BLOCKS:
        return ()
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None
    is_in, blocks = ("<module>", 1), list[str]()
    for node, kinds in _path(tree.body, line):
        if isinstance(node, _FUNCTIONS):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            is_in, blocks = (node.name, first), []
        blocks += kinds
    return tuple(blocks) if tree.body and is_in == (name, first_line if name != "<module>" else 1) else None


def _path(statements: Sequence[ast.stmt], line: int) -> Iterator[tuple[ast.stmt, list[str]]]:
    """Yield the statements that hold ``line``, outermost first, each with what its part does to an exception there."""
    node = next((each for each in statements if _first_line(each) <= line <= (each.end_lineno or 0)), None)
    if node is None:
        return
    for kinds, part in _parts(node):
        if part and _first_line(part[0]) <= line <= (part[-1].end_lineno or 0):
            yield node, kinds
            yield from _path(part, line)
            return
    # At its head: with ``with``, an object of its may be leaving just now.
    yield node, ["catches"] if isinstance(node, ast.With | ast.AsyncWith) else []


def _parts(node: ast.stmt) -> Iterator[tuple[list[str], Sequence[ast.stmt]]]:
    if isinstance(node, ast.Try | ast.TryStar):
        drops = any(isinstance(each, _LEAVES) for last in node.finalbody for each in ast.walk(last))
        at_last = ["catches"] if drops else []
        yield ["catches"] if node.handlers else at_last, node.body
        for handler in node.handlers:
            yield ["catches"], handler.body
        yield at_last, node.orelse
        yield [*at_last, "finally"], node.finalbody
    elif isinstance(node, ast.With | ast.AsyncWith):
        yield [f"with {item.context_expr.lineno}" for item in node.items], node.body
    elif isinstance(node, ast.Match):
        for case in node.cases:
            yield [], case.body
    else:
        yield [], getattr(node, "body", [])
        yield [], getattr(node, "orelse", [])


def _first_line(node: ast.stmt) -> int:
    if isinstance(node, _FUNCTIONS):
        return min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return node.lineno
