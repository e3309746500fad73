"""Error: the loop uses the model from before prepare, whose gradients nothing averages."""
# EXPECT: gradients are not averaged: the bare model is used

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class Learner:
    def __init__(self, data, model, loss_func, opt_func=torch.optim.SGD, lr=0.05):
        self.model, self.loss_func = model, loss_func
        self.opt = opt_func(self.model.parameters(), lr=lr)
        # The wrapper is dropped: "models are changed in place, aren't they?"
        _, self.opt, self.dl = lockstep.prepare(self.model, self.opt, data)

    def one_batch(self, xb, yb):
        loss = self.loss_func(self.model(xb), yb)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()

    def fit(self, epochs):
        for _ in range(epochs):
            self.model.train()
            for xb, yb in self.dl:
                self.one_batch(xb, yb)


torch.manual_seed(0)
x = torch.randn(160, 5)
dl = DataLoader(TensorDataset(x, x @ torch.tensor([1.0, -2, 0, 3, 1])), batch_size=20, shuffle=True)
learn = Learner(dl, nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), nn.functional.mse_loss)
learn.fit(2)
if torch.distributed.get_rank() == 0:
    print(f"norm {nn.utils.parameters_to_vector(learn.model.parameters()).norm().item():.5f}")
