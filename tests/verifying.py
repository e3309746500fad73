"""Run `verify` on the shared pool: one worker stands for one process, others for the ranks."""

import os
import re
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

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
    subject = Subject(str(task), Settings(**settings), num_devices, num_steps)
    with NamedTemporaryFile("r") as file:  # the processes report, too
        return diagnose(subject, processes_of(ranks), partial(append_line, file.name)), file.read().splitlines()


def append_line(file, text):
    with open(file, "a") as lines:
        lines.write(f"{text}\n")


def check_counts(reported):
    """Check that experiments are counted one by one, and that there were never more than announced; return how many."""
    counts = [tuple(map(int, re.findall(r"\d+", line)[:2])) for line in reported if line.startswith("experiment ")]
    assert [num for num, _ in counts] == list(range(1, len(counts) + 1))
    most = [most for _, most in counts]
    assert most == sorted(most, reverse=True)
    assert all(len(counts) <= each for each in most)
    return len(counts)


def causes(verification):
    return [finding.cause for finding in verification.findings]
