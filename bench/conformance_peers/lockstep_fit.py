"""`lockstep.fit` of a `Task`, as docs/task.md writes it."""

import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from bench.conformance_peers import shared
from bench.conformance_peers.lockstep_script import command
from bench.conformance_peers.shared import Batch, Case, NotOffered, record

PACKAGES = ("lockstep-torch",)
EXACT, APART = "reproducible=6", "sync_batchnorm=False"
WHOLE = "optimizer=lambda model: ..."
"""The optimizer gets the frozen parameters, too."""
FORKS = False
"""A run that was stopped ends with code 75."""
SWITCHES = {
    "gradients": (EXACT,),
    "batchnorm": (APART, EXACT),
    "dropout": (EXACT,),
    "unfreeze": (WHOLE,),
    "resume": (EXACT,),
}
SHUFFLES_ALWAYS = True
__all__ = ["command"]


class Script:
    """The callback of the case."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def on_step_end(self, run: Any) -> None:
        """Stop, unfreeze, edit a parameter on one rank, or call a collective on rank zero alone."""
        shared.edit_if_due(self.case, run.rank, run.step, run.model)
        if run.step == run.steps_per_epoch:
            shared.unfreeze_if_due(self.case, 1, run.model)
        if run.step == self.case.stop_at:
            run.stop("the case says so")
        if self.case.alone and run.step == run.steps_per_epoch and run.is_rank_zero:
            dist.all_reduce(torch.zeros(1))

    def on_end(self, run: Any) -> None:
        """Record the weights."""
        if not self.case.evaluates:
            shared.record_end(run.model)


def make_dataset(case: Case) -> Any:
    """Return the data set; with ``fewer``, that of the victim lacks its last batch."""
    data, rank = shared.make_data(case), dist.get_rank() if dist.is_initialized() else 0
    is_short = case.fewer and rank == shared.VICTIM
    return torch.utils.data.Subset(data, range(len(data) - shared.BATCH)) if is_short else data


_CALLS = itertools.count(1)
"""Of `loss` in training: one in each step of a rank."""


def loss(case: Case, model: nn.Module, batch: Batch) -> Any:
    """Return the mean over samples, or the sum over tokens with their number."""
    if torch.is_grad_enabled() and case.kill_at:
        shared.kill_if_due(case, dist.get_rank(), next(_CALLS))
    value, count = shared.loss_of(model, batch), shared.count_of(batch)
    return lockstep.Loss(value * count, count) if case.model == "tokens" else value


def metrics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the accuracy, a value for each sample."""
    return {"accuracy": shared.right_of(model(batch["inputs"]), batch).double()}


def with_parameters(parameters: Any) -> Any:
    """Return an optimizer of those that are trained as the run begins."""
    return shared.make_optimizer(parameters)


def with_model(model: nn.Module) -> Any:
    """Return an optimizer of all parameters."""
    return shared.make_optimizer(model.parameters())


def task_of(case: Case) -> lockstep.Task:
    """Return the task of the case."""
    return lockstep.Task(
        model=partial(shared.make_model, case),
        dataset=partial(make_dataset, case),
        eval_dataset=partial(shared.make_data, case) if case.evaluates else None,
        metrics=metrics if case.evaluates else None,
        loss=partial(loss, case),
        optimizer=with_model if case.switch == WHOLE else with_parameters,
        schedule=(lambda optimizer, num_steps: shared.make_schedule(optimizer)) if case.schedule else None,
        global_batch_size=shared.BATCH,
        callbacks=[Script(case)],
    )


def train(case: Case) -> None:
    """Train or evaluate."""
    if case.edits:
        raise NotOffered("A task has no place between backward and the step.")
    if case.looks:
        raise NotOffered("A task has no loader.")
    if case.second:
        raise NotOffered("A task has one data set to train on.")
    if case.ahead:
        raise NotOffered("`fit` has the loop.")
    if case.evaluates_first:
        lockstep.evaluate(task_of(replace(case, evaluates=True)), model=shared.make_model(case))
    task = task_of(case)
    if case.evaluates:
        found = lockstep.evaluate(task, model=shared.make_model(case))
        record("metrics", loss=found["loss"], accuracy=found["accuracy"])
        return
    checkpoint = Path(case.folder) / "saved" if case.stop_at or case.resumes or case.kill_at else None
    result = lockstep.fit(
        task,
        epochs=None if case.divided else case.epochs,
        steps=case.epochs * case.num_samples // shared.BATCH if case.divided else None,
        accumulate=case.accumulate,
        clip=case.clip,
        checkpoint=checkpoint,
        reproducible=6 if case.switch == EXACT else None,
        sync_batchnorm=False if case.switch == APART else None,
        quiet=True,
    )
    if result.exit_code:
        sys.exit(result.exit_code)
