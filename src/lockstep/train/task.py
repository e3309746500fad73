"""What to train: `Task`, `Loss` for losses that are not a mean over the samples, and loading a task from a file."""

import importlib.util
import inspect
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset

from lockstep.base import activity
from lockstep.base.accelerator import is_on_meta, move
from lockstep.base.torch_internals import is_counted_step, reparametrize_module
from lockstep.checkpoints.model_state import plain_name, unwrap
from lockstep.comm.fully_shard import copy_part, own_class
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.health.heartbeat import num_calls
from lockstep.train.settings import refusing_unknown
from lockstep.train.task_file import TaskSpec, find_task, read_parameters, without_task

# The methods of a callback.
_POINTS = ("on_start", "on_step_end", "on_evaluation", "on_checkpoint", "on_end")


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Refuse what has no method that a run calls, or one that no run calls.

    Raises:
        ConfigurationError: There is such a callback; names the methods that there are.
    """
    if not isinstance(callbacks, Sequence):
        raise ConfigurationError("callbacks is not a list.\nGive one: callbacks=[MyCallback()].")
    for callback in callbacks:
        name = getattr(callback, "__name__", type(callback).__name__)
        methods = [point for point in dir(callback) if point.startswith("on_") and callable(getattr(callback, point))]
        unknown = [method for method in methods if method not in _POINTS]
        if isinstance(callback, type):
            raise ConfigurationError(f"The callback {name} is a class.\nGive an object: callbacks=[{name}()].")
        if unknown:
            raise ConfigurationError(
                f"No run calls {unknown[0]} of the callback {name}.\nThere are {', '.join(_POINTS)}."
            )
        if not methods:
            raise ConfigurationError(f"The callback {name} has none of the methods {', '.join(_POINTS)}.\nDefine one.")


@dataclass(frozen=True)
class Loss:
    """A loss that is a sum over items other than samples, such as tokens that are not padding.

    The loss of a step is the sum of ``total`` over the sum of ``count``, over all devices and micro-batches: what one
    device would compute on the whole global batch. ``Loss(cross_entropy(..., reduction="sum"), num_tokens)``.

    Args:
        total: 0-dimensional floating tensor with a gradient: the sum over the items, not their mean.
            (`lockstep.backward` takes a mean, and the number that it is ``mean_over``.)
        count: Number of items in ``total``; a number or a 0-dimensional tensor.
    """

    total: Tensor
    count: Tensor | float


@refusing_unknown("field of Task")
@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train: one description serves one device, many devices, and comparing them.

    Args:
        model: Returns a new model; called with the seed set, so that every rank gets the same weights. Modules keep
            the modes (``train()``, ``eval()``) that it has set, so frozen layers stay in evaluation mode.
        dataset: Returns the samples: an object with ``len`` and ``[]``, or an `IterableDataset` that yields the same
            stream in every process. On each machine `fit` calls it on one rank first, as it may download something.
        loss: Maps ``(model, batch)`` to a 0-dimensional tensor that is the mean over the batch's samples, or a `Loss`.
            ``model`` has no wrappers, so its attributes and methods can be used.
        optimizer: Maps the model's trainable parameters to the optimizer. If its parameter is called ``model``, it gets
            the model; if ``named_parameters``, ``named_params`` or ``named``, pairs of name and parameter.
        global_batch_size: Samples in one optimizer step over all devices.
        eval_dataset: Returns the samples for evaluation, as ``dataset``; a stream must end. Evaluation reports the loss
            on them. The first batch is evaluated before the training, to find errors early.
        metrics: Maps ``(model, batch)`` to further metrics of an evaluation, by name: each is a tensor with one value
            for each sample of the batch (the mean over all samples is reported), a `Loss`, or a metric of torchmetrics
            that the function has updated: it is reset before, and combines the states of all ranks.
        collate: Maps a list of samples to a batch; torch's ``default_collate`` if None.
        drop_last: Whether to skip the last global batch of an epoch if it is not full, for example for models with
            batch norm, which cannot train on a single sample. Otherwise its gradient is the mean over its samples.
        schedule: Maps ``(step, num_steps)`` to the factor on the learning rate at optimizer step ``step``, from 0. Or,
            if its first parameter is called ``optimizer``, maps ``(optimizer, num_steps)`` to a scheduler of torch;
            a `ReduceLROnPlateau` gets the loss of each evaluation.
        after: Called with the trained model, without wrappers, on rank zero at the end.
        shard: Maps the model to its modules that strategy fsdp shards as units, innermost first; if None, these are the
            children of its outermost lists and sequences.
        prepare: Called once on each machine before the ranks create anything, such as for a download or the tokens of a
            corpus; its result is ignored. If it fails, every rank raises an error.
        ema: Decay of an exponential moving average of the weights, such as 0.999, as ``torch.optim.swa_utils`` averages
            them after each update. Evaluations, ``export`` and the weights at the end are those of the average.
        callbacks: Objects with methods ``on_start``, ``on_step_end``, ``on_evaluation``, ``on_checkpoint`` or
            ``on_end``; see `lockstep.train.callbacks.RunView`, which they get.
        epochs: Default number of passes over the data set.
        name: The name of the task in reports; by default commands use the name of its file.
        counts: The name of the items that a `Loss` counts, in reports.
        parameters: Values that the task was made with, by name, for the record of the run; `load_task` sets them.

    Raises:
        ConfigurationError: A number is not positive, or a value that must be a function is not callable.
    """

    model: Callable[[], nn.Module]
    dataset: Callable[[], Dataset[Any]]
    loss: Callable[[nn.Module, Any], Tensor | Loss]
    optimizer: Callable[[Any], Optimizer]
    global_batch_size: int
    eval_dataset: Callable[[], Dataset[Any]] | None = None
    metrics: Callable[[nn.Module, Any], Mapping[str, Tensor | Loss]] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    drop_last: bool = False
    schedule: Callable[[int, int], float] | Callable[..., LRScheduler] | None = None
    after: Callable[[nn.Module], object] | None = None
    shard: Callable[[nn.Module], Iterable[nn.Module]] | None = None
    prepare: Callable[[], object] | None = None
    ema: float | None = None
    callbacks: Sequence[object] = ()
    epochs: int = 1
    name: str = "task"
    counts: str = "tokens"
    parameters: Mapping[str, bool | int | float | str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "epochs"):
            number: object = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigurationError(f"Task.{name} is {number!r}.\nGive a whole number of at least 1.")
        if self.ema is not None and not (isinstance(self.ema, float) and 0 < self.ema < 1):
            raise ConfigurationError(f"Task.ema is {self.ema!r}.\nGive a decay between 0 and 1, such as 0.999.")
        check_callbacks(self.callbacks)
        examples = {
            "model": "model=Net, not model=Net()",
            "dataset": "dataset=lambda: MyDataset(...)",
            "loss": "loss=my_loss, with def my_loss(model, batch)",
            "optimizer": "optimizer=lambda params: AdamW(params, lr=3e-4)",
        }
        for name in (*examples, "eval_dataset", "metrics", "collate", "schedule", "after", "shard", "prepare"):
            value: object = getattr(self, name)
            # A module is callable, but does not create a model.
            is_made = name == "model" and isinstance(value, nn.Module)
            if is_made or not (callable(value) or (value is None and name not in examples)):
                example = f", such as {examples[name]}" if name in examples else ""
                raise ConfigurationError(f"Task.{name} is a {type(value).__name__}.\nGive a function{example}.")


_POLL_S = 0.1  # how often the making of a data set is watched


def prepare(task: Task, world: World) -> Task:
    """Call `Task.prepare` once on each machine. Collective: every rank. Blocks until this machine is done.

    Returns:
        The task; its data sets are made on the first rank of each machine before the others, as they may download, too.

    Raises:
        RankFailed: It failed on another rank of this machine.
    """
    if world.is_late:  # the others are in their steps; on their machines it was called before
        if task.prepare is not None:
            task.prepare()
        return task
    with world.rank_zero_first(local=True):
        if world.local_rank == 0 and task.prepare is not None:
            task.prepare()

    def first(make: Callable[[], Any]) -> Any:
        is_made, num_before = threading.Event(), num_calls()
        with world.rank_zero_first(local=True) as let_others_begin:

            def watch() -> None:
                while not is_made.wait(_POLL_S):
                    if activity.now.collective or num_calls() != num_before:  # it needs the others, as in a barrier
                        let_others_begin()
                        return

            if world.local_rank == 0 and world.local_world_size > 1:
                threading.Thread(target=watch, name="lockstep-data-set", daemon=True).start()
            try:
                return make()
            finally:
                is_made.set()

    evaluated = task.eval_dataset and partial(first, task.eval_dataset)
    return replace(task, dataset=partial(first, task.dataset), eval_dataset=evaluated)


def build_model(task: Task, device: torch.device | str = "cpu", *, keeps_meta: bool = False) -> nn.Module:
    """Return a new model of ``task`` on ``device``; with ``keeps_meta``, a model on the meta device stays there.

    Raises:
        ConfigurationError: ``Task.model`` does not return a module, or the module has nothing to train.
    """
    model: object = task.model()
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"Task.model returned a {type(model).__name__}, not a torch.nn.Module.\nReturn the model from it."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        reason = "all of its parameters are frozen" if any(True for _ in model.parameters()) else "it has no parameters"
        raise ConfigurationError(
            f"{type(model).__name__} has no trainable parameter: {reason}.\n"
            "Set requires_grad on the parameters that should be trained."
        )
    if not is_on_meta(model):
        return move(model, device)
    return model if keeps_meta else initialize(model, device)


def initialize(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Allocate the meta tensors of ``model`` on ``device`` and initialise them; return the model.

    The modules' ``reset_parameters`` initialises whole tensors on the CPU, of which each rank keeps its shard. So the
    random numbers are the same on any number of ranks, and the same as for a model that was not created on the meta
    device. It takes the memory of one module at a time.

    Raises:
        ConfigurationError: A module has tensors on the meta device, but no ``reset_parameters``.
    """
    names = {module: name or "the model" for name, module in model.named_modules()}
    unset = {}
    for module in _children_first(model):
        tensors = {**module._parameters, **module._buffers}
        if on_meta := [name for name, tensor in tensors.items() if tensor is not None and tensor.is_meta]:
            unset[module] = on_meta
    move(model, device)
    for module, on_meta in unset.items():
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is None:
            raise ConfigurationError(
                f"The model is on the meta device, but {names[module]} ({own_class(module).__name__}), which holds "
                f"{', '.join(on_meta)}, has no reset_parameters.\nDefine it: it must give them their initial values."
            )
        whole = {name: torch.empty(getattr(module, name).shape, dtype=getattr(module, name).dtype) for name in on_meta}
        with torch.no_grad(), reparametrize_module(module, whole):
            reset()
        for name, value in whole.items():
            copy_part(getattr(module, name), value)
    return model


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in ``module``, and ``module`` itself, in the order of their construction."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def required_by(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that have no default; none if ``function`` does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def call_optimizer(make: Callable[[Any], object], model: nn.Module) -> object:
    """Call `Task.optimizer` with what it wants of ``model``: parameters, names with parameters, or all of it."""
    wanted = (required_by(make) or [""])[0]
    if wanted == "model":
        return make(unwrap(model))
    named = [(plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
    return make(named if wanted in ("named_parameters", "named_params", "named") else [p for _, p in named])


_SEVERAL = (
    "Task.optimizer returned several objects, but a task has one loss and one optimizer.\n"
    "For several optimizers, as of a GAN, write a script with lockstep.init and lockstep.DistributedDataParallel, such "
    "as examples/recovery_gan.py."
)
_SCHEDULER = (
    "Task.optimizer has made a learning-rate scheduler, which would have no effect: it is never stepped.\n"
    "Return it from Task.schedule: schedule=lambda optimizer, num_steps: OneCycleLR(optimizer, total_steps=num_steps, "
    "...)."
)


def build_optimizer(task: Task, model: nn.Module) -> Optimizer:
    """Return the optimizer of ``task`` for the trainable parameters of ``model``.

    Raises:
        ConfigurationError: ``Task.optimizer`` does not return an optimizer, but several, or with a scheduler.
    """
    optimizer = call_optimizer(task.optimizer, model)
    if isinstance(optimizer, Mapping | list | tuple):
        items = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
        raise ConfigurationError(_SCHEDULER if any(isinstance(item, LRScheduler) for item in items) else _SEVERAL)
    if isinstance(optimizer, Optimizer) and is_counted_step(optimizer.step):
        raise ConfigurationError(_SCHEDULER)
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"Task.optimizer returned a {type(optimizer).__name__}, not a torch.optim.Optimizer.\n"
            "Return the optimizer from it."
        )
    return optimizer


def check_registered(optimizer: Optimizer, model: nn.Module, *, is_alone: bool) -> None:
    """Refuse parameters of ``optimizer`` that no module of ``model`` registers; a single process only warns.

    Raises:
        ConfigurationError: There are some, so that each rank would train its own copy.
    """
    registered = set(map(id, model.parameters()))
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    outside = [f"number {i} of shape {tuple(p.shape)}" for i, p in enumerate(trained) if id(p) not in registered]
    if outside:
        text = (
            f"The optimizer has parameters that no module of the model registers: {', '.join(outside[:5])}"
            f"{' ...' if len(outside) > 5 else ''}.\nOn several devices their gradients would not be averaged, and "
            "checkpoints leave them out. Register them: nn.ModuleList for a list of modules, nn.ParameterList for one "
            "of parameters; make what the loss trains an attribute of the model."
        )
        if not is_alone:
            raise ConfigurationError(text)
        warnings.warn(text, stacklevel=2)


_ALL_EVAL = (
    "All modules of the model are in evaluation mode, as from_pretrained() leaves them: dropout is off, and batch norm "
    "keeps its statistics.\nfit keeps the modes of Task.model: call model.train() there, unless this is intended."
)


def warn_early(model: nn.Module) -> None:
    """Warn if no module of ``model`` is in training mode."""
    if not any(module.training for module in model.modules()):
        warnings.warn(_ALL_EVAL, stacklevel=2)


_SPLIT = (
    "Task.{} returned a stream that split_dataset_by_node has divided: each rank reads another part, of which it "
    "takes its own.\nOmit split_dataset_by_node: Lockstep divides each global batch among the ranks."
)


def build_dataset(task: Task, *, evaluation: bool = False) -> Any:
    """Return the samples of ``task``, for training or for evaluation: with ``len`` and ``[]``, or an `IterableDataset`.

    Raises:
        ConfigurationError: The data set is empty, or it is no stream and has no length.
    """
    field = "eval_dataset" if evaluation else "dataset"
    dataset: Any = getattr(task, field)()
    if isinstance(dataset, IterableDataset):
        # Of Hugging Face's ``datasets``, in which no method tells.
        if vars(dataset).get("_distributed") is not None:
            warnings.warn(_SPLIT.format(field), stacklevel=2)
        return dataset
    if not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
        advice = "Return a data set with len() and [], such as a torch.utils.data.Dataset, or list(...) of the samples"
        if isinstance(dataset, Iterable):
            advice += (
                ".\nFor a stream, return a torch.utils.data.IterableDataset whose __iter__ begins anew in each epoch; "
                "a generator can be read only once"
            )
        raise ConfigurationError(
            f"Task.{field} returned a {type(dataset).__name__}, which has no length or no index.\n{advice}."
        )
    if len(dataset) == 0:
        raise ConfigurationError(f"The data set of Task.{field} is empty.\nCheck where it reads its samples from.")
    return dataset


# --- load a task from a file ------------------------------------------------------------------------------------------

T = TypeVar("T")


def load_task(spec: str) -> Task:
    """Return the task that ``spec`` names: ``FILE.py`` for its attribute ``task``, or ``FILE.py:NAME``.

    The attribute is a `Task`, or a function that returns one; its parameters get the values of a `TaskSpec`. The file
    runs as a module, with its folder on ``sys.path``.

    Raises:
        ConfigurationError: The file or the attribute does not exist, it is not a task, or the file raises an error;
            names the line.
    """
    path, name = find_task(spec)
    module = _explain_errors(path, lambda: _import(path))
    task: object = getattr(module, name, None)
    if task is None:
        raise without_task(path, name, [key for key, value in vars(module).items() if isinstance(value, Task)])
    values = read_parameters(task, spec.parameters if isinstance(spec, TaskSpec) else {}, f"{path}: {name}")
    if callable(task):
        task = _explain_errors(path, partial(task, **values))
    if not isinstance(task, Task):
        raise ConfigurationError(
            f"{path}: {name} is a {type(task).__name__}, not a lockstep.Task.\n"
            "It must be a Task, or a function that returns one."
        )
    # By default the name of a task is that of its file.
    own_name = path.stem if name == "task" else f"{path.stem}:{name}"
    values = {key: value for key, value in values.items() if isinstance(value, bool | int | float | str | None)}
    name = own_name if task.name == Task.name else task.name
    return replace(task, name=name, parameters=values | {**task.parameters})


def _import(path: Path) -> ModuleType:
    # As for a script, the folder comes first, so that the file can import its neighbours. The module gets the name of
    # the file, because loader processes may import it by name, unless another module has that name.
    sys.path.insert(0, str(path.parent.resolve()))
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_task"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _explain_errors(path: Path, action: Callable[[], T]) -> T:
    """Run ``action``, and turn an error into one that shows the line of the file first."""
    try:
        return action()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        in_file = [frame for frame in frames if Path(frame.filename) == path.resolve()]
        # The innermost line in the task's own file, if there is one: its author can change it.
        frame = (in_file or frames)[-1]
        place, number, line = path if in_file else frame.filename, frame.lineno, frame.line
        cause, *rest = (str(error) or "no message").splitlines()
        if isinstance(error, SyntaxError) and error.filename:
            place, number, line, cause = error.filename, error.lineno, error.text, error.msg
        kind = "" if isinstance(error, ConfigurationError) else f"{type(error).__name__}: "
        text = [f"{place}, line {number}: {kind}{cause}", f"    {(line or '').strip()}", *rest]
        raise ConfigurationError("\n".join(text)) from error
