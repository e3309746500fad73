"""Run `verify` on the shared pool: one worker stands for one process, others for the ranks."""

import os
import re
import textwrap
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


# Sound; `plant` replaces the names in braces by lines.
TASK = """
import os, random, time
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
import lockstep

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(45, 6, generator=generator), torch.randint(0, 3, (45,), generator=generator)
        self.order = list(range(45))
        {SAMPLES}

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        x, y = self.x[self.order[index]], self.y[self.order[index]]
        {SAMPLE}
        return x, y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.register_buffer("buffer", torch.ones(16))
        {INIT}

    def forward(self, x):
        h = torch.tanh(self.first(x))
        {FORWARD}
        return self.last(h)


def loss(model, batch):
    x, y = batch
    out = model(x)
    {LOSS}
    return F.cross_entropy(out, y)


class Updates(torch.optim.SGD):
    def step(self, closure=None):
        {STEP}
        return super().step(closure)


def optimizer(params):
    lr, weight_decay = 0.05, 0.0
    {OPTIMIZER}
    return Updates(params, lr=lr, weight_decay=weight_decay, momentum=0.9)


def schedule(step, num_steps):
    {SCHEDULE}
    return 1 - step / num_steps


task = lockstep.Task(
    model=Net, dataset=Samples, loss=loss, optimizer=optimizer, schedule=schedule, global_batch_size=8
)
"""


def plant(folder, **changes):
    """Return a file with the task above, with some lines changed."""
    text = TASK
    for place in ("SAMPLES", "SAMPLE", "INIT", "FORWARD", "LOSS", "STEP", "OPTIMIZER", "SCHEDULE"):
        indent = " " * (4 if place in ("LOSS", "OPTIMIZER", "SCHEDULE") else 8)
        lines = textwrap.dedent(changes.pop(place, "pass")).strip()
        text = text.replace("{" + place + "}", lines.replace("\n", "\n" + indent))
    assert not changes
    file = folder / "planted.py"
    file.write_text(text)
    return file
