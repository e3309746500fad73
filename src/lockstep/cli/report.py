"""``lockstep report``: one page about a recorded run."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.output_file import check_writable
from lockstep.errors import ConfigurationError

EXAMPLES = """\b
Examples:
  lockstep train examples/digits.py --devices 2 --run-dir runs/digits
  lockstep report runs/digits
      runs/digits/report.html: how fast, where the time goes, what to change first
  lockstep report runs/before runs/after --out both.html
      two runs side by side
  lockstep report runs/digits --against runs/single
      with the loss of a run on one device beside it, and how much more devices gave
  lockstep report runs/digits --trace digits.json
      the timeline for ui.perfetto.dev or chrome://tracing
"""


@click.command(context_settings={"max_content_width": 110}, epilog=EXAMPLES)
@click.argument("folders", metavar="RUN [RUN2]", nargs=-1, required=True)
@click.option("--out", "out_file", metavar="FILE", help="Where the page goes; report.html in the folder of the run.")
@click.option("--trace", "trace_file", metavar="FILE", help="Write the timeline as a Chrome trace, too; of one run.")
@click.option(
    "--against",
    "other_folder",
    metavar="RUN",
    help="A run of the same on one device: whether the losses are the same, and how much more devices gave.",
)
def report(folders: tuple[str, ...], out_file: str | None, trace_file: str | None, other_folder: str | None) -> None:
    """Say of a run that was recorded with --run-dir: how fast it was, where the time went, and what to change first.

    Prints three sentences, and writes a page that opens offline in any browser. With two runs, they are compared.
    """
    from lockstep.study.report.beside import put_beside
    from lockstep.study.report.page import render
    from lockstep.study.report.verdict import against, sentences
    from lockstep.study.report.view import look_at

    if len(folders) > 2:
        raise ConfigurationError(f"{len(folders)} runs are given.\nName one, or two to compare.")
    for flag, value in (("A trace is of", trace_file), ("--against is for", other_folder)):
        if value is not None and len(folders) > 1:
            raise ConfigurationError(f"{flag} one run, but two are given.\nName one.")
    views = [look_at(Path(folder), label) for folder, label in zip(folders, _labels(len(folders)), strict=True)]
    beside = None if other_folder is None else put_beside(views[0], look_at(Path(other_folder)))
    page_file = out_file or str(Path(folders[0]) / "report.html")
    for file in (page_file, trace_file):
        check_writable(file)
    if trace_file is not None:
        from lockstep.study.report.trace import to_trace

        Path(trace_file).write_text(to_trace(views[0].run), encoding="utf-8")
    Path(page_file).write_text(render(views, beside), encoding="utf-8")
    if len(views) > 1:
        click.echo(against(*views))
    for view in views:
        for sentence in sentences(view, beside):
            click.echo(view.named(sentence))
        for gap in view.run.gaps:
            click.echo(view.named(f"Missing: {gap}"))
    if beside is not None:
        click.echo(beside.loss_note)
    if trace_file is not None:
        click.echo(f"trace written to {trace_file}")
    click.echo(f"page written to {page_file}")


def _labels(count: int) -> list[str]:
    return [""] if count == 1 else ["A", "B"]
