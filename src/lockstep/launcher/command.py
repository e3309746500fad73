"""``lockstep run``: torchrun's command line with additional flags; all are checked before the first process starts."""

import argparse
import difflib
import inspect
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from click import UsageError
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

from lockstep.base import torch_internals
from lockstep.base.activity import log
from lockstep.base.rank_files import ENDED, FailureRecord
from lockstep.errors import ConfigurationError
from lockstep.launcher.api import choose_num_ranks, environment_restored, num_cores, supervise, threads_for
from lockstep.launcher.bootstrap import RANK_SETUP
from lockstep.launcher.job import Job
from lockstep.launcher.node_rendezvous import choose_interfaces, choose_rendezvous, max_nodes, wait_for_host
from lockstep.launcher.output import LEVELS, LogSettings, LogTail
from lockstep.launcher.quorum import check_lighthouse
from lockstep.launcher.reaper import Reaper
from lockstep.telemetry.record import RANK_FILES

# What `lockstep train` takes from a file: a Task, or a function that returns one.
_TASK = re.compile(r"^(def task\(|task\s*[:=])", re.MULTILINE)


# What each rank calls for ``--adopt`` and ``--monitor``: ranks load them by name, as the launcher stands below both.
_ADOPT, _ATTACH = "lockstep.loop.adopt:adopt", "lockstep.loop.monitor:attach"


class _Parser(argparse.ArgumentParser):
    """Start SCRIPT once per device, as torchrun starts it: the same environment variables, the same flags.

    If a rank fails, its traceback is shown first and the others are stopped; Ctrl-C stops all of them.

    Examples:
      all GPUs of this machine, or all CPU cores if there is no GPU
          lockstep run train.py
      four ranks; what follows is for the script
          lockstep run train.py --devices 4 --lr 0.1
      a script written for torch's DistributedDataParallel, on Lockstep's engine
          lockstep run train.py --devices 4 --adopt
      where the time of its steps goes; then: lockstep report runs/first
          lockstep run --monitor runs/first --devices 4 train.py
      two machines with eight GPUs each; the same line on both, but for --node-rank 0 and 1
          lockstep run --nnodes 2 --node-rank 0 --master-addr host0 --master-port 29500 --devices 8 train.py
      what every rank writes in a file of its own; the terminal shows errors only
          lockstep run --log-dir logs --quiet train.py
      machines that may come and go, with restarts
          lockstep run --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint host0:29500 --max-restarts 3 train.py

    --devices and --adopt may precede or directly follow the script; the first of each is taken. All
    other arguments after the script go to it. Flags cannot be abbreviated.
    """

    def error(self, message: str) -> None:  # type: ignore[override]
        unknown = message.partition("unrecognized arguments: ")[2].split()
        near = next(filter(None, map(self.nearest, unknown)), None)
        hint = f"Did you mean {near}?\n" if near else ""
        raise UsageError(f"{message}\n{hint}Try 'lockstep run --help'.")

    def nearest(self, flag: str) -> str | None:
        """Return the flag that ``flag`` resembles, or is."""
        flags = [name for action in torch_internals.argparse_actions(self) for name in action.option_strings]
        words = difflib.get_close_matches(flag.partition("=")[0].replace("_", "-"), flags, n=1, cutoff=0.8)
        return words[0] if words and flag.startswith("--") else None


def build_parser() -> _Parser:
    """Return the parser; all flags except ours come from the installed torch, so they always match it."""
    torchrun = get_args_parser()
    torch_internals.set_argparse_title(torchrun, "torchrun's options")
    description, _, examples = inspect.cleandoc(_Parser.__doc__ or "").partition("\n\nExamples:\n")
    parser = _Parser(
        prog="lockstep run",
        usage="lockstep run [OPTIONS] SCRIPT [--devices N] [--adopt] [SCRIPT ARGUMENTS]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"examples:\n{examples}",
        parents=[torchrun],
        add_help=False,  # provided by the parent
        allow_abbrev=False,  # argparse would also look for abbreviations among the script's flags
    )
    flag = parser.add_argument_group("options").add_argument
    torch_internals.put_last_argparse_group_first(parser)  # ours: most users need these
    flag("--devices", dest="nproc_per_node", metavar="N", help="ranks on this machine; default: all GPUs, or all cores")
    flag("--adopt", action="store_true", help="replace torch's engines and sampler by Lockstep's")
    flag("--monitor", metavar="DIR", help="record any training loop for `lockstep report DIR`; must precede SCRIPT")
    flag("--view", choices=("live", "lines"), help="with --monitor: show progress as a live view, or as lines")
    flag("--log-to", metavar="SINK,..", help="with --monitor: sinks for metrics, as for lockstep train")
    flag("--watchdog", type=float, metavar="SECONDS", help="report a hang after this time (60); 0: never")
    flag("--watchdog-action", choices=("end", "warn"), help="after that report, end with exit code 83, or continue")
    flag(
        "--min-devices", type=int, metavar="N", help="with --max-restarts: go on without killed ranks, with N at least"
    )
    flag("--spares", type=int, metavar="N", help="with --max-restarts: keep N processes ready to replace lost ranks")
    replaced = "ranks replaced while the others go on: those that died, or raised exceptions, too"
    flag("--recover", choices=("deaths", "exceptions"), help=replaced)
    flag("--lighthouse", metavar="HOST:PORT", help="torchft's, where machines agree; default: the first serves one")
    flag("--logs", choices=("merged", "raw"), default="merged", help="merge the output of the ranks, or not")
    flag("--log-level", choices=tuple(LEVELS), default="info", help="show all, standard error only, or reports only")
    flag("--quiet", action="store_const", dest="log_level", const="error", help="the same as --log-level error")
    for action in torch_internals.argparse_actions(parser):
        # Both spellings are accepted; the help shows one.
        action.option_strings = [name for name in action.option_strings if "_" not in name]
        if action.dest == "training_script":
            action.metavar, action.help = "SCRIPT", "the program; a module with -m, any executable with --no-python"
        elif action.dest == "training_script_args":
            action.metavar, action.help = "...", "arguments of the script (sys.argv[1:])"
        elif action.dest == "log_dir":
            action.help = "folder for a file rank-N.log of each rank; with --redirects or --tee for torchrun's own"
    for name in ("nproc_per_node", "master_addr", "master_port"):
        # To distinguish the user's choice from torch's defaults, which change from version to version.
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})
    return parser


def parse_arguments(args: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of ``lockstep run``; ``nproc_per_node`` is ``None`` if it is not given.

    Raises:
        UsageError: The arguments are invalid.
    """
    parser = build_parser()
    parsed = parser.parse_args(args)
    behind = parsed.training_script_args
    # Some versions of argparse drop the "--" that marks all later arguments as the script's.
    is_kept = len(args) > len(behind) and args[len(args) - len(behind) - 1] == "--"
    parsed.taken = set()
    while behind and not is_kept and (behind[0] in ("--devices", "--adopt") or behind[0].startswith("--devices=")):
        # REMAINDER took them; a second one is the script's own.
        takes_value = behind[0] == "--devices"
        if parsed.adopt if behind[0] == "--adopt" else parsed.nproc_per_node is not None:
            break
        if takes_value and len(behind) < 2:
            parser.error("argument --devices: expected one argument")
        parsed.taken.add(behind[0].partition("=")[0])
        flags, behind = behind[: 1 + takes_value], behind[1 + takes_value :]
        parser.parse_args([*flags, parsed.training_script], namespace=parsed)
    parsed.training_script_args = behind
    return parsed


def run(argv: Sequence[str]) -> None:
    """Run the command ``lockstep run`` with ``argv``, and wait for its end.

    Blocks as long as the ranks run. All checks are done before the first process is started.

    Args:
        argv: The arguments.

    Raises:
        UsageError: The arguments are invalid.
        ConfigurationError: The script, the devices or the port are not available.
        JobHangs: Ranks waited for each other for too long.
        RankFailed: A rank failed; the message has the first one's traceback.
        LockstepError: The rendezvous of the job's machines failed.
        Stopped: This process was requested to end, and has ended the ranks.
    """
    args = parse_arguments(argv)
    was_chosen = args.nproc_per_node is not None
    num_ranks = choose_num_ranks(args.nproc_per_node, f"--devices {args.nproc_per_node}", args.spares or 0)
    args.nproc_per_node = str(num_ranks)
    mode = _check_target(args)
    choose_rendezvous(args)
    check_lighthouse(args.lighthouse, max_nodes(args))
    logs = _log_settings(args)
    # The code below sets variables of this process for the ranks to inherit.
    with environment_restored(), _monitoring(args), Reaper() as reaper:
        setups = json.loads(os.environ.get(RANK_SETUP, "[]"))  # `lockstep rehearse` has some
        setups += [[_ADOPT]] if args.adopt else []
        if args.monitor is not None:
            setups.append([_ATTACH, os.path.abspath(args.monitor), args.view or "none", args.log_to or ""])
        os.environ[RANK_SETUP] = json.dumps(setups)
        _print_choices(args, num_ranks, was_chosen)
        if args.redirects == args.tee == "0":
            # A place for elastic's error files. Logs that the user requested by torchrun's flags must stay.
            args.log_dir = str(reaper.run_dir / "elastic")
        config, python = _config(args)
        wait_for_host(config)
        with LogTail(reaper.run_dir, num_ranks, logs) if logs.need_launcher(num_ranks) else nullcontext() as log_tail:
            job = Job(
                *(reaper, log_tail, args.min_devices, args.watchdog, args.watchdog_action, args.spares or 0),
                recover=args.recover,
                lighthouse=args.lighthouse,
            )
            supervise(job, config, mode, args.training_script, args.training_script_args, python)
        if mode == "script":
            _refuse_unused_task(args, reaper.run_dir)


def _refuse_unused_task(args: argparse.Namespace, run_dir: Path) -> None:
    """Raise an error if the script, which has ended, only defines a task: `lockstep run` trains none.

    Raises:
        ConfigurationError: It does, and no rank trained or joined a process group.
    """
    path = Path(args.training_script)
    ends = FailureRecord.read_all(run_dir, ENDED).values()
    has_trained = any(end.has_joined or end.num_steps for end in ends)
    text = path.read_text("latin-1") if path.is_file() and ends and not has_trained else ""
    if _TASK.search(text) and "Task(" in text:
        raise ConfigurationError(
            f"{path} only defines a task, which `lockstep run` does not train.\n"
            f"Train it: lockstep train {path} --devices {args.nproc_per_node}"
        )


def _check_target(args: argparse.Namespace) -> str:
    """Check the program that each rank will run, and flags that need others; return its mode."""
    if args.min_devices is not None and (args.min_devices < 1 or max_nodes(args) > 1):
        raise ConfigurationError(
            f"--min-devices {args.min_devices} is not possible: it must be at least 1, and the job on one machine.\n"
            "For machines that may be lost, pass a range such as --nnodes 1:4."
        )
    if args.monitor is not None and args.no_python:
        raise ConfigurationError(
            "--monitor records Python scripts, but --no-python starts any executable.\nLeave one out."
        )
    if args.spares is not None and (args.spares < 1 or args.no_python):
        raise ConfigurationError(
            f"--spares {args.spares} is not possible: it must be at least 1, and the program a Python script.\n"
            "Leave it out, or --no-python."
        )
    values = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items()}
    needs = dict.fromkeys(("--min-devices", "--spares", "--recover"), "--max-restarts N")
    needs |= dict.fromkeys(("--view", "--log-to"), "--monitor DIR")
    for flag, needed in needs.items():
        required = needed.partition(" ")[0]
        if values[flag] is not None and not values[required]:
            raise ConfigurationError(f"{flag} needs {required}.\nAdd {needed}, or omit {flag}.")
    target = args.training_script
    mode = "command" if args.no_python else "module" if args.module else "script"
    if mode == "command" and shutil.which(target) is None:
        raise ConfigurationError(f"Executable not found: {target}.\nCheck its name, or leave --no-python out.")
    if mode == "script" and not os.path.isfile(target) and not os.path.isfile(os.path.join(target, "__main__.py")):
        near = difflib.get_close_matches(target, map(str, Path(target).parent.glob("*.py")), n=1)
        hint = f"Did you mean {near[0]}?" if near else "Check the path; with -m it is a module's name."
        raise ConfigurationError(f"There is no script {target} (looked in {os.getcwd()}).\n{hint}")
    return mode


def _log_settings(args: argparse.Namespace) -> LogSettings:
    has_torchruns = args.redirects != "0" or args.tee != "0"
    # With a virtual local rank every rank has local rank 0, so their logs cannot be distinguished.
    is_virtual, is_raw = args.virtual_local_rank, args.logs == "raw"
    excluding = {"--redirects and --tee": has_torchruns, "--virtual-local-rank": is_virtual, "--logs raw": is_raw}
    excluded_by = next((flag for flag, is_given in excluding.items() if is_given), "")
    folder = None if has_torchruns else args.log_dir
    return LogSettings(folder=folder, level=args.log_level, excluded_by=excluded_by, num_nodes=max_nodes(args))


def _print_choices(args: argparse.Namespace, num_ranks: int, was_chosen: bool) -> None:
    notes = [] if was_chosen else [f"{num_ranks} ranks, one per device; choose with --devices"]
    if num_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = threads_for(num_ranks)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        notes.append(f"OMP_NUM_THREADS={threads}, as {num_ranks} ranks share {num_cores()} cores")
    if any(arg.partition("=")[0] == "--devices" for arg in args.training_script_args) and not was_chosen:
        notes.append("--devices after other arguments goes to the script; put it before or directly after the script")
    for note in notes + _notes_on_script_flags(args) + choose_interfaces(args):
        _print(args, note)


def _notes_on_script_flags(args: argparse.Namespace) -> list[str]:
    """Return notes on flags after the script: the script has one that is ours, or not one that resembles ours."""
    flags = dict.fromkeys(word.partition("=")[0] for word in args.training_script_args if word.startswith("--"))
    path = Path(args.training_script)
    if not (flags or args.taken) or not path.is_file():
        return []
    text, parser = path.read_text("latin-1").replace("-", "_"), build_parser()
    shared_flags = [flag for flag in sorted(args.taken) if re.search(rf"""['"]{flag.replace("-", "_")}['"]""", text)]
    explanation = f"{path.name}, which has a flag of this name, is ours; the script gets it if ours is before SCRIPT"
    near = {flag: parser.nearest(flag) for flag in flags if flag.strip("-").replace("-", "_") not in text}
    note = f"{path.name} is given {{}}; did you mean `lockstep run {{}} {path.name}`?"
    return [f"{flag} after {explanation}" for flag in shared_flags] + [
        note.format(flag, meant) for flag, meant in near.items() if meant not in (None, flag)
    ]


def _print(args: argparse.Namespace, text: str) -> None:
    if args.log_level != "error":
        log(text)


def _config(args: argparse.Namespace) -> tuple[LaunchConfig, str]:
    # Our bootstrap already does the same as --run-path: the script runs in the interpreter that was started.
    args.run_path = False
    try:
        config, python, _ = config_from_args(args)
    except (ValueError, AssertionError, RuntimeError, NotADirectoryError) as error:
        raise ConfigurationError(f"torchrun's options do not fit together: {error}") from None
    return config, sys.executable if args.no_python else str(python)


@contextmanager
def _monitoring(args: argparse.Namespace) -> Iterator[None]:
    """Print at the end where ``--monitor``, if given, recorded the run; the ranks write the record."""
    if args.monitor is None:
        yield
        return
    from lockstep.telemetry.sinks import parse_targets  # not for runs without a record

    parse_targets(args.log_to or ())
    folder, began_s = Path(args.monitor), time.time()
    try:
        yield
    finally:
        is_recorded = any(path.stat().st_mtime >= began_s - 1.0 for path in folder.glob(RANK_FILES))
        text = f"recorded in {folder}; read it with: lockstep report {folder}"
        none = f"nothing was recorded in {folder}: no rank ran forward and backward of a torch model that could be seen"
        if is_recorded or sys.exception() is None:  # else the failure is the cause, and is printed next
            _print(args, text if is_recorded else none)
