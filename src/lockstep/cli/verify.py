"""``lockstep verify``: is it the same training run on N devices as on one? If not, why?"""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.output_file import check_writable, say_written
from lockstep.errors import EXIT_CODE

EXAMPLES = """\b
Examples:
  lockstep verify examples/digits.py --devices 2
      is it the same run with fit on 2 devices as on one?
  lockstep verify train.py --devices 4 --reproducible 4
      the same to the bit, dropout and batch norm included?
  lockstep verify train.py --devices 2 --torch-ddp
      what torch's DistributedDataParallel makes of it in a hand-written loop
"""


@click.command(context_settings={"max_content_width": 110}, epilog=EXAMPLES)
@click.argument("task_file", metavar="TASK.py")
@click.option("--devices", type=int, metavar="N", help="Ranks; all GPUs, or 2 CPU processes if there are none.")
@click.option("--steps", type=int, default=4, show_default=True, metavar="N", help="Steps to train.")
@click.option("--reproducible", type=int, metavar="SHARDS", help="Train in reproducible mode, and compare every bit.")
@click.option("--torch-ddp", is_flag=True, help="Examine torch's DistributedDataParallel in a hand-written loop.")
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="Where weights and order derive from."
)
@click.option("--global-batch-size", type=int, metavar="SAMPLES", help="Instead of the task's own.")
@click.option("--json", "json_file", metavar="FILE", help="Write everything that was found as JSON.")
def verify(
    task_file: str,
    devices: int | None,
    steps: int,
    reproducible: int | None,
    torch_ddp: bool,
    seed: int,
    global_batch_size: int | None,
    json_file: str | None,
) -> int:
    """Train some steps of TASK.py as one process and as N ranks: is it the same run?

    If not, names the first tensor that differs, and finds the cause by turning one thing off at a time. Computes in
    float64 where the task allows it. Exit code 0: the same run; 1: it is not, or an error.
    """
    import torch

    from lockstep.study.compare.table import console
    from lockstep.study.verify import record, table
    from lockstep.study.verify import verify as run_verification
    from lockstep.train.settings import Settings

    check_writable(json_file)
    verification = run_verification(
        task_file,
        devices=torch.cuda.device_count() or 2 if devices is None else devices,
        steps=steps,
        torch_ddp=torch_ddp,
        settings=Settings(seed=seed, global_batch_size=global_batch_size, reproducible=reproducible),
    )
    name = Path(task_file).name
    console().print(table.render(verification, name))
    if json_file is not None:
        Path(json_file).write_text(record.to_json(verification, name), encoding="utf-8")
        say_written(console(), "findings", json_file)
    return 0 if verification.same else EXIT_CODE
