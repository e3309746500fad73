"""``lockstep run``: hand the arguments to the launcher; and the output flags of commands that start ranks."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import Any, TypeVar

import click

from lockstep.launcher.output import DEFAULT_MIB, LEVELS, LogSettings

# ``lockstep run``: hand the arguments to the launcher.


@click.command(
    # The launcher parses: its flags are those of the installed torchrun.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(args: tuple[str, ...]) -> None:
    """Start a script on every device, as torchrun does."""
    from lockstep.launcher.cli import UsageError
    from lockstep.launcher.cli import run as launch_script

    os.environ.setdefault("LOCKSTEP_COMMAND", shlex.join(["lockstep", "run", *args]))  # for the record of the run
    try:
        launch_script(args)
    except UsageError as error:
        raise click.ClickException(f"{error}\nTry 'lockstep run --help'.") from None


# The flags of commands that start ranks about what these write; `lockstep run` has the same in its own parser.

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--logs",
        type=click.Choice(("merged", "raw")),
        default="merged",
        show_default=True,
        help="Show one stream of what ranks say, with the rank before what differs, or let all write to the terminal.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(tuple(LEVELS)),
        default="info",
        show_default=True,
        help="Show all that ranks say, only what they write to standard error, or none of it but reports.",
    ),
    click.option("--log-dir", metavar="DIR", help="Folder for a file rank-N.log of all that each rank says."),
    click.option(
        "--log-json", metavar="FILE", help="File for every line as JSON: its time, rank, stream (stdout, stderr), text."
    ),
    click.option(
        "--log-size",
        type=click.FLOAT,
        default=DEFAULT_MIB,
        show_default=True,
        metavar="MIB",
        help="Bound of each of these files; at half of it one begins anew, with the half before beside it as FILE.1.",
    ),
)


def log_options(function: F) -> F:
    """Give a command these flags; `take_logs` takes their values."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def take_logs(values: dict[str, Any]) -> LogSettings:
    """Remove what the flags say from ``values``, and return it.

    Raises:
        ConfigurationError: They do not go together.
    """
    logs = LogSettings(
        folder=values.pop("log_dir"),
        json_file=values.pop("log_json"),
        size_mib=values.pop("log_size"),
        level=values.pop("log_level"),
        merges=values.pop("logs") == "merged",
    )
    if not logs.merges:
        logs.refuse("--logs raw")
    return logs
