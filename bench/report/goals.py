"""What the benchmark is to show, and whether a run shows it."""

from collections.abc import Callable
from dataclasses import dataclass

from bench.report.run import Run, mean_ratio, memory_ratio, models, ratio, rounds
from lockstep.study.common import Spread

LARGE, SMALL = "100000000", "4000"
PART = "steps_fused"
FUSED = {
    "mlp 25M": (1.18, 1.08),
    "gpt 17M": (1.05, 1.05),
    "cnn 1.6M": (1.05, 1.05),
    "100 tiny": (1.15, 1.15),
    "lstm 2M": (1.05, 1.05),
}
"""By model, how much longer than without synchronisation a step may take at most, without and with ZeRO-1."""
COMPUTING = ("gpt", "cnn", "lstm")
"""Models that compute enough for synchronisation to hide behind."""


@dataclass(frozen=True)
class Goal:
    """A claim as a ratio and its limit.

    Attributes:
        text: What the ratio is of.
        at_least: Whether the limit is the least that will do, or the most.
        limit: The ratio that is to be reached.
        measured: Finds the ratio in a run; None where the run did not measure it.
    """

    text: str
    at_least: bool
    limit: float
    measured: Callable[[Run], Spread | None]


@dataclass(frozen=True)
class Judgement:
    """A goal and what a run says to it; ``reached`` goes by the median, and is None where nothing was measured."""

    text: str
    limit: str
    measured: str
    reached: bool | None

    @property
    def word(self) -> str:
        """Yes, no, or that nobody knows."""
        return {True: "reached", False: "not reached", None: "not measured"}[self.reached]


def judge(run: Run) -> list[Judgement]:
    """Return a line for each goal."""
    return [judge_one(goal, run) for goal in goals(run)]


def judge_one(goal: Goal, run: Run) -> Judgement:
    limit = f"{'at least' if goal.at_least else 'at most'} {goal.limit:g}"
    found = goal.measured(run)
    if found is None:
        return Judgement(goal.text, limit, "", None)
    reached = found.median >= goal.limit if goal.at_least else found.median <= goal.limit
    return Judgement(goal.text, limit, f"{found.median:.3g} ({found.low:.3g} to {found.high:.3g})", reached)


def goals(run: Run) -> list[Goal]:
    """Return all goals; those of each model for the models of the run."""
    names = models(run)
    return [
        Goal(
            "all_reduce of 100 MB on shm, times as fast as Gloo", True, 8, sums("times_as_fast_as_gloo", "shm", LARGE)
        ),
        Goal(
            "the same of a shared tensor, as our buckets are", True, 8, sums("times_as_fast_as_gloo", "in place", LARGE)
        ),
        Goal("all_reduce of 4 kB on shm, times as fast as Gloo", True, 6, sums("times_as_fast_as_gloo", "shm", SMALL)),
        Goal(
            "all_reduce of 100 MB on shm, part of a plain copy's speed",
            True,
            0.6,
            sums("part_of_the_copy", "shm", LARGE),
        ),
        *(
            Goal(f"{name}: our step, times as fast as torch DDP's", True, 1, step(name, "torch", "ours"))
            for name in names
        ),
        Goal("all models: our step, times as fast as torch DDP's", True, 1.25, mean("torch", "ours")),
        Goal("all models: with ZeRO-1, times as fast as torch DDP", True, 1.4, mean("torch", "ours-zero")),
        *(
            Goal(f"{name}: our step over no synchronisation", False, beyond_bound(name), step(name, "ours", "none"))
            for name in names
        ),
        Goal("all models: with ZeRO-1 over no synchronisation", False, 1, mean("ours-zero", "none")),
        Goal("wide mlp: with ZeRO-1 over no synchronisation", False, 0.9, step("wide mlp", "ours-zero", "none")),
        *(
            Goal(f"fused AdamW, {name}: {contender} over no synchronisation", False, limit, fused(name, contender))
            for name, limits in FUSED.items()
            for contender, limit in zip(("ours", "ours-zero"), limits, strict=True)
        ),
        Goal(
            "fused AdamW, all models: our step, times as fast as torch DDP's", True, 1.42, mean("torch", "ours", PART)
        ),
        Goal("tiny layers: our reducer over torch's, both on shm", False, 1, step("tiny layers", "ours", "torch-shm")),
        *(
            Goal(f"{name}: a world of one over the bare loop", False, 1.01, alone(name))
            for name in models(run, "one_rank")
        ),
        *(
            Goal(f"{name}: peak memory of {ours} over {torchs} ({kind})", False, 1, memory(name, ours, torchs, kind))
            for name in run["parts"].get("memory", {}).get("mib", {})
            for ours, torchs in (("ours", "torch"), ("ours-zero", "torch-zero"))
            for kind in ("PSS", "tensors")
        ),
        Goal("all models: a step of DP over our DDP's", False, 1.05, mean("dp", "ours")),
        Goal("all models: DP on two devices, times as fast as one", True, 1.8, mean("single", "dp")),
        Goal("from command to first step, over torchrun", False, 1, launched()),
    ]


def beyond_bound(name: str) -> float:
    return 1.03 if name in COMPUTING else 1.12


def sums(what: str, contender: str, size: str) -> Callable[[Run], Spread | None]:
    def measured(run: Run) -> Spread | None:
        found = run["parts"].get("all_reduce", {}).get("sizes", {}).get(size)
        return Spread(**found[what][contender]) if found else None

    return measured


def step(name: str, over: str, under: str) -> Callable[[Run], Spread | None]:
    return lambda run: ratio(rounds(run, "steps", "models", name), over, under)


def fused(name: str, contender: str) -> Callable[[Run], Spread | None]:
    return lambda run: ratio(rounds(run, PART, "models", name), contender, "none")


def mean(over: str, under: str, part: str = "steps") -> Callable[[Run], Spread | None]:
    return lambda run: mean_ratio(run, over, under, part)


def alone(name: str) -> Callable[[Run], Spread | None]:
    return lambda run: ratio(rounds(run, "one_rank", "models", name), "ours", "none")


def memory(name: str, ours: str, torchs: str, kind: str) -> Callable[[Run], Spread | None]:
    return lambda run: memory_ratio(run, name, ours, torchs, kind)


def launched() -> Callable[[Run], Spread | None]:
    return lambda run: ratio(rounds(run, "launch", "moments", "step"), "lockstep run", "torchrun")
