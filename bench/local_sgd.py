"""What LocalSGD and DiLoCo learn beside DistributedDataParallel: at equal steps, and at equal time on slow networks.

A small GPT over characters (bench/models.py) is trained on the text of Python's standard library by two ranks, each on
eight sequences a step, with AdamW, the same batches for all. Every 25 steps the loss on text that nobody trains on is
measured: of LocalSGD and DiLoCo that of the outer parameters, which a run would keep.

Steps are trained in full. Time is modelled, and the output says so: computing is the median step of one rank as
measured here, and what a rank sends is what it would send to one other rank, over the bandwidth. Nothing is hidden
behind computing, except where the exchange has steps for that (delay).

Usage: python -m bench.local_sgd [--steps N] [--quick] [--json FILE]
"""

import statistics
import sysconfig
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import SECTION_TIMEOUT_S, parser, record
from bench.models import NUM_CHARACTERS, Language, loss_of
from lockstep import DiLoCo, DistributedDataParallel, LocalSGD, init, launch

LENGTH, EVERY, MEGABITS = 64, 25, (20, 100, 1000)


@dataclass(frozen=True)
class Method:
    """How ranks train together, and what of the parameters' bytes a rank sends in a step on average."""

    wrap: Callable[[nn.Module, torch.optim.Optimizer], Any] | None
    part: float
    is_hidden: bool = False


METHODS = {
    "ddp": Method(None, 1.0),
    "local-sgd, 8": Method(lambda model, optimizer: LocalSGD(model, optimizer, 8), 1 / 8),
    "local-sgd, 50": Method(lambda model, optimizer: LocalSGD(model, optimizer, 50), 1 / 50),
    "diloco, 20": Method(lambda model, optimizer: DiLoCo(model, optimizer, 20), 1 / 20),
    "diloco, 50": Method(lambda model, optimizer: DiLoCo(model, optimizer, 50), 1 / 50),
    "diloco, 50, int8": Method(lambda model, optimizer: DiLoCo(model, optimizer, 50, compression="int8"), 1 / 200),
    "diloco, 50, 5 fragments, delay 5": Method(
        lambda model, optimizer: DiLoCo(model, optimizer, 50, fragments=5, sync_delay=5), 1 / 50, is_hidden=True
    ),
}


def text() -> Tensor:
    """Return the characters of Python's standard library as numbers."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    characters = "".join(file.read_text(errors="ignore") for file in files)
    codes = torch.frombuffer(bytearray(characters.encode("ascii", "ignore")), dtype=torch.uint8).long()
    return (codes - 32).clamp(0, NUM_CHARACTERS - 1)


def batch_of(tokens: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences at random, and the characters that follow."""
    starts = torch.randint(len(tokens) - LENGTH - 1, (count,), generator=generator)
    rows = torch.stack([tokens[start : start + LENGTH + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def train(name: str, num_steps: int) -> tuple[dict[int, float], float, int]:
    """Return held-out losses by step, the seconds of a step without an exchange, and bytes of the parameters."""
    torch.set_num_threads(1)
    with init(backend="gloo") as world:
        tokens = text()
        known, held_out = tokens[: -len(tokens) // 20], tokens[-len(tokens) // 20 :]
        torch.manual_seed(0)
        model, outer = Language(128, 3, LENGTH), Language(128, 3, LENGTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        wrap = METHODS[name].wrap
        sync = None if wrap is None else wrap(model, optimizer)
        trained = DistributedDataParallel(model) if sync is None else model
        places, tests = torch.Generator().manual_seed(1 + world.rank), batch_of(held_out, 128, torch.Generator())
        losses, seconds = {}, []
        with sync or nullcontext():
            for step in range(1, num_steps + 1):
                batch = batch_of(known, 8, places)
                began = time.process_time()
                optimizer.zero_grad()
                loss_of(trained, batch).backward()
                optimizer.step()
                seconds.append(time.process_time() - began)
                if step % EVERY == 0 and world.is_rank_zero:
                    state = model.state_dict() if sync is None else sync.outer_state()
                    outer.load_state_dict(state, strict=False)
                    with torch.no_grad():
                        losses[step] = float(loss_of(outer, tests))
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        return losses, statistics.median(seconds), num_bytes


def at_equal_steps(found: dict[str, dict[int, float]], num_steps: int) -> None:
    marks = [step for step in (50, 100, 200, 300) if step <= num_steps] or [num_steps]
    print(f"\nloss on held-out text after so many steps\n  {'':<34}" + "".join(f"{mark:>9}" for mark in marks))
    for name, losses in found.items():
        last = losses[marks[-1]] / found["ddp"][marks[-1]] - 1
        print(f"  {name:<34}" + "".join(f"{losses[mark]:>9.3f}" for mark in marks) + f"   {last:+.1%} at the end")


def at_equal_time(
    found: dict[str, dict[int, float]], compute_s: float, num_bytes: int, megabits: int
) -> dict[str, dict[str, float]]:
    """Print and return the loss when ddp has done a few steps; others have done more by then."""
    rows = {}
    cost_s = {
        name: max(compute_s, sent_s) if method.is_hidden else compute_s + sent_s
        for name, method in METHODS.items()
        for sent_s in [method.part * num_bytes * 8 / (megabits * 1e6)]
    }
    print(f"\n{megabits} Mb/s (modelled): milliseconds a step, and the loss at equal time")
    budgets = [step * cost_s["ddp"] for step in (EVERY, 2 * EVERY, 4 * EVERY)]
    print(f"  {'':<34}{'ms':>8}" + "".join(f"{f'{budget:.1f} s':>22}" for budget in budgets))
    for name, losses in found.items():
        cells = []
        for budget in budgets:
            done = min(max(losses), int(budget / cost_s[name] + 1e-9) // EVERY * EVERY)
            cells.append(f"{losses[done]:.3f} in {done} steps" if done else "-")
        rows[name] = {"step_s": cost_s[name]}
        print(f"  {name:<34}{1e3 * cost_s[name]:>8.1f}" + "".join(f"{cell:>22}" for cell in cells))
    return rows


def main() -> None:
    made = parser(__doc__, rounds=1, meaning="not used")
    made.add_argument("--steps", type=int, default=300, help="of each method (300)")
    options = made.parse_args()
    num_steps = 2 * EVERY if options.quick else options.steps

    def measure_all() -> dict[str, Any]:
        found, seconds, num_bytes = {}, [], 0
        for name in METHODS:
            losses, step_s, num_bytes = launch(train, name, num_steps, devices=2, timeout_s=SECTION_TIMEOUT_S)[0]
            found[name] = losses
            seconds.append(step_s)
        compute_s = min(seconds)  # of the method that a busy machine has disturbed least
        print(f"{num_bytes / 1e6:.1f} MB of parameters, {1e3 * compute_s:.1f} ms to compute a step on one core")
        at_equal_steps(found, num_steps)
        modelled = {str(speed): at_equal_time(found, compute_s, num_bytes, speed) for speed in MEGABITS}
        return {"losses": found, "compute_s": compute_s, "bytes": num_bytes, "modelled": modelled}

    record(options.json, measure_all)


if __name__ == "__main__":
    main()
