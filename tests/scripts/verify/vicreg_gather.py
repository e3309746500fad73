"""Sound: VICReg gathers the embeddings of all ranks, with gradients, so variance and covariance are those of all."""
# EXPECT: sound script

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class FullGatherLayer(torch.autograd.Function):
    """Gather tensors from all processes and support backward propagation for the gradients across processes."""

    @staticmethod
    def forward(ctx, x):
        output = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(output, x)
        return tuple(output)

    @staticmethod
    def backward(ctx, *grads):
        all_gradients = torch.stack(grads)
        dist.all_reduce(all_gradients)
        return all_gradients[dist.get_rank()]


def off_diagonal(x):
    n = len(x)
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


class VICReg(nn.Module):
    def __init__(self, num_features=16):
        super().__init__()
        self.num_features = num_features
        self.backbone = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, num_features))

    def forward(self, x, y):
        x, y = self.backbone(x), self.backbone(y)
        x, y = (torch.cat(FullGatherLayer.apply(z.contiguous()), dim=0) for z in (x, y))
        repr_loss = F.mse_loss(x, y)
        x, y = x - x.mean(dim=0), y - y.mean(dim=0)
        std_loss = sum(F.relu(1 - torch.sqrt(z.var(dim=0) + 0.0001)).mean() / 2 for z in (x, y))
        cov = [off_diagonal(z.T @ z / (len(z) - 1)).pow(2).sum() / self.num_features for z in (x, y)]
        return 25.0 * repr_loss + 25.0 * std_loss + sum(cov)


def main(batch_size=64):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data[:384]).float() / 16
    views = images.roll(1, dims=1), images.roll(-1, dims=1)
    dataset = TensorDataset(*views)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size // dist.get_world_size(), sampler=sampler)
    model = nn.parallel.DistributedDataParallel(VICReg())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-6)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            model(x, y).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
