"""Sound: saves model, optimizer and loader after each epoch, and goes on from there if the file exists."""
# EXPECT: sound script

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def get_args_parser():
    parser = argparse.ArgumentParser("Train", add_help=False)
    parser.add_argument("--output_dir", default="./output_prepared")
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--batch_size", default=32, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    return parser


def main(args):
    with lockstep.init() as world:
        torch.manual_seed(0)
        x = torch.randn(192, 8)
        loader = DataLoader(TensorDataset(x, x.norm(dim=1)), batch_size=args.batch_size, shuffle=True)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
        model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
        checkpoint = os.path.join(args.output_dir, "checkpoint")
        if os.path.exists(checkpoint):
            lockstep.load(checkpoint, model=model, optimizer=optimizer, loader=loader)
        for epoch in range(loader.epoch, args.epochs):
            for inputs, targets in loader:
                loss = nn.functional.smooth_l1_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            lockstep.save(checkpoint, model=model, optimizer=optimizer, loader=loader)
            world.print(f"epoch {epoch} norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")


if __name__ == "__main__":
    main(get_args_parser().parse_args())
