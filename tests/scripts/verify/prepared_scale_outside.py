"""Error: a learnable temperature is added to the optimizer after prepare, and is in no prepared model."""
# EXPECT: a parameter outside of the wrapper

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class Encoder(nn.Module):
    def __init__(self, num_inputs):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(num_inputs, 24), nn.ReLU(), nn.Linear(24, 8))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


torch.manual_seed(0)
x = torch.randn(192, 10)
labels = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
prototypes = F.normalize(torch.randn(4, 8), dim=1)
encoder = Encoder(10)
logit_scale = nn.Parameter(torch.tensor(1.0))
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, labels), batch_size=32, shuffle=True)
encoder, optimizer, loader = lockstep.prepare(encoder, optimizer, loader)
optimizer.add_param_group({"params": [logit_scale], "lr": 0.01})
for _ in range(2):
    for inputs, targets in loader:
        logits = logit_scale.exp() * encoder(inputs) @ prototypes.T
        loss = F.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if torch.distributed.get_rank() == 0:
    print(
        f"scale {logit_scale.item():.5f} norm {nn.utils.parameters_to_vector(encoder.parameters()).norm().item():.5f}"
    )
