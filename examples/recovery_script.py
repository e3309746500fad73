"""An own loop that goes on when a rank is killed: the digits of examples/digits.py, the same bits with and without.

lockstep run examples/recovery_script.py --devices 2 --max-restarts 3

Try `kill -9 PID` with the PID of a rank, which it prints.
"""

import os

import torch
from digits import network, test_set, train_set
from torch.nn import functional as F

import lockstep

NUM_STEPS, BATCH_SIZE = 200, 64


def order_of(epoch: int, size: int) -> torch.Tensor:
    """Return the order of the samples in an epoch: it depends on nothing else, so that a step can be done again."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch))


def main() -> None:
    """Train, and evaluate on rank zero."""
    inputs, labels = train_set().tensors
    per_epoch = len(labels) // BATCH_SIZE
    with lockstep.init() as world:
        # A rank that takes the place of a lost one begins here, too.
        print(f"rank {world.rank} is process {os.getpid()}", flush=True)
        torch.manual_seed(0)
        model = lockstep.DistributedDataParallel(network().to(world.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
        # Here it gets the state and the step of the others.
        recovery = lockstep.Recovery(world, model=model, optimizer=optimizer, schedule=schedule)
        while recovery.step < NUM_STEPS:
            with recovery.attempt():
                epoch, place = divmod(recovery.step, per_epoch)
                batch = order_of(epoch, len(labels))[place * BATCH_SIZE : (place + 1) * BATCH_SIZE]
                mine = batch[world.rank :: world.world_size]
                loss = F.cross_entropy(model(inputs[mine].to(world.device)), labels[mine].to(world.device))
                lockstep.backward(loss, mean_over=len(mine))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        recovery.close()
        if world.is_rank_zero:
            inputs, labels = test_set().tensors
            with torch.no_grad():
                found = model.module.eval()(inputs.to(world.device)).argmax(dim=1).cpu()
            total = sum(parameter.double().sum().item() for parameter in model.parameters())
            print(f"{(found == labels).float().mean():.1%} right, sum of the weights {total!r}")


if __name__ == "__main__":
    main()
