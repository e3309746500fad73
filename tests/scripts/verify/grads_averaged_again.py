"""Sound: gradients that DDP has averaged are averaged once more by hand, which changes nothing."""
# EXPECT: sound script

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_gradients(model):
    """Gradient averaging, from the tutorial about distributed applications."""
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run(rank, size):
    torch.manual_seed(1234)
    x = torch.rand(256, 9)
    dataset = TensorDataset(x, x.argmax(1))
    sampler = DistributedSampler(dataset)
    train_set = DataLoader(dataset, batch_size=int(64 / float(size)), sampler=sampler)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 9)))
    optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for data, target in train_set:
            optimizer.zero_grad()
            loss = F.nll_loss(F.log_softmax(model(data), dim=1), target)
            loss.backward()
            average_gradients(model)
            optimizer.step()
    if rank == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
