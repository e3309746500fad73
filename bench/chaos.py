"""Random faults over a training job at 1 to 4 ranks: does it end in the same weights, bit for bit, and leave nothing?

Each round trains a small task with dropout, 40 steps on 1 to 4 ranks, through `lockstep rehearse` with one to three
random faults: ranks that are killed anywhere in a step, run out of memory, straggle, drop off the network for a
moment or hang for a moment. Restarts are allowed, at times with a rank fewer each time. The exported weights are
compared with those of a run on one device that nobody disturbed. At the end it counts what the rounds left:
processes (found by a mark in their environment), files in /dev/shm, and the launcher's temporary folders.

Usage: python bench/chaos.py [--rounds N] [--minutes N] [--seed N]; the first limit that is reached ends it.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

MARK = "LOCKSTEP_CHAOS"
STEPS, SHARDS, EVERY = 40, 4, 5
PLACES = ("loader", "forward", "backward", "optimizer", "collective")

TASK = """\
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

def data():
    random = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(240, 16, generator=random), torch.randint(0, 4, (240,), generator=random))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

task = lockstep.Task(
    name="chaos",
    model=lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)),
    dataset=data,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    global_batch_size=24,
)
"""


def random_faults(choice: random.Random, num_ranks: int) -> tuple[list[str], int]:
    """Return rules, and how many of them end a rank."""
    rules, num_deadly = [], 0
    for _ in range(choice.randint(1, 3)):
        rank, step = choice.randrange(num_ranks), choice.randint(2, STEPS - 1)
        kind = choice.choice(("kill", "kill", "kill", "oom", "straggler", "drop", "hang"))
        place = choice.choice(PLACES if num_ranks > 1 else PLACES[:4])
        if kind == "kill":
            rules.append(f"kill:rank={rank},step={step},in={place}")
        elif kind == "oom":
            rules.append(f"oom:rank={rank},step={step},in={choice.choice(PLACES[1:4])}")
        elif kind == "straggler":
            rules.append(f"straggler:rank={rank},ms={choice.choice((5, 30))},in={choice.choice(PLACES[:4])}")
        elif num_ranks > 1 and kind == "drop":
            rules.append(f"drop:rank={rank},step={step},seconds=1")
        else:
            rules.append(f"hang:rank={rank},step={step},in={place},seconds=1")
        num_deadly += kind in ("kill", "oom")
    return rules, num_deadly


def lockstep(*args: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "lockstep", *args]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)


def left_behind(mark: str) -> list[str]:
    """Return what still runs of this program's jobs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(f"{process.pid}: {' '.join(process.cmdline())[:120]}")
        except psutil.Error:
            continue
    return found


def in_shared_memory() -> set[str]:
    """Return the names of what lies in shared memory, of whomever."""
    shared = Path("/dev/shm")
    return {str(path) for path in shared.iterdir()} if shared.is_dir() else set()


def main() -> int:
    """Run the rounds and print a line for each; return 1 if anything was amiss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    choice, mark, before = random.Random(args.seed), uuid.uuid4().hex, in_shared_memory()
    num_rounds = num_bad = 0
    deadline = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        temporary = folder / "tmp"
        temporary.mkdir()
        environ = {**os.environ, MARK: mark, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(temporary)}
        task, expected = folder / "task.py", folder / "expected.safetensors"
        task.write_text(TASK)
        common = [str(task), "--steps", str(STEPS), "--reproducible", str(SHARDS), "--quiet"]
        undisturbed = lockstep("train", *common, "--devices", "1", "--export", str(expected), environ=environ)
        assert undisturbed.returncode == 0, undisturbed.stderr
        for number in range(args.rounds):
            if time.monotonic() > deadline:
                break
            num_rounds += 1
            num_ranks = choice.randint(1, 4)
            rules, num_deadly = random_faults(choice, num_ranks)
            weights, began = folder / f"{number}.safetensors", time.monotonic()
            flags = ["--devices", str(num_ranks), "--max-restarts", str(num_deadly), "--watchdog", "30"]
            flags += ["--checkpoint", str(folder / str(number)), "--checkpoint-every", str(EVERY)]
            flags += ["--min-devices", "1"] if choice.random() < 0.3 and num_deadly else []
            for rule in rules:
                flags += ["--inject", rule]
            done = lockstep("rehearse", *common, *flags, "--export", str(weights), environ=environ)
            is_same = weights.is_file() and weights.read_bytes() == expected.read_bytes()
            num_bad += not is_same
            verdict = "the same bits" if is_same else f"DIFFERENT\n{done.stdout}\n{done.stderr}"
            print(
                f"{number:3} {num_ranks} ranks {time.monotonic() - began:5.1f} s  {' '.join(rules)}: {verdict}",
                flush=True,
            )
        time.sleep(1)
        files = sorted([*map(str, temporary.glob("lockstep-*")), *(in_shared_memory() - before)])
    processes = left_behind(mark)
    print(f"{num_rounds} rounds (seed {args.seed}), {num_bad} with other weights than the undisturbed run")
    print(f"processes left: {len(processes)} {processes or ''}\nfiles left: {len(files)} {files or ''}")
    return 1 if num_bad or processes or files else 0


if __name__ == "__main__":
    sys.exit(main())
