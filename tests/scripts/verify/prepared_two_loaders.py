"""Sound: labelled and unlabelled batches are zipped, as in semi-supervised training (FixMatch, UDA)."""
# EXPECT: sound script

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

BATCH, MU, THRESHOLD = 16, 3, 0.6


def get_loaders():
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x).float() / 16, torch.tensor(y)
    labeled = TensorDataset(x[:96], y[:96])
    unlabeled = TensorDataset(x[96:384])
    kwargs = {"shuffle": True, "drop_last": True}
    return DataLoader(labeled, BATCH, **kwargs), DataLoader(unlabeled, BATCH * MU, **kwargs)


def main():
    torch.manual_seed(5)
    labeled_loader, unlabeled_loader = get_loaders()
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    model, optimizer, labeled_loader, unlabeled_loader = lockstep.prepare(
        model, optimizer, labeled_loader, unlabeled_loader
    )
    for _ in range(3):
        for (inputs_x, targets_x), (inputs_u,) in zip(labeled_loader, unlabeled_loader, strict=True):
            loss_x = F.cross_entropy(model(inputs_x), targets_x)
            logits_u = model(inputs_u)
            soft = torch.softmax(logits_u.detach(), dim=-1)
            loss_u = F.mse_loss(torch.softmax(logits_u, dim=-1), soft.square() / soft.square().sum(1, keepdim=True))
            loss = loss_x + loss_u
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if torch.distributed.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.4f}")


if __name__ == "__main__":
    main()
