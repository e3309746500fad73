"""Sound: LBFGS over the whole data set, of which each rank has its part; the closure returns the loss of all."""
# EXPECT: sound script

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Sequence(nn.Module):
    """The sine wave example: two cells, a step at a time."""

    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 12)
        self.linear = nn.Linear(12, 1)

    def forward(self, input):
        outputs = []
        h_t = c_t = torch.zeros(input.size(0), 12, dtype=input.dtype)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            outputs += [self.linear(h_t)]
        return torch.cat(outputs, dim=1)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    np.random.seed(2)
    torch.manual_seed(0)
    T, L, N = 20, 30, 24
    x = np.arange(L) + np.random.randint(-4 * T, 4 * T, N).reshape(N, 1)
    data = torch.from_numpy(np.sin(x / T))[rank::world_size]
    input, target = data[:, :-1], data[:, 1:]
    seq = DDP(Sequence().double())
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.5, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = criterion(seq(input), target)
        loss.backward()
        total = loss.detach() / world_size
        dist.all_reduce(total)
        return total

    for _ in range(4):
        optimizer.step(closure)
    if rank == 0:
        print(f"norm {nn.utils.parameters_to_vector(seq.parameters()).norm().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
