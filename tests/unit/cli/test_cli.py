"""The command line itself: quick help, and one way to end."""

import subprocess
import sys

import click
import pytest

from lockstep import cli
from lockstep.errors import ConfigurationError, Stopped


@pytest.fixture
def command(monkeypatch):
    """Make ``lockstep go`` call a function."""

    def install(action):
        module = type(sys)("lockstep_test_commands")
        module.go = click.command("go")(action)
        monkeypatch.setitem(sys.modules, "lockstep_test_commands", module)
        monkeypatch.setitem(cli.COMMANDS, "go", ("lockstep_test_commands:go", "Go."))

    return install


def raising(error):
    def action():
        raise error

    return action


@pytest.mark.parametrize(
    ("action", "code", "text"),
    [
        (lambda: None, 0, ""),
        (raising(ConfigurationError("The cause.\nWhat to do.")), 2, "lockstep: The cause.\nWhat to do.\n"),
        (raising(Stopped("Stopped by SIGTERM; no rank is left.", signal=15)), 143, None),
        # On a line of its own: the terminal has just shown ^C.
        (raising(KeyboardInterrupt()), 130, "\nlockstep: stopped by Ctrl-C\n"),
        (raising(click.Abort()), 130, "lockstep: stopped by Ctrl-C\n"),
        (raising(click.ClickException("No.")), 1, "Error: No.\n"),
    ],
)
def test_how_commands_end(command, capsys, action, code, text):
    command(action)
    assert cli.main(["go"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert text is None or err == text


def test_wrong_usage_has_an_exit_code_of_its_own(capsys):
    assert cli.main(["nonsense"]) == 2
    assert "No such command 'nonsense'" in capsys.readouterr().err
    assert cli.main(["run", "--nonsense", "x.py"]) == 2
    assert capsys.readouterr().err.endswith(
        "\n\nError: unrecognized arguments: --nonsense\nTry 'lockstep run --help'.\n"
    )


def test_a_bug_is_not_hidden(command):
    command(raising(ZeroDivisionError("bug")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["go"])


def test_help_lists_every_command_without_importing_torch():
    program = (
        "import sys\n"
        "from lockstep.cli import main\n"
        "code = main(['--help'])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    for name, (_, line) in cli.COMMANDS.items():
        assert any(row.split(maxsplit=1) == [name, line] for row in done.stdout.splitlines())


def test_run_help_teaches(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["run", "--help"])
    assert left.value.code == 0
    assert "lockstep run train.py --devices 4 --lr 0.1" in capsys.readouterr().out


def test_the_examples_can_be_copied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["examples"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (digits,) = [line for line in lines if line.startswith("examples/digits.py  ")]
    assert digits.endswith(
        "A small convolutional network on scikit-learn's handwritten digits: over 98% right in a few seconds on a CPU."
    )
    assert lines[-1] == 'What they need besides Lockstep: pip install "lockstep-torch[examples,integrations,ray]"'
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert {line.partition(" ")[0] for line in lines[:-1]} | {"examples/cluster/jobset.yaml"} <= files
    assert [name for name in files if "__pycache__" in name] == []
    assert cli.main(["examples"]) == 2
    assert capsys.readouterr() == (
        "",
        "lockstep: examples already exists.\nName another folder: lockstep examples FOLDER\n",
    )
    assert cli.main(["examples", "mine/others"]) == 0
    assert (tmp_path / "mine" / "others" / "gpt.py").is_file()
