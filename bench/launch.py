"""How long `lockstep run` takes from the command to the first training step, against torchrun; with how many resources.

Every round runs both once, in an order that alternates. Seconds from the command until the slowest rank has done it:

    script   the script's first line runs
    step     the first step of training is done: torch is imported, the ranks have met, the model is made and trained.
             Under torchrun the script uses torch's DistributedDataParallel on Gloo, under `lockstep run` Lockstep's
             as it comes.
    end      the command has returned

And for the whole command: seconds of processor time; MiB of memory (PSS) after the step, of a rank and of the launcher.
The median and the range that holds it with 90% certainty, and the ratios of each round.

Usage: python -m bench.launch [--quick] [--rounds N] [--devices N [N ...]] [--json FILE]
"""

import compileall
import functools
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lockstep
from bench.harness import Rounds, parser, positive, record, run_rounds, show, summarize
from lockstep.study.common import Spread, paired_ratio

TIMEOUT_S = 300
COMMANDS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node"],
    "lockstep run": ["lockstep", "run", "--devices"],
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
torch.distributed.barrier()
def pss_kib(pid):
    with open(f"/proc/{{pid}}/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(f"{{started}} {{stepped}} {{pss_kib('self')}} {{pss_kib(os.getppid())}}")
torch.distributed.barrier()
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
RESOURCES = ("seconds of processor time", "MiB of a rank", "MiB of the launcher")


def script_path(name: str, folder: Path) -> Path:
    return folder / f"step_under_{name.replace(' ', '_')}.py"


def compile_lockstep() -> None:
    """Write the bytecode of Lockstep's modules, as pip does: that of a checkout may never have been written."""
    assert lockstep.__file__ is not None
    compileall.compile_dir(Path(lockstep.__file__).parent, quiet=1)


def children_s() -> float:
    """Return the processor time of all processes that have been waited for, with those that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def once(name: str, num_ranks: int, folder: Path, figures: dict[str, Rounds]) -> float:
    """Run a command; note the seconds until each moment and what it took, and return those until the first step."""
    start, used_s = time.time(), children_s()
    command = [sys.executable, "-m", *COMMANDS[name], str(num_ranks), str(script_path(name, folder)), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    end = time.time()
    if done.returncode:
        raise RuntimeError(f"{name} failed with exit status {done.returncode}:\n{done.stderr}")
    told = [[float(text) for text in (folder / str(rank)).read_text().split()] for rank in range(num_ranks)]
    started, stepped, own_kib, launcher_kib = zip(*told, strict=True)
    moments = (max(started) - start, max(stepped) - start, end - start)
    resources = (children_s() - used_s, statistics.mean(own_kib) / 1024, launcher_kib[0] / 1024)
    for what, figure in zip((*MOMENTS, *RESOURCES), (*moments, *resources), strict=True):
        figures[what][name].append(figure)
    return moments[1]


def show_resource(title: str, figures: Rounds) -> None:
    ratio = paired_ratio(figures["lockstep run"], figures["torchrun"])
    values = ", ".join(f"{name} {Spread.of(each).median:.1f}" for name, each in figures.items())
    print(f"{title}: {values}; over torchrun {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})", flush=True)


def main() -> None:
    made = parser(__doc__, rounds=10)
    made.add_argument("--devices", type=positive, nargs="+", default=[2], metavar="N", help="numbers of ranks (2)")
    options = made.parse_args()
    compile_lockstep()

    def measure_with(num_ranks: int) -> dict[str, Rounds]:
        figures: dict[str, Rounds] = {what: {name: [] for name in COMMANDS} for what in (*MOMENTS, *RESOURCES)}
        with tempfile.TemporaryDirectory() as place:
            for name, text in SCRIPTS.items():
                script_path(name, Path(place)).write_text(text)
            turns = {name: functools.partial(once, name, num_ranks, Path(place), figures) for name in COMMANDS}
            run_rounds(turns, 2 if options.quick else options.rounds, f"launches of {num_ranks} ranks")
        for what in (*MOMENTS, *RESOURCES):
            if what in MOMENTS:
                show(f"{num_ranks} ranks, from the command to the {what}", figures[what], ("torchrun",))
            else:
                show_resource(f"{num_ranks} ranks, {what}", figures[what])
        return figures

    def measure() -> dict[str, Any]:
        found = {num_ranks: measure_with(num_ranks) for num_ranks in options.devices}
        summaries = {
            num_ranks: {what: summarize(rounds) for what, rounds in figures.items()}
            for num_ranks, figures in found.items()
        }
        moments = {moment: summaries[options.devices[0]][moment] for moment in MOMENTS}
        return {"moments": moments, "devices": {str(number): each for number, each in summaries.items()}}

    record(options.json, measure)


if __name__ == "__main__":
    main()
