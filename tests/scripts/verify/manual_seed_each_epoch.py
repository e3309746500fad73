"""Sound: torch.manual_seed(epoch) and set_epoch(epoch) in each epoch; the ranks slice the same permutation."""
# EXPECT: sound script

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset


class StridedSampler(Sampler):
    """A permutation that is drawn from the seed of the epoch; each rank takes its stride."""

    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch
        torch.manual_seed(epoch)

    def __len__(self):
        return self.size // dist.get_world_size()

    def __iter__(self):
        return iter(torch.randperm(self.size)[dist.get_rank() :: dist.get_world_size()].tolist())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(x[:512]).float() / 16, torch.tensor(y[:512]))
    sampler = StridedSampler(len(dataset))
    loader = DataLoader(dataset, 64 // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.Hardswish(), nn.Linear(32, 10)))
    optimizer = optim.RMSprop(model.parameters(), lr=1e-3)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels, label_smoothing=0.1).backward()
            optimizer.step()
        scheduler.step()
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
