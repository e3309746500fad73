"""``lockstep tune``: try settings on a task; a table of what each gave, and a file that ``lockstep train`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lockstep.cli.output_file import check_writable, say_written
from lockstep.errors import ConfigurationError

EXAMPLES = """\b
Examples:
  lockstep tune examples/gpt.py --devices 2
      for five minutes at most; writes gpt-tuned.toml
  lockstep train examples/gpt.py --settings gpt-tuned.toml
      trains with what was found
  lockstep tune examples/gpt.py --devices 2 --minutes 20 --allow-precision --out fast.toml
      longer, so with narrower spreads; bf16, too, if it is faster
  lockstep tune examples/gpt.py --settings gpt.toml --strategies ddp,ddp-zero1,fsdp
      beginning with settings of your own, and trying these strategies
"""


@click.command(context_settings={"max_content_width": 110}, epilog=EXAMPLES)
@click.argument("task_file", metavar="TASK.py")
@click.option("--devices", type=int, metavar="N", help="Devices; all GPUs, or 2 CPU processes if there are none.")
@click.option(
    "--minutes", type=float, default=5.0, show_default=True, metavar="M", help="How long it may take; Ctrl-C ends it."
)
@click.option("--out", metavar="FILE", help="Where to write the settings; TASK-tuned.toml if not given.")
@click.option("--settings", "settings_file", metavar="FILE", help="Settings to begin with; the defaults if not given.")
@click.option(
    "--strategies", metavar="LIST", help="What to try, with commas between; single, dp, ddp, ddp-zero1 if not given."
)
@click.option("--global-batch-size", type=int, metavar="SAMPLES", help="Instead of the task's own.")
@click.option("--allow-precision", is_flag=True, help="Take bf16, too, if it is faster: another arithmetic.")
@click.option(
    "--allow-division",
    is_flag=True,
    help="Divide batches otherwise, too, if that is faster, though batch norm or dropout see that.",
)
def tune(
    task_file: str,
    devices: int | None,
    minutes: float,
    out: str | None,
    settings_file: str | None,
    strategies: str | None,
    global_batch_size: int | None,
    allow_precision: bool,
    allow_division: bool,
) -> int:
    """Find settings that train the task of TASK.py faster on this machine, without changing the training.

    Tries sizes of micro-batches, loader processes, strategies, threads and buckets side by side on real steps. Ends in
    a table of what each gave, and a file of settings for lockstep train.
    """
    import psutil
    import torch

    from lockstep.cli import INTERRUPTED
    from lockstep.study.compare import table as compare_table
    from lockstep.study.tune import table, text
    from lockstep.study.tune import tune as run_tuning
    from lockstep.study.tune.organise import STRATEGIES
    from lockstep.telemetry import provenance
    from lockstep.train.settings_file import read_settings

    file = out or f"{Path(task_file.rpartition('.py')[0] or task_file).name}-tuned.toml"
    _check_free(file)
    start: dict[str, Any] = {} if settings_file is None else read_settings(settings_file)
    count = devices if devices is not None else start.get("devices") or torch.cuda.device_count() or 2
    if global_batch_size is not None:
        start["global_batch_size"] = global_batch_size
    outcome = run_tuning(
        task_file,
        devices=count,
        minutes=minutes,
        start=start,
        strategies=STRATEGIES if strategies is None else [name.strip() for name in strategies.split(",")],
        allow_precision=allow_precision,
        allow_division=allow_division,
        began_at=psutil.Process().create_time(),
    )
    terminal = compare_table.console()
    terminal.print(table.render(outcome))
    found = provenance.gather()
    facts = {"measured": found.when, **found.versions, **found.machine}
    Path(file).write_text(text.as_file(outcome, task_file=task_file, file=file, facts=facts), encoding="utf-8")
    say_written(terminal, "settings", file)
    return INTERRUPTED if outcome.interrupted else 0


def _check_free(file: str) -> None:
    """Refuse to write over what is not of the same making.

    Raises:
        ConfigurationError: It cannot be written, or is somebody else's.
    """
    from lockstep.study.tune.text import FIRST_LINE

    check_writable(file)
    path = Path(file)
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if text and not text.startswith(FIRST_LINE):
        raise ConfigurationError(
            f"{file} is there already, and lockstep tune has not written it.\nName another file (--out FILE)."
        )
