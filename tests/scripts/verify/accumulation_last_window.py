"""Error: the last window of an epoch has a small micro-batch, whose mean counts like that of a whole one."""
# EXPECT: samples of the last window do not count alike

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICRO_BATCH, GLOBAL_BATCH = 8, 32


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    accumulation_steps = GLOBAL_BATCH // MICRO_BATCH // world_size
    torch.manual_seed(0)
    x = torch.randn(88, 6)
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=MICRO_BATCH, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (inputs, labels) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss = loss / accumulation_steps
            loss.backward()
            if (step + 1) % accumulation_steps == 0 or step + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
