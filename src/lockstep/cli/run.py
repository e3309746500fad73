"""``lockstep run``: hand the arguments to the launcher; and the flags about what ranks write."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from lockstep.launcher.output import LEVELS, LogSettings
from lockstep.run_folder import hide_secrets

F = TypeVar("F", bound=Callable[..., Any])

_LOG_OPTIONS = (
    click.option(
        "--logs",
        type=click.Choice(("merged", "raw")),
        default="merged",
        show_default=True,
        help="Show one stream of what ranks write, with the rank before what differs, or let all write themselves.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(tuple(LEVELS)),
        default="info",
        show_default=True,
        help="Show all that ranks write, only what they write to standard error, or none of it but reports.",
    ),
    click.option("--log-dir", metavar="DIR", help="Folder for a file rank-N.log of all that each rank writes."),
)


def log_options(function: F) -> F:
    """Give a command these flags; `take_logs` takes their values."""
    for option in reversed(_LOG_OPTIONS):
        function = option(function)
    return function


def take_logs(values: dict[str, Any]) -> LogSettings:
    """Remove the flags from ``values``, and return what they stand for.

    Raises:
        ConfigurationError: They do not go together.
    """
    logs = LogSettings(
        folder=values.pop("log_dir"), level=values.pop("log_level"), merges=values.pop("logs") == "merged"
    )
    if not logs.merges:
        logs.refuse_with("--logs raw")
    return logs


@click.command(
    # The launcher parses: its flags are those of the installed torchrun.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(args: tuple[str, ...]) -> None:
    """Start a script on every device, as torchrun does."""
    from lockstep.launcher.cli import UsageError

    os.environ.setdefault("LOCKSTEP_COMMAND", hide_secrets(["lockstep", "run", *args]))  # for the record of the run
    try:
        start(args)
    except UsageError as error:
        raise click.UsageError(f"{error}\nTry 'lockstep run --help'.") from None


def start(args: Sequence[str]) -> None:
    """Start a script as after ``lockstep run``; see `lockstep.launcher.cli.run`."""
    from lockstep.launcher import cli

    # The ranks load these by name: the launcher stands below both.
    cli.run(args, adopt="lockstep.adoption:adopt", attach="lockstep.observe.monitor:attach")
