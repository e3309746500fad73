"""``adopt()``: replace torch's names by our classes, so that existing scripts run on them unchanged."""

import sys
import warnings
from types import ModuleType

import torch.nn.parallel
import torch.utils.data

from lockstep.data.sampler import DistributedSampler
from lockstep.parallel.ddp.wrapper import DistributedDataParallel
from lockstep.parallel.dp.wrapper import DataParallel, data_parallel
from lockstep.parallel.sync_batchnorm import SyncBatchNorm

_PUBLIC_HOMES = {
    *("torch.nn", "torch.nn.modules", "torch.nn.modules.batchnorm"),
    *("torch.nn.parallel", "torch.nn.parallel.data_parallel", "torch.nn.parallel.distributed"),
    *("torch.utils.data", "torch.utils.data.distributed"),
}

# torch's objects, which this module has imported before it replaces them.
_REPLACED = {
    torch.nn.parallel.DataParallel: DataParallel,
    torch.nn.parallel.data_parallel: data_parallel,
    torch.nn.parallel.DistributedDataParallel: DistributedDataParallel,
    torch.nn.parallel.DistributedDataParallelCPU: DistributedDataParallel,  # deprecated
    torch.nn.SyncBatchNorm: SyncBatchNorm,
    torch.utils.data.DistributedSampler: DistributedSampler,
}


def adopt() -> None:
    """Make torch's names for data-parallel training refer to our classes, permanently in this process.

    Call it first thing in a script, or start the script with ``lockstep run --adopt``. Modules that have imported
    torch's classes by name already get ours too; objects and subclasses made before stay what they are, and a warning
    names such subclasses. Libraries that decide by ``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` see
    ours as one. Calling it again does no harm. Processes that the script spawns adopt only if what they run calls it
    too. docs/script.md lists what was tried and what differs.
    """
    for torchs in (cls for cls in _REPLACED if isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        for kind in torchs.__subclasses__():
            if kind.__module__.split(".")[0] not in ("torch", "lockstep"):
                warnings.warn(
                    f"{kind.__module__}.{kind.__qualname__} is a subclass of torch's {torchs.__name__}, and stays one. "
                    "Call lockstep.adopt() before it is defined, or start the script with `lockstep run --adopt`.",
                    stacklevel=2,
                )
    replacements = {id(torchs): replacement for torchs, replacement in _REPLACED.items()}
    # torch's internal modules that are already loaded may rely on the internals of torch's class. They recognise ours
    # by isinstance, because our engine registers itself with torch's class. Modules loaded later get ours.
    # A copy of the list: reading an attribute of a module may import another module.
    for module_name, module in list(sys.modules.items()):
        may_change = module_name in _PUBLIC_HOMES or module_name.split(".")[0] not in ("torch", "lockstep")
        if isinstance(module, ModuleType) and may_change:
            for name, value in list(vars(module).items()):
                if id(value) in replacements:
                    setattr(module, name, replacements[id(value)])
