"""Sound: saves a checkpoint after each epoch and resumes from it if there is one, as DINO and Barlow Twins do."""
# EXPECT: sound script

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-dir", default="checkpoint")
parser.add_argument("--epochs", default=3, type=int)
parser.add_argument("--batch-size", default=32, type=int)


def restart_from_checkpoint(path, model, optimizer):
    if not os.path.isfile(path):
        return 0
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        os.makedirs(args.checkpoint_dir, exist_ok=True)
    path = os.path.join(args.checkpoint_dir, "checkpoint.pth")
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    dataset = TensorDataset(x, x.norm(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.batch_size // world_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    dist.barrier()
    start_epoch = restart_from_checkpoint(path, model, optimizer)
    dist.barrier()
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        if rank == 0:
            state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path)
    if rank == 0:
        print(f"from epoch {start_epoch} norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
