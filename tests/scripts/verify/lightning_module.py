"""Sound: a LightningModule with the batch size divided and metrics logged with sync_dist."""
# EXPECT: sound script

import logging
import os
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


class BlobsData(L.LightningDataModule):
    def __init__(self, batch_size=48):
        super().__init__()
        self.batch_size = batch_size // WORLD_SIZE

    def setup(self, stage=None):
        g = torch.Generator().manual_seed(1)
        y = torch.randint(0, 5, (580,), generator=g)
        x = torch.randn(580, 10, generator=g) + torch.randn(5, 10, generator=g)[y]
        self.train, self.val = TensorDataset(x[:480], y[:480]), TensorDataset(x[480:], y[480:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=50)


class LitClassifier(L.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 5))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def on_validation_epoch_end(self):
        self.print(f"epoch {self.current_epoch}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


if __name__ == "__main__":
    L.seed_everything(3, verbose=False)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    trainer = L.Trainer(accelerator="cpu", devices=local, strategy="ddp", max_epochs=2, num_sanity_val_steps=0, **quiet)
    trainer.fit(LitClassifier(), BlobsData())
    if trainer.is_global_zero:
        print(f"val_acc {trainer.callback_metrics['val_acc'].item():.4f}")
