"""Error: in a prepared script, rank 0 alone updates a buffer of class weights after each update."""
# EXPECT: buffer changed on one rank only

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class Classifier(nn.Module):
    def __init__(self, num_classes=4):
        super().__init__()
        self.register_buffer("prior", torch.full((num_classes,), 1 / num_classes))
        self.net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, num_classes))

    def forward(self, x):
        return self.net(x) + self.prior.log()  # logit adjustment


def main():
    torch.manual_seed(0)
    x = torch.randn(240, 6)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 1).long()
    with lockstep.init() as world:
        loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
        for _ in range(2):
            for inputs, labels in loader:
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if world.rank == 0:
                    counts = torch.bincount(labels, minlength=4) / len(labels)
                    model.module.prior.lerp_(counts.clamp(min=0.01), 0.3)
        world.print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")


if __name__ == "__main__":
    main()
