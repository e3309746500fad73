"""Adopting for the length of a block, since the processes that run tests outlive a test."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch.nn.parallel
import torch.utils.data

import lockstep
from lockstep.adoption import adopt
from lockstep.parallel.dp.wrapper import data_parallel

TORCHS = {
    "DataParallel": torch.nn.parallel.DataParallel,
    "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
    "DistributedSampler": torch.utils.data.DistributedSampler,
    "SyncBatchNorm": torch.nn.SyncBatchNorm,
    "data_parallel": torch.nn.parallel.data_parallel,
}
OURS = {
    "DataParallel": lockstep.DataParallel,
    "DistributedDataParallel": lockstep.DistributedDataParallel,
    "DistributedSampler": lockstep.DistributedSampler,
    "SyncBatchNorm": lockstep.SyncBatchNorm,
    "data_parallel": data_parallel,
}


def places_of(objects: dict[str, object]) -> dict[tuple[str, str], str]:
    """Where modules hold one of ``objects``: (module, name there) -> key."""
    keys = {id(value): key for key, value in objects.items()}
    return {
        (module_name, name): keys[id(value)]
        for module_name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if id(value) in keys
    }


@contextmanager
def adopted() -> Iterator[None]:
    """Call ``lockstep.adopt()``, and give all that it changed, or that was imported meanwhile, torch's objects back."""
    before = places_of(OURS)
    try:
        adopt()
        yield
    finally:
        for (module_name, name), key in places_of(OURS).items():
            if (module_name, name) not in before and not module_name.startswith("lockstep"):
                setattr(sys.modules[module_name], name, TORCHS[key])
