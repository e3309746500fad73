"""Error: in a prepared script, each rank shuffles the list of files by Python's random, which nothing has seeded."""
# EXPECT: the data set depends on the rank: an unseeded shuffle of the files

import random

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

import lockstep

FOLDER = {f"{kind}/{number:02d}.wav": (kind, number) for kind in ("cat", "dog", "owl") for number in range(40)}


class AudioFolder(Dataset):
    """Files of each class in the folder, in random order, the first ones for training."""

    def __init__(self, train=True):
        files = list(FOLDER)
        random.shuffle(files)
        self.files = files[:96] if train else files[96:]
        self.classes = sorted({path.split("/")[0] for path in files})

    def __len__(self):
        return len(self.files)

    def __getitem__(self, idx):
        kind, number = FOLDER[self.files[idx]]
        label = self.classes.index(kind)
        return torch.sin(torch.arange(24) * (label + 1) * 0.4 + number) + 0.01 * number, label


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(AudioFolder(), batch_size=24, shuffle=True)
    model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
    for _ in range(2):
        for waves, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(waves), labels).backward()
            optimizer.step()
    if torch.distributed.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
