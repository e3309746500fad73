"""docs/works_with.md, of what bench/programs.py has found and nothing else."""

# ruff: noqa: E501  (commands and sentences as they are)

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.programs_list.table import NOT_RUN, PROGRAMS

PAGE = Path(__file__).parent.parent / "docs" / "works_with.md"

INTRO = """\
Public training programs at a named commit, on 2 CPU ranks, with tiny data and models. A script runs them and writes \
this page; every cell is the result of a run. The programs are fetched by the person who runs it, none is part of this \
repository. A few steps of each compare weights; they do not show that a model is trained well."""

LEGEND = """\
| cell | meaning |
|---|---|
| changed | lines without which the program does not run here: CUDA and NCCL that it names, newer packages, downloads. [The table](../bench/programs_list/table.py) has all of them |
| same bits, N steps | after every step of an optimizer, on each rank, the parameters are those of the run beside it, and so are all losses |
| equal to X, off by X | the largest difference of a parameter's sum, relative to the norm of all these sums |
| `verify` | [its verdict](verify.md), about the program itself: whether 2 ranks train as one process does; no: the causes |"""


def write(results: Mapping[str, Any]) -> None:
    """Write the page."""
    PAGE.write_text("\n".join(page(results["programs"])) + "\n")


def page(programs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page."""
    notes: dict[str, int] = {}
    several = {name: row for name, row in programs.items() if "prepare" not in row and "missing" not in row}
    single = {name: row for name, row in programs.items() if "prepare" in row}
    missing = {name: row["missing"] for name, row in programs.items() if "missing" in row}
    missing |= {each.name: "in the table, but not run yet" for each in PROGRAMS if each.name not in programs} | NOT_RUN
    yield "# Programs that it was run with\n"
    yield from (INTRO, "", LEGEND, "")
    yield "## Written for several devices: `--adopt`\n"
    yield "| program | changed | `torchrun` | `lockstep run --adopt` | `lockstep verify` |"
    yield "|---|---|---|---|---|"
    for name, row in several.items():
        cells = [text(row[key], notes) for key in ("plain", "adopt", "verify")]
        yield f"| {title(name, row)} | {row['lines']} | " + " | ".join(cells) + " |"
    yield "\n## Written for one device: `lockstep.prepare`\n"
    yield "| program | changed | `python` | lines of `prepare` | `lockstep run` | `lockstep verify` |"
    yield "|---|---|---|---|---|---|"
    for name, row in single.items():
        plain, *cells = [text(row[key], notes) for key in ("plain", "prepare", "verify")]
        yield f"| {title(name, row)} | {row['lines']} | {plain} | {row['prepare_lines']} | " + " | ".join(cells) + " |"
    if notes:
        yield ""
        yield from (f"{number}. `{note.replace('`', chr(39))}`" for note, number in notes.items())
    yield "\n## Not run\n"
    yield from (f"- {name}: {reason}." for name, reason in missing.items())
    yield "\n## How to repeat it\n"
    yield "```bash"
    yield "python -m bench.programs                              # what is missing in bench/results/programs.json"
    yield "python -m bench.programs --only nanoGPT --again       # one program again"
    yield "python -m bench.programs --from FOLDER                # clones in FOLDER/OWNER/NAME, instead of github.com"
    yield "```\n"
    yield from measured(programs)


def title(name: str, row: Mapping[str, Any]) -> str:
    """Return the name with its place, and what a reader must know."""
    address = f"https://github.com/{row['repository']}/blob/{row['commit']}/{row['script']}"
    return f"[{name}]({address})" + (f" ({row['note']})" if row["note"] else "")


def text(cell: Mapping[str, Any], notes: dict[str, int]) -> str:
    """Return what a cell says, with the number of its note."""
    number = f" [{notes.setdefault(cell['note'], len(notes) + 1)}]" if cell.get("note") else ""
    short = re.sub(r"the same bits after each of (\d+) steps", r"same bits, \1 steps", cell["text"])
    return short.replace("not the same run: ", "no: ") + number


def measured(programs: Mapping[str, Any]) -> Iterator[str]:
    """Yield how the runs were made, with versions, machine, dates and commits."""
    found = [row["provenance"] for row in programs.values() if "provenance" in row]
    newest = max(found, key=lambda each: each["when"])
    machine = newest["machine"]
    dates = sorted({each["when"][:10] for each in found})
    commits = sorted({each["commits"].get("lockstep", "unknown").rstrip("+")[:12] for each in found})
    yield "## How it was measured\n"
    yield "- Each run has a fresh copy of the program. Data are text of Python's library, and noise."
    yield "- Python imports [a recorder](../bench/programs_list/recorder/sitecustomize.py) at its start: a hook of torch"
    yield "  that runs after each step of an optimizer. It seeds each rank's generators with its number at the start, as"
    yield "  some programs do not; `verify` runs without it. `OMP_NUM_THREADS` is 1."
    yield "- Where torch's own classes refuse CPUs (SyncBatchNorm), `verify` is run with `lockstep.adopt()` as first line."
    yield "- torchvision comes from PyPI; beside a torch without CUDA, the recorder declares two of its operators."
    yield f"- Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory']}, Python"
    yield f"  {newest['versions']['python']}, torch {newest['versions']['torch']}. Dates: {', '.join(dates)}. Commits:"
    yield f"  {', '.join(commits)}."
