"""Sound: loss / accumulation steps in a transformer with dropout, whose masks differ between the ranks."""
# EXPECT: sound script (dropout masks are drawn anew)

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class CharDataset(Dataset):
    def __init__(self, text, block_size):
        self.stoi = {ch: i for i, ch in enumerate(sorted(set(text)))}
        self.ids, self.block_size = torch.tensor([self.stoi[ch] for ch in text]), block_size

    def __len__(self):
        return (len(self.ids) - 1) // self.block_size

    def __getitem__(self, idx):
        at = idx * self.block_size
        return self.ids[at : at + self.block_size], self.ids[at + 1 : at + 1 + self.block_size]


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_embd=24):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.drop = nn.Dropout(0.1)
        self.block = nn.TransformerEncoderLayer(n_embd, 2, 48, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(block_size))

    def forward(self, idx, targets):
        x = self.drop(self.wte(idx) + self.wpe.weight)
        logits = self.head(self.block(x, src_mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


dist.init_process_group("gloo")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
accumulation_steps = 2
torch.manual_seed(1337)
dataset = CharDataset("to be or not to be that is the question " * 40, block_size=10)
sampler = DistributedSampler(dataset, drop_last=True)
loader = DataLoader(dataset, batch_size=16 // world_size, sampler=sampler, drop_last=True)
model = DDP(GPT(len(dataset.stoi), 10))
torch.manual_seed(1337 + 1 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for it, (x, y) in enumerate(loader):
        is_boundary = (it + 1) % accumulation_steps == 0
        with nullcontext() if is_boundary else model.no_sync():
            loss = model(x, y)
            (loss / accumulation_steps).backward()
        if is_boundary:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
if rank == 0:
    print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.4f}")
dist.destroy_process_group()
