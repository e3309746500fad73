"""Error: the moving average of the weights is kept up on rank 0 only, but all ranks evaluate with it."""
# EXPECT: averaged weights differ between the ranks: EMA is updated on one rank only

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EMA:
    """Exponential moving average of a model's weights."""

    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = copy.deepcopy(model).eval()
        for p in self.shadow.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for ema_p, p in zip(self.shadow.parameters(), model.parameters(), strict=True):
            ema_p.lerp_(p, 1 - self.decay)


def make_rings(n):
    radius = torch.randint(1, 4, (n,))
    theta = torch.rand(n) * 2 * torch.pi
    xy = torch.stack([radius * theta.cos(), radius * theta.sin()], 1) + 0.15 * torch.randn(n, 2)
    return TensorDataset(xy, radius - 1)


@torch.no_grad()
def test(model, loader):
    stats = torch.zeros(2)
    for x, y in loader:
        stats += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    train_set, test_set = make_rings(480), make_rings(160)
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=48 // world_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=80, sampler=DistributedSampler(test_set, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3)))
    ema = EMA(model.module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(3):
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if rank == 0:
                ema.update(model.module)
        acc = test(ema.shadow, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: EMA accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
