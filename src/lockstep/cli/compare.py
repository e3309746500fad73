"""``lockstep compare``: race the strategies on a task; a table and a verdict."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from lockstep.cli.output_file import check_writable, say_written

EXAMPLES = """\b
Examples:
  lockstep compare examples/digits.py --devices 2
      one device, both engines and torch's own
  lockstep compare examples/gpt.py --devices 2 --html gpt.html --json gpt.json
      the same, with a page to send to somebody and the raw figures
  lockstep compare examples/gpt.py --devices 2 --strategies torch-ddp,ddp --rounds 20
      two contenders, more rounds: a narrower spread
"""


@click.command(context_settings={"max_content_width": 110}, epilog=EXAMPLES)
@click.argument("task_file", metavar="TASK.py")
@click.option("--devices", type=int, metavar="N", help="Devices; all GPUs, or 2 CPU processes if there are none.")
@click.option(
    "--strategies",
    metavar="LIST",
    help="Who takes part besides single, with commas between; dp and ddp, ours and torch's, if not given.",
)
@click.option("--rounds", type=int, default=10, show_default=True, metavar="N", help="Turns of each strategy.")
@click.option("--steps", type=int, metavar="N", help="Steps of a turn; as many as take the fastest half a second.")
@click.option("--warmup", type=int, default=5, show_default=True, metavar="N", help="Steps of each before the rounds.")
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="Where weights and order derive from."
)
@click.option("--global-batch-size", type=int, metavar="SAMPLES", help="Instead of the task's own.")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True)
@click.option("--workers", type=int, default=0, show_default=True, metavar="N", help="Loader processes per rank.")
@click.option("--memory/--no-memory", default=True, help="Measure peak memory, in fresh processes; on if not given.")
@click.option("--json", "json_file", metavar="FILE", help="Write all figures as JSON.")
@click.option("--html", "html_file", metavar="FILE", help="Write a page with plots, to be opened offline.")
def compare(
    task_file: str,
    devices: int | None,
    strategies: str | None,
    rounds: int,
    steps: int | None,
    warmup: int,
    seed: int,
    global_batch_size: int | None,
    precision: str,
    workers: int,
    memory: bool,
    json_file: str | None,
    html_file: str | None,
) -> None:
    """Train the task of TASK.py on one device, with DataParallel and DistributedDataParallel, ours and torch's.

    All see the same samples from the same weights and take turns, so that a busy machine hits all alike. Ends in a
    table and a verdict in words: what to use here, and why.
    """
    import torch

    from lockstep.study.compare import compare as run_comparison
    from lockstep.study.compare import page, plots, record, table
    from lockstep.study.compare.organise import STRATEGIES
    from lockstep.study.compare.verdict import judge
    from lockstep.telemetry import provenance
    from lockstep.train.settings import Settings

    for file in (json_file, html_file):
        check_writable(file)
    if html_file is not None:
        plots.import_matplotlib()  # rather now than after the race
    comparison = run_comparison(
        task_file,
        devices=torch.cuda.device_count() or 2 if devices is None else devices,
        strategies=STRATEGIES if strategies is None else [name.strip() for name in strategies.split(",")],
        num_steps=steps,
        num_rounds=rounds,
        num_warmup=warmup,
        settings=Settings(seed=seed, global_batch_size=global_batch_size, precision=precision, workers=workers),  # type: ignore[arg-type]
        memory=memory,
        command=shlex.join(["lockstep", *sys.argv[1:]]),
    )
    verdict = judge(comparison)
    terminal = table.console()
    terminal.print(table.render(comparison, verdict, width=terminal.width))
    found = provenance.gather(Path(task_file.rpartition(".py")[0] + ".py"))
    if json_file is not None:
        Path(json_file).write_text(record.to_json(comparison, verdict, found), encoding="utf-8")
        say_written(terminal, "figures", json_file)
    if html_file is not None:
        Path(html_file).write_text(page.render(comparison, verdict, found), encoding="utf-8")
        say_written(terminal, "page", html_file)
