"""Error: the linear scaling rule, lr times world size, though prepare keeps the global batch."""
# EXPECT: learning rate differs from one process

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

BASE_LR = 0.05


def main():
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(x[:512]).float() / 16, torch.tensor(y[:512]))
    with lockstep.init() as world:
        loader = DataLoader(dataset, batch_size=64, shuffle=True)
        model = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=BASE_LR * world.world_size, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=8)
        model, optimizer, scheduler, loader = lockstep.prepare(model, optimizer, scheduler, loader)
        for _ in range(2):
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
        world.print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")


if __name__ == "__main__":
    main()
