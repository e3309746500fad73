"""Trainers on two CPU ranks: a step, an epoch and the time to the first step of the same training, by each project.

    torch          torch.nn.parallel.DistributedDataParallel on Gloo, with a loop written by hand
    accelerate     Hugging Face Accelerate, with the same loop
    fabric         Lightning Fabric, with the same loop
    lightning      the Trainer of Lightning
    transformers   the Trainer of Transformers
    adopt          torch's script under `lockstep run --adopt`
    script         lockstep.DistributedDataParallel and DistributedSampler, with the same loop
    prepare        the script for one device, with lockstep.prepare
    fit            lockstep.fit
    fit-ema        the same with a callback and an average of the weights (ema=0.99)
    fit-exact      the same with reproducible=2

All train the same models from the same weights on the same shuffled samples in memory: an MLP of 8 small layers, whose
step is mostly what the trainer does, and a small transformer. Global batch, fused AdamW, an evaluation of 4 batches
after each epoch, one thread a rank, no checkpoints; bench/trainer_loops.py has the code of each.

A trainer owns its loop and its process, so none can be given turns within one: a turn is a start of two processes, by
torchrun or `lockstep run`, which train both models, 4 epochs each. A round starts each contender once, in an order that
rotates. The model notes when a forward pass of training begins; all else is as the project does it. Of these moments:

    step         from one forward pass to the next: loading, forward, backward, update, and what the trainer adds
    epoch        from the first forward pass of an epoch to that of the next, with evaluation and logging
    first step   from the command to the end of the first step: imports, meeting of the ranks, first batch

on the slower rank, without the first epoch. Projects that log by themselves also train with all logging off ("quiet");
the others do nothing there, and their figures are the same. What they print goes to a pipe. Every rank must do the same
number of passes, and the ranks must end with the same weights.

Usage: python -m bench.trainers [--quick] [--rounds N] [--contender NAME] [--json FILE]
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import Rounds, parser, record, run_rounds, show, summarize
from bench.launch import compile_lockstep
from bench.trainer_loops import JOBS, NUM_RANKS, TRAIN, missing

TIMEOUT_S = 300
REFERENCES = ("torch", "script")
REPO = Path(__file__).parents[1]
OURS = ("adopt", "script", "prepare", "fit", "fit-ema", "fit-exact")
FIGURES = ("step", "epoch", "step, quiet", "epoch, quiet")


def command(contender: str, folder: str) -> list[str]:
    """Return how the ranks of a contender are started."""
    script = [str(REPO / "bench" / "trainer_loops.py"), contender, folder]
    if contender not in OURS:
        return ["torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}", *script]
    return ["lockstep", "run", "--devices", str(NUM_RANKS), *["--adopt"] * (contender == "adopt"), *script]


def once(contender: str, figures: dict[str, dict[str, Rounds]], first_steps: Rounds) -> float:
    """Start a contender; note its figures by model and kind, and return the seconds to its first step.

    Raises:
        RuntimeError: It failed, or its ranks have other weights.
    """
    path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        words = [sys.executable, "-m", *command(contender, folder)]
        done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
        files = [Path(folder, f"{rank}.json") for rank in range(NUM_RANKS)]
        # A rank that aborts when the interpreter ends, as some do under torchrun, has trained and has its figures.
        if done.returncode and not all(file.exists() for file in files):
            raise RuntimeError(f"{contender} failed with exit status {done.returncode}:\n{done.stdout}{done.stderr}")
        ranks = [json.loads(file.read_text()) for file in files]
    if any(rank["weights"] != ranks[0]["weights"] for rank in ranks):
        raise RuntimeError(f"The ranks of {contender} ended with other weights.")
    for model, kinds in figures.items():
        for kind, seconds in kinds.items():
            what, _, quiet = kind.partition(", ")
            found = [rank["models"][model] for rank in ranks]
            seconds.setdefault(contender, []).append(
                max(each.get(quiet or "logs", each["logs"])[what] for each in found)
            )
    first_steps.setdefault(contender, []).append(max(rank["first_step"] for rank in ranks) - start)
    return first_steps[contender][-1]


def main() -> None:
    made = parser(__doc__, rounds=5, meaning="starts of each contender")
    made.add_argument("--contender", choices=TRAIN, action="append", help="besides torch, not all; may be repeated")
    options = made.parse_args()
    absent = missing()
    wanted = [*(options.contender or TRAIN), "torch"]
    contenders = [name for name in TRAIN if name in wanted and name not in absent]
    compile_lockstep()

    def measure_all() -> dict[str, Any]:
        for name, reason in absent.items():
            print(f"{name} is missing: {reason}")
        figures: dict[str, dict[str, Rounds]] = {model: {kind: {} for kind in FIGURES} for model in JOBS}
        first_steps: Rounds = {}
        turns = {name: functools.partial(once, name, figures, first_steps) for name in contenders}
        run_rounds(turns, 1 if options.quick else options.rounds, "starts")
        for model, kinds in figures.items():
            for kind, seconds in kinds.items():
                show(f"{model}: {kind}", seconds, REFERENCES)
        show("from the command to the first step", first_steps, REFERENCES)
        models = {model: {kind: summarize(each) for kind, each in kinds.items()} for model, kinds in figures.items()}
        return {"missing": absent, "models": models, "first_step": summarize(first_steps)}

    record(options.json, measure_all)


if __name__ == "__main__":
    main()
