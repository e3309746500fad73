"""``lockstep doctor``: what on this machine, and in a script, will slow or hang training, each with its fix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from lockstep.errors import ConfigurationError

USAGE = 2
"""The exit code for a command line that makes no sense, so that CI can tell it from findings."""

EXAMPLES = """\b
Examples:
  lockstep doctor
      this machine, for a run on all of its GPUs, or CPU cores
  lockstep doctor train.py --devices 4
      also what can be told from the script's text; it is not run
  lockstep doctor examples/gpt.py --devices 2 --workers 4
      a file with a lockstep.Task is imported: batch size, BatchNorm, and memory are looked at, too
  lockstep doctor --nnodes 2 --master-addr 10.0.0.1
      for a run on several machines, as seen from this one
  lockstep run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -m lockstep doctor
      on all machines at once (--node-rank 1 on the second): do they meet, and do versions agree? also with srun
  lockstep doctor train.py --json | jq -r '.findings[] | .severity + " " + .found'
      one object, for programs

\b
Exit codes: 0 nothing worse than notes; 1 the run will hang, fail, be wrong or be slow; 2 wrong usage, such as no
such script. Each finding is explained in docs/doctor.md under its name."""


ALL_S, LEAST_S = 8.0, 2.0
"""When a task has to be through, from the start of this process, which imports torch; and what it gets in any case."""


class _Command(click.Command):
    """Ends with `USAGE` where arguments make no sense."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            error.show()
            raise click.exceptions.Exit(USAGE) from None


@click.command(cls=_Command, context_settings={"max_content_width": 110}, epilog=EXAMPLES)
@click.argument("target", metavar="[SCRIPT.py | TASK.py[:NAME]]", required=False)
@click.option(
    "--devices", type=click.IntRange(1), metavar="N", help="Ranks on this machine; all GPUs, or all CPU cores."
)
@click.option(
    "--nnodes", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Machines of the job."
)
@click.option("--master-addr", metavar="HOST", help="Where ranks meet; MASTER_ADDR if it is set.")
@click.option(
    "--master-port", type=click.IntRange(1, 65535), metavar="PORT", help="The port there; MASTER_PORT if it is set."
)
@click.option(
    "--workers",
    type=click.IntRange(0),
    metavar="N",
    help="Loader processes per rank; the script's number if it has one.",
)
@click.option("--checkpoint", metavar="DIR", help="Folder that checkpoints go to; here if not given.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def doctor(
    target: str | None,
    devices: int | None,
    nnodes: int,
    master_addr: str | None,
    master_port: int | None,
    workers: int | None,
    checkpoint: str | None,
    as_json: bool,
) -> int:
    """Say before a run what will hang, falsify or slow it, with the fix to paste.

    Looks at devices and their links, network interfaces, host name, port, shared memory, cores, threads, limits, disk
    speed and versions; at a script by its syntax tree (samplers, seeds, BatchNorm, devices, saving, collectives); at a
    task also by building its model without memory. Trains nothing, changes nothing, takes under ten seconds, and says
    what it could not see.
    """
    from lockstep.env import RankEnv
    from lockstep.study.compare.table import console
    from lockstep.study.doctor.examine import examine
    from lockstep.study.doctor.gather.plan import make_plan
    from lockstep.study.doctor.record import to_json
    from lockstep.study.doctor.report import Report
    from lockstep.study.doctor.show import show
    from lockstep.study.doctor.together import examine_together

    try:
        env = RankEnv.from_environ(os.environ)
        plan = make_plan(
            target,
            env,
            os.environ,
            devices=devices,
            machines=nnodes,
            workers=workers,
            master_addr=master_addr,
            master_port=master_port,
            checkpoint=None if checkpoint is None else Path(checkpoint),
        )
        report: Report | None
        if env.world_size == 1:
            report = examine(plan, os.environ, task_s=_time_left_s())
            code = report.exit_code
        else:
            report, code = examine_together(plan, env, os.environ)
    except ConfigurationError as error:
        click.echo(f"lockstep: {error}", err=True)
        return USAGE
    if report is None:  # rank zero tells
        return code
    if as_json:
        click.echo(to_json(report))
    else:
        show(report, console())
    return code


def _time_left_s() -> float:
    import time

    import psutil

    return float(max(LEAST_S, ALL_S - (time.time() - psutil.Process().create_time())))
