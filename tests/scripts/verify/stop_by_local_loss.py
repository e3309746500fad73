"""Error: after the third epoch, each rank decides by the loss of its own validation part whether it goes on."""
# EXPECT: the ranks make different numbers of updates

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EarlyStopper:
    def __init__(self, min_epochs, threshold):
        self.min_epochs, self.threshold = min_epochs, threshold

    def should_stop(self, epoch, loss):
        return epoch + 1 >= self.min_epochs and loss < self.threshold


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, x_val = torch.randn(160, 4), torch.randn(40, 4)
    y, y_val = x.sum(1, keepdim=True), x_val.sum(1, keepdim=True)
    y_val[1::2] += 3 * torch.randn(20, 1)  # hard samples, all on rank 1 if there are two
    train_set, val_set = TensorDataset(x, y), TensorDataset(x_val, y_val)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 32 // world_size, sampler=sampler)
    val_loader = DataLoader(val_set, 10, sampler=DistributedSampler(val_set, shuffle=False))
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stopper = EarlyStopper(min_epochs=3, threshold=1.0)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        with torch.no_grad():
            losses = [nn.functional.mse_loss(model.module(inputs), targets) for inputs, targets in val_loader]
        if stopper.should_stop(epoch, torch.stack(losses).mean().item()):
            break
    if rank == 0:
        print(f"epoch {epoch} norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
