"""Ray Train: `LockstepConfig` for the workers of a ``TorchTrainer``, and `fit` with its checkpoints in Ray's hands.

[Note: workers of Ray Train]
Driver:      ``TorchTrainer(train_fn, torch_config=LockstepConfig(), ...).fit()``
Controller:  `LockstepBackend.on_start` at each start of the workers, the first and those after failures and resizes
Worker:      `_prepare` in its main thread; then, in the thread of ``train_fn``, `_joined` around ``train_fn``

A worker whose ``train_fn`` raises leaves its process group open. Ray polls the workers for their exceptions, and a peer
that found the connection closed before would be the one it reports. Ray then ends the processes of all workers.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from typing_extensions import override

from lockstep.checkpoints.checkpoint import find_checkpoints
from lockstep.checkpoints.object_store import place_of
from lockstep.comm.world import init
from lockstep.errors import ConfigurationError
from lockstep.loop.adopt import adopt
from lockstep.train.callbacks import RunView
from lockstep.train.fit import fit_with
from lockstep.train.result import FitResult
from lockstep.train.settings import FitSettings
from lockstep.train.task import Task

try:
    import ray.train
    from ray.train.backend import Backend, BackendConfig
except ModuleNotFoundError as error:
    error.add_note("lockstep.ray needs Ray Train: pip install 'lockstep-torch[ray]'")
    raise
try:
    import ray.train.collective
    from ray.train import CheckpointUploadMode
except ImportError:
    raise ConfigurationError(
        f"lockstep.ray needs Ray Train V2, which Ray {ray.__version__} does not have here.\n"
        "Install Ray 2.60 or later, and do not set RAY_TRAIN_V2_ENABLED=0."
    ) from None


# --- the workers ------------------------------------------------------------------------------------------------------


class LockstepBackend(Backend):  # type: ignore[misc, unused-ignore]  # without Ray there are no types
    """Prepares the workers at each of their starts; lives in Ray's controller."""

    # NCCL needs to see the GPUs of its peers; ``ray.train.torch.get_device`` knows which of them is the worker's own.
    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._num_starts = 0

    @override
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, LockstepConfig)
        address = worker_group.execute_single(0, _choose_address)
        worker_group.execute(_prepare, address, num_restarts=self._num_starts, adopts=backend_config.adopt)
        self._num_starts += 1


@dataclass
class LockstepConfig(BackendConfig):  # type: ignore[misc, unused-ignore]  # without Ray there are no types
    """How the workers of a ``TorchTrainer`` become the ranks of a world: its ``torch_config``.

    Each worker gets the variables that torchrun sets, calls `lockstep.adopt`, and joins the others by `lockstep.init`,
    before the training function begins; in it, `lockstep.init` and `lockstep.fit` find that world. An exception of the
    training function is in Ray's ``WorkerGroupError``, under the rank that raised it.

    Args:
        backend: What carries the collectives, as for `lockstep.init`; ``"auto"`` for its own choice: NCCL for GPUs,
            shared memory for workers of one machine, Gloo between machines.
        timeout_s: How long a worker waits for the others at the start.
        adopt: Whether torch's classes for data-parallel training are ours in the workers, so that
            ``ray.train.torch.prepare_model`` wraps in our engine.
    """

    backend: str = "auto"  # not None, which TorchTrainer would replace by torch's choice
    timeout_s: float = 60.0
    adopt: bool = True

    @property
    @override
    def backend_cls(self) -> type[LockstepBackend]:
        return LockstepBackend

    @property
    @override
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        return partial(_joined, None if self.backend == "auto" else self.backend, self.timeout_s)

    @override
    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _choose_address() -> tuple[str, int]:
    """Return the address of this worker's machine, and a port that is free on it now."""
    address: str = ray.util.get_node_ip_address()
    with socket.create_server(("", 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        return address, server.getsockname()[1]


def _prepare(master: tuple[str, int], *, num_restarts: int, adopts: bool) -> None:
    """Do in a worker what torchrun and ``--adopt`` do for a rank."""
    if adopts:
        adopt()  # before Ray imports torch's class by name, and before it reads the training function
    from ray.train.torch import get_device

    context = ray.train.get_context()
    os.environ |= {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RESTART_COUNT": str(num_restarts),  # so that `fit` waits for the lock of the workers before
        "ACCELERATE_TORCH_DEVICE": str(get_device()),  # as Ray's own backend does for Hugging Face's Accelerate
    }


@contextmanager
def _joined(backend: str | None, timeout_s: float) -> Iterator[None]:
    """Be a rank of the world within. Collective: every worker."""
    from ray.train.torch import get_device

    # In the thread of the training function, since each thread has a current GPU of its own.
    world = init(backend=backend, device=get_device(), timeout_s=timeout_s)
    yield
    world.close()  # not after an exception: see the note above


# --- fit --------------------------------------------------------------------------------------------------------------

# Of the checkpoints, in the folder of the run.
_FOLDER = "checkpoints"

# Settings of `fit` that Ray decides, and where.
_RAY_SETTINGS = {
    "checkpoint": "RunConfig(storage_path=..., name=...)",
    "keep": "CheckpointConfig(num_to_keep=...)",
    "keep_best": "CheckpointConfig(num_to_keep=..., checkpoint_score_attribute=...)",
    "resume": "RunConfig(name=...): a run of the same name goes on, one of another name starts anew",
}


def fit(task: Task, /, **settings: Any) -> FitResult:
    """Train ``task`` as `lockstep.fit` does, in the training function of a ``TorchTrainer``.

    Checkpoints are written to the folder ``checkpoints`` of the run in Ray's storage path: a folder that all machines
    share, or in an object store that fsspec knows, as for `lockstep.fit`. Once one is there, it is reported to Ray in
    its place (when the next is about to be written, or at the end) with the metrics ``step``, ``train/loss`` and those
    of an evaluation after the same step, such as ``eval/loss``. Ray removes old ones, as its ``CheckpointConfig`` says.

    When Ray starts the workers again, however many, the run goes on from the newest whole checkpoint; with
    ``reproducible`` it ends in the same bits as an undisturbed one.

    Collective: every worker. Blocks until the training is done.

    Args:
        task: As for `lockstep.fit`.
        settings: Likewise, but for ``checkpoint``, ``keep``, ``keep_best`` and ``resume``, which are Ray's.

    Raises:
        ConfigurationError: A setting is Ray's, or no package for the object store is installed; and as `lockstep.fit`.
    """
    for name in _RAY_SETTINGS.keys() & settings.keys():
        raise ConfigurationError(
            f"lockstep.ray.fit has no setting {name}, as Ray keeps the checkpoints.\nGive Ray's {_RAY_SETTINGS[name]}."
        )
    context = ray.train.get_context()
    storage = context.get_storage()
    folder = place_of(_url_of(storage))
    # What Ray knows of must be there; at the first start nothing is.
    resumes = True if ray.train.get_checkpoint() is not None else None
    all_settings = FitSettings(**settings, checkpoint=str(folder), keep=sys.maxsize, resume=resumes)
    report = _reporter(storage)
    # All but the newest, from which to go on.
    checkpoints = find_checkpoints(folder)[1:] if context.get_world_rank() == 0 and folder.exists() else []
    older = [(checkpoint.step, checkpoint.path.name) for checkpoint in checkpoints[::-1] if checkpoint.problem is None]
    for step, name in ray.train.collective.broadcast_from_rank_zero(older):
        report(name, {"step": step})  # of workers that were ended before Ray heard of it, or it would never go
    return fit_with(replace(task, callbacks=[*task.callbacks, _Reporting(report)]), all_settings)


class _Reporting:
    """The callback that reports checkpoints."""

    def __init__(self, report: Callable[[str, dict[str, float]], None]) -> None:
        self._report = report

    def on_checkpoint(self, run: RunView) -> None:
        if run.checkpoint is not None:
            self._report(run.checkpoint.name, dict(run.found))


def _url_of(storage: Any) -> str:
    """Return the folder for the checkpoints of the run, or its URL in an object store."""
    kind = storage.storage_filesystem.type_name  # pyarrow's: local, s3, gcs ..., or such as py::fsspec+s3
    folder = f"{storage.experiment_fs_path}/{_FOLDER}"
    return folder if kind == "local" else f"{kind.rpartition('+')[2]}://{folder}"


def _reporter(storage: Any) -> Callable[[str, dict[str, float]], None]:
    """Return what reports the checkpoint of a name, unless Ray knows it. Both are collective: every worker."""
    reported_paths = {entry.checkpoint.path for entry in ray.train.get_all_reported_checkpoints()}

    def report(name: str, metrics: dict[str, float]) -> None:
        # Ray would remove the folder of one that it has twice as soon as the older entry is too old. It has it already
        # if this start of the workers went on from it, or has written it in place of a damaged one.
        path = f"{storage.experiment_fs_path}/{_FOLDER}/{name}"
        if path not in reported_paths:
            reported_paths.add(path)
            checkpoint = ray.train.Checkpoint(path, filesystem=storage.storage_filesystem)
            ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    return report
