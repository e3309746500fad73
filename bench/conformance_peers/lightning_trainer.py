"""The Trainer of Lightning with a LightningModule, as its documentation writes it.

On several ranks the Trainer gives a loader without shuffling a sampler that shuffles. So where the order must be that
of one process, the script passes its own DistributedSampler, as the documentation of ``use_distributed_sampler`` says.
"""

import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset

from bench.conformance_peers import shared
from bench.conformance_peers.shared import UNUSED, Batch, Case, NotOffered, record

PACKAGES = ("lightning", "torchmetrics")
SYNC, METRICS, STATEFUL = "sync_batchnorm=True", "torchmetrics", "StatefulDataLoader"
ONE_DEVICE, FINETUNING, SANITY = "Trainer(devices=1)", "BaseFinetuning", "num_sanity_val_steps=2"
OWN_SAMPLER, INJECTED = "use_distributed_sampler=False, DistributedSampler", "use_distributed_sampler=True"
SWITCHES = {
    "gradients": (INJECTED,),
    "batchnorm": (SYNC,),
    "shuffle": (OWN_SAMPLER,),
    "metrics": (METRICS, ONE_DEVICE),
    "resume": (STATEFUL,),
    "unfreeze": (UNUSED, FINETUNING),
    "first": (SANITY,),
}
command = shared.torchrun


class Module(lightning.LightningModule):
    """The model and the loss of the case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.net = case, shared.make_model(case)
        if case.switch == METRICS:
            from torchmetrics import MeanMetric

            self.mean_loss, self.accuracy = MeanMetric(), MeanMetric()

    def on_train_start(self) -> None:
        """Freeze a layer."""
        shared.freeze_late(self.case, self.net)

    def on_train_epoch_start(self) -> None:
        """Unfreeze it."""
        if self.case.switch != FINETUNING:
            shared.unfreeze_if_due(self.case, self.current_epoch, self.net)

    def on_train_batch_end(self, *_: Any) -> None:
        """Edit a parameter on one rank."""
        shared.edit_if_due(self.case, self.global_rank, self.global_step, self.net)

    def training_step(self, batch: Any, _: int) -> Tensor:
        """Return the loss."""
        shared.kill_if_due(self.case, self.global_rank, self.global_step + 1)
        if self.case.second:
            batch = {**batch["labelled"], "unlabelled": batch["unlabelled"]["inputs"]}
        return shared.loss_of(self.net, batch)

    def validation_step(self, batch: Batch, _: int) -> None:
        """Log loss and accuracy."""
        logits = self.net(batch["inputs"])
        loss, right = shared.loss_from(logits, batch["labels"]), shared.right_of(logits, batch).double()
        if self.case.switch == METRICS:
            self.mean_loss.update(loss, len(right))
            self.accuracy.update(right)
            self.log_dict({"loss": self.mean_loss, "accuracy": self.accuracy})
        else:
            self.log_dict({"loss": loss, "accuracy": right.mean()}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and the schedule by steps."""
        optimizer = shared.make_optimizer(self.net.parameters())
        if not self.case.schedule:
            return optimizer
        schedule = {"scheduler": shared.make_schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Edit a gradient."""
        if self.case.edits:
            shared.first_parameter(self.net).grad.mul_(2)

    def on_train_epoch_end(self) -> None:
        """Call a collective on rank zero alone."""
        if self.case.alone and self.current_epoch == 0 and self.trainer.is_global_zero:
            self.all_gather(torch.zeros(1))


class Finetuning(BaseFinetuning):
    """Freezes and unfreezes the first layer."""

    def freeze_before_training(self, pl_module: Any) -> None:
        """Freeze it."""
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """Unfreeze it in the second epoch; the optimizer has it already."""
        if epoch == 1:
            self.make_trainable(pl_module.net[0])


def train(case: Case) -> None:
    """Train or evaluate."""
    if case.ahead:
        raise NotOffered("The Trainer has the loop.")
    lightning.seed_everything(0, verbose=False)
    num_ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    has_own = case.switch == OWN_SAMPLER or not (
        case.shuffle or case.evaluates or case.divided or case.switch == INJECTED
    )
    saves = ModelCheckpoint(
        dirpath=case.folder,
        save_last=True,
        every_n_train_steps=case.stop_at,
        every_n_epochs=None if case.stop_at else 1,
    )
    keeps = bool(case.stop_at or case.resumes or case.kill_at)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy="ddp_find_unused_parameters_true" if case.switch == UNUSED else "ddp",
        max_epochs=case.epochs,
        max_steps=case.stop_at or -1,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        sync_batchnorm=case.switch == SYNC,
        use_distributed_sampler=not has_own,
        enable_checkpointing=keeps,
        callbacks=[saves] * keeps + [Finetuning()] * (case.switch == FINETUNING),
        default_root_dir=case.folder,
        num_sanity_val_steps=2 if case.switch == SANITY else 0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, data = Module(case), shared.make_data(case)
    if case.fewer and rank == shared.VICTIM:
        data = Subset(data, range(len(data) - shared.BATCH))
    Loader: Any = DataLoader
    if case.switch == STATEFUL:
        from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    if has_own:
        sampler = DistributedSampler(data, num_ranks, rank, shuffle=case.shuffle)
        loader = Loader(data, batch_size=case.micro_batch(num_ranks), sampler=sampler)
    else:
        loader = Loader(data, batch_size=case.micro_batch(num_ranks), shuffle=case.shuffle)
    if case.second:
        extra = shared.make_second(case)
        sampler = DistributedSampler(extra, num_ranks, rank, shuffle=False)
        second = DataLoader(extra, batch_size=case.micro_batch(num_ranks) // 2, sampler=sampler)
        loader = CombinedLoader({"labelled": loader, "unlabelled": second})
    test = DataLoader(data, batch_size=case.micro_batch(num_ranks))
    if case.switch == ONE_DEVICE:
        if rank == 0:
            alone = lightning.Trainer(
                accelerator="cpu", devices=1, num_nodes=1, logger=False, enable_progress_bar=False
            )
            (found,) = alone.validate(module, test, verbose=False)
            record("metrics", loss=found["loss"], accuracy=found["accuracy"])
        return
    if case.evaluates_first and case.switch != SANITY:
        trainer.validate(module, test, verbose=False)
    if case.evaluates:
        (found,) = trainer.validate(module, loader, verbose=False)
        record("metrics", loss=found["loss"], accuracy=found["accuracy"])
        return
    if case.looks and rank == 0:
        next(iter(loader))
    last = Path(case.folder) / "last.ckpt"
    goes_on = last.exists() and (case.resumes or case.kill_at)
    tests = test if case.evaluates_first and case.switch == SANITY else None
    trainer.fit(module, loader, tests, ckpt_path=str(last) if goes_on else None)
    shared.record_end(module.net)
