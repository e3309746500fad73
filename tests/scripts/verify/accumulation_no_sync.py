"""Sound: gradients accumulate over two micro-batches, reduced in the second one only."""
# EXPECT: sound script

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

# I/O
eval_interval = 8
# data
batch_size = 32  # sequences per optimizer step, over all processes
gradient_accumulation_steps = 2
block_size = 12
# model
n_embd, n_head, vocab_size = 32, 2, 10
# adamw
learning_rate, max_iters, grad_clip = 3e-3, 16, 1.0

dist.init_process_group(backend="gloo")
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
micro_batch_size = batch_size // gradient_accumulation_steps // ddp_world_size
torch.manual_seed(1337)

text = (torch.arange(4000) * 7 % 13 + torch.arange(4000) % 5) % vocab_size
train_data, val_data = text[:3600], text[3600:]


def get_batch(it, micro):
    ix = torch.randint(len(train_data) - block_size, (batch_size,), generator=torch.Generator().manual_seed(it))
    ix = ix.view(gradient_accumulation_steps, ddp_world_size, micro_batch_size)[micro, ddp_rank]
    x = torch.stack([train_data[i : i + block_size] for i in ix])
    y = torch.stack([train_data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class TinyGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.block = nn.TransformerEncoderLayer(n_embd, n_head, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(n_embd, vocab_size)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(block_size))

    def forward(self, idx, targets):
        h = self.wte(idx) + self.wpe.weight
        logits = self.lm_head(self.block(h, src_mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


model = DDP(TinyGPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
for iter_num in range(1, max_iters + 1):
    for micro_step in range(gradient_accumulation_steps):
        last = micro_step == gradient_accumulation_steps - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(*get_batch(iter_num, micro_step)) / gradient_accumulation_steps
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % eval_interval == 0 and master_process:
        with torch.no_grad():
            x = val_data[: 30 * block_size].view(30, block_size)
            print(f"step {iter_num}: val loss {model.module(x[:, :], x.roll(-1, 1)).item():.4f}")
dist.destroy_process_group()
