"""`prepare` on the simulated accelerator: models, optimizer states and batches are moved to the rank's device."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def run(world=None):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    inputs = torch.randn(21, 6).double()
    loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=5, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (model(inputs) - inputs[:, :1]).square().mean().backward()
    optimizer.step()  # so that it has a state
    optimizer.zero_grad()
    if world is not None:
        model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            assert world is None or x.device == y.device == world.device
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


def test_weights_are_those_of_the_script_without_it(sim_ranks):
    expected = run()
    for num_ranks in (1, 2):
        for weights in sim_ranks(num_ranks)(run):
            assert (weights - expected).abs().max() < 1e-12
