"""Sound: of four shards that are read side by side, each rank reads those at rank::world_size."""
# EXPECT: sound script

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SHARDS = [f"train_{i:02d}.bin" for i in range(4)]
ROWS_PER_SHARD, ROWS_PER_STEP = 96, 8


def load_shard(name):
    """Stands for np.memmap."""
    g = torch.Generator().manual_seed(int(name[6:8]))
    tokens = torch.randint(0, 9, (ROWS_PER_SHARD, 8), generator=g)
    return tokens, tokens.sum(1) % 2


class ShardLoader:
    """Each step takes some rows of each shard of this rank."""

    def __init__(self, shards, rank, world_size):
        self.shards = [load_shard(name) for name in sorted(shards)[rank::world_size]]

    def __iter__(self):
        for start in range(0, ROWS_PER_SHARD, ROWS_PER_STEP):
            parts = [(x[start : start + ROWS_PER_STEP], y[start : start + ROWS_PER_STEP]) for x, y in self.shards]
            yield torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Embedding(9, 12), nn.Flatten(), nn.Linear(96, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = ShardLoader(SHARDS, rank, dist.get_world_size())
    for _ in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    if rank == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
