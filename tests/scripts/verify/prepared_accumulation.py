"""Sound: gradient accumulation in a prepared script, with loss / steps and a scheduler."""
# EXPECT: sound script

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import lockstep

gradient_accumulation_steps = 2
num_train_epochs = 2
per_device_train_batch_size = 16

torch.manual_seed(7)
tokens = (torch.arange(2560) * 5 % 17 + torch.arange(2560) % 3).view(160, 16) % 20
train_dataloader = DataLoader(TensorDataset(tokens), batch_size=per_device_train_batch_size, shuffle=True)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 24)
        self.rnn = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, 20)

    def forward(self, input_ids, labels):
        logits = self.head(self.rnn(self.embed(input_ids))[0])
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


model = LM()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
max_train_steps = num_train_epochs * math.ceil(len(train_dataloader) / gradient_accumulation_steps)
lr_scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / max_train_steps))
model, optimizer, train_dataloader, lr_scheduler = lockstep.prepare(model, optimizer, train_dataloader, lr_scheduler)
for _ in range(num_train_epochs):
    model.train()
    for step, (batch,) in enumerate(train_dataloader):
        loss = model(batch, batch) / gradient_accumulation_steps
        loss.backward()
        if (step + 1) % gradient_accumulation_steps == 0 or step == len(train_dataloader) - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
if torch.distributed.get_rank() == 0:
    print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.4f}")
