"""Error: each rank stops early by the loss of its own part of the validation set, which is prepared."""
# EXPECT: the ranks make different numbers of updates

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class EarlyStopping:
    def __init__(self, goal):
        self.goal, self.early_stop = goal, False

    def __call__(self, val_loss):
        self.early_stop = val_loss < self.goal


def run():
    torch.manual_seed(0)
    x = torch.randn(160, 4)
    y = x.sum(1, keepdim=True)
    x_val = torch.randn(40, 4)
    y_val = x_val.sum(1, keepdim=True) + torch.arange(40).ge(20).float()[:, None] * 9  # the rear half is hard
    train_loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    val_loader = DataLoader(TensorDataset(x_val, y_val), batch_size=40)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train_loader, val_loader = lockstep.prepare(model, optimizer, train_loader, val_loader)
    stopper = EarlyStopping(goal=4.0)
    for _ in range(3):
        model.train()
        for inputs, targets in train_loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = [nn.functional.mse_loss(model(inputs), targets).item() for inputs, targets in val_loader]
        stopper(sum(losses) / len(losses))
        if stopper.early_stop:
            break
    if torch.distributed.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")


if __name__ == "__main__":
    run()
