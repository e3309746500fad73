"""Data-parallel training for PyTorch: the same training run on any number of devices.

The public names are loaded on first use, so that ``import lockstep`` costs nothing and imports not even torch.
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep import errors as errors
from lockstep.comm.shm import register_when_needed

if TYPE_CHECKING:
    from lockstep.comm.world import World as World
    from lockstep.comm.world import init as init
    from lockstep.comm.world import seed as seed
    from lockstep.data.sampler import DistributedSampler as DistributedSampler
    from lockstep.data.shards import ShardedDataset as ShardedDataset
    from lockstep.launcher.api import launch as launch
    from lockstep.loop.adopt import adopt as adopt
    from lockstep.loop.monitor import monitor as monitor
    from lockstep.loop.prepare import prepare as prepare
    from lockstep.loop.recovery import Recovery as Recovery
    from lockstep.loop.saving import load as load
    from lockstep.loop.saving import save as save
    from lockstep.parallel.ddp.reducer import backward as backward
    from lockstep.parallel.ddp.wrapper import DistributedDataParallel as DistributedDataParallel
    from lockstep.parallel.dp.wrapper import DataParallel as DataParallel
    from lockstep.parallel.local_sgd import DiLoCo as DiLoCo
    from lockstep.parallel.local_sgd import LocalSGD as LocalSGD
    from lockstep.parallel.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
    from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from lockstep.study.compare.benchmark import compare as compare
    from lockstep.study.report.run_page import report as report
    from lockstep.study.tune import tune as tune
    from lockstep.study.verify.diagnose import verify as verify
    from lockstep.train.callbacks import EarlyStopping as EarlyStopping
    from lockstep.train.fit import fit as fit
    from lockstep.train.inference import evaluate as evaluate
    from lockstep.train.inference import predict as predict
    from lockstep.train.task import Loss as Loss
    from lockstep.train.task import Task as Task

__version__ = "0.1.0"

# Where each public name is.
_HOMES = {
    "comm.world": ["World", "init", "seed"],
    "data.sampler": ["DistributedSampler"],
    "data.shards": ["ShardedDataset"],
    "launcher.api": ["launch"],
    "loop.adopt": ["adopt"],
    "loop.monitor": ["monitor"],
    "loop.prepare": ["prepare"],
    "loop.recovery": ["Recovery"],
    "loop.saving": ["load", "save"],
    "parallel.ddp.reducer": ["backward"],
    "parallel.ddp.wrapper": ["DistributedDataParallel"],
    "parallel.dp.wrapper": ["DataParallel"],
    "parallel.local_sgd": ["DiLoCo", "LocalSGD"],
    "parallel.sync_batchnorm": ["SyncBatchNorm"],
    "parallel.zero.optimizer": ["ZeroRedundancyOptimizer"],
    "study.compare.benchmark": ["compare"],
    "study.report.run_page": ["report"],
    "study.tune": ["tune"],
    "study.verify.diagnose": ["verify"],
    "train.callbacks": ["EarlyStopping"],
    "train.fit": ["fit"],
    "train.inference": ["evaluate", "predict"],
    "train.task": ["Loss", "Task"],
}
_MODULES = {name: f"lockstep.{module}" for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_MODULES, "errors"])

# So that torch.distributed, once imported, knows the backend by its name.
register_when_needed()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    # Imported objects are not freed. A full garbage collection during the import would visit all of torch's objects for
    # nothing, which takes longer than the import itself.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        value = getattr(import_module(_MODULES[name]), name)
    finally:
        if was_enabled:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
