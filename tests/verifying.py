"""Run `verify` on the shared pool: one worker stands for one process, others for the ranks."""

import os
from pathlib import Path

from lockstep.study.verify.diagnose import diagnose
from lockstep.study.verify.interventions import Subject
from lockstep.train.settings import Settings

FAULTS = Path(__file__).parent / "faults"


def as_launched(world, function, args):
    """Run with what the launcher would have put into the environment."""
    kept = dict(os.environ)
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.world_size))
    try:
        return function(*args, world)
    finally:
        os.environ.clear()
        os.environ.update(kept)


def processes_of(ranks):
    """Return what starts the processes of `verify`, on the pool."""

    def processes(function, *args, devices, timeout_s=None):
        return ranks(devices, warnings="ignore")(as_launched, function, args)

    return processes


def verify_on(ranks, task, *, num_steps=3, num_devices=2, **settings):
    """Return what verify finds about the task in a file, and what it reported meanwhile."""
    reported = []
    subject = Subject(str(task), Settings(**settings), num_devices, num_steps)
    return diagnose(subject, processes_of(ranks), reported.append), reported


def causes(verification):
    return [finding.cause for finding in verification.findings]
