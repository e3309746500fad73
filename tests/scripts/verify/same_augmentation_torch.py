"""Error: all ranks have the same torch seed, so the random crops of the data set are the same on each of them."""
# EXPECT: the same random numbers on all ranks: augmentation

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class RandomCrop:
    def __init__(self, size, padding):
        self.size, self.pad = size, nn.ZeroPad2d(padding)

    def __call__(self, img):
        img = self.pad(img)
        i, j = torch.randint(0, img.shape[-1] - self.size + 1, (2,)).tolist()
        return img[..., i : i + self.size, j : j + self.size]


class RandomErasing:
    def __init__(self, p=0.3):
        self.p = p

    def __call__(self, img):
        if torch.rand(1) < self.p:
            at = torch.randint(0, 6, (1,)).item()
            img[..., at : at + 2, :] = 0
        return img


class Digits(Dataset):
    def __init__(self, transforms):
        digits = load_digits()
        self.images, self.targets = torch.tensor(digits.images[:512]).float() / 16, digits.target[:512]
        self.transforms = transforms

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        img = self.images[index, None].clone()
        for transform in self.transforms:
            img = transform(img)
        return img, int(self.targets[index])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Digits([RandomCrop(8, padding=1), RandomErasing()])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64 // dist.get_world_size(), sampler=sampler)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(net.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
