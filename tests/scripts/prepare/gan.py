"""A GAN with two optimizers that learns a ring of eight Gaussians."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Ring(Dataset):
    def __init__(self, size=2048, modes=8, std=0.05):
        which = torch.randint(modes, (size,))
        angle = which * (2 * math.pi / modes)
        self.points = torch.stack([angle.cos(), angle.sin()], dim=1) + std * torch.randn(size, 2)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index]


class Generator(nn.Module):
    def __init__(self, latent_dim):
        super().__init__()
        self.latent_dim = latent_dim
        self.model = nn.Sequential(nn.Linear(latent_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, z):
        return self.model(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
        )

    def forward(self, x):
        return self.model(x)


def train(n_epochs=4, batch_size=128, lr=1e-3, latent_dim=8):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataloader = DataLoader(Ring(), batch_size=batch_size, shuffle=True)
    generator, discriminator = Generator(latent_dim).to(device), Discriminator().to(device)
    optimizer_G = torch.optim.Adam(generator.parameters(), lr=lr, betas=(0.5, 0.999))
    optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=lr, betas=(0.5, 0.999))
    adversarial_loss = nn.BCEWithLogitsLoss()

    for epoch in range(n_epochs):
        for real in dataloader:
            real = real.to(device)
            valid = torch.ones(real.size(0), 1, device=device)
            fake = torch.zeros(real.size(0), 1, device=device)

            # train the generator
            optimizer_G.zero_grad()
            z = torch.randn(real.size(0), latent_dim, device=device)
            gen = generator(z)
            g_loss = adversarial_loss(discriminator(gen), valid)
            g_loss.backward()
            optimizer_G.step()

            # train the discriminator
            optimizer_D.zero_grad()
            real_loss = adversarial_loss(discriminator(real), valid)
            fake_loss = adversarial_loss(discriminator(gen.detach()), fake)
            d_loss = (real_loss + fake_loss) / 2
            d_loss.backward()
            optimizer_D.step()
        print(f"[Epoch {epoch + 1}/{n_epochs}] [D loss: {d_loss.item():.4f}] [G loss: {g_loss.item():.4f}]")
    return generator, device


if __name__ == "__main__":
    torch.manual_seed(0)
    generator, device = train()
    with torch.no_grad():
        radius = generator(torch.randn(1000, generator.latent_dim, device=device)).norm(dim=1)
    print(f"radius of the fakes: mean {radius.mean().item():.4f}, std {radius.std().item():.4f}")
