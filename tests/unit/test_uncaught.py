"""Whether an exception that a ``finally`` holds up will end the program: read from the source, and only if certain."""

import contextlib
import importlib.util
import sys

import pytest

from lockstep.telemetry import uncaught

SOURCE = """\
from contextlib import contextmanager, suppress

class Known:
    def __enter__(self): return self
    def __exit__(self, *_): return None

class Slow(Known):
    def __exit__(self, *_): look()

def plain():
    try:
        1 / 0
    finally:
        look()

def nested():
    try:
        try:
            plain()
        finally:
            pass
    finally:
        pass

def after_else():
    try:
        pass
    except ValueError:
        pass
    else:
        if True:
            plain()

def decorated():
    @contextmanager
    def unused():
        yield
    def inner(): return [plain() for _ in range(1)]
    return (lambda: inner())()

def generator():
    def numbers():
        try:
            yield 1
            raise KeyError
        finally:
            look()
    list(numbers())

def known():
    with Known() as a:  # known
        plain()

def partly_known():
    with Known() as a, \\
            suppress(KeyError):
        plain()

def suppressed():
    with suppress(ZeroDivisionError):
        plain()

def caught():
    try:
        plain()
    except KeyError:
        pass

def handled():
    try:
        1 / 0
    except ZeroDivisionError:
        look()
        raise

def in_except():
    try:
        1 / 0
    except ZeroDivisionError:
        try:
            pass
        finally:
            look()
        raise

def dropped():
    try:
        plain()
    finally:
        return

def dropped_here():
    for _ in range(1):
        try:
            1 / 0
        finally:
            look()
            break

def leaves_with():
    with Slow():
        1 / 0

def __del__():
    plain()
"""
CERTAIN = ["plain", "nested", "after_else", "decorated", "generator", "known"]
UNCERTAIN = ["partly_known", "suppressed", "caught", "handled", "in_except", "dropped", "dropped_here", "leaves_with"]


@pytest.mark.parametrize("name", [*CERTAIN, *UNCERTAIN, "__del__"])
def test_certain_or_not(tmp_path, monkeypatch, name):
    path = tmp_path / "planted.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("planted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(uncaught, "_OUTERMOST", (__file__,))  # stands for the bootstrap
    uncaught._blocks.cache_clear()
    found, lines = [], SOURCE.splitlines()
    passing = {(str(path), number) for number, line in enumerate(lines, 1) if line.startswith("    with Known()")}

    def look():
        found.append(uncaught.ends_program(sys.exc_info()[1], sys._getframe(), passing=passing))

    module.look = look
    with contextlib.suppress(ZeroDivisionError, KeyError):
        getattr(module, name)()
    assert found == [name in CERTAIN]


def test_without_source_nothing_is_certain(monkeypatch):
    monkeypatch.setattr(uncaught, "_OUTERMOST", (__file__,))
    found = []
    names = {"look": lambda: found.append(uncaught.ends_program(sys.exc_info()[1], sys._getframe(), passing=set()))}
    with pytest.raises(ZeroDivisionError):
        exec("def f():\n    try:\n        1 / 0\n    finally:\n        look()\nf()", names)
    assert found == [False]
