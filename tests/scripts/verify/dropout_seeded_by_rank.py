"""Sound: dropout and noise differ between the ranks: seed + rank, after model and data exist."""
# EXPECT: sound script (dropout and noise are drawn anew)

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SEED = 21


class NoisyWaves(Dataset):
    """Which of four frequencies is it? With random noise on each access."""

    def __init__(self, size, noise):
        g = torch.Generator().manual_seed(size)
        self.noise = noise
        self.kind = torch.randint(4, (size,), generator=g)
        self.phase = torch.rand(size, generator=g) * 6.28

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, i):
        t = torch.linspace(0, 6.28, 32)
        wave = torch.sin((self.kind[i] + 1) * t + self.phase[i])
        return wave + self.noise * torch.randn(32), self.kind[i]


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 16, 5), nn.ReLU(), nn.MaxPool1d(4))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 7, 4))

    def forward(self, x):
        return self.head(self.conv(x.unsqueeze(1)))


class Experiment:
    def __init__(self):
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(SEED)
        self.model = DistributedDataParallel(WaveNet())
        torch.manual_seed(SEED + self.rank)
        self.train_set, self.test_set = NoisyWaves(256, 0.3), NoisyWaves(100, 0.0)
        self.sampler = DistributedSampler(self.train_set, seed=SEED)
        self.loader = DataLoader(self.train_set, batch_size=32 // self.world, sampler=self.sampler)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for x, y in self.loader:
                nn.functional.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.report(epoch)

    @torch.no_grad()
    def report(self, epoch):
        self.model.eval()
        right = sum((self.model.module(x).argmax(1) == y).sum().item() for x, y in DataLoader(self.test_set, 50))
        if self.rank == 0:
            print(f"[{epoch}] {right} of {len(self.test_set)}")


if __name__ == "__main__":
    Experiment().fit(2)
    dist.destroy_process_group()
