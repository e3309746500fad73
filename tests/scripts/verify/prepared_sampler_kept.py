"""Error: a DistributedSampler is left in the loader that is given to prepare, so ranks read different lists."""
# EXPECT: ranks read different lists of samples

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lockstep


def main():
    with lockstep.init() as world:
        torch.manual_seed(0)
        x, y = load_digits(return_X_y=True)
        dataset = TensorDataset(torch.tensor(x[:640]).float() / 16, torch.tensor(y[:640]))
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=64, sampler=sampler)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        world.print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")


if __name__ == "__main__":
    main()
