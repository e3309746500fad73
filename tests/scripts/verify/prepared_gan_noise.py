"""Sound: a prepared GAN with batch norm; the loop draws noise by torch, other noise on each rank."""
# EXPECT: sound script (noise is drawn anew)

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class Network(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(sizes[0], sizes[1]), nn.BatchNorm1d(sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2])
        )

    def forward(self, x):
        return self.main(x)


class Critic(Network):
    pass


def main():
    torch.manual_seed(0)
    angle = torch.rand(96) * 6.28
    loader = DataLoader(TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1)), batch_size=24)
    generator, critic = Network(3, 12, 2), Critic(2, 12, 1)
    update_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
    update_critic = torch.optim.Adam(critic.parameters(), lr=1e-2)
    generator, critic, loader = lockstep.prepare(generator, critic, loader)
    for _ in range(2):
        for (real,) in loader:
            critic.zero_grad()
            nn.functional.softplus(-critic(real)).mean().backward()
            fake = generator(torch.randn(len(real), 3))
            nn.functional.softplus(critic(fake.detach())).mean().backward()
            update_critic.step()
            generator.zero_grad()
            nn.functional.softplus(-critic(fake)).mean().backward()
            update_generator.step()


if __name__ == "__main__":
    main()
