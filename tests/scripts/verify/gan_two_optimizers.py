"""Sound: a GAN with two wrapped networks, two optimizers, and noise cut from one global draw."""
# EXPECT: sound script

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.manual_seed(999)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

batch_size = 64  # global
nz, ngf, ndf = 8, 32, 32
num_epochs, lr, beta1 = 2, 2e-3, 0.5

# A ring of gaussians
angle = torch.randint(0, 8, (512,)) * (2 * torch.pi / 8)
ring = torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(512, 2)
dataset = TensorDataset(ring)
sampler = DistributedSampler(dataset)
dataloader = DataLoader(dataset, batch_size=batch_size // world_size, sampler=sampler)

netG = DDP(nn.Sequential(nn.Linear(nz, ngf), nn.ReLU(), nn.Linear(ngf, 2)))
netD = DDP(nn.Sequential(nn.Linear(2, ndf), nn.LeakyReLU(0.2), nn.Linear(ndf, 1), nn.Flatten(0)))
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=lr, betas=(beta1, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=lr, betas=(beta1, 0.999))
fixed_noise = torch.randn(256, nz)
noise_source = torch.Generator().manual_seed(5)


def sample_noise(n):
    # every rank draws the noise of all, and takes the rows of its samples
    return torch.randn(n * world_size, nz, generator=noise_source)[rank::world_size]


for epoch in range(num_epochs):
    sampler.set_epoch(epoch)
    for (real,) in dataloader:
        n = len(real)
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        fake = netG(sample_noise(n))
        errD_real = criterion(netD(real), torch.ones(n))
        errD_real.backward()
        errD_fake = criterion(netD(fake.detach()), torch.zeros(n))
        errD_fake.backward()
        optimizerD.step()

        # (2) Update G network: maximize log(D(G(z)))
        netG.zero_grad()
        for p in netD.parameters():
            p.requires_grad_(False)
        errG = criterion(netD.module(fake), torch.ones(n))
        errG.backward()
        for p in netD.parameters():
            p.requires_grad_(True)
        optimizerG.step()

    if rank == 0:
        with torch.no_grad():
            radius = netG.module(fixed_noise).norm(dim=1)
        print(f"[{epoch}/{num_epochs}] mean radius of fakes {radius.mean():.4f}")
dist.destroy_process_group()
