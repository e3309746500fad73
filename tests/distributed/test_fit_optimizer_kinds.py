"""Optimizers with modes, with a closure and with others inside: as in a loop of one process, also after a resume."""

import copy

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.training import make_task, mean_loss, read_state, relative_error, samples, token_loss

NUM_STEPS = 6


class ScheduleFree(Optimizer):
    """SGD that is schedule-free: parameters are to train in training mode, and to use in evaluation mode."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _switch(self, mode, weight):
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] is not mode else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight(group["beta"]))
            group["train_mode"] = mode

    def eval(self):
        self._switch(False, lambda beta: 1 - 1 / beta)

    def train(self):
        self._switch(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def step(self, closure=None):
        assert self.param_groups[0]["train_mode"]
        for group in self.param_groups:
            group["k"] += 1
            part = 1 / group["k"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, part)
                    p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - part) - 1))
                    z.sub_(p.grad, alpha=group["lr"])


class InSlices(ScheduleFree):
    """The same, which ZeRO-1 divides by elements."""

    elementwise = True


class SAM(Optimizer):
    """Sharpness-aware minimization around an SGD with momentum, whose state torch does not save."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.base = SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("SAM requires a closure")
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        before = [p.clone() for p in trained]
        for p in trained:
            p.data.add_(p.grad / norm, alpha=0.05)
        closure()
        for p, value in zip(trained, before, strict=True):
            p.copy_(value)
        self.base.step()


class Lookahead(Optimizer):
    """Slow weights, in its own state, around an AdamW."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})
        self.fast, self.num_steps = AdamW(self.param_groups, lr=lr), 0

    @torch.no_grad()
    def step(self, closure=None):
        slow = {p: self.state[p].setdefault("slow", p.clone()) for g in self.param_groups for p in g["params"]}
        self.fast.step()
        for p, value in slow.items():
            self.state[p]["calls"] = self.state[p].get("calls", 0) + 1
            if self.state[p]["calls"] % 2 == 0:
                p.copy_(value.lerp_(p, 0.5))


class LookaheadOfItsOwn(Lookahead):
    """The same, which saves itself, in a format of its own."""

    def state_dict(self):
        states = list(self.state.values())
        slow, calls = ([state[name] for state in states] for name in ("slow", "calls"))
        return {"slow": slow, "calls": calls, "fast": self.fast.state_dict()}

    def load_state_dict(self, state):
        self.fast.load_state_dict(state["fast"])
        trained = [p for group in self.param_groups for p in group["params"]]
        for p, slow, calls in zip(trained, state["slow"], state["calls"], strict=True):
            self.state[p] = {"slow": slow.clone(), "calls": calls}


def lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def by_hand(task, num_steps=NUM_STEPS, clip=None):
    """Return the weights of a loop of one process on whole batches, and the evaluations after each step."""
    trainer = Trainer(task, Settings(), None, strategy="single", devices=[torch.device("cpu")])
    model, order = trainer.model, trainer.plan.order
    optimizer, data, losses = task.optimizer(list(model.parameters())), samples(), []
    for step in range(num_steps):
        batch = tuple(tensor[order.batch(step)] for tensor in data.tensors)

        @torch.enable_grad()
        def closure(batch=batch):
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss = loss.total / loss.count if isinstance(loss, lockstep.Loss) else loss
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            return loss

        if isinstance(optimizer, ScheduleFree):
            optimizer.train()
            optimizer.step(closure())
            optimizer.eval()
        else:
            if not isinstance(optimizer, torch.optim.LBFGS):
                closure()
            optimizer.step(closure)
        with torch.no_grad():
            losses.append(float(mean_loss(model, data.tensors)))
    trainer.close()
    return flat(model), losses


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def fit(strategy, task, **settings):
    """Return the weights of the result, as a whole, and the losses of the evaluations."""
    weights = []
    task = copy.copy(task)
    object.__setattr__(task, "after", lambda model: weights.append(flat(model)))
    devices = {"devices": 2} if strategy == "dp" else {}
    result = lockstep.fit(task, strategy=strategy, **{"steps": NUM_STEPS, "quiet": True, **devices, **settings})
    return weights[0] if weights else None, [each.metrics["loss"] for each in result.evaluations]


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "ddp-zero1", "ddp-zero1 in slices", "fsdp"])
def test_an_optimizer_with_modes_is_switched_for_evaluations_and_the_result(ranks, tmp_path, strategy):
    strategy, *in_slices = strategy.split(" ", 1)
    kind = InSlices if in_slices else ScheduleFree
    task = make_task(optimizer=kind, eval_dataset=samples, drop_last=True)
    export = tmp_path / "weights.safetensors"
    saves = {"checkpoint": tmp_path / "run", "checkpoint_every": 2, "eval_every": 1, "export": str(export)}
    expected, losses = by_hand(task)

    def part(steps):
        return lambda _world=None: fit(strategy, task, steps=steps, **saves)

    if strategy in ("single", "dp"):
        first, (found, last) = part(3)()[1], part(NUM_STEPS)()
    else:
        first, (found, last) = ranks(2)(part(3))[0][1], ranks(3)(part(NUM_STEPS))[0]
    assert first + last == pytest.approx(losses, rel=1e-12)
    assert relative_error(found, expected) < 1e-12
    from safetensors.torch import load_file

    assert sum(float(value.square().sum()) for value in load_file(export).values()) == pytest.approx(
        float(expected.square().sum()), rel=1e-12
    )
    # A checkpoint has both: the weights to train and, for who loads it without the optimizer, those to use.
    model = task.model()
    lockstep.load(tmp_path / "run", model=model)
    assert relative_error(flat(model), expected) < 1e-12
    state = read_state(tmp_path / "run" / f"step-{NUM_STEPS:010d}")
    assert not torch.equal(state["ema"]["0.weight"], state["model"]["0.weight"])


@pytest.mark.parametrize("make", [lbfgs, SAM])
def test_an_optimizer_that_needs_a_closure_gets_the_gradient_of_the_whole_step_again(ranks, tmp_path, make):
    # 50 samples in batches of 24: the last batch of an epoch has two, of which some of the micro-batches have none.
    task, clip = make_task(optimizer=make, loss=token_loss), 0.05
    expected, _ = by_hand(task, clip=clip)
    for strategy in ("single", "dp"):
        assert relative_error(fit(strategy, task, clip=clip)[0], expected) < 1e-9

    def parts(world):
        how = {"clip": clip, "checkpoint": tmp_path}
        fit("ddp", task, steps=3, **how)
        return fit("ddp", task, **how)[0], fit("torch-ddp", make_task(optimizer=make, drop_last=True))[0]

    found, drop = ranks(2)(parts)[0]
    assert relative_error(found, expected) < 1e-9
    assert relative_error(drop, by_hand(make_task(optimizer=make, drop_last=True))[0]) < 1e-9
    even = make_task(optimizer=make, loss=token_loss, drop_last=True)
    accumulated = ranks(2)(lambda _world: fit("ddp", even, clip=clip, accumulate=3)[0])[0]
    assert relative_error(accumulated, by_hand(even, clip=clip)[0]) < 1e-9


@pytest.mark.parametrize("kind", [Lookahead, LookaheadOfItsOwn])
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_the_state_of_an_optimizer_inside_another_is_saved(ranks, tmp_path, strategy, kind):
    # A rate that changes, which the optimizer inside must get after a resume, too.
    task = make_task(optimizer=kind, schedule=lambda step, _num_steps: 1 / (1 + step))

    def parts(_world=None):
        fit(strategy, task, steps=3, checkpoint=tmp_path)
        return fit(strategy, task)[0], fit(strategy, task, checkpoint=tmp_path)[0]

    whole, resumed = parts() if strategy == "single" else ranks(2)(parts)[0]
    assert torch.equal(whole, resumed)


def test_the_best_weights_of_an_optimizer_with_modes_are_those_that_were_evaluated(tmp_path):
    task = make_task(optimizer=lambda params: ScheduleFree(params, lr=3.0), eval_dataset=samples)
    keep = {"keep_best": "loss", "load_best": True, "early_stopping": "loss", "patience": 1, "checkpoint": tmp_path}
    weights, losses = fit("single", task, eval_every=1, **keep)
    _, expected = by_hand(task, num_steps=len(losses))
    assert losses == pytest.approx(expected, rel=1e-9)
    assert losses[-1] > min(losses)
    model = task.model()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    assert mean_loss(model, samples().tensors).item() == pytest.approx(min(losses), rel=1e-9)


def closure_text(kind):
    return (
        f"{kind} needs a closure, which computes the gradient again in its step; fit has one with the strategies "
        "single, dp and ddp, without fp16, compression and overlap_optimizer.\nUse one of these, or write a script "
        "with lockstep.prepare, in which optimizer.step(closure) works."
    )


def test_what_does_not_go_together_is_refused_on_all_ranks(ranks):
    def message(world, strategy, num_steps=0, precision="fp32", **changes):
        settings = Settings(steps=3, precision=precision)
        with pytest.raises(ConfigurationError) as error:
            task = make_task(drop_last=True, **changes)
            trainer = Trainer(task, settings, world, strategy=strategy, devices=[torch.device("cpu")])
            for _ in range(num_steps):
                trainer.step()
        return str(error.value)

    class Asking(SGD):
        """An optimizer of which only its first step shows that it needs a closure."""

        def step(self, closure=None):
            if closure is None:
                raise RuntimeError("a closure is required")

    def run(world):
        return [
            message(world, "fsdp", optimizer=lbfgs),
            message(world, "ddp-zero1", num_steps=1, optimizer=lambda params: Asking(params, lr=0.1)),
            message(world, "ddp", precision="fp16", optimizer=lbfgs),
            message(world, "ddp", optimizer=ScheduleFree, ema=0.9),
            message(world, "local-sgd", optimizer=ScheduleFree),
            message(world, "ddp-zero1", optimizer=Lookahead),
            message(world, "local-sgd", optimizer=Lookahead),
            message(world, "fsdp", optimizer=LookaheadOfItsOwn),
        ]

    modes = (
        "ScheduleFree has train() and eval(), as optimizers that average the weights themselves; it cannot be combined "
    )
    for texts in ranks(2)(run):
        assert texts == [
            closure_text("LBFGS"),
            closure_text("Asking"),
            closure_text("LBFGS"),
            modes + "with Task.ema.\nOmit ema.",
            modes + "with strategy local-sgd, which exchanges parameters in training mode.\nUse strategy ddp.",
            "Lookahead holds another optimizer as fast, so its state cannot be divided among ranks.\n"
            "Use it as it is, without ZeroRedundancyOptimizer; with fit, strategy ddp.",
            "Lookahead holds another optimizer, which strategy local-sgd cannot save.\nUse strategy ddp.",
            "LookaheadOfItsOwn has calls, fast, slow in its state_dict, which strategy fsdp cannot save.\n"
            "Use strategy ddp.",
        ]
