"""Comparisons with planted figures, for the tests of the verdict, the table, the page and the JSON."""

from collections.abc import Sequence
from dataclasses import replace

from lockstep.study.compare.comparison import Candidate, Comparison, Measurement, Setup
from lockstep.telemetry.step_times import StepTimes

MIB = 2**20
BATCH = 64
STEPS = 10
NUM_ROUNDS = 5
STEADY = (1.0, 1.01, 0.99, 1.0, 1.0)
"""How far the rounds of a quiet machine are from their median."""


def setup(**changes: object) -> Setup:
    values: dict[str, object] = {
        "task": "digits.py",
        "command": "lockstep compare digits.py --devices 2",
        "device": "cuda",
        "num_devices": 2,
        "num_cores": 2,
        "busy_cores": 0.1,
        "global_batch_size": BATCH,
        "num_steps": STEPS,
        "num_rounds": NUM_ROUNDS,
        "num_warmup": 5,
        "seed": 0,
        "precision": "fp32",
        "num_parameters": 1000,
        "split_layers": (),
    }
    return Setup(**(values | changes))  # type: ignore[arg-type]


def contender(
    strategy: str,
    step_ms: float,
    *,
    noise: Sequence[float] = STEADY,
    exposed_ms: float | None = None,
    data_ms: float = 0.0,
    core_wait_ms: float = 0.0,
    num_threads: int = 2,
    losses: Sequence[float] = (2.0, 1.0),
    peak_bytes: Sequence[int] | None = (100 * MIB, 100 * MIB),
) -> Candidate:
    """Return a contender whose step takes ``step_ms``, forward a quarter of what is not data or communication."""
    turns = []
    for index, factor in enumerate(noise):
        step_s = step_ms / 1e3 * factor
        work_s = step_s - (exposed_ms or 0.0) / 1e3 - data_ms / 1e3
        turns.append(
            Measurement(
                round=index,
                place=0,
                num_samples=BATCH * STEPS,
                seconds=step_s * STEPS,
                times=StepTimes(
                    total_s=step_s,
                    data_wait_s=data_ms / 1e3,
                    forward_s=work_s / 4,
                    backward_s=work_s / 2,
                    exposed_s=None if exposed_ms is None else exposed_ms / 1e3,
                    optimizer_s=work_s / 4,
                    core_wait_s=core_wait_ms / 1e3,
                ),
            )
        )
    peaks = None if peak_bytes is None else tuple(peak_bytes)
    return Candidate(strategy, num_threads, tuple(turns), tuple(losses), peaks, None, 2)


def comparison(*contenders: Candidate, left_out: Sequence[dict[str, str]] = (), **changes: object) -> Comparison:
    """Return a comparison, with figures of the first contender as single's."""
    single, *others = contenders
    against = [replace(each, single=single, num_devices=2) for each in others]
    return Comparison(setup(**changes), (replace(single, single=None, num_devices=2), *against), tuple(left_out))
