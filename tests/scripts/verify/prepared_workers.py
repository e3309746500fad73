"""Sound: a prepared loader with two processes that load, over a data set of its own class."""
# EXPECT: sound script

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep


class DigitsDataset(Dataset):
    def __init__(self, split, transform=None):
        images, targets = load_digits(return_X_y=True)
        part = slice(0, 600) if split == "train" else slice(600, 900)
        self.images, self.targets, self.transform = images[part], targets[part], transform

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, idx):
        image = torch.from_numpy(self.images[idx]).float()
        if self.transform:
            image = self.transform(image)
        return {"image": image, "label": int(self.targets[idx])}


def main():
    torch.manual_seed(42)
    dataset = DigitsDataset("train", transform=lambda image: image / 16 - 0.5)
    loader = DataLoader(dataset, batch_size=50, shuffle=True, num_workers=2, persistent_workers=True)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            loss.backward()
            optimizer.step()
    if torch.distributed.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")


if __name__ == "__main__":
    main()
