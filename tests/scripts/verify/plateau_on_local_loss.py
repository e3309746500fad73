"""Error: ReduceLROnPlateau sees the validation loss of the rank's own part, so the ranks reduce at different times."""
# EXPECT: learning rates differ between the ranks: schedule by a local loss

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def load_series(n=460, window=12):
    """One step ahead of a noisy sine."""
    torch.manual_seed(4)
    t = torch.arange(n + window + 1)
    series = torch.sin(t / 5) + 0.4 * torch.randn(len(t))
    x = series.unfold(0, window, 1)[:n]
    return TensorDataset(x, series[window : window + n])


class Forecaster:
    def __init__(self, rank, world_size, batch_size=40):
        self.rank = rank
        data = load_series()
        self.train_ds, val_ds = (
            torch.utils.data.Subset(data, range(400)),
            torch.utils.data.Subset(data, range(400, 460)),
        )
        self.sampler = DistributedSampler(self.train_ds)
        self.train_dl = DataLoader(self.train_ds, batch_size // world_size, sampler=self.sampler)
        self.val_dl = DataLoader(val_ds, 30, sampler=DistributedSampler(val_ds, shuffle=False))
        self.model = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)))
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.scheduler = ReduceLROnPlateau(self.optimizer, factor=0.3, patience=0)

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        for x, y in self.train_dl:
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()
            if epoch == 0:
                continue
            self.scheduler.step(self.validation_loss())  # small data: check after each step

    @torch.no_grad()
    def validation_loss(self):
        losses = [nn.functional.mse_loss(self.model.module(x), y) for x, y in self.val_dl]
        return torch.stack(losses).mean().item()

    def fit(self, epochs):
        for epoch in range(epochs):
            self.train_epoch(epoch)
            loss = torch.tensor(self.validation_loss())
            dist.all_reduce(loss)
            if self.rank == 0:
                print(f"epoch {epoch} val {loss.item() / dist.get_world_size():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Forecaster(dist.get_rank(), dist.get_world_size()).fit(3)
    dist.destroy_process_group()
