"""Goodput: which share of the time trains if machines fail, and how often to write checkpoints. Pure functions.

Failures come at random (Poisson), also while a job saves or starts again. What was not saved is done again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.study.common import Table
from lockstep.telemetry.cost import Price
from lockstep.telemetry.live_view import duration
from lockstep.telemetry.step_times import milliseconds


@dataclass(frozen=True)
class JobTimes:
    """What the share depends on, in seconds.

    Attributes:
        step_s: A step.
        checkpoint_s: Writing a checkpoint, for which training waits, and reading it.
        notice_s: Until the others know of a lost machine.
        replacement_s: Until ranks in its place have started, and have built the model.
        copy_s: Sending the state to them.
    """

    step_s: float
    checkpoint_s: float
    notice_s: float
    replacement_s: float
    copy_s: float


@dataclass(frozen=True)
class Goodput:
    """The result of `predict_goodput`.

    Attributes:
        machine_mtbf_s, mtbf_s: Mean time between failures of one machine, and of the job.
        times: As given.
        young_s, best_s: The best time between checkpoints for ``restart``, by Young and by Daly; a step at least.
        every_s: Shown times between checkpoints.
        shares: By kind of recovery, the share of the time that trains with each of these.
        lost: Likewise, device-hours of 1,000 that train nothing, with a checkpoint every ``best_s``. A spare's count.
    """

    machine_mtbf_s: float
    mtbf_s: float
    times: JobTimes
    young_s: float
    best_s: float
    every_s: Sequence[float]
    shares: Mapping[str, Sequence[float]]
    lost: Mapping[str, float]

    def table(self, price: Price | None) -> Table:
        """Return the shares, and what is lost at the best time between checkpoints."""
        title = f"Goodput: a machine fails every {self.machine_mtbf_s / 3600:g} h, the job every {_time(self.mtbf_s)}"
        rows = [[_time(s), *(f"{share[i]:.2%}" for share in self.shares.values())] for i, s in enumerate(self.every_s)]
        price = price or Price(1.0, "")
        label = f"lost of 1,000 device-hours, {price.currency}".rstrip(", ")
        rows.append([label, *(f"{price.amount * device_hours:,.2f}" for device_hours in self.lost.values())])
        return Table(title, ["checkpoint every", *self.lost], rows, numbers=self.lost)

    def sentence(self) -> str:
        """Return how often to write checkpoints, and what trains then."""
        best_index, times = self.every_s.index(self.best_s), self.times
        shares = ", ".join(f"{recovery} {share[best_index]:.2%}" for recovery, share in self.shares.items())
        return (
            f"Checkpoint every {_time(self.best_s)} (Young: {_time(self.young_s)}). Share that trains: {shares}. "
            f"Writing one takes {_time(times.checkpoint_s)}, a replacement {_time(times.replacement_s)}, to send "
            f"it the state {_time(times.copy_s)}; a lost machine is noticed after {_time(times.notice_s)}."
        )


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 60 else milliseconds(seconds)


def share_of_time(mtbf_s: float, work_s: float, save_s: float, down_s: float) -> float:
    """Return the share of the time that makes progress.

    Args:
        mtbf_s: Mean time between failures, of the job.
        work_s: Work that is done again after a failure in it, or while it is saved.
        save_s: Saving it.
        down_s: From a failure until the job works again.

    Source: the work over the expected run time, in the complete model of Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006).
    """
    # M e^(down/M) (e^((work + save)/M) - 1) / work, inverted without overflow.
    exponent = (work_s + save_s) / mtbf_s
    return work_s / mtbf_s * math.exp(-down_s / mtbf_s - exponent) / -math.expm1(-exponent)


def best_interval_s(mtbf_s: float, save_s: float) -> tuple[float, float]:
    """Return the time of work between checkpoints for which `share_of_time` is highest, in two approximations.

    Returns:
        That of Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17
        (1974): the root of 2 save_s mtbf_s; and the higher order of Daly (2006, see `share_of_time`).
    """
    ratio, young_s = save_s / (2 * mtbf_s), math.sqrt(2 * save_s * mtbf_s)
    return young_s, young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s if ratio < 1 else mtbf_s


def predict_goodput(times: JobTimes, machine_mtbf_s: float, num_machines: int) -> Goodput:
    """Return the shares for three kinds of recovery from a failure of one of the machines.

    ``restart``: all ranks start again, from the last checkpoint. ``in place``: the others wait for the replacement,
    give it the state, and do the step again; checkpoints are for the loss of all. ``spare``: one more machine, which
    has built the model, waits to be the replacement.
    """
    mtbf_s, down_s = machine_mtbf_s / num_machines, times.notice_s + times.replacement_s
    # Until the next spare is ready: the mean of what is left of that at the next failure.
    late_s = times.replacement_s + mtbf_s * math.expm1(-times.replacement_s / mtbf_s)
    young_s, best_s = (max(times.step_s, interval_s) for interval_s in best_interval_s(mtbf_s, times.checkpoint_s))
    in_place = share_of_time(mtbf_s, times.step_s, 0.0, down_s + times.copy_s)
    spare = share_of_time(mtbf_s, times.step_s, 0.0, times.notice_s + times.copy_s + late_s)
    every_s = [max(times.step_s, best_s * factor) for factor in (0.25, 0.5, 1.0, 2.0, 4.0)]
    work_shares = [interval_s / (interval_s + times.checkpoint_s) for interval_s in every_s]
    restart_s = times.checkpoint_s, down_s + times.checkpoint_s
    shares = {
        "restart": [share_of_time(mtbf_s, interval_s, *restart_s) for interval_s in every_s],
        "in place": [share * in_place for share in work_shares],
        "spare": [share * spare for share in work_shares],
    }
    lost = {recovery: 1e3 * (1 - share[every_s.index(best_s)]) for recovery, share in shares.items()}
    lost["spare"] = (1e3 + lost["spare"] * num_machines) / (num_machines + 1)
    return Goodput(machine_mtbf_s, mtbf_s, times, young_s, best_s, every_s, shares, lost)
