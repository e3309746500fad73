"""Sound: a prepared model with batch norm, which is that of one device."""
# EXPECT: sound script

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class BasicBlock(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.conv1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + x)


def main():
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(x[:400], y[:400]), batch_size=80, shuffle=True)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), BasicBlock(8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    net, optimizer, scheduler, loader = lockstep.prepare(net, optimizer, scheduler, loader)
    for _ in range(3):
        net.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
        scheduler.step()
    if torch.distributed.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(net.parameters()).norm().item():.4f}")


if __name__ == "__main__":
    main()
