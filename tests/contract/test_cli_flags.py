"""The commands and their flags: scripts depend on them, so they change only on purpose."""

import difflib
import inspect
from pathlib import Path

import click
import pytest
from torch.distributed.run import get_args_parser

import lockstep
from lockstep.cli import group
from lockstep.launcher.command import build_parser
from lockstep.train.settings import Settings

FROZEN = Path(__file__).parent / "cli_flags.txt"
HOW_TO_UPDATE = (
    "The command line differs from tests/contract/cli_flags.txt.\n"
    "If that is meant: .venv/bin/python -m tests.contract.test_cli_flags > tests/contract/cli_flags.txt, "
    "and name the change in CHANGELOG.md."
)


def flags(command: click.Command, name: str, parent: click.Context | None = None) -> list[str]:
    """One line a parameter, "command flag/flag", for a command and the commands under it."""
    context = click.Context(command, parent=parent, **command.context_settings)
    command._help_option = None  # click keeps it as the first caller had it, such as a test without the group above
    found = []
    for parameter in command.get_params(context):
        spelled = "/".join([*parameter.opts, *parameter.secondary_opts])
        is_argument = isinstance(parameter, click.Argument)
        found.append(f"{name} {parameter.human_readable_name if is_argument else spelled}")
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found += flags(command.get_command(context, child), f"{name} {child}", context)
    return found


def difference(frozen: list[str], current: list[str]) -> list[str]:
    """What was removed ("-") and added ("+"), in words that a failing test can print."""
    changes = difflib.unified_diff(frozen, current, lineterm="", n=0)
    return [line for line in changes if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def run_flags() -> list[str]:
    """The flags that `lockstep run` adds to torchrun's, whose own come from the installed torch."""
    torchruns = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    ours = [[flag for flag in action.option_strings if flag not in torchruns] for action in build_parser()._actions]
    return [f"lockstep run {'/'.join(spelled)}" for spelled in ours if spelled]


def current_flags() -> list[str]:
    return flags(group, "lockstep") + run_flags()


def test_flags_are_frozen():
    changes = difference(FROZEN.read_text().splitlines(), current_flags())
    if changes:
        pytest.fail("\n".join([HOW_TO_UPDATE, *changes]), pytrace=False)


# Flags that are a file of the command, or a field of the function's ``settings`` (of `tune`: ``start``).
FILES, SETTINGS = {"json", "html", "out", "set", "settings", "trace", "help"}, {*Settings.__dataclass_fields__}


@pytest.mark.parametrize("name", ["compare", "evaluate", "report", "tune", "verify"])
def test_a_flag_has_the_name_of_the_functions_parameter(name):
    spelled = {line.split(" --")[1].partition("/")[0] for line in current_flags() if f"lockstep {name} --" in line}
    parameters = set(inspect.signature(getattr(lockstep, name)).parameters)
    # verify --strategy selects a check that is no public function; --minutes and --allow-writes are for scripts.
    others = FILES | ({"strategy", "minutes", "allow_writes"} if name == "verify" else set())
    others |= SETTINGS if parameters & {"settings", "start"} else set()
    assert {flag.replace("-", "_") for flag in spelled} - others - parameters == set()


def test_flags_walks_groups_options_and_arguments():
    @click.group()
    def tool():
        pass

    @tool.command()
    @click.argument("script")
    @click.option("-n", "--devices")
    @click.option("--html/--no-html")
    def go(script, devices, html):
        pass

    assert flags(tool, "tool") == [
        "tool --help",
        "tool go SCRIPT",
        "tool go -n/--devices",
        "tool go --html/--no-html",
        "tool go --help",
    ]


def test_difference_names_what_went_and_what_came():
    assert difference(["a --x", "a --y"], ["a --x", "a --z"]) == ["-a --y", "+a --z"]
    assert difference(["a --x"], ["a --x"]) == []


if __name__ == "__main__":
    print(*current_flags(), sep="\n")
