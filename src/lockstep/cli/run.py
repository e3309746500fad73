"""``lockstep run``: hand the arguments to the launcher."""

import os
import signal

import click

from lockstep.base.record_files import hide_secrets
from lockstep.launcher import fork_server


@click.command(
    # The launcher parses: its flags are those of the installed torchrun.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@fork_server.signal_handlers((signal.SIGINT,), fork_server.end_early)
def run(args: tuple[str, ...]) -> None:
    """Start a script on every device, as torchrun does."""
    fork_server.start()
    if "--no-python" not in args:
        fork_server.preload("lockstep.comm.world", "lockstep.parallel.ddp.wrapper")
    from lockstep.launcher import command

    os.environ.setdefault("LOCKSTEP_COMMAND", hide_secrets(["lockstep", "run", *args]))  # for the record of the run
    command.run(args)
