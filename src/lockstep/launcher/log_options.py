"""The flags of ``lockstep run`` about what ranks write, and what comes of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.launcher.log_files import DEFAULT_MIB
from lockstep.launcher.logs import LEVELS, Logs
from lockstep.launcher.streams import Streams


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


def level_of(args: argparse.Namespace) -> str:
    """Return what the terminal is to show."""
    return "error" if args.quiet else str(args.log_level)


def make_streams(args: argparse.Namespace, run_dir: Path, num_ranks: int) -> Streams | None:
    """Return what reads the ranks' output; ``None`` where they write to the terminal themselves.

    Raises:
        ConfigurationError: The options do not go together, or files cannot be written.
    """
    is_torchruns = args.redirects != "0" or args.tee != "0"
    # Then every rank takes itself to be local rank 0, and they could not be told apart.
    is_virtual = bool(getattr(args, "virtual_local_rank", False))
    is_raw = is_torchruns or is_virtual or args.logs == "raw"
    logs = Logs(
        folder=None if is_torchruns else args.log_dir,
        json_file=args.log_json,
        size_mib=args.log_size,
        level=level_of(args),
        merges=not is_raw,
    )
    if is_raw:
        logs.refuse("--redirects and --tee" if is_torchruns else "--virtual-local-rank" if is_virtual else "--logs raw")
    return Streams(run_dir, num_ranks, logs.level, logs.open_files()) if logs.are_read(num_ranks) else None
