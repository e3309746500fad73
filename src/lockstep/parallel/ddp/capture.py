"""Steps that are captured in a CUDA graph: what they cannot do, since the host must not look at the device.

[Note: capture]
Hooks and callbacks run once, while the graph is recorded, and everything they put on streams is recorded with it: the
copies into the buckets, the all-reduces (NCCL joins the capture), the waits of streams for each other. In a replay no
Python runs. So by then the buckets must be the final ones: as with torch's class, some steps are run before the
capture, on a side stream in which the wrapper was made.
"""

from __future__ import annotations

import torch

from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.bucket import Bucket


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
