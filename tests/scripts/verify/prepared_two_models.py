"""Sound: a prepared GAN with two models, two optimizers and noise that every rank draws by numpy."""
# EXPECT: sound script

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

latent_dim, batch_size, n_epochs = 4, 32, 2


def block(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 16), nn.LeakyReLU(0.2), nn.Linear(16, n_out))


torch.manual_seed(0)
np.random.seed(0)
angles = torch.rand(320) * 6.28
real = torch.stack([angles.cos(), angles.sin()], 1)
noise = torch.from_numpy(np.random.normal(0, 1, (320, latent_dim)).astype("float32"))
dataloader = DataLoader(TensorDataset(real, noise), batch_size=batch_size, shuffle=True)
generator, discriminator = block(latent_dim, 2), block(2, 1)
adversarial_loss = nn.BCEWithLogitsLoss()
optimizer_G = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
generator, discriminator, optimizer_G, optimizer_D, dataloader = lockstep.prepare(
    generator, discriminator, optimizer_G, optimizer_D, dataloader
)
for _ in range(n_epochs):
    for points, z in dataloader:
        valid, fake = torch.ones(len(points), 1), torch.zeros(len(points), 1)
        optimizer_G.zero_grad()
        gen_points = generator(z)
        g_loss = adversarial_loss(discriminator(gen_points), valid)
        g_loss.backward()
        optimizer_G.step()
        optimizer_D.zero_grad()
        real_loss = adversarial_loss(discriminator(points), valid)
        fake_loss = adversarial_loss(discriminator(gen_points.detach()), fake)
        ((real_loss + fake_loss) / 2).backward()
        optimizer_D.step()
if torch.distributed.get_rank() == 0:
    norms = [nn.utils.parameters_to_vector(model.parameters()).norm().item() for model in (generator, discriminator)]
    print("norms {:.4f} {:.4f}".format(*norms))
