"""The flags of ``lockstep run`` about what ranks write, and what comes of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.errors import ConfigurationError
from lockstep.launcher.log_files import DEFAULT_MIB, LogFiles
from lockstep.launcher.streams import LEVELS, Streams


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
    level = level_of(args)
    is_torchruns = args.redirects != "0" or args.tee != "0"
    # Then every rank takes itself to be local rank 0, and they could not be told apart.
    is_virtual = bool(getattr(args, "virtual_local_rank", False))
    asked = {"--log-json": args.log_json is not None, f"--log-level {level}": level != "info"}
    asked["--log-dir"] = args.log_dir is not None and not is_torchruns
    if is_torchruns or is_virtual or args.logs == "raw":
        if any(asked.values()):
            names = " and ".join(name for name, is_asked in asked.items() if is_asked)
            what = "--redirects and --tee" if is_torchruns else "--virtual-local-rank" if is_virtual else "--logs raw"
            raise ConfigurationError(f"{names} cannot be had with {what}.\nLeave one of them out.")
        return None
    if num_ranks == 1 and not any(asked.values()):
        return None
    if not args.log_size > 0:
        raise ConfigurationError(f"--log-size {args.log_size:g} is no size.\nPass MiB, such as 100.")
    folder = None if args.log_dir is None else Path(args.log_dir)
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        json_file = None if args.log_json is None else Path(args.log_json)
        files = LogFiles(folder, json_file, int(args.log_size * 2**20))
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename} cannot be written: {error.strerror}.\nName another place with --log-dir or --log-json."
        ) from None
    return Streams(run_dir, num_ranks, level, files)
