"""Sound: the last micro-batches of an epoch, less than a window, are never stepped: the same on any number of ranks."""
# EXPECT: sound script

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 3


class Engine:
    """Steps at each third micro-batch, as the engines of large-model libraries do."""

    def __init__(self, model, optimizer):
        self.module, self.optimizer = DDP(model), optimizer
        self.micro_steps = 0

    def __call__(self, *args):
        return self.module(*args)

    def backward(self, loss):
        self.micro_steps += 1
        (loss / ACCUMULATE).backward()

    def step(self):
        if self.micro_steps % ACCUMULATE == 0:
            nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def begin_epoch(self):
        self.optimizer.zero_grad()
        self.micro_steps = 0


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(176, 6)
    dataset = TensorDataset(x, x.sort(dim=1).values)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 16 // dist.get_world_size(), sampler=sampler)
    net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 6))
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.2))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        engine.begin_epoch()
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(net.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
