"""The section of docs/speed.md with what `make gpu` found, written between marks from bench/results/gpu-*.json."""

from collections.abc import Sequence
from pathlib import Path

from bench.report.run import RESULTS, Run, load, ratio
from bench.report.table import SPEED, with_block
from lockstep.study.common import Spread

MARKS = "<!-- GPU results: written by `make gpu` -->", "<!-- end of GPU results -->"
PATTERN = "gpu-*.json"
UNMEASURED = "No GPU figures are filed yet: `make gpu` has not run on a machine with GPUs."
SHOWN = {
    "none": "no synchronisation (the bound)",
    "torch": "torch DDP",
    "torch-view": "torch DDP, bucket views",
    "torch-zero": "torch DDP + torch's ZeRO",
    "ours": "**Lockstep DDP**",
    "ours-alone": "**Lockstep DDP** that reduces as among many",
    "ours-zero": "**Lockstep DDP + ZeRO-1**",
    "fit": "**`lockstep.fit`**",
    "none, captured": "no synchronisation, CUDA graph",
    "torch, captured": "torch DDP, CUDA graph",
    "ours, captured": "**Lockstep DDP**, CUDA graph",
    "ours-alone, captured": "**Lockstep DDP** that reduces as among many, CUDA graph",
    "single": "one replica",
    "torch-dp": "torch DataParallel",
    "dp": "**Lockstep DataParallel**",
}
"""What the contenders are called, in the order of the rows."""


def runs(folder: Path = RESULTS) -> list[Run]:
    """Return the filed runs, by their names."""
    return [load(path) for path in sorted(folder.glob(PATTERN))]


def block(found: Sequence[Run]) -> str:
    """Return what stands between the marks."""
    return "\n\n".join("\n".join(of_run(run)) for run in found) or UNMEASURED


def of_run(run: Run) -> list[str]:
    """Return the lines about one machine."""
    gpus, sections, commits = run["gpus"], run["sections"], run["provenance"]["commits"]
    lines = [
        f"### {gpus['number']} x {gpus['name']}",
        "",
        f"Driver {gpus['driver']}, NCCL {gpus['nccl']}, torch {run['provenance']['versions']['torch']}, "
        f"{run['provenance']['when'][:10]}, commit {commits.get('lockstep', 'unknown')[:12]}, `{run['command']}`.",
        "",
    ]
    for name, section in sections.items():
        counts = ", ".join(f"{number} {outcome.lower()}" for outcome, number in section.get("counts", {}).items())
        lines.append(f"- {name}: {section['status']}" + (f" ({counts})" if counts else ""))
        lines += [f"    - failed: {problem}" for problem in section["problems"]]
    for setting, everywhere in sections.get("waits", {}).get("waits", {}).items():
        places = [each for each in everywhere if "beside the steps" not in each["place"]]
        total, before = (
            1e3 * sum(each["seconds_per_step"] for each in places if each["part"] in parts)
            for parts in ({each["part"] for each in places}, {"before the forward"})
        )
        lines.append(
            f"- host waits in a step of `fit`, {setting}: {total:.3f} ms, {before:.3f} of them before the forward"
        )
    for title, figures in sections.get("benchmark", {}).get("models", {}).items():
        lines += ["", *table(title, figures)]
    return [*lines, "", "Not proved by this run:", "", *(f"- {line}" for line in run["not_proved"])]


def table(title: str, figures: dict) -> list[str]:
    """Return the rows of the contenders of one model."""
    seconds = figures.get("rounds_s", {})
    lines = [
        f"| {title} | step (ms) | over torch | exposed (ms) | host (ms) | memory (MiB) | kernels |",
        f"|---|{'---:|' * 6}",
    ]
    for name in (each for each in SHOWN if each in seconds):
        median = 1e3 * figures["seconds"][name]["median"]
        # The same way to run the step, but without what the contender does to synchronise.
        bounds = ("none, captured",) if "captured" in name else ("none", "single")
        bound = next((figures["seconds"][each] for each in bounds if each in seconds), None)
        exposed = (
            "" if bound is None or name.split(",")[0] in ("none", "single") else f"{median - 1e3 * bound['median']:.3f}"
        )
        over = ratio(seconds, name, "torch-dp" if "torch-dp" in seconds else "torch")
        host, memory = 1e3 * figures["host_s"][name]["median"], figures["peak_mib"].get(name, 0)
        lines.append(
            f"| {SHOWN[name]} | {median:.3f} | {text(over)} | {exposed} | {host:.3f} | {memory:.0f} "
            f"| {figures['kernels'].get(name, '')} |"
        )
    return lines


def text(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"


def write() -> None:
    """Write the section into the page."""
    SPEED.write_text(with_block(SPEED.read_text(), block(runs()), MARKS))
