"""Sound: the loop reads the next batch before it trains on the current one (timm: last_batch is known)."""
# EXPECT: sound script

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def with_last(loader):
    """Yield each batch, and whether it is the last one."""
    iterator = iter(loader)
    current = next(iterator)
    for following in iterator:
        yield current, False
        current = following
    yield current, True


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, world):
    total, num = torch.zeros(()), 0
    for batch_idx, ((inputs, target), last_batch) in enumerate(with_last(loader)):
        output = model(inputs)
        loss = loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        total, num = total + loss.detach() * len(target), num + len(target)
        if last_batch:
            sums = torch.tensor([total, num])
            torch.distributed.all_reduce(sums)
            world.print(f"Train: {epoch} [{batch_idx}/{len(loader) - 1}] loss {sums[0] / sums[1]:.4f}")


def main():
    with lockstep.init() as world:
        torch.manual_seed(0)
        x = torch.rand(256, 6) * 2 - 1
        dataset = TensorDataset(x, (x.square().sum(1) > 2).long())
        loader = DataLoader(dataset, batch_size=32, shuffle=True)
        model = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
        for epoch in range(3):
            train_one_epoch(epoch, model, loader, optimizer, nn.CrossEntropyLoss(), world)
        world.print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.4f}")


if __name__ == "__main__":
    main()
