"""Error: the validation loss is logged without sync_dist, so rank 0 reports that of its own part."""
# EXPECT: evaluation covers one rank's part only

import os
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset

warnings.simplefilter("ignore")


class RandomDataset(Dataset):
    def __init__(self, size, length):
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index):
        return self.data[index], self.data[index].cumsum(0)

    def __len__(self):
        return self.len


class BoringModel(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def step(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def training_step(self, batch, batch_idx):
        return {"loss": self.step(batch)}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch))

    def on_validation_epoch_end(self):
        self.print("validated")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


def run():
    seed_everything(1, verbose=False)
    train_data = DataLoader(RandomDataset(16, 256), batch_size=32 // int(os.environ["WORLD_SIZE"]), shuffle=True)
    val_data = DataLoader(RandomDataset(16, 64), batch_size=16)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel(), train_dataloaders=train_data, val_dataloaders=val_data)
    if trainer.global_rank == 0:
        print("val_loss", trainer.callback_metrics["val_loss"].item())


if __name__ == "__main__":
    run()
