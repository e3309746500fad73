"""Error: an endless training sampler without the rank: all ranks train on the same samples."""
# EXPECT: all ranks train on the same samples

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset


class TrainingSampler(Sampler):
    """Infinite permutations, as in detectron2, but without `islice(..., rank, None, world_size)`."""

    def __init__(self, size, shuffle=True, seed=0):
        self._size, self._shuffle, self._seed = size, shuffle, seed

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self._seed)
        while True:
            if self._shuffle:
                yield from torch.randperm(self._size, generator=g).tolist()
            else:
                yield from range(self._size)


class SimpleTrainer:
    def __init__(self, model, data_loader, optimizer):
        self.model, self.optimizer = model, optimizer
        self._data_loader_iter = iter(data_loader)

    def train(self, max_iter):
        for self.iter in range(max_iter):
            self.run_step()

    def run_step(self):
        x, y = next(self._data_loader_iter)
        loss = nn.functional.smooth_l1_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(150, 7)
    dataset = TensorDataset(x, x[:, :2].square())
    loader = DataLoader(dataset, 20 // dist.get_world_size(), sampler=TrainingSampler(len(dataset), seed=4))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 2)))
    trainer = SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    trainer.train(25)
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()
