"""A GAN in an own loop that goes on when a rank is killed, and from its checkpoint: the same bits in each case.

lockstep run examples/recovery_gan.py --devices 2 --max-restarts 3

Try `kill -9 PID` with the PID of a rank, which it prints; or stop all of it, and start it again.
"""

import os
import sys
from pathlib import Path

import torch
from digits import train_set
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep

NUM_STEPS, BATCH_SIZE, NOISE, SAVE_EVERY = 130, 64, 16, 50


def networks() -> tuple[nn.Module, nn.Module]:
    """Return the critic, whose output is large for images of the data set, and the generator."""
    critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
    return critic, generator


def batch_of(step: int, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the images and the noise of a step: they depend on nothing else, so that it can be done again."""
    random = torch.Generator().manual_seed(step)
    chosen = torch.randperm(len(images), generator=random)[:BATCH_SIZE]
    return images[chosen], torch.randn(BATCH_SIZE, NOISE, generator=random)


def main(folder: Path) -> None:
    """Train, and compare on rank zero."""
    # Before `init`: later, rank zero may have saved already when another rank looks.
    is_saved = (folder / "manifest.json").exists()
    images = train_set().tensors[0].flatten(1)
    with lockstep.init() as world:
        # A rank that takes the place of a lost one begins here, too.
        print(f"rank {world.rank} is process {os.getpid()}", flush=True)
        torch.manual_seed(0)
        critic, generator = (lockstep.DistributedDataParallel(each.to(world.device)) for each in networks())
        judge, make = (torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.99)) for net in (critic, generator))
        start = 0
        if is_saved:
            state = lockstep.load(folder, model=generator, optimizer=make)
            critic.load_state_dict(state["critic"])
            judge.load_state_dict(state["judge"])
            start = state["step"]
        parts = {"critic": critic, "generator": generator, "judge": judge, "make": make}
        # A rank that takes the place of a lost one gets the step and the parts of the others here.
        recovery = lockstep.Recovery(world, step=start, **parts)
        while recovery.step < NUM_STEPS:
            # Two updates: from the second block on, each begins with a copy of all parts.
            with recovery.attempt():
                step = recovery.step
                if step % SAVE_EVERY == 0:
                    states = {"critic": critic.state_dict(), "judge": judge.state_dict()}
                    lockstep.save(folder, model=generator, optimizer=make, step=step, **states)
                real, noise = (each[world.rank :: world.world_size] for each in batch_of(step, images))
                real, noise = real.to(world.device), noise.to(world.device)
                with torch.no_grad():
                    made = generator.module(noise)
                loss = F.softplus(-critic(real)).mean() + F.softplus(critic(made)).mean()
                lockstep.backward(loss, mean_over=len(real))
                judge.step()
                loss = F.softplus(-critic(generator(noise))).mean()
                lockstep.backward(loss, mean_over=len(real))
                make.step()
                judge.zero_grad()  # of both losses
                make.zero_grad()
        recovery.close()
        if world.is_rank_zero:
            with torch.no_grad():
                made = generator.module(batch_of(0, images)[1].to(world.device)).cpu()
            apart = (made.mean(0) - images.mean(0)).abs().mean()
            weights = [*critic.parameters(), *generator.parameters()]
            total = sum(parameter.double().sum().item() for parameter in weights)
            print(f"after step {start}: the mean images differ by {apart:.3f}, sum of the weights {total!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/gan"))
