"""Callbacks of `fit`: what they see of a run, what they may ask of it, and `EarlyStopping`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, final

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoints.best import Monitor
from lockstep.checkpoints.object_store import Place
from lockstep.data.stream import Stateful
from lockstep.errors import ConfigurationError
from lockstep.train.evaluate import Evaluation
from lockstep.train.trainer import StepRecord


class _Verbs(Protocol):
    """What callbacks may ask of a run."""

    @property
    def model(self) -> nn.Module:
        """The model without wrappers."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the run."""

    def request(self, verb: str, why: str = "") -> None:
        """Ask all ranks to ``stop`` or to ``save``."""

    def log(self, name: str, value: float | Tensor) -> None:
        """Record a number."""


@final
@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run, as its callbacks see it.

    Each method of a callback is called on every rank, with the run as it is then: ``on_start`` before the first step,
    also of a resumed run; ``on_step_end`` after each step; ``on_evaluation`` after an evaluation; ``on_checkpoint``
    when a checkpoint is complete on disk, which is before the next one is written or at the end, also of the one that
    the run was resumed from; ``on_end`` when the run is over, with the weights that `fit` returns. An error in one of
    them ends all ranks. A callback with ``state_dict`` and ``load_state_dict`` is kept in checkpoints, with the state
    of rank zero; it continues in a resumed run, and on a rank that takes the place of a lost one.

    Attributes:
        rank, world_size: Of this process. Write files on rank zero only.
        step, num_steps: Number of steps done, and of the whole run.
        steps_per_epoch: None for a stream.
        last_step: The last step, with ``loss`` and ``grad_norm`` as tensors; None before the first.
        due: What follows this step: some of "evaluate" and "save".
        metrics: Of the last evaluation in this call of `fit`, by name; empty before.
        best: The best evaluation of the run so far, by ``keep_best``; by default by the loss.
        checkpoint: The newest checkpoint.
        found: The figures after its step, under the names that sinks use.
    """

    rank: int
    world_size: int
    step: int
    num_steps: int
    steps_per_epoch: int | None
    last_step: StepRecord | None
    due: Sequence[str]
    metrics: Mapping[str, float]
    best: Evaluation | None
    checkpoint: Place | None
    found: Mapping[str, float]
    _run: _Verbs = field(repr=False)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank zero."""
        return self.rank == 0

    @property
    def loss(self) -> float:
        """The loss of the last step, the mean over its global batch. Blocks until the device has computed it."""
        return float("nan") if self.last_step is None else float(self.last_step.loss)

    @property
    def model(self) -> nn.Module:
        """The model without wrappers; with fsdp, with the shards of this rank.

        Change its weights in ``on_end`` only; layers may be frozen and unfrozen. In ``on_evaluation`` and ``on_end``,
        it has the averaged weights of ``Task.ema``, which were evaluated.
        """
        return self._run.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. Numbers that are set in its ``param_groups`` on all ranks hold, also in a resumed run.

        So does a learning rate, ``group["lr"] *= 0.1``: schedule and warm-up go on from it. A scheduler of torch does
        with it what it does in any loop.
        """
        return self._run.optimizer

    def stop(self, why: str = "") -> None:
        """End the run early, on all ranks after the same step, on any number of devices. Any rank may call it.

        After ``on_step_end`` that is two steps later, as the ranks agree with the sums of their steps (in ``local-sgd``
        and ``diloco``: after the next exchange), else at once. Then it is evaluated and saved as at its end.
        """
        self._run.request("stop", why)

    def save(self) -> None:
        """Save a checkpoint on all ranks, as soon as `stop` would stop.

        Raises:
            ConfigurationError: The run has no folder for checkpoints.
        """
        self._run.request("save")

    def log(self, name: str, value: float | Tensor) -> None:
        """Show a number in the live view, the record and its report, and the sinks: that of rank zero. Does not block.

        Args:
            name: In sinks ``log/name``; in ``on_evaluation``, where it becomes one of the metrics, ``eval/name``.
            value: A number, or a tensor with one.

        Raises:
            ConfigurationError: They are something else.
        """
        is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
        if not (is_number and isinstance(name, str)):
            raise ConfigurationError(
                f"run.log({name!r}, {value!r}) is not a name and a number.\n"
                "Give a number, or a tensor with one element."
            )
        self._run.log(name, value if isinstance(value, Tensor) else float(value))


class Callbacks:
    """The callbacks of a run.

    Args:
        callbacks: In the order in which they are called.
    """

    def __init__(self, callbacks: Sequence[object]) -> None:
        self.given = list(callbacks)

    def have(self, point: str) -> bool:
        """Return whether one of them has the method ``point``."""
        return any(getattr(callback, point, None) is not None for callback in self.given)

    def call(self, point: str, run: RunView) -> None:
        """Call the method ``point`` of each; an error says whose it is."""
        for callback in self.given:
            name, method = type(callback).__name__, getattr(callback, point, None)
            try:
                if method is not None:
                    method(run)
            except Exception as error:
                error.add_note(f"{name}.{point} raised it, on rank {run.rank} after step {run.step}.")
                raise

    def _stateful(self) -> Iterator[tuple[str, Stateful]]:
        """Yield the callbacks that have a state by their names, which differ."""
        seen = Counter[str]()
        for callback in self.given:
            if isinstance(callback, Stateful):
                name = type(callback).__name__
                seen[name] += 1
                yield (name if seen[name] == 1 else f"{name} {seen[name]}"), callback

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each that has one, by name."""
        return {name: callback.state_dict() for name, callback in self._stateful()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of another run or rank; callbacks that it lacks are left as they are."""
        for name, callback in self._stateful():
            if name in state:
                callback.load_state_dict(state[name])


@final
class EarlyStopping:
    """Ends a run when a metric stops improving; `fit` makes it from ``early_stopping`` and ``patience``.

    All ranks get the same metrics, so they decide alike; the decision is kept over a resume.

    Args:
        metric: Such as ``loss``, or ``accuracy:max`` if more of it is better.
        patience: Number of evaluations in a row without a new best that ends the run.

    Raises:
        ConfigurationError: ``metric`` is not of this form.
    """

    def __init__(self, metric: str = "loss", patience: int = 5) -> None:
        self.monitor, self._patience = Monitor.of(metric), patience
        self._best, self._at, self._num_since = float("inf"), 0, 0

    def on_start(self, run: RunView) -> None:
        """Stop at once if the run had been stopped before it was resumed."""
        self._judge(run)

    def on_evaluation(self, run: RunView) -> None:
        """Compare the metric with the best one so far."""
        if self._num_since >= self._patience:
            return  # it is evaluated once more after a resume
        score = self.monitor.score(run.metrics)
        if score < self._best:
            self._best, self._at, self._num_since = score, run.step, 0
        else:
            self._num_since += 1
        self._judge(run)

    def _judge(self, run: RunView) -> None:
        if self._num_since >= self._patience:
            best = f"{self.monitor.name} {self.monitor.sign * self._best:.4f}"
            run.stop(f"no better than {best} after step {self._at} in {self._num_since} evaluations")

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues."""
        return {"best": self._best, "at": self._at, "num_since": self._num_since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._best, self._at, self._num_since = state["best"], state["at"], state["num_since"]
