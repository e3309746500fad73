"""Sound by common standards: batch norm over two samples a rank, where SyncBatchNorm is missing."""
# EXPECT: sound by common standards (batch norm over each rank's part)

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

IMAGES_PER_BATCH = 4


class Shapes(Dataset):
    """Images with a bright square, and its mask, for segmentation: large images, so small batches."""

    def __init__(self, size=48):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, idx):
        g = torch.Generator().manual_seed(idx)
        image, mask = torch.randn(1, 16, 16, generator=g) * 0.3, torch.zeros(16, 16, dtype=torch.long)
        i, j = torch.randint(0, 10, (2,), generator=g).tolist()
        mask[i : i + 6, j : j + 6] = 1
        return image + mask * (0.5 + idx % 3), mask


def conv_bn_relu(inp, out):
    return nn.Sequential(nn.Conv2d(inp, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True))


def main():
    dist.init_process_group(backend="gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = nn.Sequential(conv_bn_relu(1, 8), conv_bn_relu(8, 8), nn.Conv2d(8, 2, 1))
    model = nn.parallel.DistributedDataParallel(model)
    dataset = Shapes()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=IMAGES_PER_BATCH // world_size, sampler=sampler, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    total = 2 * len(loader)
    poly = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: (1 - it / (total + 1)) ** 0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for image, target in loader:
            loss = nn.functional.cross_entropy(model(image), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            poly.step()
    if rank == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
