"""What kind of script it is: whose engine, who places the model, who divides the data."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property

from lockstep.study.doctor.script.ranks import Ranks
from lockstep.study.doctor.script.source import Script, argument, constant, words

MANAGERS = ("accelerate", "lightning", "pytorch_lightning", "deepspeed", "composer", "ray", "ignite")
"""Packages that wrap models and loaders themselves."""

_ASKS = {"distributed", "is_distributed", "ddp", "world_size", "multiprocessing_distributed", "WORLD_SIZE", "is_ddp"}
"""Names in a condition that tell a run on several ranks from one on a single device."""

_INDEX = {"gpu", "gpu_id", "device_id"}
"""Names that are ``None`` in a run that is not on one given device."""


@dataclass(frozen=True)
class ScriptFacts:
    """A script, and what of this machine bears on it.

    Attributes:
        script: Parsed.
        devices: Ranks that it is to run on.
        num_gpus: That torch can use here.
    """

    script: Script
    devices: int = 2
    num_gpus: int = 0

    @cached_property
    def ranks(self) -> Ranks:
        """Where it depends on the rank."""
        return Ranks(self.script)

    @cached_property
    def wrappings(self) -> list[ast.Call]:
        """The calls of DistributedDataParallel, torch's or ours, by whatever name it was imported."""
        return self.script.calls_of("DistributedDataParallel", "DDP")

    @cached_property
    def is_distributed(self) -> bool:
        """Whether it runs on several ranks."""
        return bool(self.wrappings or self.script.calls_of("init_process_group", "fully_shard")) or self.starts_lockstep

    @property
    def starts_lockstep(self) -> bool:
        """Whether it calls ``lockstep.init``, which sets the device, or starts ranks by ``lockstep.launch``."""
        return any(
            name in ("lockstep.init", "lockstep.comm.world.init", "lockstep.launch") for name, _ in self.script.calls
        )

    @property
    def starts_elsewhere(self) -> bool:
        """Whether the ranks are not set up in this file with torch's own functions, so that it does not show how."""
        starts = bool(self.script.calls_of("init_process_group")) and not self.script.imports("torch.distributed.rpc")
        return self.starts_lockstep or not starts

    @property
    def manager(self) -> str | None:
        """The package that places the model and divides the data in this script's stead, if one does."""
        return next((name for name in MANAGERS if self.script.imports(name)), None)

    @property
    def uses_task(self) -> bool:
        """Whether it makes a `lockstep.Task`."""
        return any(name in ("lockstep.Task", "lockstep.train.task.Task") for name, _ in self.script.calls)

    @cached_property
    def uses_cuda(self) -> bool:
        """Whether it names CUDA."""
        for node in self.script.nodes:
            if isinstance(node, ast.Attribute) and node.attr == "cuda":
                return True
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda"):
                return True
        return False

    @property
    def most_workers(self) -> int | None:
        """The largest number of loader processes that is written in it; ``None`` if none is."""
        numbers = [constant(argument(call, "num_workers", 5)) for call in self.script.calls_of("DataLoader")]
        return max((number for number in numbers if isinstance(number, int)), default=None)

    @property
    def smallest_batch(self) -> int | None:
        """The smallest batch of a loader that is written in it as a number."""
        numbers = [constant(argument(call, "batch_size", 1)) for call in self.script.calls_of("DataLoader")]
        return min((number for number in numbers if isinstance(number, int)), default=None)

    def is_for_one(self, node: ast.AST) -> bool:
        """Say whether ``node`` runs only where the script has asked whether it is distributed, or for the rank."""
        for child, parent in self.script.ancestors(node):
            if not isinstance(parent, (ast.If, ast.IfExp)) or child is parent.test:
                continue
            named = words(parent.test)
            is_absent = any(isinstance(part, (ast.Is, ast.IsNot)) for part in ast.walk(parent.test))
            if named & _ASKS or self.ranks.mentions(parent.test) or (is_absent and named & _INDEX):
                return True
        return False

    def is_ours(self, call: ast.Call) -> bool:
        """Say whether lockstep's own is called."""
        return self.script.name(call.func).startswith("lockstep.")
