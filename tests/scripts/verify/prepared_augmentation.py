"""Sound: a prepared loader over a data set that shifts and flips each image at random."""
# EXPECT: sound script (random augmentation is drawn anew)

import random

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep


class RandomShift:
    def __call__(self, image):
        return torch.roll(image, (random.randint(-1, 1), random.randint(-1, 1)), dims=(-2, -1))


class AddNoise:
    def __init__(self, std):
        self.std = std

    def __call__(self, image):
        return image + self.std * torch.randn_like(image)


class Digits(Dataset):
    def __init__(self, transforms):
        digits = load_digits()
        self.images, self.labels = torch.tensor(digits.images[:512]).float()[:, None] / 16, digits.target[:512]
        self.transforms = transforms

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        for transform in self.transforms:
            image = transform(image)
        return image, int(self.labels[index])


random.seed(0)
torch.manual_seed(0)
loader = DataLoader(Digits([RandomShift(), AddNoise(0.1)]), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
for _ in range(2):
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if torch.distributed.get_rank() == 0:
    print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.4f}")
