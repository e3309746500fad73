"""Random tasks through `fit`, as people fine-tune: right is a plain loop of one process on the whole batches.

Crossed are strategies, numbers of ranks, accumulation, uneven data, optimizers, schedules, warm-up, clipping, callbacks
that freeze, unfreeze and set numbers of param groups, averaged weights, early stopping, the best weights, a run that
ended in the middle and goes on elsewhere, and lost ranks. SOAK_MINUTES: for how long further ones are drawn.
"""

import copy
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import lockstep
from tests.distributed.commands import lockstep as run_lockstep
from tests.distributed.test_fit_optimizer_kinds import SAM, InSlices, lbfgs

NUM_STEPS, LAYERS = 9, ("back", "middle", "head")


def data(size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1))


class Net(nn.Module):
    """Three layers, of which some begin frozen."""

    def __init__(self, frozen):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.back, self.middle, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.double()
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def forward(self, inputs):
        return self.head(torch.tanh(self.middle(torch.tanh(self.back(inputs)))))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class DecaySchedule(LRScheduler):
    """Raises weight decay, and lowers the rate, from what they are."""

    def get_lr(self):
        for group in self.optimizer.param_groups if self.last_epoch else ():
            group["weight_decay"] = group["weight_decay"] * 1.3 + 0.01
        return [group["lr"] * (0.9 if self.last_epoch else 1.0) for group in self.optimizer.param_groups]


def groups_of(model):
    return [
        {"params": model.back.parameters(), "lr": 0.02},
        {"params": [*model.middle.parameters()]} | {"weight_decay": 0.05},
        {"params": model.head.parameters()},
    ]


# Each is made from the model; the second says which strategies can divide it.
OPTIMIZERS = {
    "momentum": lambda model: torch.optim.SGD(groups_of(model), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(groups_of(model), lr=0.01),
    "adagrad": lambda model: torch.optim.Adagrad(groups_of(model), lr=0.05),
    "schedule-free": lambda model: InSlices(model.parameters(), lr=0.1),
    "sam": lambda model: SAM(model.parameters(), lr=0.1),
    "lbfgs": lambda model: lbfgs([p for p in model.parameters() if p.requires_grad]),
}
SCHEDULES = {
    "constant": None,
    "function": lambda step, num_steps: 1.0 / (1 + step),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.8**step),
    "decay": DecaySchedule,
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05),
}


@dataclass(frozen=True)
class Program:
    """A task, and what becomes of it."""

    size: int
    frozen: tuple[str, ...]
    optimizer: str
    schedule: str
    warmup: int
    clip: float | None
    accumulate: int
    ema: float | None
    events: tuple[tuple[str, int, str, str], ...]  # the point and the step at which a callback does something
    eval_every: int
    patience: int | None
    takes_best: bool
    places: tuple[tuple[str, int], ...]  # strategies and numbers of ranks, one after the other
    ends: tuple[int, ...]  # the steps after which the run ends, and goes on in the next place
    lost: int | None  # the step after which a rank is killed, in the last place
    saves_every: int = field(default=2)

    @classmethod
    def draw(cls, choose, *, may_lose):
        """Return a random one that `fit` accepts."""
        optimizer = choose.choice(["momentum", "adamw", "adamw", "adagrad", "schedule-free", "sam", "lbfgs"])
        is_plain = optimizer in ("momentum", "adamw", "adagrad")
        strategies = ["single", "dp", "ddp", "ddp"] + ["ddp-zero1", "ddp-zero1", "fsdp"] * is_plain
        strategies += ["ddp-zero1"] * (optimizer == "schedule-free")
        ends = sorted(choose.sample(range(1, NUM_STEPS), choose.choice([0, 1, 1, 2])))
        places = []
        for _ in range(len(ends) + 1):
            strategy = "ddp" if may_lose else choose.choice(strategies)
            places.append((strategy, 1 if strategy == "single" else choose.choice([2, 2, 3])))
        events = []
        for _ in range(choose.choice([0, 1, 2, 4])):
            kinds = ["freeze", "unfreeze", "unfreeze"] * (optimizer != "lbfgs") + ["rate"]
            kinds += ["decay"] * is_plain
            point, step = choose.choice(["step", "evaluation"]), choose.randrange(1, NUM_STEPS)
            events.append((point, step, choose.choice(kinds), choose.choice(LAYERS[:2])))
        schedules = list(SCHEDULES) if is_plain else ["constant", "function"]
        schedule = choose.choice(schedules)
        frozen = choose.choice([(), ("back",), ("back", "middle")]) if optimizer != "lbfgs" else ()
        return cls(
            size=choose.choice([13, 20, 37]),
            frozen=frozen,
            optimizer=optimizer,
            schedule=schedule,
            warmup=choose.choice([0, 0, 3]) if schedule in ("constant", "function") else 0,
            clip=choose.choice([None, 0.05, 0.5]),
            accumulate=choose.choice([1, 1, 2, 3]),
            ema=choose.choice([None, 0.7]) if optimizer != "schedule-free" else None,
            events=tuple(events),
            eval_every=choose.choice([1, 2, 3]),
            patience=choose.choice([None, None, 1, 2]),
            takes_best=choose.random() < 0.4,
            places=tuple(places),
            ends=tuple(ends),
            lost=choose.randrange(1, NUM_STEPS) if may_lose else None,
        )

    def task(self, callbacks):
        return lockstep.Task(
            model=lambda: Net(self.frozen),
            dataset=lambda: data(self.size),
            eval_dataset=lambda: data(11, seed=2),
            loss=loss_of,
            optimizer=lambda model: OPTIMIZERS[self.optimizer](model),
            schedule=SCHEDULES[self.schedule],
            global_batch_size=self.size,
            ema=self.ema,
            callbacks=callbacks,
        )

    def act(self, point, step, model, optimizer):
        """Do what callbacks do."""
        for where, when, kind, layer in self.events:
            if (where, when) != (point, step):
                continue
            if kind in ("freeze", "unfreeze"):
                getattr(model, layer).requires_grad_(kind == "unfreeze")
            for group in optimizer.param_groups if kind == "rate" else ():
                group["lr"] *= 0.5
            for group in optimizer.param_groups if kind == "decay" else ():
                group["weight_decay"] = 0.2

    def settings(self, place, folder):
        strategy, num_devices = self.places[place]
        best = {"keep_best": True, "load_best": True} if self.takes_best else {}
        patience = {} if self.patience is None else {"early_stopping": "loss", "patience": self.patience}
        devices = {"devices": num_devices} if strategy == "dp" else {}
        return {
            "strategy": strategy,
            "steps": NUM_STEPS,
            "warmup": self.warmup,
            "clip": self.clip,
            "quiet": True,
            "accumulate": self.accumulate,
            "eval_every": self.eval_every,
            "checkpoint": folder,
            "keep": 3,
            "checkpoint_every": self.saves_every,
            **best,
            **patience,
            **devices,
        }


class Ended(Exception):
    """Ends a run in the middle."""


class Acting:
    """Does what the program says, and ends a run."""

    def __init__(self, program, end=None, kill=None):
        self.program, self.end, self.kill = program, end, kill

    def on_step_end(self, run):
        self.program.act("step", run.step, run.model, run.optimizer)
        if run.step == self.end:
            if torch.distributed.is_initialized():  # no rank ends while another still exchanges what it has updated
                getattr(run.optimizer, "wait", torch.distributed.barrier)()
                torch.distributed.barrier()
            raise Ended
        if self.kill is not None and (run.step, run.rank) == self.kill[1:] and not Path(self.kill[0]).exists():
            Path(self.kill[0]).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_evaluation(self, run):
        self.program.act("evaluation", run.step, run.model, run.optimizer)


def oracle(program):
    """Return the weights and the losses of evaluations of a plain loop."""
    model, (inputs, labels) = Net(program.frozen), data(program.size).tensors
    held_out = data(11, seed=2).tensors
    optimizer = OPTIMIZERS[program.optimizer](model)
    schedule, made, factor = SCHEDULES[program.schedule], None, 1.0
    has_factor = program.schedule in ("constant", "function")
    if not has_factor:
        made = schedule(optimizer)
    average = None
    if program.ema is not None:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(program.ema), use_buffers=False)
    has_modes = program.optimizer == "schedule-free"

    @torch.enable_grad()
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, (inputs, labels))
        loss.backward()
        if program.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), program.clip)
        return loss

    def in_use():
        """The model as it is evaluated."""
        if has_modes:
            optimizer.eval()
            used = copy.deepcopy(model)
            optimizer.train()
            return used
        return model if average is None else average.module

    evaluations, best, num_since, best_weights = {}, float("inf"), 0, None
    if has_modes:
        optimizer.train()
    for step in range(1, NUM_STEPS + 1):
        if has_factor:
            now = min(1.0, step / program.warmup) if program.warmup else 1.0
            now *= schedule(step - 1, NUM_STEPS) if schedule else 1.0
            for group in optimizer.param_groups:
                group["lr"] *= now / factor
            factor = now
        elif step > 1 and not isinstance(made, ReduceLROnPlateau):
            made.step()
        if program.optimizer == "lbfgs":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step(closure) if program.optimizer == "sam" else optimizer.step()
        if average is not None:
            average.update_parameters(model)
        program.act("step", step, model, optimizer)
        if step % program.eval_every == 0 or step == NUM_STEPS:
            used = in_use()
            with torch.no_grad():
                loss = float(loss_of(used, held_out))
            evaluations[step] = loss
            if isinstance(made, ReduceLROnPlateau):
                made.step(loss)
            num_since = 0 if loss < best else num_since + 1
            if loss < best:
                best, best_weights = loss, copy.deepcopy(used.state_dict())
            program.act("evaluation", step, model, optimizer)
            if program.patience is not None and num_since >= program.patience:
                break
    return (best_weights if program.takes_best else in_use().state_dict()), evaluations


def assert_right(program, weights, evaluations):
    expected, losses = oracle(program)
    # A line search, clipped, amplifies rounding: 3e-9 was seen in the loss after 6 steps.
    atol = 1e-6 if program.optimizer == "lbfgs" else 1e-9
    for step, loss in evaluations.items():
        assert loss == pytest.approx(losses[step], rel=0, abs=atol), f"evaluation after step {step}: {program}"
    if evaluations:
        assert max(evaluations) == max(losses), program
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(weights[name], value, rtol=0, atol=atol), f"{name}: {weights[name] - value} {program}"


def fit_at(world, program, place, folder, end):
    """Train in one place of a program; return weights and evaluations, or None if it ended in the middle."""
    try:
        task = program.task([Acting(program, end)])
        result = lockstep.fit(task, **program.settings(place, folder))
    except Ended:
        return None
    weights = {name: lockstep_whole(value).clone() for name, value in result.model.state_dict().items()}
    return weights, {each.step: each.metrics["loss"] for each in result.evaluations}


def lockstep_whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def run_program(ranks, program, folder):
    """Train in all places of a program, and compare."""
    for place, end in enumerate([*program.ends, None]):
        strategy, num_devices = program.places[place]
        if strategy in ("single", "dp"):
            found = fit_at(None, program, place, folder, end)
        else:
            found, *_ = ranks(num_devices)(fit_at, program, place, folder, end)
        if found is not None:  # also if it stopped before it was to end
            assert_right(program, *found)
            return


@pytest.mark.parametrize("seed", range(4))
def test_random_tasks(ranks, tmp_path, seed):
    run_program(ranks, Program.draw(random.Random(seed), may_lose=False), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_tasks(ranks, tmp_path):
    seed, end = random.randrange(2**31), time.monotonic() + 60 * float(os.environ.get("SOAK_MINUTES", "1"))
    number = 0
    while time.monotonic() < end:
        print("random task", seed + number)
        run_program(ranks, Program.draw(random.Random(seed + number), may_lose=False), tmp_path / str(number))
        number += 1
    print(number, "random tasks were right")


TASK = """\
import os, random
from tests.distributed.test_fit_random import Acting, Program
program = Program.draw(random.Random(int(os.environ["SEED"])), may_lose=True)
task = program.task([Acting(program, kill=(os.environ["KILLED"], program.lost, int(os.environ["LOST_RANK"])))])
"""


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_random_tasks_with_a_lost_rank(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    seed, end = random.randrange(2**31), time.monotonic() + 60 * float(os.environ.get("SOAK_MINUTES", "1"))
    number = 0
    while time.monotonic() < end:
        program = Program.draw(random.Random(seed + number), may_lose=True)
        print("random task with a lost rank", seed + number)
        _strategy, num_devices = program.places[-1]
        weights, lost_rank = tmp_path / f"{number}.safetensors", number % num_devices
        flags = []
        # Else the best checkpoint may be lost with the rank that writes it.
        settings = {**program.settings(-1, tmp_path / str(number)), "checkpoint_blocking": True}
        for name, value in settings.items():
            flag = f"--{name.replace('_', '-')}"
            flags += [flag] if value is True else [] if value in (None, False) else [flag, str(value)]
        done = run_lockstep(
            *("train", tmp_path / "task.py", "--devices", str(num_devices), "--max-restarts", "2", *flags),
            *("--export", weights),
            env={**os.environ, "SEED": str(seed + number), "KILLED": f"{weights}-killed", "LOST_RANK": str(lost_rank)},
        )
        assert done.code == 0, f"{done.err}\n{program}"
        assert_right(program, load_file(weights), {})
        number += 1
    print(number, "random tasks with a lost rank were right")
