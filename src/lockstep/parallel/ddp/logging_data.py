"""The facts that torch's ``_get_ddp_logging_data()`` reports, as far as they mean something here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lockstep.comm.collectives import backend_name

if TYPE_CHECKING:
    from lockstep.parallel.ddp.torch_names import TorchNames

_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def logging_data(ddp: TorchNames, bucket_sizes_bytes: list[int], *, rebuilt: bool) -> dict[str, str | int]:
    """Return torch's keys with our values."""
    trainable = [parameter for parameter in ddp._module_parameters if parameter.requires_grad]
    sizes = ", ".join(str(size) for size in bucket_sizes_bytes)
    return {
        "module_name": type(ddp.module).__name__,
        "world_size": ddp.process_group.size(),
        "rank": ddp.process_group.rank(),
        "backend_name": backend_name(ddp.process_group),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "device_ids": "" if ddp.device_ids is None else ", ".join(str(index) for index in ddp.device_ids),
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "can_set_static_graph": 0,  # it would gain nothing; Lightning advises it where this says 1
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "bucket_sizes": "" if rebuilt else sizes,
        "has_rebuilt_buckets": int(rebuilt),
        "rebuilt_bucket_sizes": sizes if rebuilt else "",
        "join_uneven_inputs": int(ddp._joins_uneven_inputs),
        "num_parameter_tensors": len(trainable),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in trainable),
        "dtypes": ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trainable})),
        **({"comm_hook": ddp._comm_hooks[0][0].__qualname__} if ddp._comm_hooks else {}),
        **{name.lower(): os.environ.get(name, "N/A") for name in _ENVIRONMENT},
    }
