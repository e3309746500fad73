"""Error: pad=False gives the ranks uneven last batches, but backward() is called without their sizes."""
# EXPECT: uneven parts of the last batch are averaged as equals

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep


class Sines(Dataset):
    def __init__(self, count, offset=0):
        self.t = (torch.arange(count) * 0.61803 + offset) % 1

    def __len__(self):
        return len(self.t)

    def __getitem__(self, i):
        t = self.t[i]
        return torch.stack([t, t * t]), torch.sin(8 * t)


class MLP(nn.Module):
    def __init__(self, sizes=(2, 40, 40)):
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.last = nn.Linear(sizes[-1], 1)

    def forward(self, x):
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.last(x)[:, 0]


def epoch_loop(model, loader, opt):
    for x, y in loader:
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        opt.step()


def main():
    with lockstep.init() as world:
        torch.manual_seed(13)
        model = lockstep.DistributedDataParallel(MLP())
        train, test = Sines(203), Sines(64, offset=0.3)
        sampler = lockstep.DistributedSampler(train, seed=13, pad=False)
        loader = DataLoader(train, 40 // world.world_size, sampler=sampler)
        opt = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            epoch_loop(model, loader, opt)
            x, y = (torch.stack(column) for column in zip(*test, strict=True))
            with torch.no_grad():
                world.print(f"epoch {epoch} test mse {nn.functional.mse_loss(model.module(x), y):.4f}")


if __name__ == "__main__":
    main()
