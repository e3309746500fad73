"""Error: the evaluation loader is prepared, so each rank has its part, and rank 0 prints the accuracy of its own."""
# EXPECT: evaluation covers one rank's part only

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def train(dataloader, model, loss_fn, optimizer):
    model.train()
    for X, y in dataloader:
        loss = loss_fn(model(X), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test(dataloader, model):
    model.eval()
    correct = size = 0
    with torch.no_grad():
        for X, y in dataloader:
            correct += (model(X).argmax(1) == y).type(torch.float).sum().item()
            size += len(y)
    return correct / size


def main():
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x).float() / 16, torch.tensor(y)
    train_dataloader = DataLoader(TensorDataset(x[:640], y[:640]), batch_size=64, shuffle=True)
    test_dataloader = DataLoader(TensorDataset(x[640:1040], y[640:1040]), batch_size=40)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.init() as world:
        model, optimizer, train_dataloader, test_dataloader = lockstep.prepare(
            model, optimizer, train_dataloader, test_dataloader
        )
        for t in range(2):
            train(train_dataloader, model, nn.CrossEntropyLoss(), optimizer)
            accuracy = test(test_dataloader, model)
            world.print(f"Epoch {t + 1} Accuracy: {100 * accuracy:>0.2f}%")
    print("Done!") if world.rank else None
    return model


if __name__ == "__main__":
    main()
