"""How torch.compile and CUDA graph capture treat the frames of the engines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.bucket_plan import FIRST_CAP_BYTES
from lockstep.parallel.ddp.buckets import Bucket

if TYPE_CHECKING:
    from lockstep.parallel.ddp.torch_compat import TorchCompat


# How torch.compile treats the frames of a wrapper.

_Function = TypeVar("_Function", bound=Callable[..., Any])


def leave_uncompiled(function: _Function) -> _Function:
    """Make torch.compile run ``function`` as it is and compile the frames that it calls.

    ``torch.compiler.disable(recursive=False)`` does the same, but its first call imports the compiler, which costs
    seconds, also for those who never compile.
    """
    _set_strategy(function, for_callees=torch._C._dynamo.eval_frame._FrameAction.DEFAULT)
    return function


def leave_all_uncompiled(function: _Function) -> _Function:
    """Make torch.compile run ``function`` and the frames that it calls as they are: it cannot trace collectives."""
    _set_strategy(function, for_callees=torch._C._dynamo.eval_frame._FrameAction.SKIP)
    return function


def keep_out_of_graphs(function: _Function) -> _Function:
    """Make torch.compile end a graph before each call of ``function``, run it as it is, and go on behind it.

    The functions above do so for frames that are entered from outside a graph; this does it for a module's forward,
    too, which the compiler would otherwise inline. Autograd calls hooks where a compiled step runs its backward, so
    these need it as well. Not around another decorator, whose code others share.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return leave_all_uncompiled(function)


def _set_strategy(function: Callable[..., Any], *, for_callees: Any) -> None:
    frames = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, for_callees)
    frames.set_code_exec_strategy(function.__code__, strategy)


def refuse_compiled_autograd() -> None:
    """Refuse a backward that torch.compile runs as a graph of its own: it calls hooks when it likes, and no callbacks.

    Raises:
        ConfigurationError: It is one.
    """
    compiler = sys.modules.get("torch._dynamo.compiled_autograd")  # not imported where nobody compiles
    if compiler is not None and compiler.in_compiled_autograd_region:
        raise ConfigurationError(
            "Compiled autograd does not work with DistributedDataParallel: gradients would not be averaged.\n"
            "Set torch._dynamo.config.compiled_autograd = False; the backward of what is compiled is compiled anyway."
        )


@leave_uncompiled
def run_in_parts(wrapper: TorchCompat, module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return ``module(*inputs, **kwargs)``; what is compiled meanwhile is compiled in parts, of about a bucket each.

    A graph hands over all its gradients when its backward ends, so one graph for the whole model would leave nothing to
    overlap. torch.compile cuts graphs while its own class says that a forward runs, and asks the wrapper that it finds
    there for ``bucket_bytes_cap``. It takes none below that of its first bucket.
    """
    if wrapper.bucket_bytes_cap < FIRST_CAP_BYTES or wrapper.process_group.size() == 1:
        return module(*inputs, **kwargs)
    before = TorchDistributedDataParallel._active_ddp_module
    TorchDistributedDataParallel._active_ddp_module = wrapper  # type: ignore[assignment]
    try:
        return module(*inputs, **kwargs)
    finally:
        TorchDistributedDataParallel._active_ddp_module = before


# Steps that are captured in a CUDA graph: what they cannot do, since the host must not look at the device.
#
# [Note: capture]
# Hooks and callbacks run once, while the graph is recorded, and everything they put on streams is recorded with it: the
# copies into the buckets, the all-reduces (NCCL joins the capture), the waits of streams for each other. In a replay no
# Python runs. So by then the buckets must be the final ones: as with torch's class, some steps are run before the
# capture, on a side stream in which the wrapper was made.


def is_capturing(device: torch.device) -> bool:
    """Return whether what goes to the current stream of ``device`` is recorded into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_absent(bucket: Bucket) -> None:
    """Refuse to capture a step in which the host has to read who used a parameter.

    Raises:
        ConfigurationError: A parameter of ``bucket`` received no gradient on this rank; names it.
    """
    if bucket.absent and is_capturing(bucket.spec.device):
        raise ConfigurationError(
            f"Parameter {bucket.names[bucket.absent[0].place]} received no gradient in a step that is captured in a "
            "CUDA graph.\nFreeze what is not used (requires_grad_(False)) before wrapping, or train eagerly."
        )
