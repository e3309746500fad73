"""``lockstep run``: start a script on every device, as torchrun does."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, determine_local_world_size

from lockstep.errors import ConfigurationError
from lockstep.launcher.arguments import parse
from lockstep.launcher.devices import choose_num_ranks, num_cores, threads_for
from lockstep.launcher.guard import Guard
from lockstep.launcher.log_options import level_of, make_streams
from lockstep.launcher.recorded import recorded
from lockstep.launcher.rendezvous import await_host, choose_meeting_place, max_nodes, prepare_for_others
from lockstep.launcher.response import watch_of
from lockstep.launcher.streams import Streams
from lockstep.launcher.supervise import Program, supervise
from lockstep.launcher.surroundings import environment_restored


def run(argv: Sequence[str]) -> None:
    """Start what ``argv`` says, as after ``lockstep run``, and wait for its end.

    Blocks as long as the ranks run. All checks come before the first process is started.

    Raises:
        UsageError: The arguments make no sense.
        ConfigurationError: The script, the devices or the port are not there.
        JobHangs: Ranks waited for each other for too long.
        RankFailed: A rank failed; the message has the first one's traceback.
        LockstepError: The machines of the job did not come together.
        Stopped: This process was told to end, and has ended the ranks.
    """
    args = parse(argv)
    was_chosen = args.nproc_per_node is not None
    num_ranks = _num_ranks(args)
    args.nproc_per_node = str(num_ranks)
    program = _program(args)
    choose_meeting_place(args)
    with (
        environment_restored(),
        recorded(args),
        Guard() as guard,
        _streams(args, guard, num_ranks) as streams,
    ):
        _say_what_was_chosen(args, num_ranks, was_chosen)
        if args.redirects == args.tee == "0":
            # elastic's error files need a place; logs that the user asked torchrun for must outlive us.
            args.log_dir = str(guard.run_dir / "elastic")
        config, python = _config(args)
        await_host(args)
        watch = watch_of(args.watchdog, args.watchdog_action)
        python = sys.executable if args.no_python else python
        supervise(config, replace(program, streams=streams), guard, python=python, watch=watch)


def _streams(args: argparse.Namespace, guard: Guard, num_ranks: int) -> AbstractContextManager[Streams | None]:
    return make_streams(args, guard.run_dir, num_ranks) or nullcontext()


def _num_ranks(args: argparse.Namespace) -> int:
    try:
        return int(determine_local_world_size(str(choose_num_ranks(args.nproc_per_node))))
    except ConfigurationError:
        raise
    except (ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"--devices {args.nproc_per_node}: {str(error).rstrip('.')}.\nPass a number, 'gpu', 'cpu' or 'auto'."
        ) from None


def _program(args: argparse.Namespace) -> Program:
    mode = "command" if args.no_python else "module" if args.module else "script"
    if args.no_python and args.module:
        raise ConfigurationError("--no-python and --module exclude each other.\nLeave one of them out.")
    # Our bootstrap does what --run-path is for: the script runs in the interpreter that was started.
    args.run_path = False
    if args.min_devices is not None and (args.min_devices < 1 or max_nodes(args) > 1):
        raise ConfigurationError(
            f"--min-devices {args.min_devices} cannot be had: it is at least 1, and for a job on one machine only.\n"
            "For machines that may be lost, pass a range such as --nnodes 1:4."
        )
    target = args.training_script
    {"command": _check_command, "module": _check_module, "script": _check_script}[mode](target)
    return Program(mode, target, args.training_script_args, args.adopt, min_ranks=args.min_devices)


def _check_script(path: str) -> None:
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "__main__.py")):
        raise ConfigurationError(f"{path} is a folder without a __main__.py.\nName the script in it to start.")
    if os.path.exists(path):
        return
    folder, name = os.path.split(path)
    there = [entry.name for entry in Path(folder or ".").glob("*.py")] if os.path.isdir(folder or ".") else []
    close = difflib.get_close_matches(name, there, n=1)
    hint = (
        f"Did you mean {os.path.join(folder, close[0])}?" if close else "Check the path; with -m it is a module's name."
    )
    raise ConfigurationError(f"There is no script {path} (looked in {os.getcwd()}).\n{hint}")


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    if top not in sys.builtin_module_names and PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
        raise ConfigurationError(
            f"There is no module {top} (looked in {os.getcwd()} and the installed packages).\n"
            "Check the name, or leave -m out to start a file."
        )


def _check_command(name: str) -> None:
    if shutil.which(name) is None:
        raise ConfigurationError(
            f"There is no executable {name}.\nCheck the name and its permissions, or leave --no-python out."
        )


def _say_what_was_chosen(args: argparse.Namespace, num_ranks: int, was_chosen: bool) -> None:
    notes = []
    if not was_chosen:
        notes.append(f"{num_ranks} ranks, one per device; choose with --devices")
    if num_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = threads_for(num_ranks)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        notes.append(
            f"OMP_NUM_THREADS={threads}, as {num_ranks} ranks share {num_cores()} cores; set it to change that"
        )
    if any(arg.partition("=")[0] == "--devices" for arg in args.training_script_args) and not was_chosen:
        notes.append("--devices behind other arguments goes to the script; put it before or directly behind the script")
    notes += prepare_for_others(args)
    for note in notes if level_of(args) != "error" else ():
        print(f"lockstep: {note}", file=sys.stderr, flush=True)


def _config(args: argparse.Namespace) -> tuple[LaunchConfig, str]:
    try:
        config, python, _ = config_from_args(args)
    except (ValueError, AssertionError, RuntimeError, NotADirectoryError) as error:
        raise ConfigurationError(f"torchrun's options do not fit together: {error}") from None
    assert isinstance(python, str)
    return config, python
