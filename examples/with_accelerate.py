"""A loop of Hugging Face accelerate on Lockstep: nothing in the script names Lockstep.

lockstep run --devices 2 --adopt examples/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from digits import loss, network, train_set
from torch.utils.data import DataLoader

torch.manual_seed(0)
accelerator = Accelerator(cpu=not torch.cuda.is_available())
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loader = DataLoader(train_set(), batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch, _ in zip(loader, range(20), strict=False):
    value = loss(model, batch)
    accelerator.backward(value)
    optimizer.step()
    optimizer.zero_grad()
mean = accelerator.reduce(value.detach(), "mean")
accelerator.print(f"engine {type(model).__module__}, last loss {mean:.6f}")
accelerator.end_training()
