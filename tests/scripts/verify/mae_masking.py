"""Sound: a masked autoencoder, whose masks are drawn in forward by torch.rand from a seed plus the rank."""
# EXPECT: sound script (random masks are drawn anew)

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MaskedAutoencoder(nn.Module):
    def __init__(self, num_patches=16, dim=24, mask_ratio=0.75):
        super().__init__()
        self.mask_ratio = mask_ratio
        self.embed, self.pos = nn.Linear(4, dim), nn.Parameter(torch.zeros(1, num_patches, dim))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.encoder, self.decoder = (nn.TransformerEncoderLayer(dim, 2, 48, 0.0, batch_first=True) for _ in range(2))
        self.pred = nn.Linear(dim, 4)

    def random_masking(self, x):
        N, L, D = x.shape
        len_keep = int(L * (1 - self.mask_ratio))
        noise = torch.rand(N, L, device=x.device)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        x_masked = torch.gather(x, 1, ids_shuffle[:, :len_keep, None].expand(-1, -1, D))
        mask = torch.ones(N, L, device=x.device)
        mask[:, :len_keep] = 0
        return x_masked, torch.gather(mask, 1, ids_restore), ids_restore

    def forward(self, imgs):
        target = imgs.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(imgs), 16, 4)
        x, mask, ids_restore = self.random_masking(self.embed(target) + self.pos)
        x = self.encoder(x)
        x = torch.cat([x, self.mask_token.expand(len(x), 16 - x.shape[1], -1)], dim=1)
        x = torch.gather(x, 1, ids_restore[..., None].expand(-1, -1, x.shape[2]))
        loss = (self.pred(self.decoder(x + self.pos)) - target).square().mean(dim=-1)
        return (loss * mask).sum() / mask.sum()


def main(batch_size=64, epochs=2, seed=0):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = MaskedAutoencoder()
    torch.manual_seed(seed + dist.get_rank())
    np.random.seed(seed + dist.get_rank())
    images = torch.tensor(load_digits().images[:512]).float() / 16
    dataset_train = TensorDataset(images)
    sampler_train = DistributedSampler(dataset_train, shuffle=True)
    loader = DataLoader(dataset_train, batch_size // dist.get_world_size(), sampler=sampler_train, drop_last=True)
    model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for epoch in range(epochs):
        sampler_train.set_epoch(epoch)
        for (samples,) in loader:
            loss = model(samples)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
