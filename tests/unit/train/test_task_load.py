"""Finding the task in a file, and saying what is wrong with the file."""

import sys

import pytest

from lockstep.errors import ConfigurationError
from lockstep.train.task import load_task

HEAD = """\
import lockstep
from dataclasses import dataclass

@dataclass
class Fields:
    number: int = 3

def make(size=8):
    return lockstep.Task(model=int, dataset=int, loss=int, optimizer=int, global_batch_size=size)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(HEAD + text)
        return path

    return write


def message(spec):
    with pytest.raises(ConfigurationError) as error:
        load_task(str(spec))
    return str(error.value)


def test_the_attribute_may_be_a_task_or_a_function_and_another_can_be_named(write):
    path = write("task = make()\nother = make(16)\ndef third(): return make(32)\nnot_this = 3\n")
    assert load_task(str(path)).global_batch_size == 8
    assert load_task(f"{path}:other").global_batch_size == 16
    assert load_task(f"{path}:third").global_batch_size == 32
    assert message(f"{path}:not_this") == (
        f"{path}: not_this is a int, not a lockstep.Task.\nIt must be a Task, or a function that returns one."
    )
    assert message(f"{path}:fourth") == f"{path} has no 'fourth'.\nName what it has: {path}:task"


def test_a_file_without_a_task(write):
    path = write("")
    assert (
        message(path)
        == f"{path} has no 'task'.\nDefine one: task = lockstep.Task(...). A script is run by: lockstep run {path}"
    )


def test_the_file_finds_its_neighbours_and_hides_no_module_of_its_own_name(write):
    write("number = 12", name="neighbour.py")
    path = write("import neighbour, json\ntask = make(neighbour.number)\n", name="json.py")
    json = sys.modules["json"]
    assert load_task(str(path)).global_batch_size == 12
    assert sys.modules["json"] is json


def test_no_such_file(tmp_path):
    advice = "Name a Python file that has a lockstep.Task."
    assert message(tmp_path / "no.py") == f"{tmp_path}/no.py does not exist.\n{advice}"
    assert message(tmp_path) == f"{tmp_path} is a folder.\n{advice}"


@pytest.mark.parametrize(
    ("text", "line", "cause"),
    [
        (
            "task = make(\n  sise=3)",
            10,
            "TypeError: make() got an unexpected keyword argument 'sise'\n    task = make(",
        ),
        (
            "import nothing_of_the_kind\ntask = make()",
            10,
            "ModuleNotFoundError: No module named 'nothing_of_the_kind'\n    import nothing",
        ),
        ("def task(): return 1 / 0", 10, "ZeroDivisionError: division by zero\n    def task(): return 1 / 0"),
        (
            "import json\ntask = json.loads('{')",
            11,
            "JSONDecodeError: Expecting property name enclosed in",
        ),
        ("task = (", 10, "SyntaxError: '(' was never closed\n    task = ("),
        (
            "task = make(0)",
            9,
            "Task.global_batch_size is 0.\n"
            "    return lockstep.Task(model=int, dataset=int, loss=int, optimizer=int, global_batch_size=size)\n"
            "Give a whole number of at least 1.",
        ),
    ],
)
def test_a_broken_file_shows_its_own_line(write, text, line, cause):
    path = write(text)
    found = message(path).replace(". Did you mean 'size'?", "")  # Python 3.14 adds that
    assert found.startswith(f"{path}, line {line}: {cause}")
