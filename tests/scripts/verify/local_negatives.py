"""Error: the contrastive loss has the rank's own samples as negatives, so it depends on how the batch is divided."""
# EXPECT: loss depends on the whole batch: negatives of one rank only

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Pairs(Dataset):
    """Two fixed noisy views of each of n points: like image and caption."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        latent = torch.randn(n, 6, generator=g)
        mix = torch.Generator().manual_seed(0)
        self.a = latent @ torch.randn(6, 16, generator=mix) + 0.3 * torch.randn(n, 16, generator=g)
        self.b = latent @ torch.randn(6, 20, generator=mix) + 0.3 * torch.randn(n, 20, generator=g)

    def __len__(self):
        return len(self.a)

    def __getitem__(self, i):
        return self.a[i], self.b[i]


class TinyCLIP(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, dim))
        self.text = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, dim))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        i, t = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return self.logit_scale.exp() * i @ t.T


def clip_loss(logits):
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(31)
    train_set, test_set = Pairs(480, 1), Pairs(100, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 48 // dist.get_world_size(), sampler=sampler, drop_last=True)
    model = DDP(TinyCLIP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for image, text in loader:
            loss = clip_loss(model(image, text))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            with torch.no_grad():
                top1 = (model.module(test_set.a, test_set.b).argmax(1) == torch.arange(100)).float().mean()
            print(f"epoch {epoch}: R@1 {top1:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
