"""The benchmark's tables in docs/speed.md and the claim in README.md, written between marks from the newest run."""

from collections.abc import Sequence
from pathlib import Path

from bench.report.run import Run, mean_ratio, memory_ratio, models, ratio, rounds
from lockstep.study.common import Spread

BEGIN, END = "<!-- benchmark: written by `make bench` -->", "<!-- end of benchmark -->"
REPO = Path(__file__).parents[2]
README, SPEED = REPO / "README.md", REPO / "docs" / "speed.md"
UNMEASURED = "Nothing measured yet: run `make bench`."
SHOWN = {
    "none": "no synchronisation (the bound)",
    "torch": "torch DDP, Gloo",
    "torch-view": "torch DDP, Gloo, bucket views",
    "torch-shm": "torch DDP on our `shm`",
    "torch-zero": "torch DDP + torch's ZeRO, Gloo",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "ours-gloo": "**Lockstep DDP**, Gloo",
    "ours": "**Lockstep DDP**",
    "ours-zero": "**Lockstep DDP + ZeRO-1**",
    "dp": "**Lockstep DataParallel**, one process",
    "single": "one core, all samples",
}
"""What the contenders are called, in the order of the rows."""
CLAIMED = {"ours": "DistributedDataParallel", "ours-zero": "the same with ZeRO-1", "dp": "DataParallel in one process"}
"""The contenders in the README."""
TRAINERS = {
    "torch": "torch DDP, own loop",
    "accelerate": "Accelerate, own loop",
    "fabric": "Lightning Fabric, own loop",
    "lightning": "Lightning `Trainer`",
    "transformers": "Transformers `Trainer`",
    "adopt": "torch DDP's script, **`lockstep run --adopt`**",
    "script": "**Lockstep DDP**, own loop",
    "prepare": "**`lockstep.prepare`**, own loop",
    "fit": "**`lockstep.fit`**",
    "fit-ema": "**`lockstep.fit`**, EMA and a callback",
    "fit-exact": "**`lockstep.fit`**, `reproducible=2`",
}
"""What the contenders of bench/trainers.py are called, in the order of the rows."""


def blocks(run: Run | None) -> dict[Path, str]:
    """Return what stands between the marks of each page."""
    if run is None:
        return dict.fromkeys((README, SPEED), UNMEASURED)
    default, fused = steps(run, "steps", tuple(SHOWN)), steps(run, "steps_fused", tuple(SHOWN))
    note = "The last column is the geometric mean, over the models, of the median ratio of step times to torch DDP; "
    return {
        README: claim(run, "steps_fused" if fused else "steps"),
        SPEED: "\n".join(
            [*default, "", *fused, "", f"{note}below 1 is faster. {measured_on(run)}", "", *others(run), *trainers(run)]
        ),
    }


def claim(run: Run, part: str) -> str:
    """Return the README's item on speed."""
    ratios = [f"{text(mean_ratio(run, name, 'torch', part))} with {words}" for name, words in CLAIMED.items()]
    setup = f"{len(models(run, part))} models, 2 ranks, {'AdamW(fused=True)' if part == 'steps_fused' else 'AdamW()'}"
    steps = f"{setup}: a step takes {', '.join(ratios)} of the time that torch's DistributedDataParallel takes"
    measured = f"{steps} ([all results](docs/speed.md#results)). {measured_on(run)}"
    return f"- **Faster than torch's classes.** {measured}"


def steps(run: Run, part: str, contenders: Sequence[str]) -> list[str]:
    """Return the table of step times; no line where the part was not measured."""
    names = models(run, part)
    if not names:
        return []
    optimizer = "AdamW(fused=True)" if part == "steps_fused" else "AdamW()"
    lines = [
        f"| step time, 2 ranks, {optimizer} (ms) | {' | '.join(names)} | over torch DDP |",
        f"|---|{'---:|' * (len(names) + 1)}",
    ]
    absent = run["parts"][part]["missing"]
    for contender in contenders:
        label = SHOWN[contender]
        if part == "steps" and contender in absent:
            lines.append(f"| {label} |{' |' * len(names)} {absent[contender]} |")
        elif contender in run["parts"][part]["models"][names[0]]["seconds"]:
            cells = [f"{milliseconds(run, part, name, contender):.1f}" for name in names]
            lines.append(f"| {label} | {' | '.join(cells)} | {text(mean_ratio(run, contender, 'torch', part))} |")
    return lines


def milliseconds(run: Run, part: str, name: str, contender: str) -> float:
    return float(run["parts"][part]["models"][name]["seconds"][contender]["median"]) * 1e3


def measured_on(run: Run) -> str:
    provenance = run["provenance"]
    return (
        f"{provenance['machine']['cpu']}, {provenance['machine']['cores']} cores, "
        f"torch {provenance['versions']['torch']}, "
        f"{provenance['when'][:10]}, commit {provenance['commits'].get('lockstep', 'unknown')[:12]}."
    )


def others(run: Run) -> list[str]:
    lines = []
    sizes = run["parts"].get("all_reduce", {}).get("sizes", {})
    for size, words in (("4000", "4 kB"), ("100000000", "100 MB")):
        if size in sizes:
            faster = {name: Spread(**found) for name, found in sizes[size]["times_as_fast_as_gloo"].items()}
            lines.append(
                f"- all_reduce of {words} on `shm`: {faster['shm'].median:.1f} times as fast as Gloo, "
                f"{faster['in place'].median:.1f} times if the tensor is in shared memory, as buckets are"
                + (f"; {faster['shm, cold'].median:.1f} times after a pause." if "shm, cold" in faster else ".")
            )
    for name in run["parts"].get("memory", {}).get("mib", {}):
        found = text(memory_ratio(run, name, "ours", "torch", "PSS"))
        lines.append(f"- Peak memory of a rank, {name}: {found} times torch DDP's.")
    alone = [
        f"{name} {text(ratio(rounds(run, 'one_rank', 'models', name), 'ours', 'none'))}"
        for name in models(run, "one_rank")
    ]
    if alone:
        lines.append(f"- Step time of one rank, relative to a loop without Lockstep: {', '.join(alone)}.")
    return lines


def trainers(run: Run) -> list[str]:
    """Return the table of trainers; no line where they were not measured."""
    part = run["parts"].get("trainers")
    if part is None:
        return []
    columns = [
        (f"{model}: {kind} (ms)", part["models"][model][kind]["rounds_s"], 1e3)
        for model in part["models"]
        for kind in ("step", "step, quiet", "epoch")
    ]
    columns.append(("first step (s)", part["first_step"]["rounds_s"], 1.0))
    lines = [
        "",
        f"| trainers, 2 ranks; in brackets: over torch DDP | {' | '.join(title for title, _, _ in columns)} |",
        f"|---|{'---:|' * len(columns)}",
    ]
    for name, label in TRAINERS.items():
        if name in part["missing"]:
            lines.append(f"| {label} |{' |' * (len(columns) - 1)} {part['missing'][name]} |")
        elif name in columns[-1][1]:
            cells = [
                f"{Spread.of(seconds[name]).median * unit:.1f} ({text(ratio(seconds, name, 'torch'))})"
                for _, seconds, unit in columns
            ]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def text(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.2f}"


def between_marks(page: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """Return what stands between the marks now."""
    return page.split(marks[0], 1)[1].split(marks[1], 1)[0].strip("\n")


def with_block(page: str, content: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """Return the page with ``content`` between its marks.

    Raises:
        ValueError: The marks are not there, once each and in order.
    """
    begin, end = marks
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended or begin in rest or end in after:
        raise ValueError(f"The page needs the lines {begin!r} and {end!r}, once each.")
    return f"{before}{begin}\n{content}\n{end}{after}"


def write(run: Run | None) -> None:
    """Write the tables into the pages."""
    for page, content in blocks(run).items():
        page.write_text(with_block(page.read_text(), content))
