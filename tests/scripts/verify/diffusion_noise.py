"""Sound: a diffusion model; the loop draws times and noise by torch, other ones on each rank, and keeps an EMA."""
# EXPECT: sound script (noise is drawn anew)

from collections import OrderedDict
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@torch.no_grad()
def update_ema(ema_model, model, decay=0.99):
    ema_params = OrderedDict(ema_model.named_parameters())
    for name, param in OrderedDict(model.named_parameters()).items():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(50, 16)
        self.inp, self.out = nn.Linear(2, 16), nn.Sequential(nn.SiLU(), nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 2))

    def forward(self, x, t):
        return self.out(self.inp(x) + self.time(t))


def main(global_batch_size=64, global_seed=0):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(global_seed)
    theta = torch.rand(512) * 6.28
    dataset = TensorDataset(torch.stack([theta.cos(), theta.sin()], 1))
    alphas = torch.linspace(0.999, 0.9, 50).cumprod(0)
    model = Denoiser()
    ema = deepcopy(model).requires_grad_(False)
    model = DDP(model)
    torch.manual_seed(global_seed * world_size + rank)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=global_seed)
    loader = DataLoader(dataset, global_batch_size // world_size, sampler=sampler, drop_last=True)
    update_ema(ema, model.module, decay=0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            t = torch.randint(0, 50, (x.shape[0],))
            noise = torch.randn_like(x)
            a = alphas[t, None]
            loss = nn.functional.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
            opt.zero_grad()
            loss.backward()
            opt.step()
            update_ema(ema, model.module)
    if rank == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
