"""A replica's forward and backward as a CUDA graph: what is recorded once is replayed without Python.

[Note: recorded steps]

A recorded step does what it did when it was recorded: it reads the memory that it read, runs the kernels that ran, and
writes where it wrote. So it stands for a step only where everything that Python would have looked at is the same: the
loss function, the modes, whether modules train, the shapes of what a shard is made of and what else is in it, the scale
unless it is a tensor, and where weights and buffers lie. That is its *key*. A step runs as written as long as its key
has not come ``WARM_UP_STEPS`` times in a row; so lazy work (cuBLAS, cuDNN and the allocator do some) is done by then,
and a step that is like no other, as with the last batch of an epoch, is not recorded.

Inputs are copied into memory that the recording reads. What it wrote is overwritten by the next replay, so gradients
and losses are copied out of it.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils import _pytree
from typing_extensions import override

from lockstep.errors import ConfigurationError

WARM_UP_STEPS = 3
"""How many steps with a key run as written before one is recorded; torch asks for as many."""

_CONSTANTS = (int, float, str, bytes, bool, type(None))


class Action(Enum):
    """What to do with a step."""

    RUN = auto()
    RECORD = auto()
    REPLAY = auto()


class Outcome(NamedTuple):
    """What a step leaves: the loss, and a gradient for each weight, None for one that was not used."""

    loss: Tensor
    gradients: list[Tensor | None]


@dataclass(frozen=True)
class Key:
    """What must be the same for a recorded step to stand for another; see [Note: recorded steps]."""

    behaviour: object
    spec: object
    leaves: tuple[object, ...]


def make_key(behaviour: object, shard: object, scale: float | Tensor, device: torch.device) -> Key:
    """Return the key of a step.

    Args:
        behaviour: All that is not of the shard or the scale; compared by ``==``.
        shard: Tensors and constants in tuples, lists and dicts.
        scale: A number is a part of the step, a tensor is an input.
        device: The replica's.

    Raises:
        ConfigurationError: There is something else in the shard, or a tensor elsewhere.
    """
    leaves, spec = _pytree.tree_flatten((shard, scale))
    return Key(behaviour, spec, tuple(_leaf(leaf, device) for leaf in leaves))


def _leaf(leaf: object, device: torch.device) -> object:
    if isinstance(leaf, Tensor):
        if leaf.device.type != device.type:
            raise ConfigurationError(f"a shard holds a tensor on {leaf.device}, which a graph would not read again")
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    if not isinstance(leaf, _CONSTANTS):
        raise ConfigurationError(
            f"a shard holds something of type {type(leaf).__name__}, in which tensors would be overlooked"
        )
    return type(leaf), leaf


class Recorder(ABC):
    """Records work. Abstract: `GraphRecorder`, or what a test puts in its place."""

    @abstractmethod
    def record(self, work: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        """Return where the work leaves its results, and what does it; nothing is computed yet."""


@final
class GraphRecorder(Recorder):
    """Records CUDA graphs, each replica's on a stream of its own."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @override
    def record(self, work: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        """Record on the current device. Blocks until the device is idle."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        # Other threads, those of autograd among them, may go on meanwhile: only this one must not do what is forbidden.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            outcome = work()
        return outcome, graph.replay


def make_recorder(device: torch.device) -> Recorder | None:
    """Return what records on ``device``; None where there is nothing to gain."""
    return GraphRecorder() if device.type == "cuda" else None


@dataclass(frozen=True)
class _Recording:
    key: Key
    inputs: list[Tensor]
    outcome: Outcome
    replay: Callable[[], None]


class ReplicaCapture:
    """The recorded step of one replica, if there is one, and what is to become of the next.

    Args:
        replica: Its number.
        recorder: Makes recordings; None: steps can only run as written.
    """

    def __init__(self, replica: int, recorder: Recorder | None) -> None:
        self._replica, self._recorder = replica, recorder
        self._recording: _Recording | None = None
        self._candidate: Key | None = None
        self._seen = 0
        self._failed = self._told = False

    def decide(self, key: Key) -> Action:
        """Return what to do with a step of this key; call it once for each step."""
        if self._recorder is None and not self._failed:
            self.fail("only CUDA devices have graphs")
        if self._failed:
            return Action.RUN
        if self._recording is not None and key == self._recording.key:
            self._candidate = None
            return Action.REPLAY
        if key != self._candidate:
            self._candidate, self._seen = key, 0
        self._seen += 1
        if self._seen > WARM_UP_STEPS:
            return Action.RECORD
        if self._recording is not None and not self._told:
            self._told = True
            warnings.warn(
                f"Replica {self._replica} of DataParallel got a step that differs from the recorded one (shapes, loss "
                "function, modes, or where weights lie). Such steps run as written, without a CUDA graph.",
                stacklevel=2,
            )
        return Action.RUN

    def record(self, key: Key, shard: Any, scale: float | Tensor, work: Callable[[Any, Any], Outcome]) -> None:
        """Record ``work(shard, scale)``, with copies of the tensors in them."""
        assert self._recorder is not None
        self._recording = None  # its memory first
        leaves, spec = _pytree.tree_flatten((shard, scale))
        fixed = [
            leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        arguments = _pytree.tree_unflatten(fixed, spec)
        outcome, replay = self._recorder.record(lambda: work(*arguments))
        self._recording = _Recording(key, [leaf for leaf in fixed if isinstance(leaf, Tensor)], outcome, replay)

    @torch.no_grad()
    def replay(self, shard: Any, scale: float | Tensor) -> Outcome:
        """Do the recorded step with other tensors; the gradients are overwritten by the next replay."""
        assert self._recording is not None
        given = [leaf for leaf in _pytree.tree_leaves((shard, scale)) if isinstance(leaf, Tensor)]
        for fixed, value in zip(self._recording.inputs, given, strict=True):
            fixed.copy_(value, non_blocking=True)
        self._recording.replay()
        loss, gradients = self._recording.outcome
        return Outcome(loss.clone(), gradients)

    def fail(self, error: Exception | str) -> None:
        """Record no more, and say once why."""
        self._failed, self._recording = True, None
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"DataParallel cannot record the steps of replica {self._replica}: {reason}. They run as written.",
            stacklevel=2,
        )
