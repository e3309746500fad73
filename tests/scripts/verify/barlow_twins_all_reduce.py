"""Error: the cross-correlation is summed over the ranks without gradients: DDP's mean is too small."""
# EXPECT: gradients are scaled by 1 / world size

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def off_diagonal(x):
    n, _ = x.shape
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


class BarlowTwins(nn.Module):
    def __init__(self, batch_size, lambd=0.0051):
        super().__init__()
        self.batch_size, self.lambd = batch_size, lambd
        self.backbone = nn.Linear(64, 32, bias=False)
        self.projector = nn.Sequential(nn.Tanh(), nn.Linear(32, 16, bias=False), nn.LayerNorm(16))

    def forward(self, y1, y2):
        z1, z2 = self.projector(self.backbone(y1)), self.projector(self.backbone(y2))
        c = z1.T @ z2
        c.div_(self.batch_size)
        dist.all_reduce(c)  # autograd does not see it
        on_diag = torch.diagonal(c).add_(-1).pow_(2).sum()
        return on_diag + self.lambd * off_diagonal(c).pow_(2).sum()


def main(batch_size=64):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data[:384]).float() / 16
    dataset = TensorDataset(images.roll(1, dims=1), images.roll(-1, dims=1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size // dist.get_world_size(), sampler=sampler)
    model = nn.parallel.DistributedDataParallel(BarlowTwins(batch_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for y1, y2 in loader:
            optimizer.zero_grad()
            loss = model(y1, y2)
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
