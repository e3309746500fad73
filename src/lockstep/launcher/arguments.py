"""The command line of ``lockstep run``: torchrun's own parser, with some flags of ours."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Sequence

from torch.distributed.run import get_args_parser

from lockstep.launcher.log_options import add_log_options

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


def parse(args: Sequence[str]) -> argparse.Namespace:
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
