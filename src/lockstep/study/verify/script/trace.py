"""The trace of a script in one rank: its passes over loaders and its updates, as plain data."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lockstep.study.verify.fingerprint import DOUBLE, HALF, SINGLE, StepTrace, Tolerance, Trace


@dataclass
class Pass:
    """One pass over a loader.

    Attributes:
        dataset: Class and length of the data set; that of a rank may be its part.
        is_stream: Whether it has no indices, so that only what was loaded is known.
        shuffles: Whether the sampler shuffles, and has to be given the epoch.
        source: The id of the data set.
        num_before: Updates of the script before the pass.
        is_late: Whether only its first batch is loaded.
        indices: What the sampler yielded, also for batches that were not loaded; of a stream, digests of samples.
        contents: By index, a digest of the sample.
        waiting: The indices of the batches that are being loaded.
        num_loaded: Batches that the script has received.
        is_over: Whether it has received all.
        is_training: Whether there was a backward during the pass.
        is_combined: Whether ranks communicated during the pass, or before the next one.
    """

    dataset: str
    is_stream: bool = False
    shuffles: bool = False
    source: int = 0
    num_before: int = 0
    is_late: bool = False
    indices: list[Any] = field(default_factory=list)
    contents: dict[Any, bytes] = field(default_factory=dict)
    waiting: deque[list[Any]] = field(default_factory=deque)
    num_loaded: int = 0
    is_over: bool = False
    is_training: bool = False
    is_combined: bool = False

    def note(self, indices: Any) -> list[Any]:
        """Add what the sampler has yielded, and return it as a list."""
        if self.is_stream:
            return []
        yielded = indices if isinstance(indices, list | tuple) else [indices]
        yielded = [index if isinstance(index, int) else str(index) for index in yielded]
        self.indices += yielded
        return yielded


@dataclass(frozen=True)
class ScriptStep(StepTrace):
    """One update of a script.

    Attributes:
        indices: Of the samples from which this rank computed its gradients.
        draws: Whether random numbers were drawn, other than for data.
        random_state: A digest of the generators' state before.
        operations: Those that made the loss, the last one first.
        before_clipping: A digest of the gradients when they were clipped; None if they were not.
        outside: Names of the updated parameters that are in no data-parallel wrapper, if there is one.
        bypassed: Whether forward was called on the module in the wrapper, or the backward was in ``no_sync``.
        attributes: Numbers and tensors that modules have as plain attributes.
    """

    indices: tuple[bytes, ...]
    draws: bool
    random_state: bytes
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
        engine: ``ddp`` if the script has a wrapper, torch's or ours, else ``none``.
        is_augmented: Whether samples are drawn at random, so that one is another in each epoch.
    """

    steps: tuple[ScriptStep, ...] = ()
    passes: tuple[Pass, ...] = ()
    norms: tuple[str, ...] = ()
    precision: str = "fp32"
    engine: str = "none"
    is_augmented: bool = False

    @property
    def tolerance(self) -> Tolerance:
        """How far apart numbers may be."""
        return {"float64": DOUBLE, "fp32": SINGLE}.get(self.precision, HALF)
