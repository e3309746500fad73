"""Sound: batch norm with statistics over all ranks (torch's runs on GPUs only, so Lockstep's class)."""
# EXPECT: sound script

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep

BATCH = 64


def conv_block(c_in, c_out):
    return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU())


def resnetish():
    return nn.Sequential(
        conv_block(1, 8),
        nn.MaxPool2d(2),
        conv_block(8, 16),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def load():
    bunch = load_digits()
    x = torch.tensor(bunch.images).float().unsqueeze(1).div_(16)
    y = torch.tensor(bunch.target)
    return TensorDataset(x[:768], y[:768]), (x[768:1168], y[768:1168])


def main():
    world = lockstep.init()
    torch.manual_seed(0)
    model = lockstep.SyncBatchNorm.convert_sync_batchnorm(resnetish())
    model = lockstep.DistributedDataParallel(model)
    train, (x_test, y_test) = load()
    sampler = lockstep.DistributedSampler(train, seed=0)
    loader = DataLoader(train, batch_size=BATCH // world.world_size, sampler=sampler, drop_last=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for epoch in range(2):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            acc = (model.module(x_test).argmax(-1) == y_test).float().mean()
        world.print(f"epoch {epoch} acc {acc:.4f}")
    world.close()


main()
