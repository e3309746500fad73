"""Sound: an endless sampler that gives each rank every world_size-th index, as in EDM and StyleGAN2-ADA."""
# EXPECT: sound script

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn


class InfiniteSampler(torch.utils.data.Sampler):
    def __init__(self, dataset, rank=0, num_replicas=1, shuffle=True, seed=0, window_size=0.5):
        self.dataset, self.rank, self.num_replicas = dataset, rank, num_replicas
        self.shuffle, self.seed, self.window_size = shuffle, seed, window_size

    def __iter__(self):
        order = np.arange(len(self.dataset))
        rnd = np.random.RandomState(self.seed)
        rnd.shuffle(order)
        window = int(np.rint(order.size * self.window_size))
        idx = 0
        while True:
            i = idx % order.size
            if idx % self.num_replicas == self.rank:
                yield int(order[i])
            if window >= 2:
                j = (i - rnd.randint(window)) % order.size
                order[i], order[j] = order[j], order[i]
            idx += 1


def training_loop(total_kimg=1, batch_size=32, lr=2e-3):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    dataset_obj = torch.utils.data.TensorDataset(torch.tensor(x[:300]).float() / 16, torch.tensor(y[:300]))
    dataset_sampler = InfiniteSampler(dataset_obj, rank=rank, num_replicas=world_size, seed=1)
    dataset_iterator = iter(
        torch.utils.data.DataLoader(dataset_obj, sampler=dataset_sampler, batch_size=batch_size // world_size)
    )
    net = nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 10))
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr, betas=(0.9, 0.999))
    cur_nimg = 0
    while True:
        images, labels = next(dataset_iterator)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(ddp(images), labels, reduction="none")
        loss.sum().mul(1 / (batch_size // world_size)).backward()
        for g in optimizer.param_groups:
            g["lr"] = lr * min(cur_nimg / 200, 1)
        optimizer.step()
        cur_nimg += batch_size
        if cur_nimg >= total_kimg * 1000:
            break
    if rank == 0:
        print(f"kimg {cur_nimg / 1e3} norm {nn.utils.parameters_to_vector(net.parameters()).norm().item():.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    training_loop()
    dist.destroy_process_group()
