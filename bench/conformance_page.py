"""docs/comparison.md, of what bench/conformance.py has found and nothing else."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

PAGE = Path(__file__).parent.parent / "docs" / "comparison.md"
OURS = ("lockstep_prepare", "lockstep_script", "lockstep_fit")
RIGHT = {"same", "equal"}
NUMBER = r"(after |off by )([\d.]+(?:e[+-]\d+)?)"

INTRO = """\
The same small trainings in float64, on 2 and 3 CPU ranks, with Lockstep and with other projects. Each program is
written as the documentation of its project says ([bench/conformance_peers](../bench/conformance_peers/torch_ddp.py)),
with its defaults first. A switch that the documentation offers has its own line. Lockstep has three programs: a
script for one device with `prepare`, a script with its classes in the place of torch's (drop-in), and a task for
`fit`. A script writes this page: every cell is the result of a run. The reference is one plain process that trains on
the whole batches, or the same program on one rank where random numbers or the order are its own. These are small runs
on CPUs, not all that a project can do."""

LEGEND = """\
| cell | meaning |
|---|---|
| equal, bit for bit; equal to 1e-12 | the weights (or metrics) are those of the reference; relative difference |
| equal to 1e-05 | the same in float32, as the project refuses float64 |
| off by X | the relative difference of the weights at the end, or after the first step if that is larger |
| samples again, left out | trained on more or less than once an epoch |
| ranks differ | at the end, the ranks do not hold the same state |
| error | the program ended with the error in the note |
| after X s | in the first table, the longest of 2 and 3 ranks |
| hangs | it had not ended after {deadline} s |
| not offered | the program has no place for it |"""


LONGEST_NOTE = 170
NOT_RUN = [
    "- Composer was not run: mosaicml 0.32.1, its newest release, asks for torch below 2.7.1.",
]


class Row(Protocol):
    """A row of bench/conformance.py."""

    key: str
    title: str
    question: str
    kind: str


def write(
    results: Mapping[str, Any],
    rows: Sequence[Any],
    peers: Mapping[str, str],
    only: Mapping[str, Sequence[str]],
    deadline_s: int,
) -> None:
    """Write the page; peers in ``only`` have no column in the first table."""
    PAGE.write_text("\n".join(page(results["rows"], rows, peers, only, deadline_s)) + "\n")


def page(
    cells: Mapping[str, Any],
    rows: Sequence[Row],
    peers: Mapping[str, str],
    only: Mapping[str, Sequence[str]],
    deadline_s: int,
) -> Iterator[str]:
    """Yield the lines of the page; only peers and rows of which there are runs."""
    asked, known = (
        rows,
        {peer: name for peer, name in peers.items() if any(peer in cells.get(row.key, {}) for row in rows)},
    )
    rows = [row for row in rows if row.key in cells]
    yield "# Is it the same run?\n"
    yield from (INTRO.replace("\n", " "), "", LEGEND.format(deadline=deadline_s), "")
    columns = {peer: name for peer, name in known.items() if peer not in only}
    yield "| question | " + " | ".join(columns.values()) + " |"
    yield "|---|" + "---|" * len(columns)
    for row in rows:
        short = [summary(row, cells[row.key].get(peer)) for peer in columns]
        yield f"| [{row.title}](#{row.key}) | " + " | ".join(short) + " |"
    yield "\n## Where Lockstep is not right, or others are as well\n"
    for row in rows:
        yield from remarks(row, cells[row.key], known)
    for row in rows:
        yield f"\n## {row.title} {{#{row.key}}}\n\n{row.question}\n"
        yield from details(cells[row.key], known)
    yield "\n## How it was measured\n"
    yield from measured(cells, asked, peers, only)


def is_right(row: Row, finding: Mapping[str, str]) -> bool:
    """Whether a finding is what a user would want: of wrong use, an error."""
    return finding["kind"] in ({"refused", *RIGHT} if row.kind == "misuse" else RIGHT)


def all_right(row: Row, line: Mapping[str, Any]) -> bool:
    return all(is_right(row, finding) for finding in line["findings"].values())


def summary(row: Row, cell: Mapping[str, Any] | None) -> str:
    """Return the default, and the first switch that makes it right."""
    if cell is None:
        return ""
    default, *others = cell["lines"]
    if all_right(row, default):
        return short(default)
    better = [f"`{line['switch']}`: {short(line)}" for line in others if all_right(row, line)]
    return "<br>".join([short(default), *better[:1]])


def short(line: Mapping[str, Any]) -> str:
    """Return what the numbers of ranks have in common, or the worst of them."""
    texts = [re.sub(r" \((?!\d of \d runs).*?\)", "", finding["text"]) for finding in line["findings"].values()]
    common = [re.sub(NUMBER, r"\1#", text) for text in texts]
    worst = max(texts, key=lambda text: [float(found[2]) for found in re.finditer(NUMBER, text)])
    return worst if len(set(common)) == 1 else " / ".join(dict.fromkeys(texts))


def remarks(row: Row, cells: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[str]:
    """Yield what is not right with Lockstep, and who else is right."""
    wrong = [f"{known[peer]}: {short(cells[peer]['lines'][0])}" for peer in OURS
             if peer in cells and not all_right(row, cells[peer]["lines"][0])]  # fmt: skip
    others = {peer: cells[peer]["lines"] for peer in known if peer in cells and peer not in OURS}
    default = [known[peer] for peer, lines in others.items() if all_right(row, lines[0])]
    switch = [
        known[peer]
        for peer, lines in others.items()
        if not all_right(row, lines[0]) and any(all_right(row, line) for line in lines[1:])
    ]
    parts = [
        f"not right: {'; '.join(wrong)}" if wrong else "",
        f"also right: {', '.join(default)}" if default else "",
        f"with a switch: {', '.join(switch)}" if switch else "",
    ]
    if any(parts):
        yield f"- **{row.title}**: {'. '.join(part[0].upper() + part[1:] for part in parts if part)}."


def details(cells: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[str]:
    """Yield the table of a question, and its notes."""
    columns = list(
        dict.fromkeys(name for cell in cells.values() for line in cell["lines"] for name in line["findings"])
    )
    yield "| project | switch | " + " | ".join(f"{name} ranks" for name in columns) + " |"
    yield "|---|---|" + "---|" * len(columns)
    notes: dict[str, int] = {}
    alike: dict[tuple[str, ...], list[str]] = {}  # projects, by switch and texts
    for peer, name in known.items():
        for line in cells[peer]["lines"] if peer in cells else []:
            texts = []
            for column in columns:
                finding = line["findings"].get(column, {"text": "", "note": ""})
                note = shorten(finding["note"])
                number = f" [{notes.setdefault(note, len(notes) + 1)}]" if note else ""
                texts.append(finding["text"] + number)
            switch = f"`{line['switch']}`" if line["switch"] else ""
            alike.setdefault((switch, *texts), []).append(name)
    for line, names in alike.items():
        yield f"| {', '.join(names)} | " + " | ".join(line) + " |"
    if notes:
        yield ""
        yield from (f"{number}. `{note.replace('`', chr(39))}`" for note, number in notes.items())


def shorten(note: str) -> str:
    """Return the beginning of an error, which names what happened."""
    return note if len(note) <= LONGEST_NOTE else note[:LONGEST_NOTE].rsplit(" ", 1)[0] + " ..."


def measured(
    cells: Mapping[str, Any], rows: Sequence[Row], peers: Mapping[str, str], only: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield versions, machine, dates and commits."""
    all_cells = [cell for row in cells.values() for cell in row.values()]
    versions = {name: number for cell in all_cells for name, number in cell["versions"].items()}
    found = [cell["provenance"] for cell in all_cells]
    newest = max(found, key=lambda each: each["when"])
    commits = sorted({each["commits"].get("lockstep", "unknown").rstrip("+")[:12] for each in found})
    dates = sorted({each["when"][:10] for each in found})
    machine = newest["machine"]
    yield "`python -m bench.conformance` runs what is missing in `bench/results/conformance.json`, and writes this"
    yield "page; `--only ROW --peer NAME --again` runs a part again.\n"
    yield f"- Versions: {', '.join(f'{name} {number}' for name, number in sorted(versions.items()))}."
    yield f"- Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory']}, {machine['os']}, "
    yield f"  Python {newest['versions']['python']}, torch {newest['versions']['torch']}."
    yield from NOT_RUN
    yield f"- Dates: {', '.join(dates)}. Commits: {', '.join(commits)}."
    for peer, name in peers.items():
        asked = [row for row in rows if row.key in only.get(peer, [row.key])]
        titles = [row.title for row in asked if peer not in cells.get(row.key, {})]
        if titles:
            yield f"- Not run yet, {name}: {'all' if len(titles) == len(rows) else ', '.join(titles)}."
