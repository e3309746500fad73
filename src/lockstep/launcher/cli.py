"""``lockstep run``: torchrun's command line with some flags of ours, checked before the first process starts."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, determine_local_world_size, get_args_parser

from lockstep.errors import ConfigurationError
from lockstep.launcher.api import choose_num_ranks, num_cores, threads_for
from lockstep.launcher.node_rendezvous import await_host, choose_rendezvous, max_nodes, prepare_for_others
from lockstep.launcher.output import DEFAULT_MIB, LEVELS, LogSettings, LogTail
from lockstep.launcher.reaper import Reaper
from lockstep.launcher.supervise import Program, environment_restored, supervise, watchdog_policy
from lockstep.telemetry.run_record import RANK_FILES

# The flags of ``lockstep run`` about what ranks write, and what comes of them.


def add_log_options(group: argparse._ArgumentGroup) -> None:
    """Add the flags; torchrun's own ``--log-dir`` gets a meaning without ``--redirects`` and ``--tee``."""
    group.add_argument(
        "--logs",
        choices=("merged", "raw"),
        default="merged",
        help="merged: what other ranks say as rank 0 does is left out, what differs has the rank before it, and "
        "warnings come once; raw: all write to the terminal themselves (default: merged)",
    )
    group.add_argument(
        "--log-level",
        choices=tuple(LEVELS),
        default="info",
        help="what the terminal shows: all that ranks say, only what they write to standard error, or none of it but "
        "the launcher's reports (default: info)",
    )
    group.add_argument("--quiet", action="store_true", help="the same as --log-level error")
    group.add_argument(
        "--log-json",
        metavar="FILE",
        help="write every line as JSON: its time, rank, stream (stdout or stderr) and text",
    )
    group.add_argument(
        "--log-size",
        type=float,
        default=DEFAULT_MIB,
        metavar="MIB",
        help="bound of each file of --log-dir and --log-json: at half of it the file begins anew, with the half before "
        f"beside it as FILE.1 (default: {DEFAULT_MIB})",
    )


def log_level(args: argparse.Namespace) -> str:
    """Return what the terminal is to show."""
    return "error" if args.quiet else str(args.log_level)


def make_log_tail(args: argparse.Namespace, run_dir: Path, num_ranks: int) -> LogTail | None:
    """Return what reads the ranks' output; ``None`` where they write to the terminal themselves.

    Raises:
        ConfigurationError: The options do not go together, or files cannot be written.
    """
    is_torchruns = args.redirects != "0" or args.tee != "0"
    # Then every rank takes itself to be local rank 0, and they could not be told apart.
    is_virtual = bool(getattr(args, "virtual_local_rank", False))
    is_raw = is_torchruns or is_virtual or args.logs == "raw"
    logs = LogSettings(
        folder=None if is_torchruns else args.log_dir,
        json_file=args.log_json,
        size_mib=args.log_size,
        level=log_level(args),
        merges=not is_raw,
    )
    if is_raw:
        logs.refuse("--redirects and --tee" if is_torchruns else "--virtual-local-rank" if is_virtual else "--logs raw")
    return LogTail(run_dir, num_ranks, logs.level, logs.open_files()) if logs.are_read(num_ranks) else None


# The command line of ``lockstep run``: torchrun's own parser, with some flags of ours.

USAGE = "lockstep run [OPTIONS] SCRIPT [--devices N] [--adopt] [SCRIPT ARGUMENTS]"

DESCRIPTION = """\
Start SCRIPT once per device, as torchrun starts it: the same environment variables, the same flags.
If a rank fails, its traceback is shown first and the others are stopped; Ctrl-C stops all of them."""

EXAMPLES = """\
examples:
  all GPUs of this machine, or all CPU cores where there is none
      lockstep run train.py
  four ranks; what follows is for the script
      lockstep run train.py --devices 4 --lr 0.1
  a script written for torch's DistributedDataParallel, on Lockstep's engine
      lockstep run train.py --devices 4 --adopt
  where the time of its steps goes; then: lockstep report runs/first
      lockstep run --monitor runs/first --devices 4 train.py
  two machines with eight GPUs each; the same line on both, but for --node-rank 0 and 1
      lockstep run --nnodes 2 --node-rank 0 --master-addr host0 --master-port 29500 --devices 8 train.py
  what every rank says in a file of its own and in one for programs; the terminal shows errors only
      lockstep run --log-dir logs --log-json logs/all.jsonl --quiet train.py
  machines that may come and go, with restarts
      lockstep run --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint host0:29500 --max-restarts 3 train.py

--devices and --adopt stand before the script or directly behind it; all else behind it goes to the script."""

_SCRIPT = {
    "training_script": ("SCRIPT", "the program; a module with -m, any executable with --no-python"),
    "training_script_args": ("...", "what the script finds in sys.argv[1:]"),
}

_EXPLAINED = (
    *("help", "nproc_per_node", "adopt", "monitor", "watchdog", "watchdog_action", "module", "no_python"),
    *("min_devices", "logs", "log_level", "quiet", "log_json", "log_size"),
    *("max_restarts", "log_dir", "redirects", "tee"),
    *("nnodes", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id"),
)

_OURS = ("--devices", "--adopt")


class UsageError(Exception):
    """The arguments make no sense; the message is argparse's own."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; all flags but ours come from the installed torch, so they cannot drift apart."""
    torchrun = get_args_parser()
    torchrun._optionals.title = "torchrun's options"
    parser = _Parser(
        prog="lockstep run",
        usage=USAGE,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[torchrun],
        add_help=False,  # comes with the parent
    )
    ours = parser.add_argument_group("options")
    ours.add_argument(
        "--devices",
        dest="nproc_per_node",
        metavar="N",
        help="ranks on this machine: a number, or 'gpu', 'cpu' or 'auto' (default: every GPU, or every CPU core where "
        "there is none); the same as --nproc-per-node",
    )
    ours.add_argument(
        "--adopt",
        action="store_true",
        help="put Lockstep's engines and sampler where torch's names are, before the script runs",
    )
    ours.add_argument(
        "--monitor",
        metavar="[DIR]",
        help="record the training loop of a script that knows nothing of it, as far as that can be seen from outside, "
        "for `lockstep report DIR` (default: runs/ and the name of the script); before the script only",
    )
    ours.add_argument(
        "--watchdog",
        type=float,
        default=None,
        metavar="SECONDS",
        help="how long ranks may wait for one that does nothing before a report says who waits for whom (default: 60); "
        "0: they are not watched",
    )
    ours.add_argument(
        "--watchdog-action",
        choices=("end", "warn"),
        default=None,
        help="what follows the report: the job ends with exit code 83, or goes on (default: end); without --watchdog, "
        "ranks that wait for one that computes are only reported",
    )
    ours.add_argument(
        "--min-devices",
        type=int,
        metavar="N",
        help="with --max-restarts on one machine: after a rank was killed, go on with one fewer, but no fewer than N "
        "(default: as many as before)",
    )
    add_log_options(ours)
    # Ours first: they are what most people need.
    parser._action_groups.insert(0, parser._action_groups.pop())
    parser.epilog = f"{_tidy(parser)}\n\n{EXAMPLES}"
    for name in ("nproc_per_node", "master_port"):
        # So that what was chosen can be told from torch's defaults, which change from version to version.
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})
    return parser


def _tidy(parser: argparse.ArgumentParser) -> str:
    """Explain only the flags that most people need; returns a paragraph that names the rest."""
    others: list[str] = []
    for action in parser._actions:
        # They stay accepted; only the help gets shorter.
        action.option_strings = [flag for flag in action.option_strings if "_" not in flag]
        if action.dest in _SCRIPT:
            action.metavar, action.help = _SCRIPT[action.dest]
        elif action.option_strings and action.dest not in _EXPLAINED:
            others.append(action.option_strings[-1])
            action.help = argparse.SUPPRESS
        elif action.dest == "log_dir":
            action.metavar = "DIR"
            action.help = (
                "folder for a file rank-N.log of all that each rank says, bounded by --log-size; with --redirects or "
                "--tee for torchrun's own files"
            )
        elif action.nargs is None and action.metavar is None:
            action.metavar = "X"
    return textwrap.fill(
        f"also accepted, as `torchrun --help` explains: {', '.join(others)}", width=100, break_on_hyphens=False
    )


def parse_arguments(args: Sequence[str]) -> argparse.Namespace:
    """Parse what follows ``lockstep run``; ``nproc_per_node`` is ``None`` if nobody chose it.

    Raises:
        UsageError: The arguments make no sense.
    """
    parser = build_parser()
    given = _without_folder(args)
    try:
        found = parser.parse_args(args)
        took_script = found.monitor is not None and _is_script(found.monitor)
    except UsageError:
        if given is args:
            raise
        took_script = True
    if took_script and given is not args:
        args = given
        found = parser.parse_args(args)
    behind = found.training_script_args
    # Some versions of argparse drop the "--" with which a user keeps all that follows for the script.
    is_kept = len(args) > len(behind) and args[len(args) - len(behind) - 1] == "--"
    while behind and not is_kept and behind[0].partition("=")[0] in _OURS:
        # REMAINDER took them; a second --devices is the script's own.
        takes_value = behind[0] == "--devices"
        if behind[0].startswith("--devices") and found.nproc_per_node is not None:
            break
        if takes_value and len(behind) < 2:
            raise UsageError("argument --devices: expected one argument")
        flags, behind = behind[: 1 + takes_value], behind[1 + takes_value :]
        parser.parse_args([*flags, found.training_script], namespace=found)
    found.training_script_args = behind
    return found


def _is_script(value: str) -> bool:
    """Return whether what follows ``--monitor`` is not its folder, but the script or another flag."""
    return value.startswith("-") or value.endswith(".py") or os.path.isfile(value)


def _without_folder(args: Sequence[str]) -> Sequence[str]:
    """Return ``args`` with a ``--monitor`` that does not take what follows, if that is not its folder."""
    place = args.index("--monitor") if "--monitor" in args else len(args)
    if not any(map(_is_script, args[place + 1 : place + 2])):
        return args
    return [*args[:place], "--monitor=", *args[place + 1 :]]


# ``lockstep run --monitor [DIR]``: has the ranks recorded into a folder, and says so at the end.

MONITOR = "LOCKSTEP_MONITOR"
"""The variable that tells the ranks into which folder they are recorded; their bootstrap looks for it."""


@contextmanager
def monitoring(args: argparse.Namespace) -> Iterator[None]:
    """Within, ranks that are started are recorded, if ``--monitor`` was given.

    Raises:
        ConfigurationError: The folder cannot be, or what is started is no Python program.
    """
    if args.monitor is None:
        yield
        return
    given = args.monitor or str(Path("runs") / (Path(args.training_script).stem or "script"))
    folder = Path(given).absolute()
    if args.no_python:
        raise ConfigurationError("--monitor records Python scripts, but --no-python starts anything.\nLeave one out.")
    _check_folder(folder, given)
    began_s = time.time()
    os.environ[MONITOR] = str(folder)
    try:
        yield
    finally:
        del os.environ[MONITOR]
        if log_level(args) != "error":
            print(f"lockstep: {_outcome(folder, given, began_s)}", file=sys.stderr, flush=True)


def _check_folder(folder: Path, given: str) -> None:
    if folder.is_file():
        raise ConfigurationError(
            f"--monitor {given}: that is a file.\n"
            "Give the folder for the record, and then the script: lockstep run --monitor runs/first train.py"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"Cannot record the run in {given}: {error.strerror}.\nName another folder (--monitor DIR)."
        ) from None
    if not os.access(folder, os.W_OK):
        raise ConfigurationError(
            f"Cannot record the run in {given}: it is not writable.\nName another folder (--monitor DIR)."
        )


def _outcome(folder: Path, given: str, began_s: float) -> str:
    """Return what to say at the end."""
    files = [path for path in folder.glob(RANK_FILES) if path.stat().st_mtime >= began_s - 1.0]
    if files:
        return f"recorded in {given}; look at it with: lockstep report {given}"
    return f"nothing was recorded in {given}: no rank ran forward and backward of a torch model that could be seen"


# ``lockstep run``: start a script on every device, as torchrun does.


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
    args = parse_arguments(argv)
    was_chosen = args.nproc_per_node is not None
    num_ranks = _num_ranks(args)
    args.nproc_per_node = str(num_ranks)
    program = _program(args)
    choose_rendezvous(args)
    with (
        environment_restored(),
        monitoring(args),
        Reaper() as guard,
        _streams(args, guard, num_ranks) as streams,
    ):
        _say_what_was_chosen(args, num_ranks, was_chosen)
        if args.redirects == args.tee == "0":
            # elastic's error files need a place; logs that the user asked torchrun for must outlive us.
            args.log_dir = str(guard.run_dir / "elastic")
        config, python = _config(args)
        await_host(args)
        watch = watchdog_policy(args.watchdog, args.watchdog_action)
        python = sys.executable if args.no_python else python
        supervise(config, replace(program, streams=streams), guard, python=python, watch=watch)


def _streams(args: argparse.Namespace, guard: Reaper, num_ranks: int) -> AbstractContextManager[LogTail | None]:
    return make_log_tail(args, guard.run_dir, num_ranks) or nullcontext()


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
    for note in notes if log_level(args) != "error" else ():
        print(f"lockstep: {note}", file=sys.stderr, flush=True)


def _config(args: argparse.Namespace) -> tuple[LaunchConfig, str]:
    try:
        config, python, _ = config_from_args(args)
    except (ValueError, AssertionError, RuntimeError, NotADirectoryError) as error:
        raise ConfigurationError(f"torchrun's options do not fit together: {error}") from None
    assert isinstance(python, str)
    return config, python
