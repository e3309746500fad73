"""The trace of a script in one rank: its passes over loaders and its updates, as plain data."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.base.containers import find_tensors
from lockstep.study.verify.fingerprint import DOUBLE, HALF, SINGLE, StepTrace, Tolerance, Trace


@dataclass
class Pass:
    """One pass over a loader.

    Attributes:
        dataset: Class and length of the data set; that of a rank may be its part.
        is_stream: Whether it has no indices, or no end, so that only what was loaded is known.
        is_endless: Whether the sampler yields a few times the data set's length, and more.
        shuffles: Whether the sampler shuffles, and has to be given the epoch.
        is_divided: Whether the sampler is a ``DistributedSampler``.
        is_prepared: Whether `lockstep.prepare` divides its batches.
        source: The id of the data set.
        num_before: Updates of the script before the pass.
        is_late: Whether only its first batch is loaded.
        indices: What the sampler yielded, also for batches that were not loaded; of a stream, digests of samples.
        contents: By index, a digest of the sample.
        drawn: By generator that samples are drawn from, a digest of its state before.
        waiting: The indices of the batches that are being loaded.
        num_loaded: Batches that the script has received.
        is_over: Whether it has received all.
        is_training: Whether there was a backward of its batches.
        is_combined: Whether ranks communicated during the pass, or before the next one.
    """

    dataset: str
    is_stream: bool = False
    is_endless: bool = False
    shuffles: bool = False
    is_divided: bool = False
    is_prepared: bool = False
    source: int = 0
    num_before: int = 0
    is_late: bool = False
    indices: list[Any] = field(default_factory=list)
    contents: dict[Any, bytes] = field(default_factory=dict)
    drawn: dict[str, bytes] = field(default_factory=dict)
    waiting: deque[list[Any]] = field(default_factory=deque)
    num_loaded: int = 0
    is_over: bool = False
    is_training: bool = False
    is_combined: bool = False


@dataclass(frozen=True)
class ScriptStep(StepTrace):
    """One update of a script.

    Attributes:
        indices: Of the samples from which this rank computed its gradients.
        drawn: By generator from which numbers were drawn, other than for data, a digest of its state before.
        num_backwards: How many backwards its gradients are from.
        operations: The operations that made the loss, the last one first.
        before_clipping: A digest of the gradients when they were clipped; None if they were not.
        outside: Names of the updated parameters that are in no data-parallel wrapper, if there is one.
        bypassed: Whether forward was called on the module in the wrapper, or the backward was in ``no_sync``.
        attributes: Numbers and tensors that modules have as plain attributes.
    """

    indices: tuple[bytes, ...]
    drawn: dict[str, bytes]
    num_backwards: int
    operations: tuple[str, ...]
    before_clipping: bytes | None
    outside: tuple[str, ...]
    bypassed: bool
    attributes: dict[str, Any]


@dataclass(frozen=True)
class ScriptTrace(Trace):
    """The trace of a script in one rank.

    Attributes:
        passes: Over loaders.
        norms: Layers of batch norm that normalise with the statistics of this rank's part.
        precision: The lowest in which a model is computed, such as ``float64``, ``fp32`` or ``bf16 autocast``.
        engine: ``ddp`` if a model is in a wrapper, otherwise ``none``.
        is_augmented: Whether samples are drawn at random, so that one is another in each epoch.
        is_padded: Whether the shape of a sample depends on the rest of its batch.
        unseen: What was not compared, in sentences.
    """

    steps: tuple[ScriptStep, ...] = ()
    passes: tuple[Pass, ...] = ()
    norms: tuple[str, ...] = ()
    precision: str = "fp32"
    engine: str = "none"
    is_augmented: bool = False
    is_padded: bool = False
    unseen: tuple[str, ...] = ()

    @property
    def tolerance(self) -> Tolerance:
        """How far apart numbers may be."""
        return {"float64": DOUBLE, "fp32": SINGLE}.get(self.precision, HALF)


# Digests: of generators and of samples.


def generator_states() -> dict[str, bytes]:
    """Return a digest of the state of each generator of the process: of torch, its devices, Python and NumPy."""
    states = {"torch": torch.get_rng_state().numpy().tobytes()}
    if torch.accelerator.is_available():
        device = torch.get_device_module(torch.accelerator.current_accelerator())
        states["device"] = device.get_rng_state().numpy().tobytes()
    keys = np.random.get_state(legacy=False)["state"]
    states |= {"random": repr(random.getstate()).encode(), "numpy": repr([keys["key"].tobytes(), keys["pos"]]).encode()}
    return {name: blake2b(state, digest_size=16).digest() for name, state in states.items()}


# The first bytes of the digest of a sample are those of its shapes, which depend on the batch if samples are padded.
SHAPES = 4


def row_digests(batch: Any) -> list[bytes]:
    """Return a digest of each sample of a batch: of what its tensors have at one place of their first dimension."""
    tensors = [tensor.detach() for tensor in find_tensors(batch) if tensor.dim() > 0]
    if not tensors:
        return []
    num = len(tensors[0])
    rows = [t.to("cpu").reshape(num, -1).contiguous() for t in tensors if len(t) == num and t.numel()]
    shapes = blake2b(str([row.shape[1] for row in rows]).encode(), digest_size=SHAPES).digest()
    views = [row.view(torch.uint8).numpy() for row in rows]
    digests = (blake2b(b"".join(view[row].tobytes() for view in views), digest_size=12) for row in range(num))
    return [shapes + digest.digest() for digest in digests]


def tensor_digests(value: Any) -> set[bytes]:
    """Return a digest of the contents of each tensor in ``value``, which a view or a copy on a device shares."""
    tensors = [t.detach() for t in find_tensors(value) if t.layout is torch.strided and t.numel() > 1]
    return {
        blake2b(t.to("cpu").contiguous().flatten().view(torch.uint8).numpy().data, digest_size=12).digest()
        for t in tensors
    }


def storage_of(tensor: Tensor) -> int:
    """Return the address of what a tensor and its views hold; 0 if that has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def as_bytes(samples: Sequence[Any]) -> tuple[bytes, ...]:
    """Return indices and digests of samples as bytes."""
    return tuple(sample if isinstance(sample, bytes) else str(sample).encode() for sample in samples)
