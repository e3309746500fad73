"""The command ``lockstep``: finds the subcommand, and ends every error the same way."""

import atexit
import difflib
import errno
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any, cast

import click

from lockstep import __version__
from lockstep.base.activity import goes_on
from lockstep.base.env import open_closed_streams
from lockstep.errors import EXIT_CODE, HANG_EXIT_CODE, ConfigurationError, JobHangs, LockstepError, Stopped

# torch reads this when it is imported, and has no filter for single messages. Each rank would print a warning for each
# connection, such as a retry or a host without a name. Errors and Python warnings are still shown.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# What shells return for a command that Ctrl-C ended: 128 and the number of SIGINT.
INTERRUPTED = 130

# What click and torchrun return for wrong usage. A ConfigurationError returns it, too, so that CI can distinguish it
# from a failure.
USAGE = 2

# Errors of the operating system for which a traceback does not help, and what to do.
_REMEDIES = {
    errno.EPIPE: "",
    errno.ENOSPC: "Look at `df` and `df /dev/shm`; make room, or write to another disk.",
    errno.EDQUOT: "Make room within your quota, or write to another disk.",
    errno.EROFS: "Name a file or folder that can be written.",
    errno.EMFILE: "Raise the limit with `ulimit -n 65536`, or use fewer loader processes (--workers).",
}

# Where each command lives, and its line in ``lockstep --help``: so that the help imports none of them.
COMMANDS = {
    "run": ("lockstep.cli.run:run", "Start a script on every device, as torchrun does."),
    "train": ("lockstep.cli.train:train", "Train the task of a file on one device or many."),
    "evaluate": ("lockstep.cli.train:evaluate", "Evaluate the weights of a checkpoint on a task's evaluation data."),
    "compare": ("lockstep.cli.studies:compare", "Compare one device, both engines and torch's own on a task."),
    "tune": ("lockstep.cli.studies:tune", "Find settings that train a task faster, and write them to a file."),
    "predict": ("lockstep.cli.studies:predict", "Is it faster on several machines here, and with what?"),
    "verify": ("lockstep.cli.studies:verify", "Is it the same run on N devices as on one? If not, why?"),
    "doctor": ("lockstep.cli.studies:doctor", "Find what can hang, corrupt or slow training here, with fixes."),
    "report": ("lockstep.cli.studies:report", "A page on a recorded run: where time went, what to change."),
    "rehearse": ("lockstep.cli.studies:rehearse", "Break a job on purpose, on the CPU, and see what is detected."),
    "examples": ("lockstep.cli.examples:examples", "Copy the examples into a folder, and list them."),
}


def command(
    before: str = "", cls: type[click.Command] = click.Command, **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of a function, as `click.command` does; the examples of its docstring follow the flags.

    Args:
        before: Paragraphs before the examples.
        cls: Of the command.
        settings: Of click's context.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        text, heading, examples = inspect.cleandoc(function.__doc__ or "").partition("\n\nExamples:\n")
        paragraphs = [*before.split("\n\n"), f"{heading.strip()}\n{examples.replace('``', '')}"]
        # click does not wrap a paragraph that begins with a backspace.
        epilog = "\n\n".join(f"\b\n{paragraph}" for paragraph in "\n\n".join(paragraphs).split("\n\n") if paragraph)
        context = {"max_content_width": 110, **settings}
        text = text or COMMANDS[function.__name__][1]  # with PYTHONOPTIMIZE=2 there are no docstrings
        return click.command(cls=cls, context_settings=context, help=text, epilog=epilog)(function)

    return decorate


class LazyGroup(click.Group):
    """Imports a command only when it is used, because the imports of each are slow."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in COMMANDS:
            near = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            ctx.fail(f"No such command '{cmd_name}'." + "".join(f" Did you mean {name}?" for name in near))
        return cast(click.Command, resolve_name(COMMANDS[cmd_name][0]))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lockstep")
def group() -> None:
    """Data-parallel training for PyTorch: the same run on any number of devices.

    Each command explains itself: lockstep run --help
    """


def _end_at_once(code: int) -> None:
    """Exit without ending the threads of `in_time`: an end within C++ code would abort the process."""
    if goes_on():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _explain_flag(error: click.NoSuchOption) -> click.UsageError:
    """Return the error about an unknown flag, with the flag of the command that was probably meant."""
    from lockstep.train.settings import suggest  # not for a help without an error

    parameters = error.ctx.command.params if error.ctx is not None else []
    flags = {flag.strip("-").replace("-", "_"): flag for parameter in parameters for flag in parameter.opts}
    # Click's own suggestions go by spelling alone.
    hint = suggest(error.option_name, flags)
    return click.UsageError(f"No such option '{error.option_name}'. {hint}".rstrip(), error.ctx)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0, 75 for a run that was stopped and has saved, 83 for a hang, 2 for wrong usage (a `ConfigurationError` too), 130
    for Ctrl-C, else 1.
    """
    open_closed_streams()
    try:
        # Not click's standalone mode: it would end the process, and in its own way for each error.
        code = group.main(args=args, prog_name="lockstep", standalone_mode=False)
        code = code if isinstance(code, int) else 0
        if goes_on():
            atexit.register(_end_at_once, code)
        return code
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            error = _explain_flag(error)
        error.show()
        return error.exit_code
    except LockstepError as error:
        click.echo(f"lockstep: {error}", err=True)
        if isinstance(error, Stopped):
            return error.exit_code
        if isinstance(error, ConfigurationError):
            return USAGE
        return HANG_EXIT_CODE if isinstance(error, JobHangs) else EXIT_CODE
    except (KeyboardInterrupt, click.Abort):
        click.echo("lockstep: stopped by Ctrl-C", err=True)
        return INTERRUPTED
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        if error.filename is None:
            # A write to a stream failed: its reader has ended, as `head` does, or its disk is full. Without this,
            # Python would report the error again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            place = "" if error.filename is None else f": {error.filename}"
            click.echo(f"lockstep: {error.strerror}{place}.\n{_REMEDIES[error.errno]}", err=True)
        return EXIT_CODE
