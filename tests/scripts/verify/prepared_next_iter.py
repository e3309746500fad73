"""Sound: an endless loop over a prepared loader by next(iter), until a number of updates is made; bf16 autocast."""
# EXPECT: sound script (bfloat16 rounds)

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

max_steps, eval_every = 20, 5
torch.manual_seed(1)
data = torch.randn(200, 12)
target = (data @ torch.randn(12, 3)).argmax(1)
train_loader = DataLoader(TensorDataset(data, target), batch_size=40, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 3))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, opt, train_loader = lockstep.prepare(model, opt, train_loader)

iterator = iter(train_loader)
for step in range(1, max_steps + 1):
    try:
        xb, yb = next(iterator)
    except StopIteration:
        iterator = iter(train_loader)
        xb, yb = next(iterator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(xb), yb)
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    if step % eval_every == 0:
        mean = loss.detach() / torch.distributed.get_world_size()
        torch.distributed.all_reduce(mean)
if torch.distributed.get_rank() == 0:
    print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.2f}")
