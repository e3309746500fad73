"""Error: torch.manual_seed(1337) on all ranks, and dropout in a small GPT: nanoGPT without its seed offset."""
# EXPECT: the same random numbers on all ranks: dropout masks are equal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

block_size, vocab_size, n_embd, batch_size = 10, 12, 24, 32


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.drop = nn.Dropout(0.2)
        self.mlp = nn.Sequential(nn.LayerNorm(n_embd), nn.Linear(n_embd, 48), nn.GELU(), nn.Linear(48, n_embd))
        self.lm_head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx, targets):
        x = self.drop(self.wte(idx) + self.wpe.weight)
        x = x + self.drop(self.mlp(x.cumsum(1) / torch.arange(1, block_size + 1)[:, None]))
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(1337)
    text = ((torch.arange(3001) * 5) % 7 + torch.arange(3001) % 4) % vocab_size
    windows = text.unfold(0, block_size + 1, block_size)
    dataset = TensorDataset(windows[:, :-1], windows[:, 1:])
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, batch_size // dist.get_world_size(), sampler=sampler, drop_last=True)
    model = DDP(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for X, Y in loader:
            loss = model(X, Y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
