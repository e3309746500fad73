"""Error: after prepare, the loop calls a method of model.module that runs forward, so nothing averages gradients."""
# EXPECT: gradients are not averaged: forward of the module in the wrapper

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 24), nn.ReLU())
        self.cls, self.box = nn.Linear(24, 3), nn.Linear(24, 4)

    def forward(self, x):
        features = self.backbone(x)
        return self.cls(features), self.box(features)

    def training_step(self, batch):
        x, labels, boxes = batch
        scores, predicted = self(x)
        return nn.functional.cross_entropy(scores, labels) + nn.functional.l1_loss(predicted, boxes)


def main():
    torch.manual_seed(0)
    x = torch.randn(160, 8)
    dataset = TensorDataset(x, x[:, :3].argmax(1), x[:, 4:].abs())
    loader = DataLoader(dataset, batch_size=20, shuffle=True)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            loss = model.module.training_step(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if torch.distributed.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")


if __name__ == "__main__":
    main()
