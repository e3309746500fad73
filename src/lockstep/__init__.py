"""Data-parallel training for PyTorch: the same training run on any number of devices.

The public names are loaded on first use, so that ``import lockstep`` costs nothing and imports not even torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep import errors as errors
from lockstep.comm.shm import register_when_needed

if TYPE_CHECKING:
    from lockstep.adoption import adopt as adopt
    from lockstep.comm.world import World as World
    from lockstep.comm.world import init as init
    from lockstep.data.sampler import DistributedSampler as DistributedSampler
    from lockstep.launcher.api import launch as launch
    from lockstep.observe.monitor import monitor as monitor
    from lockstep.parallel.ddp.wrapper import DistributedDataParallel as DistributedDataParallel
    from lockstep.parallel.ddp.wrapper import backward as backward
    from lockstep.parallel.dp.wrapper import DataParallel as DataParallel
    from lockstep.parallel.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
    from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from lockstep.train.checkpoints.checkpoint import load as load
    from lockstep.train.checkpoints.checkpoint import save as save
    from lockstep.train.fit import fit as fit
    from lockstep.train.task import Loss as Loss
    from lockstep.train.task import Task as Task

__version__ = "0.1.0.dev0"

_HOMES = {
    "DataParallel": "lockstep.parallel.dp.wrapper",
    "DistributedDataParallel": "lockstep.parallel.ddp.wrapper",
    "DistributedSampler": "lockstep.data.sampler",
    "Loss": "lockstep.train.task",
    "SyncBatchNorm": "lockstep.parallel.sync_batchnorm",
    "Task": "lockstep.train.task",
    "World": "lockstep.comm.world",
    "ZeroRedundancyOptimizer": "lockstep.parallel.zero.optimizer",
    "adopt": "lockstep.adoption",
    "backward": "lockstep.parallel.ddp.wrapper",
    "fit": "lockstep.train.fit",
    "init": "lockstep.comm.world",
    "launch": "lockstep.launcher.api",
    "load": "lockstep.train.checkpoints.checkpoint",
    "monitor": "lockstep.observe.monitor",
    "save": "lockstep.train.checkpoints.checkpoint",
}

__all__ = sorted([*_HOMES, "errors"])

# So that torch.distributed, once somebody imports it, knows the backend by its name.
register_when_needed()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
