"""The study commands: compare, tune, predict, verify, doctor, report and rehearse. Each parses, calls and prints."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from lockstep.base.env import RankEnv
from lockstep.base.record_files import hide_secrets
from lockstep.cli import INTERRUPTED, command
from lockstep.cli.train import devices_of_flag, settings_options, takes_task
from lockstep.errors import EXIT_CODE, ConfigurationError
from lockstep.launcher import fork_server
from lockstep.study.common import console, to_json
from lockstep.study.rehearse.fault_rules import check_ranks, describe_kinds, parse
from lockstep.telemetry.cost import Price
from lockstep.train.settings import Settings, read_settings
from lockstep.train.task_file import find_task, is_script

_DEVICES = click.option(
    "--devices", type=devices_of_flag, metavar="N", help="Devices; default: all GPUs, or 2 CPU processes."
)
_STRATEGIES = click.option("--strategies", metavar="LIST", help="Comma-separated strategies to try, such as ddp,fsdp.")
_JSON = click.option("--json", "json_file", metavar="FILE", help="Write the results as JSON.")
_REPLACEMENT = "Until ranks in place of a lost machine have built the model; default: as long as one takes here."
_PRICE = click.option("--price", metavar="SUM", help='Price of a device per hour, such as 2.50 or "2.50 EUR".')

FAULTS = f"""Faults (rank and step are counted from 0 and from 1):
{describe_kinds()}

kill, hang, straggler and oom take in=loader|forward|backward|optimizer, kill and hang also in=collective."""


def check_writable(*files: str | None) -> None:
    """Raise an error for a file that cannot be written, before minutes are spent on its contents."""
    for path in (Path(file) for file in files if file is not None):
        is_new = not path.exists()
        # Only an attempt proves it: permissions do not show a read-only file system or a full quota.
        try:
            path.open("ab").close()
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written: {error.strerror}.\nName another file.") from error
        if is_new:
            path.unlink()


def write(what: str, file: str | None, text: str) -> None:
    """Write a text if there is a file, and print where: in one line, so that the name can be copied."""
    if file is not None:
        Path(file).write_text(text, encoding="utf-8")
        click.echo(f"{what} written to {file}")


def _num_devices(devices: int | None) -> int:
    fork_server.start()  # before devices are counted
    import torch

    return torch.accelerator.device_count() or 2 if devices is None else devices


def _words(text: str | None, otherwise: Sequence[str]) -> Sequence[str]:
    return otherwise if text is None else [word.strip() for word in text.split(",")]


def _take_settings(options: dict[str, Any], *names: str) -> Settings:
    """Remove the settings from the options of a command, and return them."""
    return Settings(**{name: options.pop(name) for name in names})


_COMPARED = ("seed", "global_batch_size", "precision", "workers", "sync_batchnorm")


@command()
@takes_task
@_DEVICES
@_STRATEGIES
@click.option("--rounds", type=int, default=10, show_default=True, metavar="N", help="Number of rounds.")
@click.option("--steps", type=int, metavar="N", help="Steps per round; default: about half a second each.")
@click.option("--warmup", type=int, default=5, show_default=True, metavar="N", help="Steps before that.")
@settings_options(Settings, *_COMPARED)
@click.option("--memory/--no-memory", default=True, help="Measure peak memory in new processes; default: on.")
@_PRICE
@_JSON
@click.option("--html", "html_file", metavar="FILE", help="Write a page with a plot, which needs no network.")
def compare(task_file: str, json_file: str | None, html_file: str | None, **options: Any) -> None:
    """Train the task of TASK.py on one device, with DataParallel and DistributedDataParallel, ours and torch's.

    All see the same samples from the same weights and take turns, so that a busy machine hits all alike. Ends in a
    table and a verdict: what to use here, and why.

    Examples:
      lockstep compare examples/digits.py --devices 2
          one device, both engines and torch's own
      lockstep compare examples/gpt.py --devices 2 --html gpt.html --json gpt.json
          the same, with a page to send to somebody and the raw figures
      lockstep compare examples/gpt.py --devices 2 --strategies torch-ddp,ddp --rounds 20
          two strategies, more rounds: a narrower spread
    """
    from lockstep.study.compare import benchmark, comparison
    from lockstep.telemetry import provenance

    check_writable(json_file, html_file)
    options["devices"] = _num_devices(options["devices"])
    options["strategies"] = _words(options["strategies"], benchmark.STRATEGIES)
    settings, command = _take_settings(options, *_COMPARED), hide_secrets(["lockstep", *sys.argv[1:]])
    measured = benchmark.compare(task_file, settings=settings, command=command, **options)
    console().print(measured)
    origin = provenance.gather(Path(task_file.rpartition(".py")[0] + ".py"))
    write("figures", json_file, to_json(comparison.to_record(measured, origin)))
    if html_file is not None:
        write("page", html_file, comparison.render_page(measured, origin))


@command()
@takes_task
@_DEVICES
@click.option("--minutes", type=float, default=5.0, show_default=True, metavar="M", help="Maximum duration.")
@click.option("--out", metavar="FILE", help="File for the settings; default: TASK-tuned.toml.")
@click.option("--settings", "settings_file", metavar="FILE", help="Settings to start from.")
@_STRATEGIES
@settings_options(Settings, "global_batch_size")
@click.option("--allow-precision", is_flag=True, help="Also use bf16 if it is faster, which changes the arithmetic.")
@click.option("--allow-division", is_flag=True, help="Also divide batches differently, despite batch norm or dropout.")
def tune(task_file: str, devices: int | None, out: str | None, settings_file: str | None, **limits: Any) -> int:
    """Find settings that train the task of TASK.py faster on this machine, without changing the training.

    Tries sizes of micro-batches, loader processes, strategies and threads side by side on real steps. Ends in
    a table of what each gave, and a file of settings for lockstep train.

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
    from lockstep.study import tune as tuning
    from lockstep.telemetry import provenance

    file = out or f"{Path(task_file.rpartition('.py')[0] or task_file).name}-tuned.toml"
    check_writable(file)
    path = Path(file)
    if path.exists() and path.stat().st_size and not path.read_text("utf-8", "replace").startswith(tuning.FIRST_LINE):
        raise ConfigurationError(
            f"{file} already exists, and lockstep tune did not write it.\nName another file (--out FILE)."
        )
    start: dict[str, Any] = {} if settings_file is None else read_settings(settings_file)
    if (global_batch_size := limits.pop("global_batch_size")) is not None:
        start["global_batch_size"] = global_batch_size
    limits["strategies"] = _words(limits["strategies"], tuning.STRATEGIES)
    devices = _num_devices(start.get("devices") if devices is None else devices)
    outcome = tuning.tune(task_file, devices=devices, start=start, **limits)
    console().print(outcome)
    origin = provenance.gather()
    facts = {"measured": origin.when, **origin.versions, **origin.machine}
    write("settings", file, tuning.as_file(outcome, task_file=task_file, file=file, facts=facts))
    return INTERRUPTED if outcome.interrupted else 0


@command()
@click.argument("target", metavar="TASK.py")
@click.option("--machines", "num_machines", type=click.IntRange(1), metavar="N", help="Machines; 2, or the job's.")
@click.option("--link", metavar="RATE", help="Of each machine, such as 100Mb or 20MB/s; probed between those of a job.")
@click.option("--latency", type=click.FloatRange(0), default=0.2, metavar="MS", help="Of a message over --link; 0.2.")
@click.option("--ranks-per-machine", type=click.IntRange(1), metavar="N", help="Ranks of each; 1, or those of the job.")
@click.option("--mtbf", "mtbf_h", type=click.FloatRange(1e-6, 1e9), metavar="HOURS", help="A machine's: adds goodput.")
@click.option("--replacement", "replacement_s", type=click.FloatRange(0, 1e9), metavar="SECONDS", help=_REPLACEMENT)
@settings_options(Settings, "global_batch_size", "precision")
@_PRICE
@_JSON
def predict(target: str, link: str | None, latency: float, json_file: str | None, **options: Any) -> None:
    """Predict what the task of TASK.py takes on several machines over a network.

    Measures a step on one rank, what exchanging gradients takes of the processor, and between the machines of a job
    the link. Ends in seconds and efficiency for 1, 2, 4, 8 ... machines, with each thing that can be turned on, and a
    verdict: what to turn on, and from which link on more machines pay. With --mtbf, also which share of the time
    trains if machines fail, by the time between checkpoints.

    Examples:
      lockstep predict examples/gpt.py --machines 2 --link 100Mb
          two machines in an office
      lockstep predict examples/gpt.py --machines 4 --link 1Gb --ranks-per-machine 8
          four machines with eight ranks each
      lockstep predict examples/gpt.py --machines 8 --link 10Gb --mtbf 1000 --replacement 300 --price 2.50
          one of the machines fails every 125 h: what restarts, recovery in place and a spare machine lose
      lockstep run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --devices 1 -m lockstep predict examples/gpt.py
          on both machines (--node-rank 1 on the second): the link between them is probed
    """
    from lockstep.comm.world import init
    from lockstep.study import predict as prediction
    from lockstep.study.links import given_link
    from lockstep.telemetry import provenance

    check_writable(json_file)
    cost, settings = Price.read(options.pop("price")), _take_settings(options, "global_batch_size", "precision")
    options["link"] = None if link is None else given_link(link, latency / 1e3)
    in_job = RankEnv.from_environ(os.environ).world_size > 1
    with init() if in_job else nullcontext() as world:
        forecast = prediction.predict_task(target, settings, world, **options)
    if forecast is None:  # rank zero prints it
        return
    forecast = replace(forecast, price=cost)
    console().print(prediction.render(forecast))
    origin = provenance.gather(Path(target.rpartition(".py")[0] + ".py"))
    write("figures", json_file, to_json(prediction.to_record(forecast, origin)))


def _verify_script(
    command: Sequence[str],
    devices: int | None,
    steps: int,
    minutes: float | None,
    allow_writes: bool,
    json_file: str | None,
    **settings: Any,
) -> int:
    if names := [name for name, value in settings.items() if value not in (None, Settings().seed)]:
        raise click.UsageError(f"--{names[0].replace('_', '-')} is for a task, and {command[0]} is a script.")
    check_writable(json_file)
    # Each run is forked from this process, so it must not use devices or threads.
    with fork_server.signal_handlers((signal.SIGINT,), fork_server.end_early):
        from lockstep.study.verify.script import runs, verify_script

        fork_server.import_modules(runs.MODULES)
    import torch

    torch.set_num_threads(1)
    limits: dict[str, Any] = {"steps": steps, "minutes": minutes, "allow_writes": allow_writes}
    verdict = verify_script.verify_script(command, devices=devices or runs.count_devices() or 2, **limits)
    return _show_verified(verdict, json_file)


def _show_verified(verdict: Any, json_file: str | None) -> int:
    console().print(verdict)
    write("findings", json_file, verdict.to_json())
    return 0 if verdict.same else 3 if verdict.apart_from else EXIT_CODE


@command()
@partial(takes_task, run_script=_verify_script)
@_DEVICES
@click.option(
    "--steps", type=int, default=4, show_default=True, metavar="N", help="Steps to train; of a script, each epoch."
)
@settings_options(Settings, "reproducible", "seed", "global_batch_size")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), metavar="M", help="For all runs of a script.")
@click.option("--allow-writes", is_flag=True, help="Let the runs of a script change files.")
@_JSON
def verify(
    task_file: str,
    devices: int | None,
    steps: int,
    minutes: float | None,
    allow_writes: bool,
    json_file: str | None,
    **settings: Any,
) -> int:
    """Train some steps of a task, or of any script, as one process and as N ranks: is it the same run?

    If not, names the first tensor that differs, and finds the cause by turning off one feature at a time. Computes in
    float64 where a task allows it. A script runs as under lockstep run, on shortened epochs; what it writes is removed.

    Exit code 0: the same run; 3: the same, apart from dropout masks, other random numbers in forward, or batch norm
    statistics; 1: not the same, or an error.

    Examples:
      lockstep verify examples/digits.py --devices 2
          is it the same run with fit on 2 devices as on one?
      lockstep verify train.py --devices 4 --reproducible 4
          the same to the bit, dropout and batch norm included?
      lockstep verify ddp.py --devices 2 -- --lr 0.1
          a script with its arguments, whatever it trains with
    """
    from lockstep.study.verify import diagnose

    if minutes is not None or allow_writes:
        raise click.UsageError(f"--minutes and --allow-writes are for a script, and {task_file} is a task.")
    check_writable(json_file)
    num_devices = _num_devices(devices)
    verification = diagnose.verify(task_file, devices=num_devices, steps=steps, settings=Settings(**settings))
    return _show_verified(verification, json_file)


@command()
@click.argument("target", metavar="[TASK.py[:NAME]]", required=False)
@click.option("--devices", type=click.IntRange(1), metavar="N", help="Ranks on this machine; all GPUs, or all cores.")
@click.option("--nnodes", "machines", type=click.IntRange(1), default=1, metavar="N", help="Machines; default: 1.")
@click.option("--master-addr", metavar="HOST", envvar="MASTER_ADDR", help="Host of rank 0; default: MASTER_ADDR.")
@click.option("--workers", type=click.IntRange(0), metavar="N", help="Loader processes per rank, if known.")
@click.option("--checkpoint", metavar="DIR", default=".", help="Folder for checkpoints; default: the current folder.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--explain", "kind", metavar="FINDING", help="Examine nothing; explain a finding, by its name.")
def doctor(target: str | None, as_json: bool, kind: str | None, **planned: Any) -> int:
    """Say before a run what will hang, falsify or slow it, with the fix to paste.

    Examines devices, network interfaces, host name, shared memory, cores, threads, disk space and versions; a task by
    building its model without memory. Takes under ten seconds, and lists what it could not see. It starts no script:
    record a run of it with lockstep run --monitor DIR, and look at that with lockstep report DIR.

    Examples:
      lockstep doctor
          this machine, for a run on all of its GPUs, or CPU cores
      lockstep doctor examples/gpt.py --devices 2 --workers 4
          a file with a lockstep.Task is imported: batch size, BatchNorm, and memory are checked, too
      lockstep doctor --nnodes 2 --master-addr 10.0.0.1
          for a run on several machines, as seen from this one
      lockstep run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -m lockstep doctor
          on all machines at once (--node-rank 1 on the second): do they meet, and do versions agree? also with srun
      lockstep doctor --json | jq -r '.findings[] | .severity + " " + .found'
          one object, for programs
      lockstep doctor --explain threads-too-many
          what a finding means, what it costs, and what to do

    Exit codes: 0 nothing worse than notes; 1 the run will hang, fail, be wrong or be slow; 2 wrong usage, such as no
    such task.
    """
    from lockstep.study.doctor import examine
    from lockstep.study.doctor.findings import Plan, explain

    if kind is not None:
        click.echo(explain(kind))
        return 0
    planned["devices"] = planned["devices"] or 0
    if "://" in planned["checkpoint"]:
        raise ConfigurationError(
            f"--checkpoint {planned['checkpoint']} is in an object store, which is not examined.\nLeave it out."
        )
    report, code = examine.run(Plan(target=target, **planned), RankEnv.from_environ(os.environ), os.environ)
    if report is None:  # rank zero prints it
        return code
    if as_json:
        click.echo(report.to_json())
    else:
        examine.show(report, console())
    return code


@command()
@click.argument("folder", metavar="RUN")
@click.option("--out", "out_file", metavar="FILE", help="File for the page; default: report.html in the run's folder.")
@click.option("--trace", "trace_file", metavar="FILE", help="Also write the timeline as a Chrome trace.")
@click.option("--against", multiple=True, metavar="RUN", help="Compare with another run; may be repeated.")
@_PRICE
def report(
    folder: str, out_file: str | None, trace_file: str | None, against: tuple[str, ...], price: str | None
) -> None:
    """Say of a run that was recorded with --run-dir: how fast it was, where the time went, and what to change first.

    Prints three sentences and what the run used, and writes a page that opens offline in any browser.

    Examples:
      lockstep train examples/digits.py --devices 2 --run-dir runs/digits
      lockstep report runs/digits
          runs/digits/report.html: how fast, where the time goes, what to change first
      lockstep report runs/digits --against runs/single
          with another run beside it: are the losses the same, how much faster is it, which settings differ
      lockstep report runs/digits --price "2.50 EUR"
          what it cost in all, and for an epoch
      lockstep report runs/digits --trace digits.json
          the timeline for ui.perfetto.dev or chrome://tracing
    """
    from lockstep.study.report import run_page
    from lockstep.study.report.view import to_trace

    page_report = run_page.report(folder, against=against, price=price)
    page_file = out_file or str(Path(folder) / "report.html")
    check_writable(page_file, trace_file)
    click.echo("\n".join(page_report.sentences))
    if trace_file is not None:
        write("trace", trace_file, to_trace(page_report.view.run))
    write("page", page_file, page_report.page)


@command(before=FAULTS, ignore_unknown_options=True)
@click.argument("file", metavar="SCRIPT_OR_TASK")
@click.argument("args", metavar="[ARGUMENTS]", nargs=-1, type=click.UNPROCESSED)
@click.option("--devices", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="Ranks, on the CPU.")
@click.option("--inject", "texts", multiple=True, required=True, metavar="RULE", help="A fault; may be repeated.")
@click.option("--watchdog", default=5.0, show_default=True, metavar="SECONDS", help="A longer wait is a hang.")
@click.option("--max-restarts", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Restarts.")
@click.option("--quiet", is_flag=True, help="Show only the table, not the job's output.")
def rehearse(
    file: str, args: Sequence[str], devices: int, texts: Sequence[str], watchdog: float, max_restarts: int, quiet: bool
) -> int:
    """Run a script or a task as real ranks on the CPU, break it by rule, and see what is detected.

    Ends in a table: what was injected, after how long it was detected, the report, and the outcome. The exit
    code is 0 if every fault was detected or survived, else 1.

    Examples:
      lockstep rehearse examples/digits.py --devices 4 --inject kill:rank=2,step=20 --steps 40
          a task; what lockstep train understands may follow
      lockstep rehearse examples/digits.py --devices 2 --inject kill:rank=1,step=12 --max-restarts 1
          --checkpoint runs/d --checkpoint-every 5     does it go on by itself?
      lockstep rehearse train.py --devices 8 --inject hang:rank=1,step=5,in=loader -- --lr 0.1
          a script of one's own, with its arguments
    """
    from lockstep.study.rehearse import runner

    # Refuse an invalid rule before starting a job.
    rules = [parse(text) for text in texts]
    check_ranks(rules, devices)
    flags = ["--devices", str(devices), "--watchdog", f"{watchdog:g}", "--max-restarts", str(max_restarts)]
    is_task = not is_script(file)
    if is_task:
        find_task(file)
    command = ["train", file, *flags, *args] if is_task else ["run", *flags, file, *args]
    records = not is_task and any(rule.kind == "straggler" for rule in rules)
    # A job of its own, not one of this process: what is broken may be the launcher.
    started = [sys.executable, "-m", "lockstep", *command]
    rehearsal = runner.rehearse(started, rules, num_ranks=devices, records=records, shows=not quiet)
    console().print(runner.render(rehearsal))
    return 1 if rehearsal.failed else 0
