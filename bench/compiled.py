"""Is as much communication hidden behind backward with ``compile=True`` as without? Over a link of given rate.

Two ranks are on machines of their own: network namespaces on this one, each with a cable, on which ``tc ... tbf``
limits what it may send, and a core each. Both train a small GPT over characters (bench/models.py), 13 MB of gradients
in buckets of 2 MiB, with strategy ddp: a trainer that compiles and one that does not take turns in the same processes.
Exposed communication is the time of a step less that of one without the exchange of gradients.

Needs root and iproute2. Usage: python -m bench.compiled [--rates 1Gb,...] [--rounds N] [--quick] [--json FILE]
"""

import json
import signal
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import lockstep
from bench.harness import Rounds, parser, record, run_rounds, slowest, timed
from bench.models import NUM_CHARACTERS, Language, loss_of
from bench.predict import limit, machines, run_job
from lockstep.study.common import Spread, paired_ratio
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer

LENGTH, BATCH, NUM_STEPS = 64, 16, 3


def sequences() -> TensorDataset:
    """Return characters at random, and those that follow."""
    drawn = torch.randint(NUM_CHARACTERS, (256, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(drawn[:, :-1], drawn[:, 1:])


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    return loss_of(model, batch)


task = lockstep.Task(
    model=lambda: Language(256, 4, LENGTH),
    dataset=sequences,
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    global_batch_size=BATCH,
    epochs=1000,
)


def measure(num_rounds: int) -> dict[str, Rounds]:
    """Return the seconds of steps, and of their exposed communication, eager and compiled, one value a round."""
    torch.set_num_threads(1)
    with lockstep.init(backend="gloo") as world:
        trainers = {}
        for name, compiles in (("eager", False), ("compiled", True)):
            settings = Settings(bucket_cap_mb=2.0, compile=compiles)
            trainers[name] = Trainer(task, settings, world, strategy="ddp", devices=[world.device])
        exposed: Rounds = {name: [] for name in trainers}

        def turn(name: str) -> float:
            trainer = trainers[name]
            world.barrier()
            whole = slowest(timed(trainer.step, NUM_STEPS))
            with trainer.without_sync():
                world.barrier()
                exposed[name].append(whole - slowest(timed(trainer.step, NUM_STEPS)))
            return whole

        turns = {name: partial(turn, name) for name in trainers}
        run_rounds(turns, 2, "compiling", shown=False)  # the first step compiles, the second has rebuilt buckets
        for values in exposed.values():
            values.clear()
        steps = run_rounds(turns, num_rounds, "eager and compiled", shown=False)
        for trainer in trainers.values():
            trainer.close()
        return {"step": steps, "exposed": exposed}


def main() -> None:
    """Measure over each link, and print the table."""
    made = parser(__doc__, 10)
    made.add_argument("--rates", default="1Gb", help="of the link, separated by commas (1Gb)")
    made.add_argument("--inside", type=Path, help="for the ranks: measure, and write to this file")
    options = made.parse_args()
    num_rounds = 3 if options.quick else options.rounds
    if options.inside is not None:
        found = measure(num_rounds)
        options.inside.write_text(json.dumps(found))  # both machines have the same file, and the same figures
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that machines are taken away

    def all_links() -> dict[str, Any]:
        figures = {}
        with machines() as names, tempfile.TemporaryDirectory() as folder:
            for rate in options.rates.split(","):
                limit(names, rate)
                file = Path(folder) / rate
                run_job(names[:2], "--inside", str(file), "--rounds", str(num_rounds), module="bench.compiled")
                figures[rate] = json.loads(file.read_text())
                for what, seconds in figures[rate].items():
                    ratio = paired_ratio(seconds["compiled"], seconds["eager"])
                    medians = {name: Spread.of(values).median for name, values in seconds.items()}
                    line = "".join(f"  {name} {1e3 * value:.1f} ms" for name, value in medians.items())
                    spread = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
                    print(f"{rate:>6}  {what:<8}{line}  compiled over eager {spread}", flush=True)
                    figures[rate][what]["ratio"] = asdict(ratio)
        return {"links": figures}

    record(options.json, all_links)


if __name__ == "__main__":
    main()
