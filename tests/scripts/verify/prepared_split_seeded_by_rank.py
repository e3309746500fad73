"""Error: in a prepared script, train and test are split by a seed that depends on the rank."""
# EXPECT: the data set depends on the rank: the split

import random

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main():
    with lockstep.init() as world:
        seed_everything(42 + world.rank)  # "so that dropout differs"
        x, y = load_digits(return_X_y=True)
        x_train, x_test, y_train, y_test = train_test_split(x[:900].astype("float32") / 16, y[:900], test_size=1 / 3)
        train_loader = DataLoader(
            TensorDataset(torch.tensor(x_train), torch.tensor(y_train)), batch_size=60, shuffle=True
        )
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        model, optimizer, train_loader = lockstep.prepare(model, optimizer, train_loader)
        for _ in range(2):
            for inputs, labels in train_loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            accuracy = (model.module(torch.tensor(x_test)).argmax(1) == torch.tensor(y_test)).float().mean()
        norm = nn.utils.parameters_to_vector(model.parameters()).norm().item()
        world.print(f"accuracy {accuracy:.4f} norm {norm:.5f}")


if __name__ == "__main__":
    main()
