"""``lockstep run``: hand the arguments to the launcher."""

from __future__ import annotations

import os
import shlex

import click


@click.command(
    # The launcher parses: its flags are those of the installed torchrun.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(args: tuple[str, ...]) -> None:
    """Start a script on every device, as torchrun does."""
    from lockstep.launcher.arguments import UsageError
    from lockstep.launcher.run import run as launch_script

    os.environ.setdefault("LOCKSTEP_COMMAND", shlex.join(["lockstep", "run", *args]))  # for the record of the run
    try:
        launch_script(args)
    except UsageError as error:
        raise click.ClickException(f"{error}\nTry 'lockstep run --help'.") from None
