"""A run of the benchmark as it lies in bench/results, and the ratios that everything else reads from it."""

import json
import math
from pathlib import Path
from typing import Any

from lockstep.study.common import Spread, paired_ratio

RESULTS = Path(__file__).parents[1] / "results"
PATTERN = "run-*.json"
Run = dict[str, Any]
"""``command``, ``provenance``, ``quick``, ``seconds``, and ``parts``: what each benchmark recorded, by its name."""


def newest(folder: Path = RESULTS) -> Run | None:
    """Return the last run that was kept, if there is one; their names hold the time."""
    found = sorted(folder.glob(PATTERN))
    return load(found[-1]) if found else None


def load(path: Path) -> Run:
    run: Run = json.loads(path.read_text())
    return run


def rounds(run: Run, part: str, *keys: str) -> dict[str, list[float]]:
    """Return a part's rounds by contender; nothing where it was not measured."""
    found: Any = run["parts"].get(part, {})
    for key in keys:
        found = found.get(key, {})
    rounds_s: dict[str, list[float]] = found.get("rounds_s", {})
    return rounds_s


def ratio(seconds: dict[str, list[float]], over: str, under: str) -> Spread | None:
    """Return how many times as long the first takes as the second; None where one of them was not measured."""
    if over not in seconds or under not in seconds:
        return None
    return paired_ratio(seconds[over], seconds[under])


def models(run: Run, part: str = "steps") -> list[str]:
    return list(run["parts"].get(part, {}).get("models", {}))


def geometric_mean(spreads: list[Spread | None]) -> Spread | None:
    """Return the mean of the medians; its range is that of all low and of all high ends, wider than it need be."""
    present = [spread for spread in spreads if spread is not None]
    if not present or len(present) < len(spreads):
        return None
    ends = [[getattr(spread, end) for spread in present] for end in ("median", "low", "high")]
    return Spread(*(math.exp(math.fsum(map(math.log, values)) / len(values)) for values in ends))


def mean_ratio(run: Run, over: str, under: str, part: str = "steps") -> Spread | None:
    """Return the geometric mean over the models of how many times as long a step of the first takes."""
    return geometric_mean([ratio(rounds(run, part, "models", name), over, under) for name in models(run, part)])


def memory_ratio(run: Run, name: str, over: str, under: str, kind: str) -> Spread | None:
    """Return how many times as much memory the first takes as the second."""
    found = run["parts"].get("memory", {}).get("mib", {}).get(name, {})
    return ratio({other: kinds[kind] for other, kinds in found.items() if kind in kinds}, over, under)
