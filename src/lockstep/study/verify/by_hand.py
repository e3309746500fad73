"""Steps by hand: one process that stands for N ranks, and torch's class as a hand-written loop uses it.

`Loop` is what is verified; this is what it is compared with. A process that computes the N shares of each batch one
after the other, each with a model and a copy of the task of its own, has all that N ranks have but the number of the
rank and the communication. Their gradients become one as the engine has it: ours weighs each share by its samples (or
its count); with torch's class it is the plain mean over the ranks of each rank's own loss, on samples from torch's own
sampler with its padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from torch.utils.data.distributed import DistributedSampler

from lockstep.comm.collectives import all_reduce
from lockstep.comm.world import World
from lockstep.data.device import map_tensors
from lockstep.data.order import cut
from lockstep.data.seeding import mix, seed_cpu
from lockstep.errors import ConfigurationError
from lockstep.study.verify.bench import Bench, Place
from lockstep.study.verify.trace import read_rates
from lockstep.train.objective import LossModule, Objective, Part
from lockstep.train.schedule import LearningRate, base_rates, set_rates
from lockstep.train.seeds import DATA, INIT
from lockstep.train.task import build_dataset, build_model, build_optimizer

_SAMPLE, _FORWARD = 41, 42
"""Keep the bits of samples and forward apart."""

Samples = list[tuple[int | None, Any]]


class Share:
    """What a rank has: its copy of the task, its model and its optimizer."""

    def __init__(self, bench: Bench, number: int, device: torch.device) -> None:
        self.number, self.device = number, device
        self.place: Place = bench.place(number)
        seed = bench.subject.settings.seed
        seed_cpu(mix(seed, DATA))
        self.samples = build_dataset(self.place.task)
        seed_cpu(mix(seed, INIT))
        self.model = build_model(self.place.task).to(device).train()
        self.optimizer = build_optimizer(self.place.task, self.model)
        self.base_rates = base_rates(self.optimizer)
        self.module: nn.Module = LossModule(self.model, Objective(self.place.task, "fp32"))

    def load(self, indices: Sequence[int], *, seed: int, epoch: int) -> Samples:
        """Load samples, each with random numbers of its own."""
        found: Samples = []
        for index in indices:
            seed_cpu(mix(seed, _SAMPLE, epoch, index))
            found.append((index, self.samples[index]))
        return found

    def forward(self, samples: Samples, seed: int, step: int) -> Part:
        """Return the loss on ``samples``."""
        seed_cpu(mix(seed, _FORWARD, step, self.number))
        if not samples:
            return self.module(None, 0)  # type: ignore[no-any-return]
        batch = (self.place.task.collate or default_collate)([sample for _, sample in samples])
        batch = map_tensors(batch, lambda tensor: tensor.to(self.device))
        return self.module(batch, len(samples))  # type: ignore[no-any-return]


class ByHand:
    """Trains a step at a time.

    Args:
        bench: With the task and what is turned off.
        num_shares: That the global batch is divided into.
        world: The ranks, each with one share; None if this process stands for all.
        device: Of this process.

    Collective if there is a world: every rank makes it and calls `step`.
    """

    def __init__(self, bench: Bench, num_shares: int, world: World | None, device: torch.device) -> None:
        self._bench, self._num_shares, self._world = bench, num_shares, world
        self._subject, self._settings = bench.subject, bench.subject.settings
        numbers = range(num_shares) if world is None else [world.rank]
        self.shares = [Share(bench, number, device) for number in numbers]
        first = self.shares[0]
        self.is_stream = first.place.is_stream
        if self._subject.torch_ddp and self.is_stream:
            raise ConfigurationError(
                "The data set is a stream, which torch's DistributedSampler cannot divide.\n"
                "Leave --torch-ddp out, or give the data set a length."
            )
        if world is not None:
            for share in self.shares:
                share.module = nn.parallel.DistributedDataParallel(share.module, process_group=world.group)
        batch_size = self._settings.global_batch_size or first.place.task.global_batch_size
        self.sizes = {
            "samples of the data set": None if self.is_stream else len(first.samples),
            "samples of a global batch": batch_size,
        }

    def step(self, step: int, number: int) -> tuple[float, dict[str, float]]:
        """Train on the global batch of ``step``, the ``number``-th that is trained on; return loss and rates.

        Collective if there is a world: every rank.
        """
        parts = [self._load(share, step) for share in self.shares]
        num_samples = sum(map(len, parts))
        self._take_buffers_of_first()
        losses = []
        for share, samples in zip(self.shares, parts, strict=True):
            share.optimizer.zero_grad(set_to_none=True)
            part = share.forward(samples, self._settings.seed, step)
            value = own_mean(part) if self._subject.torch_ddp else part.value * (part.weight / num_samples)
            value.backward()
            losses.append(part)
        self._combine(losses, num_samples)
        factor = self._rate(number)
        for share in self.shares:
            set_rates(share.optimizer, share.base_rates, factor)
            share.optimizer.step()
        return self._loss(losses), read_rates(self.shares[0].optimizer)

    def _load(self, share: Share, step: int) -> Samples:
        """Return the samples of a share: those that one process had where these are known."""
        known = self._bench.given.samples.get(step)
        if not self._subject.torch_ddp:
            assert known is not None
            part = cut(len(known), self._num_shares, share.number)
            return known[part.start : part.stop]
        if "data" in self._bench.experiment.off and known is not None:
            return known[share.number :: self._num_shares]  # what the sampler gives, without its padding
        size, batch_size = len(share.samples), (self.sizes["samples of a global batch"] or 1) // self._num_shares
        sampler: DistributedSampler[int] = DistributedSampler(
            range(size),  # type: ignore[arg-type]  # all it asks for is the length
            num_replicas=self._num_shares,
            rank=share.number,
            seed=self._settings.seed,
        )
        steps_per_epoch = -(-len(sampler) // batch_size)
        epoch, position = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)
        indices = list(sampler)[position * batch_size : (position + 1) * batch_size]
        return share.load(indices, seed=self._settings.seed, epoch=epoch)

    def _take_buffers_of_first(self) -> None:
        """Do what the engines do at the beginning of forward; both take rank zero's buffers."""
        with torch.no_grad():
            for share in self.shares[1:]:
                for mine, first in zip(share.model.buffers(), self.shares[0].model.buffers(), strict=True):
                    mine.copy_(first)

    def _combine(self, parts: list[Part], num_samples: int) -> None:
        """Make the shares' gradients one, as the ranks' become; torch's class has done so already."""
        if self._world is not None:
            return
        if self._subject.torch_ddp:
            divisor = float(len(self.shares))
        else:
            divisor = float(sum(torch.as_tensor(part.out_of).double() for part in parts)) / num_samples
        for replicas in zip(*(share.model.parameters() for share in self.shares), strict=True):
            grads = [parameter.grad for parameter in replicas if parameter.grad is not None]
            if grads:
                total = sum(grads[1:], start=grads[0].clone()) / divisor
                for parameter in replicas:
                    parameter.grad = total.clone()

    def _rate(self, number: int) -> float:
        """Return the factor on the learning rates at the ``number``-th update; it falls over the task's own epochs."""
        task, size = self.shares[0].place.task, self.sizes["samples of the data set"]
        batch_size = self.sizes["samples of a global batch"] or 1
        num_steps = self._subject.num_steps if size is None else task.epochs * -(-size // batch_size)
        return LearningRate(1.0, 0, num_steps, task.schedule or "constant").factor(number)

    def _loss(self, parts: list[Part]) -> float:
        if not self._subject.torch_ddp:
            total = sum(float(part.value.detach()) * part.weight for part in parts)
            return total / max(sum(float(part.out_of) for part in parts), 1e-30)
        mean = torch.stack([own_mean(part).detach() for part in parts]).double().mean().reshape(1)
        if self._world is not None:
            all_reduce(mean, group=self._world.group)
            mean /= self._world.world_size
        return float(mean)


def own_mean(part: Part) -> Tensor:
    """Return what the loss of a part comes to by itself; zero without samples."""
    return part.value * (part.weight / torch.as_tensor(part.out_of, device=part.value.device).clamp(min=1e-30))
