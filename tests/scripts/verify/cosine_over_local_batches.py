"""Error: T_max counts the batches as if each rank read the whole data set, so the schedule is half done at the end."""
# EXPECT: learning rate depends on the number of ranks: length of the schedule

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import lockstep

epochs = 3
world = lockstep.init()
batch_size = 64 // world.world_size
torch.manual_seed(0)

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).reshape(-1, 8, 8) / 16  # rows as a sequence
y = torch.tensor(digits.target)
train, x_test, y_test = TensorDataset(x[:640], y[:640]), x[640:960], y[640:960]


class RowRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(8, 32, batch_first=True)
        self.fc = nn.Linear(32, 10)

    def forward(self, rows):
        return self.fc(self.rnn(rows)[0][:, -1])


net = lockstep.DistributedDataParallel(RowRNN())
sampler = lockstep.DistributedSampler(train, seed=0)
loader = DataLoader(train, batch_size=batch_size, sampler=sampler)
steps_per_epoch = len(train) // batch_size
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
scheduler = CosineAnnealingLR(optimizer, T_max=epochs * steps_per_epoch)

for epoch in range(epochs):
    for rows, label in loader:
        loss = cross_entropy(net(rows), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    with torch.no_grad():
        acc = (net.module(x_test).argmax(1) == y_test).float().mean().item()
    world.print(f"epoch {epoch}: lr {scheduler.get_last_lr()[0]:.5f}, accuracy {acc:.3f}")
world.close()
