"""How long `lockstep run` takes from the command to the first training step of two ranks, against torchrun.

Every round runs both once, in an order that alternates. Seconds from the command until the slowest rank has done it:

    script   the script's first line runs
    step     the first step of training is done: torch is imported, the ranks have met, the model is made and trained.
             Under torchrun the script uses torch's DistributedDataParallel on Gloo, under `lockstep run` Lockstep's
             as it comes.
    end      the command has returned

The median and the range that holds it with 90% certainty, and the ratios of each round.

Usage: python -m bench.launch [--quick] [--rounds N] [--json FILE]
"""

import functools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import Rounds, parser, record, run_rounds, show, summarize

NUM_RANKS = 2
TIMEOUT_S = 120
COMMANDS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node", str(NUM_RANKS)],
    "lockstep run": ["lockstep", "run", "--devices", str(NUM_RANKS)],
}
SCRIPT = """
import os, sys, time
started = time.time()
import torch
{setup}
model = {wrapper}(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
stepped = time.time()
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(f"{{started}} {{stepped}}")
{teardown}
"""
SCRIPTS = {
    "torchrun": SCRIPT.format(
        setup="torch.distributed.init_process_group('gloo')",
        wrapper="torch.nn.parallel.DistributedDataParallel",
        teardown="torch.distributed.destroy_process_group()",
    ),
    "lockstep run": SCRIPT.format(
        setup="import lockstep\nworld = lockstep.init(device='cpu')",
        wrapper="lockstep.DistributedDataParallel",
        teardown="world.close()",
    ),
}
MOMENTS = ("script", "step", "end")


def script_path(name: str, folder: Path) -> Path:
    return folder / f"step_under_{name.replace(' ', '_')}.py"


def once(name: str, folder: Path, moments: dict[str, Rounds]) -> float:
    """Run a command; note the seconds until each of the moments, and return those until the first step."""
    start = time.time()
    command = [sys.executable, "-m", *COMMANDS[name], str(script_path(name, folder)), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    end = time.time()
    if done.returncode:
        raise RuntimeError(f"{name} failed with exit status {done.returncode}:\n{done.stderr}")
    told = [(folder / str(rank)).read_text().split() for rank in range(NUM_RANKS)]
    script, step = (max(float(rank[which]) for rank in told) for which in (0, 1))
    for moment, at in zip(MOMENTS, (script, step, end), strict=True):
        moments[moment][name].append(at - start)
    return step - start


def main() -> None:
    options = parser(__doc__, rounds=10).parse_args()

    def measure() -> dict[str, Any]:
        moments: dict[str, Rounds] = {moment: {name: [] for name in COMMANDS} for moment in MOMENTS}
        with tempfile.TemporaryDirectory() as place:
            for name, text in SCRIPTS.items():
                script_path(name, Path(place)).write_text(text)
            turns = {name: functools.partial(once, name, Path(place), moments) for name in COMMANDS}
            run_rounds(turns, 2 if options.quick else options.rounds, "launches")
        for moment in MOMENTS:
            show(f"from the command to the {moment}", moments[moment], ("torchrun",))
        return {"moments": {moment: summarize(moments[moment]) for moment in MOMENTS}}

    record(options.json, measure)


if __name__ == "__main__":
    main()
