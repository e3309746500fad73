"""A character-level GPT with dropout, AdamW, gradient clipping, warm-up and cosine decay, after nanoGPT."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

# -----------------------------------------------------------------------------
batch_size, block_size = 32, 32
n_layer, n_head, n_embd, dropout = 2, 4, 64, 0.1
learning_rate, min_lr, warmup_iters, weight_decay, grad_clip = 3e-3, 3e-4, 5, 0.1, 1.0
epochs = 2
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337)
# -----------------------------------------------------------------------------

rhyme = "the fox that found the box that held the key that locked the door of the house by the sea. "
text = "".join(rhyme[i % 40 :] + str(i) + " " for i in range(120))
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])


class CharDataset(Dataset):
    def __init__(self, data, stride):
        self.data, self.stride = data, stride

    def __len__(self):
        return (len(self.data) - block_size - 1) // self.stride

    def __getitem__(self, i):
        chunk = self.data[i * self.stride : i * self.stride + block_size + 1]
        return chunk[:-1], chunk[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout)
        )

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, n_head, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout if self.training else 0, is_causal=True)
        x = x + F.dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)), dropout, self.training)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(*[Block() for _ in range(n_layer)], nn.LayerNorm(n_embd))
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        logits = self.lm_head(self.h(self.wte(idx) + self.wpe(pos)))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


split = int(0.9 * len(data))
train_loader = DataLoader(CharDataset(data[:split], stride=12), batch_size, shuffle=True, drop_last=True)
val_loader = DataLoader(CharDataset(data[split:], stride=block_size), batch_size)
model = GPT().to(device)
decay = [p for p in model.parameters() if p.dim() >= 2]
nodecay = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
max_iters = epochs * len(train_loader)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters)))
    return min_lr + coeff * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(x.to(device), y.to(device))[1].item() for x, y in val_loader]
    model.train()
    return sum(losses) / len(losses)


iter_num = 0
for epoch in range(epochs):
    for x, y in train_loader:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        _, loss = model(x.to(device), y.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1
    print(f"epoch {epoch}: iter {iter_num}, train loss {loss.item():.4f}, val loss {estimate_loss():.4f}")
