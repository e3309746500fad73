"""Error: RandomSampler with a billion samples and the same seed on all ranks, which train on the same samples."""
# EXPECT: all ranks train on the same samples

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Trainer:
    def __init__(self, model, train_dataset, max_iters=30, batch_size=24):
        self.model, self.train_dataset = model, train_dataset
        self.max_iters, self.batch_size = max_iters, batch_size
        self.iter_num = 0

    def run(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
        order = RandomSampler(
            self.train_dataset,
            replacement=True,
            num_samples=int(1e9),
            generator=torch.Generator().manual_seed(3407),
        )
        train_loader = DataLoader(
            self.train_dataset,
            sampler=order,
            shuffle=False,
            batch_size=self.batch_size // dist.get_world_size(),
        )
        self.model.train()
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            x, y = batch
            self.loss = nn.functional.cross_entropy(self.model(x), y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            self.iter_num += 1
            if self.iter_num >= self.max_iters:
                break


dist.init_process_group("gloo")
torch.manual_seed(3407)
x = torch.randint(0, 3, (200, 6))
dataset = TensorDataset(nn.functional.one_hot(x, 3).flatten(1).float(), x.sum(1) % 3)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(18, 32), nn.GELU(), nn.Linear(32, 3)))
Trainer(model, dataset).run()
if dist.get_rank() == 0:
    print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
dist.destroy_process_group()
