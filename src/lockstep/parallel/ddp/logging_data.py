"""What torch's ``_get_ddp_logging_data()`` reports, as far as it means something here.

Times are those of step_times.py. The order in which gradients become ready is noted in the first step and not later,
when few parameters have hooks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.comm.collectives import Group, backend_name

if TYPE_CHECKING:
    from lockstep.parallel.ddp.reducer import Reducer
    from lockstep.parallel.ddp.torch_names import TorchNames

_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_OF_BACKENDS = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": ("NCCL_SOCKET_IFNAME", "NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_DEBUG", "NCCL_NTHREADS"),
}
_DTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
"""As C++ names them."""


def logging_data(ddp: TorchNames, reducer: Reducer) -> dict[str, str | int]:
    """Return torch's keys with our values. Blocks on CUDA until the last step that was looked at is over."""
    trainable = [parameter for parameter in ddp._module_parameters if parameter.requires_grad]
    specs, rebuilt = [bucket.spec for bucket in reducer.row.buckets], reducer.row.is_rebuilt
    sizes = ", ".join(str(spec.size_bytes) for spec in specs)
    backend = backend_name(ddp.process_group)
    return {
        "module_name": type(ddp.module).__name__,
        "world_size": ddp.process_group.size(),
        "rank": ddp.process_group.rank(),
        "backend_name": backend,
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "device_ids": "" if ddp.device_ids is None else ", ".join(str(index) for index in ddp.device_ids),
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "can_set_static_graph": 0,  # it would gain nothing; Lightning advises it where this says 1
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "bucket_sizes": ", ".join(str(size) for size in reducer.row.first_sizes_bytes),
        "has_rebuilt_buckets": int(rebuilt),
        "rebuilt_bucket_sizes": sizes if rebuilt else "",
        "rebuilt_per_bucket_param_indices": ", ".join(" ".join(map(str, spec.parameters)) for spec in specs if rebuilt),
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer.row.arrivals)),
        "has_sync_bn": int(any(isinstance(each, nn.SyncBatchNorm) for each in ddp.module.modules())),
        "join_uneven_inputs": int(ddp._joins_uneven_inputs),
        "num_parameter_tensors": len(trainable),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in trainable),
        "dtypes": ", ".join(sorted({_DTYPES.get(parameter.dtype, str(parameter.dtype)) for parameter in trainable})),
        **({"comm_hook": ddp._comm_hook_name} if ddp._comm_hooks else {}),
        **({"has_error": 1, "error": ddp._last_error} if ddp._last_error else {}),
        **(_gloo_threads(ddp.process_group) if backend == "gloo" else {}),
        **{name.lower(): os.environ.get(name, "N/A") for name in (*_ENVIRONMENT, *_OF_BACKENDS.get(backend, ()))},
        **reducer.times.figures(),
    }


def _gloo_threads(group: Group) -> dict[str, int]:
    try:
        return {"gloo_num_threads": group._get_backend(torch.device("cpu")).options._threads}  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # a wrapper around Gloo, as TORCH_DISTRIBUTED_DEBUG=DETAIL puts there
        return {}
