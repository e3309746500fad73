"""Sound: argparse, a log and the weights in a relative output folder, which rank 0 makes."""
# EXPECT: sound script

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_args_parser():
    parser = argparse.ArgumentParser("Linear classification", add_help=False)
    parser.add_argument("--batch_size", default=64, type=int, help="of all processes")
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--blr", default=0.4, type=float)
    parser.add_argument("--output_dir", default="./output_linear")
    parser.add_argument("--seed", default=0, type=int)
    return parser


def main(args):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    x, y = load_digits(return_X_y=True)
    dataset_train = TensorDataset(torch.tensor(x[:640]).float() / 16, torch.tensor(y[:640]))
    sampler_train = DistributedSampler(dataset_train, num_replicas=world_size, rank=rank, shuffle=True)
    data_loader_train = DataLoader(
        dataset_train, sampler=sampler_train, batch_size=args.batch_size // world_size, drop_last=True
    )
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), args.blr * args.batch_size / 256, momentum=0.9, weight_decay=0)
    for epoch in range(args.epochs):
        sampler_train.set_epoch(epoch)
        for samples, targets in data_loader_train:
            loss = nn.functional.cross_entropy(model(samples), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss := loss.detach() / world_size)
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, f"{args.output_dir}/checkpoint.pth")
            with open(f"{args.output_dir}/log.txt", "a", encoding="utf-8") as f:
                f.write(json.dumps({"epoch": epoch, "train_loss": loss.item()}) + "\n")
    if rank == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    args = get_args_parser().parse_args()
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    main(args)
