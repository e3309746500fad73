"""Sound: Lockstep's classes on a data set that does not divide evenly: pad=False and mean_over."""
# EXPECT: sound script

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def data():
    x, y = load_digits(return_X_y=True)
    x = torch.from_numpy(x).float() / 16
    y = torch.from_numpy(y)
    return TensorDataset(x[:515], y[:515]), TensorDataset(x[515:818], y[515:818])


def evaluate(net, world, dataset):
    xs, ys = dataset[world.rank :: world.world_size]
    net.eval()
    with torch.no_grad():
        sums = torch.tensor([(net(xs).argmax(1) == ys).sum(), len(ys)])
    net.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main(batch_size=60, epochs=3):
    with lockstep.init() as world:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        model = lockstep.DistributedDataParallel(net)
        lockstep.seed(world, 0)

        train_set, test_set = data()
        sampler = lockstep.DistributedSampler(train_set, seed=12, pad=False)
        loader = DataLoader(train_set, batch_size=batch_size // world.world_size, sampler=sampler)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(loader))
        for epoch in range(epochs):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                lockstep.backward(loss, mean_over=len(y))
                model.clip_grad_norm_(1.0)
                optimizer.step()
                schedule.step()
            world.print(f"epoch {epoch}: accuracy {evaluate(net, world, test_set):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
