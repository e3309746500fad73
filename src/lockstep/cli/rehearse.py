"""``lockstep rehearse``: meet faults on the CPU before the cluster shows them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from lockstep.study.rehearse.rules import taught

EXAMPLES = f"""\b
Faults (rank and step are counted from 0 and from 1):
{taught()}

\b
kill, hang, straggler and oom take in=loader|forward|backward|optimizer, kill and hang also in=collective.

\b
Examples:
  lockstep rehearse examples/digits.py --devices 4 --inject kill:rank=2,step=20 --steps 40
      a task; what lockstep train understands may follow
  lockstep rehearse examples/digits.py --devices 2 --inject kill:rank=1,step=12 --max-restarts 1
      --checkpoint runs/d --checkpoint-every 5     does it go on by itself?
  lockstep rehearse train.py --devices 8 --inject hang:rank=1,step=5,in=loader -- --lr 0.1
      a script of one's own, with its arguments
"""


@click.command(context_settings={"max_content_width": 110, "ignore_unknown_options": True}, epilog=EXAMPLES)
@click.argument("file", metavar="SCRIPT_OR_TASK")
@click.argument("args", metavar="[ARGUMENTS]", nargs=-1, type=click.UNPROCESSED)
@click.option("--devices", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="Ranks, on the CPU.")
@click.option("--inject", "texts", multiple=True, required=True, metavar="RULE", help="A fault; may be given often.")
@click.option(
    "--watchdog",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long ranks may wait for each other before that is reported.",
)
@click.option("--max-restarts", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Restarts.")
@click.option("--quiet", is_flag=True, help="Show only the table, not what the job says.")
def rehearse(
    file: str,
    args: tuple[str, ...],
    devices: int,
    texts: Sequence[str],
    watchdog: float,
    max_restarts: int,
    quiet: bool,
) -> int:
    """Run a script or a task as real ranks on the CPU, break it by rule, and see what is noticed.

    Ends in a table: what was injected, after how long it was noticed, what was said, and what came of it. The exit
    code is 0 if every fault was noticed or survived, else 1.
    """
    from lockstep.study.rehearse import table
    from lockstep.study.rehearse.organise import is_task
    from lockstep.study.rehearse.organise import rehearse as run_rehearsal
    from lockstep.study.rehearse.rules import check_ranks, parse

    rules = [parse(text) for text in texts]
    check_ranks(rules, devices)
    command = [sys.executable, "-m", "lockstep.cli.tied", str(os.getpid())]
    flags = ["--devices", str(devices), "--watchdog", f"{watchdog:g}", "--max-restarts", str(max_restarts)]
    if is_task(file):
        command += ["train", file, *flags, *args]
    else:
        command += ["run", *flags, file, *args]
    rehearsal = run_rehearsal(command, rules, shows=not quiet)
    table.console().print(table.render(rehearsal))
    return 0 if rehearsal.passed else 1
