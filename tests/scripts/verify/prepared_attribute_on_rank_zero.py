"""Error: in a prepared script, rank 0 alone anneals an attribute of the model, together with its logging."""
# EXPECT: attribute changed on one rank only

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = 0.0
        self.fc1, self.fc2 = nn.Linear(12, 16), nn.Linear(16, 8)
        self.fc3 = nn.Linear(4, 12)

    def forward(self, x):
        mu, logvar = self.fc2(F.relu(self.fc1(x))).chunk(2, dim=1)
        recon = self.fc3(mu)
        kld = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1).mean()
        return F.mse_loss(recon, x) + self.beta * kld


def main():
    torch.manual_seed(0)
    data = torch.randn(192, 4) @ torch.randn(4, 12)
    with lockstep.init() as world:
        loader = DataLoader(TensorDataset(data), batch_size=32, shuffle=True)
        model = VAE()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
        step = 0
        for epoch in range(2):
            for (x,) in loader:
                loss = model(x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if world.rank == 0:
                    model.module.beta = min(1.0, step / 8)
                    print(f"epoch {epoch} step {step} beta {model.module.beta:.2f}")
        world.print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")


if __name__ == "__main__":
    main()
