"""Sound: after each epoch, all predictions are gathered under no_grad, and the best accuracy decides about the rate."""
# EXPECT: sound script

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class Trainer:
    def __init__(self, world, lr=0.2, batch_size=40):
        self.world = world
        x, y = load_digits(return_X_y=True)
        x, y = torch.tensor(x).float() / 16, torch.tensor(y)
        train, val = TensorDataset(x[:800], y[:800]), TensorDataset(x[800:1007], y[800:1007])
        model = nn.Sequential(nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scheduler = ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
        loaders = DataLoader(train, batch_size, shuffle=True), DataLoader(val, 30)
        self.model, self.optimizer, self.train_loader, self.val_loader = lockstep.prepare(model, optimizer, *loaders)
        self.criterion = nn.CrossEntropyLoss()

    def run(self, epochs):
        for epoch in range(epochs):
            self.model.train()
            for inputs, targets in self.train_loader:
                self.optimizer.zero_grad()
                self.criterion(self.model(inputs), targets).backward()
                self.optimizer.step()
            score = self.validate()
            self.scheduler.step(score)
            self.world.print(f"epoch {epoch}: f1 {score:.4f}, lr {self.optimizer.param_groups[0]['lr']}")

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        outputs = [(self.model(inputs).argmax(1), targets) for inputs, targets in self.val_loader]
        predicted, targets = self.val_loader.gather(outputs)
        return f1_score(targets.cpu(), predicted.cpu(), average="macro")


if __name__ == "__main__":
    torch.manual_seed(0)
    with lockstep.init() as world:
        trainer = Trainer(world)
        trainer.run(3)
        world.print(f"norm {nn.utils.parameters_to_vector(trainer.model.parameters()).norm().item():.4f}")
