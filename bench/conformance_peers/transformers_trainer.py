"""The Trainer of Transformers, as its documentation writes it; the model takes ``num_items_in_batch`` as theirs do."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import Trainer, TrainerCallback, TrainingArguments

from bench.conformance_peers import shared
from bench.conformance_peers.shared import UNUSED, Case, NotOffered, record

PACKAGES = ("transformers", "accelerate")
NOT_AVERAGED, EVEN, DROP = "average_tokens_across_devices=False", "even_batches=False", "dataloader_drop_last=True"
ON_START, OWN_LOADER = "eval_on_start=True", "own get_train_dataloader"
NO_ITEMS, SYNC = "a model without num_items_in_batch", "SyncBatchNorm"
SWITCHES = {
    "uneven": (EVEN, DROP),
    "tokens": (NOT_AVERAGED, NO_ITEMS),
    "accumulate": (NO_ITEMS,),
    "batchnorm": (SYNC,),
    "unfreeze": (UNUSED,),
    "first": (ON_START,),
    "divided": (OWN_LOADER,),
}
command = shared.torchrun


class Model(nn.Module):
    """The model of the case with the signature that the Trainer calls."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net: nn.Module = shared.make_model(case)
        if case.switch == SYNC:
            self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.net)

    def forward(self, index: Tensor, inputs: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        """Return the loss and the logits. By ``kwargs`` the Trainer knows that it may pass ``num_items_in_batch``."""
        if torch.is_grad_enabled():
            record("samples", indices=index.tolist())
        logits = self.net(inputs)
        loss = shared.loss_from(logits, labels)
        if kwargs.get("num_items_in_batch") is not None:
            loss = loss * (labels != shared.PADDING).sum() / kwargs["num_items_in_batch"]
        return {"loss": loss, "logits": logits}


class ModelWithoutItems(Model):
    """One that returns the mean of its micro-batch."""

    def forward(self, index: Tensor, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss and the logits."""
        return super().forward(index, inputs, labels)


class Script(TrainerCallback):
    """What the case does between the steps."""

    trainer: Trainer
    net: nn.Module

    def __init__(self, case: Case) -> None:
        self.case = case

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Be killed."""
        shared.kill_if_due(self.case, int(os.environ["RANK"]), state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Edit a gradient."""
        if self.case.edits:
            shared.first_parameter(model).grad.mul_(2)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Freeze a layer."""
        shared.freeze_late(self.case, self.net)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Unfreeze it."""
        shared.unfreeze_if_due(self.case, round(state.epoch or 0), self.net)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Save and stop, or edit a parameter on one rank."""
        shared.edit_if_due(self.case, int(os.environ["RANK"]), state.global_step, self.net)
        if state.global_step == self.case.stop_at:
            control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Call a collective on rank zero alone."""
        if self.case.alone and round(state.epoch) == 1 and state.is_world_process_zero:
            self.trainer.accelerator.reduce(torch.zeros(1))


class OwnLoader(Trainer):
    """One whose loader the script makes."""

    def get_train_dataloader(self) -> Any:
        """Return a loader of the stream, as it is."""
        return DataLoader(self.train_dataset, batch_size=self.args.per_device_train_batch_size)


def accuracy(found: Any) -> dict[str, float]:
    """Return the metrics of all outputs."""
    logits, labels = found.predictions, found.label_ids
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def train(case: Case) -> None:
    """Train or evaluate."""
    if case.ahead:
        raise NotOffered("The Trainer has the loop.")
    if case.second:
        raise NotOffered("The Trainer has one data set to train on.")
    num_ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    arguments = TrainingArguments(
        output_dir=case.folder,
        per_device_train_batch_size=case.micro_batch(num_ranks),
        per_device_eval_batch_size=case.micro_batch(num_ranks),
        gradient_accumulation_steps=case.accumulate,
        num_train_epochs=case.epochs,
        max_grad_norm=case.clip or 0.0,
        train_sampling_strategy="random" if case.shuffle else "sequential",
        average_tokens_across_devices=case.switch != NOT_AVERAGED,
        dataloader_drop_last=case.switch == DROP,
        accelerator_config={"even_batches": case.switch != EVEN},
        save_strategy="epoch" if case.kill_at else "no",
        max_steps=case.epochs * case.num_samples // shared.BATCH if case.divided else -1,
        ddp_find_unused_parameters=True if case.switch == UNUSED else None,
        eval_on_start=case.switch == ON_START and case.evaluates_first,
        remove_unused_columns=False,
        label_names=["labels"],
        seed=0,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    model, data, script = (
        (ModelWithoutItems if case.switch == NO_ITEMS else Model)(case),
        shared.make_data(case),
        Script(case),
    )
    if case.fewer and rank == shared.VICTIM:
        data = Subset(data, range(len(data) - shared.BATCH))
    optimizer = shared.make_optimizer(model.net.parameters())
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    scheduler = shared.make_schedule(optimizer) if case.schedule else constant
    trainer = (OwnLoader if case.switch == OWN_LOADER else Trainer)(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=accuracy,
        optimizers=(optimizer, scheduler),
        callbacks=[script],
    )
    script.trainer, script.net = trainer, model.net
    if case.evaluates_first and case.switch != ON_START:
        trainer.evaluate()
    if case.evaluates:
        found = trainer.evaluate()
        record("metrics", loss=found["eval_loss"], accuracy=found["eval_accuracy"])
        return
    if case.looks and rank == 0:
        next(iter(trainer.get_train_dataloader()))
    goes_on = (case.resumes or case.kill_at) and any(Path(case.folder).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if goes_on else None)
    shared.record_end(model.net)
