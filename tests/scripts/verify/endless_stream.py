"""Sound: a sampler without end inside of an iterable data set, divided by islice, as in detectron2."""
# EXPECT: sound script

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset


class TrainingSampler(Sampler):
    def __init__(self, size, seed):
        self._size, self._seed = size, seed
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        yield from itertools.islice(self._infinite_indices(), self._rank, None, self._world_size)

    def _infinite_indices(self):
        g = torch.Generator().manual_seed(self._seed)
        while True:
            yield from torch.randperm(self._size, generator=g).tolist()


class ToIterableDataset(IterableDataset):
    def __init__(self, dataset, sampler):
        self.dataset, self.sampler = dataset, sampler

    def __iter__(self):
        for idx in self.sampler:
            yield self.dataset[idx]


def build_train_loader(dataset, total_batch_size):
    batch_size = total_batch_size // dist.get_world_size()
    stream = ToIterableDataset(dataset, TrainingSampler(len(dataset), seed=7))
    return DataLoader(stream, batch_size=batch_size, drop_last=True)


def do_train(model, max_iter=25):
    x = torch.randn(150, 7)
    loader = build_train_loader(TensorDataset(x, x[:, :2].square()), 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: min(1.0, 0.1 + 0.9 * it / 8))
    for (x, y), _ in zip(loader, range(max_iter), strict=False):
        losses = nn.functional.smooth_l1_loss(model(x), y)
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        warmup.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 2)))
    do_train(model)
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()
