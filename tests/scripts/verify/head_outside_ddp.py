"""Error: the second head is in the optimizer but outside of DDP, so each rank trains its own."""
# EXPECT: parameters outside of DDP: their gradients are not reduced

import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class DigitsMultiTask(Dataset):
    """The digit, and whether it is odd."""

    def __init__(self, train=True):
        data = load_digits()
        part = slice(0, 720) if train else slice(720, 1080)
        self.x = torch.tensor(data.images[part], dtype=torch.float32).unsqueeze(1) / 16
        self.y = torch.tensor(data.target[part])

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i], (self.y[i] % 2).float()


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 32), nn.ReLU()
        )
        self.digit_head = nn.Linear(32, 10)

    def forward(self, x):
        h = self.features(x)
        return self.digit_head(h), h


dist.init_process_group("gloo")
torch.manual_seed(0)
train_set, test_set = DigitsMultiTask(True), DigitsMultiTask(False)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=60 // dist.get_world_size(), sampler=sampler)

backbone = DDP(Backbone())
parity_head = nn.Linear(32, 1)  # auxiliary task
optimizer = torch.optim.Adam(itertools.chain(backbone.parameters(), parity_head.parameters()), lr=5e-3)
ce, bce = nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, digit, parity in loader:
        logits, h = backbone(x)
        loss = ce(logits, digit) + 0.5 * bce(parity_head(h).squeeze(1), parity)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if dist.get_rank() == 0:
        with torch.no_grad():
            logits, h = backbone.module(test_set.x)
            acc = (logits.argmax(1) == test_set.y).float().mean()
            par = ((parity_head(h).squeeze(1) > 0) == (test_set.y % 2 == 1)).float().mean()
        print(f"epoch {epoch}: digit {acc:.3f} parity {par:.3f}")
dist.destroy_process_group()
