"""Sound: autocast to bfloat16 with accumulation, gradient clipping and a fused AdamW, as in Lit-GPT."""
# EXPECT: sound script (bfloat16 rounds)

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

global_batch_size, micro_batches, max_norm = 32, 2, 1.0


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        q, k, v = self.attn(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(x)


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(1)
    tokens = (torch.arange(256 * 9) * 3 % 10 + torch.arange(256 * 9) % 2).view(256, 9)
    dataset = TensorDataset(tokens)
    sampler = DistributedSampler(dataset, seed=1)
    loader = DataLoader(dataset, global_batch_size // micro_batches // world_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Embedding(11, 16), Block(16), nn.Linear(16, 11)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, fused=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (batch,) in enumerate(loader, 1):
            model.require_backward_grad_sync = i % micro_batches == 0
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
                logits = model(batch[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            (loss / micro_batches).backward()
            if i % micro_batches == 0:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
