"""A task with parameters, and what is found out about its file before torch is imported."""

import json
import pickle
import subprocess
import sys
import time

import pytest

import lockstep
from lockstep.cli import main
from lockstep.errors import ConfigurationError
from lockstep.train.task import load_task
from lockstep.train.task_file import TaskSpec, find_task, is_script

HEAD = """\
import lockstep
from typing import Literal

def make(**given):
    return lockstep.Task(model=int, dataset=int, loss=int, optimizer=int, global_batch_size=8)

def task(lr: float, dim=128, *, flag: bool = False, name: "str | None" = None, mode: Literal["a", "b"] = "a", x=(1,)):
    assert type(lr) is float and type(dim) is int and type(flag) is bool
    return make()
"""
TAKES = (
    "It takes lr: float, dim=128, flag: bool = False, name: str | None = None, mode: Literal['a', 'b'] = 'a', x=(1,)."
)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = tmp_path / "mine.py"
    found.write_text(HEAD)
    return found


def spec(path, **parameters):
    made = TaskSpec(path)
    made.parameters = parameters
    return made


def message(function, *args):
    with pytest.raises(ConfigurationError) as error:
        function(*args)
    return str(error.value)


def test_values_are_read_by_annotation_or_default(path):
    found = load_task(pickle.loads(pickle.dumps(spec(path, lr="1e-4", flag="true", name="none", mode="b", dim="64"))))
    assert found.parameters == {"lr": 1e-4, "dim": 64, "flag": True, "name": None, "mode": "b"}
    assert list(found.parameters) == ["lr", "dim", "flag", "name", "mode"], "as declared"
    assert load_task(spec(path, lr="1", name="None7")).parameters["name"] == "None7"


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"lr": "fast"}, f": --set lr=fast is not allowed.\n{TAKES}"),
        ({"lr": "1", "dim": "1.5"}, f": --set dim=1.5 is not allowed.\n{TAKES}"),
        ({"lr": "1", "flag": "2"}, f": --set flag=2 is not allowed.\n{TAKES}"),
        ({"lr": "1", "mode": "c"}, f": --set mode=c is not allowed.\n{TAKES}"),
        ({"lr": "1", "x": "1"}, f": --set x=1 is not allowed.\n{TAKES}"),
        ({"lr": "1", "dimm": "1"}, f" has no parameter 'dimm'.\nDid you mean dim? {TAKES}"),
        ({}, f" needs a value of lr.\nGive --set lr=VALUE. {TAKES}"),
    ],
)
def test_what_is_wrong_lists_the_parameters(path, parameters, text):
    assert message(load_task, spec(path, **parameters)) == f"{path}: task{text}"


def test_a_task_without_parameters(path):
    path.write_text(HEAD + "one = make()\ndef two(): return make()\n")
    for name in ("one", "two"):
        assert message(load_task, spec(f"{path}:{name}", lr="1")) == (
            f"{path}: {name} has no parameters, so --set lr has no effect.\n"
            "Make it a function with parameters that returns the task, such as def task(lr=0.1)."
        )
        assert load_task(f"{path}:{name}").parameters == {}


def test_a_script_is_not_run_to_find_that_it_has_no_task(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def main():\n    task = 3\nraise SystemError\n")
    assert message(find_task, str(script)) == (
        f"{script} has no 'task'.\nDefine one: task = lockstep.Task(...). A script is run by: lockstep run {script}"
    )
    script.write_text("small = lockstep.Task(model=3)\n")
    assert message(find_task, str(script)) == f"{script} has no 'task'.\nName what it has: {script}:small"
    for text in (
        "from other import *", "globals()['task'] = 3", "import x.y as task", "if True:\n  def task(): pass",
        "def f():\n    global task\n    task = 3", "for task in x: pass", "task = (",
    ):  # fmt: skip
        script.write_text(text + "\n")
        assert find_task(f"{script}") == (script, "task")


SMALL = """\
import lockstep, torch
from tests.training import make_task

def task(lr: float = 0.1, momentum=0.5):
    return make_task(optimizer=lambda params: torch.optim.SGD(params, lr=lr, momentum=momentum))
"""


def test_they_are_shown_kept_and_recorded(path, capfd):
    path.write_text(SMALL)
    folder = path.parent / "run"

    def train(*flags):
        how = "--strategy", "single", "--view", "none", "--checkpoint", str(folder), "--run-dir", str(folder / "record")
        assert main(["train", str(path), *how, *flags]) == 0
        return capfd.readouterr().out.splitlines()

    assert train("--steps", "2", "--set", "lr=0.2", "momentum=0.25")[0].startswith(
        "mine (lr=0.2, momentum=0.25): strategy single on 1 CPU"
    )
    lines = train("--steps", "4", "--set", "lr=0.4", "--set", "momentum=0.25")
    assert (
        "resumed after step 2 of 4; changed: lr from 0.2 to 0.4, steps from 2 to 4, learning rate from 0.2 to 0.4"
        in lines
    )
    (record,) = (folder / "record").rglob("run.json")
    sessions = json.loads(record.read_text())["sessions"]
    assert [each["parameters"]["lr"] for each in sessions] == [0.2, 0.4]


def test_fit_says_to_call_a_function():
    assert (
        message(lockstep.fit, lambda lr: None) == "fit got a function, not a lockstep.Task.\nCall it: fit(task(...))."
    )
    assert message(lockstep.fit, "gpt.py") == "fit got a str, not a lockstep.Task.\nPass the task."


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("train", "no.py"), "no.py does not exist."),
        (("verify", "no.py"), "no.py does not exist."),
        (("train", "script.py"), "script.py has no 'task'."),
        (("train", "mine.py", "--settings", "no.toml"), "no.toml cannot be read: No such file or directory."),
        (("train", "mine.py", "lr=3"), "Got unexpected extra argument (lr=3). Give --set NAME=VALUE."),
        (("train", "mine.py", "--set", "lr=3", "dim"), "Got unexpected extra argument (dim). Give --set NAME=VALUE."),
    ],
)
def test_a_wrong_command_is_answered_without_torch(path, args, text):
    (path.parent / "script.py").write_text("print('ran')\n")
    code = (
        "import sys\nfrom lockstep.cli import main\n"
        f"code = main({args!r})\nprint('torch' in sys.modules, code, file=sys.stdout)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=path.parent, capture_output=True, text=True)
    assert text in done.stderr
    assert done.stdout == "False 2\n"
    assert time.monotonic() - started < 10  # it takes 0.3 s where nothing else runs


@pytest.mark.parametrize(
    "text",
    [
        "import lockstep\ntask = lockstep.Task(model=int)",
        "import lockstep as ls\nmine = ls.Task(model=int)",
        "import lockstep.data\nif True:\n    task = lockstep.Task()",
        "from lockstep import Task\ndef make(lr=0.1):\n    return Task(model=int)",
        "from lockstep import Task as T, fit\ntask = T(model=int)",
        "from lockstep import *\ntask = Task(model=int)",
        "import lockstep\nclass Digits(lockstep.Task):\n    pass\ntask = Digits()",
        "from elsewhere import make\ndef task(lr=0.1):\n    return make(lr)",
        "from mytasks import task",
        "from mytasks import digits as task",
        "from lockstep import Task, fit\ntask = Task(model=int)\nfit(task)",
        "def broken(:",
        "pattern = '\0'",
    ],
)
def test_a_file_with_a_task_is_not_a_script(tmp_path, text):
    (tmp_path / "mine.py").write_text(text)
    assert not is_script(str(tmp_path / "mine.py"))


@pytest.mark.parametrize(
    "text",
    [
        "from pkg.task import ClassificationTask\nwork = ClassificationTask(1)",
        "from pkg.task import ClassificationTask as CT\nwork = CT(1)",
        "import importlib\ntk = importlib.import_module('pkg.task')\nCT = tk.ClassificationTask\nwork = CT(1)",
        "from pkg import task as tk\nwork = tk.Task(1)",
        "from pkg import Task\ntask = Task(1)",
        "parser.add_argument('--task')\nargs = parser.parse_args()\ntask = args.task",
        "import lockstep\nworld = lockstep.init()  # not lockstep.Task(...)",
        "from lockstep import fit\ndef train():\n    from mine import task\n    def task(): pass",
        "import lockstep\nlockstep.fit(lockstep.Task(model=int))",
        "import lockstep\nfrom mytasks import task\nlockstep.fit(task)",
        "from lockstep import Task, fit\ndef main():\n    task = Task(model=int)\n    fit(task)",
        "task = 'cola'\nprint(task)",
        "t = Task()",
        "print('\\d')",
        "",
    ],
)
def test_a_script_may_have_tasks_of_other_kinds(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    assert is_script(str(tmp_path / "train.py"))


def test_what_is_no_file_is_no_script(tmp_path):
    assert not is_script(str(tmp_path))
    assert not is_script(str(tmp_path / "none.py"))
    assert not is_script(f"{tmp_path}/train.py:other")
