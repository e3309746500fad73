"""Sound: SwAV's codes by Sinkhorn's algorithm over the batches of all ranks; prototypes are frozen at first."""
# EXPECT: sound script

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, dim=16, nmb_prototypes=12):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, dim))
        self.prototypes = nn.Linear(dim, nmb_prototypes, bias=False)

    def forward(self, *views):
        embedding = nn.functional.normalize(self.head(torch.cat(views)), dim=1)
        return self.prototypes(embedding)


@torch.no_grad()
def distributed_sinkhorn(out, epsilon=0.05, iterations=3):
    Q = torch.exp(out / epsilon).t()
    B, K = Q.shape[1] * dist.get_world_size(), Q.shape[0]
    sum_Q = torch.sum(Q)
    dist.all_reduce(sum_Q)
    Q /= sum_Q
    for _ in range(iterations):
        sum_of_rows = torch.sum(Q, dim=1, keepdim=True)
        dist.all_reduce(sum_of_rows)
        Q /= sum_of_rows
        Q /= K
        Q /= torch.sum(Q, dim=0, keepdim=True)
        Q /= B
    return (Q * B).t()


def main(batch_size=64, freeze_prototypes_niters=3, temperature=0.1):
    dist.init_process_group("gloo")
    torch.manual_seed(31)
    images = torch.tensor(load_digits().data[:384]).float() / 16
    dataset = TensorDataset(images.roll(1, dims=1), images.roll(-1, dims=1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size // dist.get_world_size(), sampler=sampler, drop_last=True)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-6)
    iteration = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for views in loader:
            with torch.no_grad():
                w = nn.functional.normalize(model.module.prototypes.weight.data.clone(), dim=1, p=2)
                model.module.prototypes.weight.copy_(w)
            a, b = model(*views).chunk(2)
            codes = distributed_sinkhorn(a.detach()), distributed_sinkhorn(b.detach())
            scores = b / temperature, a / temperature
            pairs = zip(codes, scores, strict=True)
            loss = -sum((q * torch.log_softmax(p, dim=1)).sum(dim=1).mean() for q, p in pairs) / 2
            optimizer.zero_grad()
            loss.backward()
            if iteration < freeze_prototypes_niters:
                model.module.prototypes.weight.grad = None
            optimizer.step()
            iteration += 1
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
