"""Inject faults inside a rank: kill, hang, slow down, run out of memory or disk, cut the network, corrupt numbers."""

from __future__ import annotations

import builtins
import functools
import io
import json
import os
import signal
import stat
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from lockstep.comm.collectives import Group, all_reduce_async
from lockstep.comm.shm.process_group import ShmProcessGroup
from lockstep.study.rehearse import fault_rules
from lockstep.study.rehearse.fault_rules import Rule
from lockstep.train.trainer import Trainer

# What each fault does to the rank that it strikes.

OOM_TEXT = "Tried to allocate 20.00 GiB: out of memory (made up by lockstep rehearse)."

_NAP_S = 3600.0


def kill() -> None:
    """End this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang(seconds: float) -> None:
    """Do nothing for so long."""
    deadline = time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(left_s, _NAP_S))


def run_out_of_memory() -> None:
    """Raise what torch raises then."""
    raise torch.OutOfMemoryError(OOM_TEXT)


def flip_bit(model: nn.Module) -> str:
    """Flip one bit of one number of a parameter in the middle of the model; return which."""
    name, parameter = middle_parameter(model)
    numbers = _local(parameter).detach()
    first = (0,) * numbers.ndim
    changed = numbers[first].clone().reshape(1)
    # Of the second most significant byte: large enough to see, far too small to become infinite.
    changed.view(torch.uint8)[-2] ^= 0b0100_0000
    numbers[first] = changed[0]
    return name


def middle_parameter(model: nn.Module) -> tuple[str, Tensor]:
    """Return the name of a parameter in the middle of the model, without the wrappers' prefixes, and it."""
    name, parameter = _middle(model)
    return ".".join(part for part in name.split(".") if part != "module"), parameter


def _middle(model: nn.Module) -> tuple[str, Tensor]:
    trained = [(name, found) for name, found in model.named_parameters() if found.requires_grad and found.numel()]
    return trained[len(trained) // 2]


class WholeParameters:
    """The parameters that models compute with: of what fully_shard has divided they are others than the model's own.

    Only on those do hooks run in backward. They are in the place of the model's own while its modules compute.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], weakref.ref[Tensor]] = {}

    def follow(self) -> None:
        """Take note of them from now on, for good."""
        register_module_forward_hook(self._on_forward)

    def _on_forward(self, module: nn.Module, _args: Any, _output: Any) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and not _is_divided(parameter):
                self._found[id(module), name] = weakref.ref(parameter)

    def middle(self, model: nn.Module) -> Tensor | None:
        """Return the one in the middle of ``model`` that its last forward computed with, if that is known."""
        name, parameter = _middle(model)
        if not _is_divided(parameter):
            return parameter
        path, _, leaf = name.rpartition(".")
        found = self._found.get((id(model.get_submodule(path)), leaf))
        return None if found is None else found()


def in_backward(parameter: Tensor, act: Callable[[Tensor], Tensor | None]) -> None:
    """Act once, when this backward computes the gradient of ``parameter``, which the act may replace."""
    handles: list[Any] = []

    def once(gradient: Tensor) -> Tensor | None:
        handles.pop().remove()
        return act(gradient)

    handles.append(parameter.register_hook(once))


def not_a_number(gradient: Tensor) -> Tensor:
    """Return the gradient with one number that is none."""
    broken = gradient.clone()
    broken.view(-1)[:1] = float("nan")
    return broken


def _is_divided(parameter: Tensor) -> bool:
    return hasattr(parameter, "to_local")  # a DTensor, whose module takes long to import


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if _is_divided(parameter) else parameter  # type: ignore[no-any-return]


# Which step of the training a rank is in, and where in it: for a task, and for any script.

Listener = Callable[[str], None]


class StepClock:
    """Tells a listener whenever the rank comes to a place in a step; steps are counted from 1.

    ``fit`` knows its step, also after it resumed. In other programs it is the number of steps that the optimizer has
    taken in this process, and one: of several optimizers the one that has taken most.

    The places are ``loader`` (the next batch is asked for), ``forward`` (a module is called with gradients enabled),
    ``backward`` (``backward()`` is called), ``optimizer`` (its ``step()`` is called) and ``updated`` (it is over).

    Attributes:
        model: The outermost module of the last forward, if it has parameters to train.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._fit_step: int | None = None
        self._is_inside = False
        self._num_visits = 0
        self._num_updates: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._model: weakref.ref[nn.Module] | None = None
        self._model_step = 0

    @property
    def step(self) -> int:
        """The step that this rank is in; between two steps of ``fit`` the one that is over."""
        if self._fit_step is not None:
            return self._fit_step
        return max(self._num_updates.values(), default=0) + 1

    @property
    def visit(self) -> int:
        """A number that is another one whenever a step begins, also the same one again after ``fit`` went back."""
        return self._num_visits if self._fit_step is not None else self.step

    @property
    def model(self) -> nn.Module | None:
        """The model that is trained, as far as it is known by now."""
        return None if self._model is None else self._model()

    def start(self) -> None:
        """Put the hooks in place, for good."""
        for kind in (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter):
            self._tell_before(kind, "_next_data", "loader")
        self._tell_before(torch.autograd, "backward", "backward")
        register_module_forward_pre_hook(self._on_forward)
        register_optimizer_step_pre_hook(lambda *_: self._tell("optimizer"))
        register_optimizer_step_post_hook(self._on_updated)
        self._follow_fit()

    def _tell(self, place: str) -> None:
        # Of what fit does between its steps, such as evaluation, nothing belongs to a step.
        if self._is_inside or self._fit_step is None:
            self._listener(place)

    def _tell_before(self, owner: Any, name: str, place: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def told(*args: Any, **kwargs: Any) -> Any:
            self._tell(place)
            return original(*args, **kwargs)

        setattr(owner, name, told)

    def _on_forward(self, module: nn.Module, _args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._model_step != self.step and any(found.requires_grad for found in module.parameters()):
            self._model_step, self._model = self.step, weakref.ref(module)
        self._tell("forward")

    def _on_updated(self, optimizer: Any, *_: Any) -> None:
        # Before counting: what happens now belongs to the step that is over.
        if self._fit_step is None:
            self._tell("updated")
        self._num_updates[optimizer] = self._num_updates.get(optimizer, 0) + 1

    def _follow_fit(self) -> None:
        step = Trainer.step

        @functools.wraps(step)
        def followed(loop: Trainer) -> Any:
            self._fit_step, self._is_inside = loop.num_steps_done + 1, True
            self._num_visits += 1
            try:
                record = step(loop)
                self._tell("updated")
                return record
            finally:
                self._is_inside = False

        Trainer.step = followed  # type: ignore[method-assign, assignment]


# A disk without any room: files can be made, but what is written to them fails as it does then.

_WRITING = os.O_WRONLY | os.O_RDWR
_SPARED = (f"{tempfile.gettempdir()}{os.sep}lockstep-", "/dev/", "/proc/")
"""The launcher's own folder, without which nobody could say what happened, and what is no disk."""


def fill(is_full: Callable[[], bool]) -> None:
    """Let writing to files fail from the moment on when ``is_full`` says so, in this process, for good.

    The descriptor is led to /dev/full, so that the error is the kernel's own. Programs that open files in native code
    by their name are not covered, but for those of torch and safetensors.
    """
    open_file, open_descriptor = builtins.open, os.open

    @functools.wraps(open_file)
    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        found = open_file(file, mode, *args, **kwargs)
        if set(mode) & set("wax+"):
            lead_nowhere(found.fileno())
        return found

    @functools.wraps(open_descriptor)
    def opened_low(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        found = open_descriptor(path, flags, *args, **kwargs)
        if flags & _WRITING:
            lead_nowhere(found)
        return found

    def lead_nowhere(descriptor: int) -> None:
        if not _is_on_disk(descriptor) or not is_full():
            return
        nowhere = open_descriptor("/dev/full", os.O_WRONLY)
        os.dup2(nowhere, descriptor, inheritable=False)
        os.close(nowhere)

    builtins.open = io.open = opened
    os.open = opened_low
    _write_in_python()


def _is_on_disk(descriptor: int) -> bool:
    if sys.platform != "linux" or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    return not os.readlink(f"/proc/self/fd/{descriptor}").startswith(_SPARED)


def _write_in_python() -> None:
    """Let what torch and safetensors write in native code go through Python's files."""
    import safetensors.torch
    import torch

    save = torch.save

    @functools.wraps(save)
    def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, str | os.PathLike):
            return save(obj, f, *args, **kwargs)
        with open(f, "wb") as file:
            return save(obj, file, *args, **kwargs)

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        data = safetensors.torch.save(tensors, metadata)
        with open(filename, "wb") as file:
            file.write(data)

    torch.save = saved
    safetensors.torch.save_file = save_file


# What happens to collectives: they are late, or slow, on their way to whatever carries them.

_CALLS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter", "alltoall"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "reduce_scatter_single"),
    *("alltoall_base", "all_to_all_single", "send"),
)

BeforeSend = Callable[[str, int, int], None]
"""Called with the operation, the bytes that this rank passes to it, and the size of the group."""


def watch(before: BeforeSend) -> None:
    """Call ``before`` ahead of every collective of this process, for good.

    torch's DistributedDataParallel starts its own in C++. So where it has no communication hook it is given one that
    does the same from Python.
    """
    for kind in (Group, ShmProcessGroup):
        for name in _CALLS:
            if name in vars(kind):
                setattr(kind, name, _watched(getattr(kind, name), name, before))

    def hook_torchs(module: nn.Module, _args: Any) -> None:
        is_torchs = type(module).__module__.startswith("torch.") and type(module).__name__ == "DistributedDataParallel"
        if is_torchs and not module._comm_hooks:
            # A lambda, as torch checks annotations and takes those that are strings to be wrong.
            module.register_comm_hook(module.process_group, lambda group, bucket: _mean(group, bucket))  # type: ignore[operator]

    register_module_forward_pre_hook(hook_torchs)


def _watched(method: Any, name: str, before: BeforeSend) -> Any:
    @functools.wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        before(name, _num_bytes((*args, *kwargs.values())), group.size())
        return method(group, *args, **kwargs)

    return call


def _mean(group: Any, bucket: Any) -> Any:
    """Do what torch's DistributedDataParallel does without a hook."""
    future = all_reduce_async(bucket.buffer().div_(group.size()), group=group)
    return future.then(lambda done: _first(done.value()))


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, list | tuple) else found


def _num_bytes(args: Any) -> int:
    """Return the size of the largest tensor among nested arguments: of an all-gather that is what comes of it."""
    if isinstance(args, Tensor):
        return args.numel() * args.element_size()
    if isinstance(args, list | tuple):
        sizes = [_num_bytes(arg) for arg in args]
        tensors = all(isinstance(arg, Tensor) for arg in args)
        return sum(sizes) if tensors else max(sizes, default=0)
    return 0


def seconds_on_link(name: str, num_bytes: int, size: int, mbit: float) -> float:
    """Return how long a collective keeps the link of a rank busy that sends and receives at ``mbit``.

    An all-reduce passes everything twice, but for a rank's own share; everything else once.
    """
    passes = 2 if name.startswith("allreduce") else 1
    return passes * num_bytes * (size - 1) / max(size, 1) * 8 / (mbit * 1e6)


# Arm this rank with the faults of a rehearsal: the launcher's bootstrap calls it before the program starts.


def activate(orders: str) -> None:
    """Follow ``orders``: the folder for notes and the rules, in JSON, from `lockstep.study.rehearse.runner`.

    Reads the rank from the environment; faults of other ranks are left out.
    """
    found = json.loads(orders)
    rank = int(os.environ.get("RANK", 0))
    rules = {number: Rule(**rule) for number, rule in enumerate(found["rules"])}
    mine = {number: rule for number, rule in rules.items() if rule.rank in (None, rank)}
    if mine:
        Faults(Path(found["folder"]), rank, mine).arm()


class Faults:
    """The faults that are to strike this rank.

    Args:
        folder: Where it is noted that they have struck.
        rank: This rank.
        rules: By number.
    """

    def __init__(self, folder: Path, rank: int, rules: dict[int, Rule]) -> None:
        self._folder, self._rank, self._rules = folder, rank, rules
        self._clock = StepClock(self._come_to)
        self._last_visit: dict[int, int] = {}
        self._whole = WholeParameters()

    def arm(self) -> None:
        """Put everything in place, for good."""
        self._clock.start()
        if any(rule.place == "backward" for rule in self._rules.values()):
            self._whole.follow()
        if any(rule.place == "collective" for rule in self._rules.values()):
            watch(self._before_send)
        for number, rule in self._rules.items():
            if rule.kind == "disk-full":
                fill(lambda number=number, rule=rule: self._is_full(number, rule))  # type: ignore[misc]

    def _come_to(self, place: str) -> None:
        for number, rule in self._rules.items():
            expected = "updated" if rule.kind == "bitflip" else rule.place
            if expected == place and rule.place != "collective" and self._is_due(number, rule):
                self._strike(number, rule)

    def _is_due(self, number: int, rule: Rule) -> bool:
        has_struck = self._last_visit.get(number) == self._clock.visit
        if self._clock.step < rule.step or (has_struck and rule.kind != "nan"):
            return False
        return not self._is_spent(number, rule)

    def _is_spent(self, number: int, rule: Rule) -> bool:
        """Say whether the fault was; a straggler is slow in every step, also after a restart."""
        if rule.kind == "nan" and self._last_visit.get(number) == self._clock.visit:
            return False  # who computes the step again to find out why finds the same
        return rule.kind != "straggler" and fault_rules.is_spent(self._folder, number)

    def _strike(self, number: int, rule: Rule) -> None:
        self._last_visit[number] = self._clock.visit
        model = self._clock.model
        if rule.kind == "bitflip":
            if model is not None:
                self._note(number, rule, flip_bit(model))
            return
        name = "" if model is None else middle_parameter(model)[0]
        parameter = None if model is None else self._whole.middle(model)
        if rule.place == "backward" and parameter is not None:  # in the midst of it

            def act(gradient: Tensor) -> Tensor | None:
                if self._is_spent(number, rule):
                    return None
                self._act(number, rule, f"gradient of {name}")
                return not_a_number(gradient) if rule.kind == "nan" else None

            in_backward(parameter, act)
        elif rule.kind != "nan":
            self._act(number, rule)

    def _act(self, number: int, rule: Rule, detail: str = "") -> None:
        self._note(number, rule, detail)
        if rule.kind == "kill":
            kill()
        elif rule.kind == "oom":
            run_out_of_memory()
        elif rule.kind in ("hang", "drop"):
            hang(rule.amount)
        elif rule.kind == "straggler":
            time.sleep(rule.amount / 1000)

    def _before_send(self, name: str, num_bytes: int, size: int) -> None:
        for number, rule in self._rules.items():
            if rule.place != "collective" or self._clock.step < rule.step:
                continue
            if rule.kind == "slowlink":
                self._note(number, rule)
                time.sleep(seconds_on_link(name, num_bytes, size, rule.amount))
            elif not fault_rules.is_spent(self._folder, number):
                self._act(number, rule, name)

    def _is_full(self, number: int, rule: Rule) -> bool:
        if self._clock.step < rule.step:
            return False
        self._note(number, rule)
        return True

    def _note(self, number: int, rule: Rule, detail: str = "") -> None:
        step = self._clock.step
        if not fault_rules.is_spent(self._folder, number) and fault_rules.write(
            self._folder, number, rank=self._rank, step=step, detail=detail
        ):
            where = f" ({detail})" if detail else ""
            place = f", {rule.place}" if rule.place else ""
            sys.stderr.write(f"rehearse: {rule.text} strikes rank {self._rank} in step {step}{place}{where}\n")
            sys.stderr.flush()
