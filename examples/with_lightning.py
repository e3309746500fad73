"""A LightningModule on Lockstep: nothing in the script names Lockstep.

lockstep run --devices 2 --adopt examples/with_lightning.py
"""

import os

import lightning
import torch
from digits import Batch, loss, network, train_set
from torch import Tensor
from torch.utils.data import DataLoader


class Digits(lightning.LightningModule):
    """The network and the loss of digits.py."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: Batch, _: int) -> Tensor:
        """Return the loss of a batch, and log its mean over the ranks."""
        value = loss(self.network, batch)
        self.log("loss", value, sync_dist=True)
        return value

    def on_train_end(self) -> None:
        """Print on rank zero which engine trained, and the loss."""
        engine = type(self.trainer.strategy.model).__module__
        self.print(f"engine {engine}, last loss {self.trainer.callback_metrics['loss']:.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


torch.manual_seed(0)
trainer = lightning.Trainer(
    accelerator="auto",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    strategy="ddp",
    max_steps=20,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Digits(), DataLoader(train_set(), batch_size=32, shuffle=True))
