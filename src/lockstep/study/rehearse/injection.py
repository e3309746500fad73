"""Inject faults inside a rank: kill, hang, slow down, run out of memory or disk, cut the network, corrupt numbers."""

from __future__ import annotations

import builtins
import functools
import io
import os
import re
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

from lockstep.comm.collectives import Group, stock_comm_hooks
from lockstep.comm.shm.process_group import CpuProcessGroup
from lockstep.study.rehearse import fault_rules
from lockstep.study.rehearse.fault_rules import Rule
from lockstep.torch_internals import LoaderIters
from lockstep.train.trainer import Trainer

_COLLECTIVE = re.compile(r"_?(all|reduce|broadcast|barrier|gather|scatter|send)")

OOM_TEXT = "Tried to allocate 20.00 GiB: out of memory (made up by lockstep rehearse)."


def activate(folder: str, rules: list[dict[str, Any]]) -> None:
    """Arm this rank with the faults of a rehearsal: the launcher's bootstrap calls it before the program starts.

    Args:
        folder: The folder for the notes about faults that struck.
        rules: All rules, from `lockstep.study.rehearse.runner`. The rank comes from the environment; faults of other
            ranks are ignored.
    """
    rank = int(os.environ.get("RANK", 0))
    mine = {number: Rule(**rule) for number, rule in enumerate(rules) if rule["rank"] in (None, rank)}
    if mine:
        FaultInjector(Path(folder), rank, mine).arm()


class FaultInjector:
    """Follows the training steps of a task or of any script, and makes the faults of this rank strike in them.

    Steps are counted from 1. ``fit`` knows its step, also after a resume. In other programs the step is one more than
    the number of optimizer steps in this process; of several optimizers, the one with the most steps counts.

    Args:
        folder: The folder for the notes about faults that struck.
        rank: This rank.
        rules: By number.
    """

    def __init__(self, folder: Path, rank: int, rules: dict[int, Rule]) -> None:
        self._folder, self._rank, self._rules = folder, rank, rules
        self._fit_step: int | None = None
        self._is_in_fit_step = False
        self._num_updates: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # The outermost module of the step's first forward that has parameters to train.
        self._model: weakref.ref[nn.Module] | None = None
        self._model_step = 0
        # By fault, the last step in which it struck, or is prepared to strike.
        self._last_step: dict[int, int] = {}

    def arm(self) -> None:
        """Install all hooks; they are not removed."""
        for kind in LoaderIters:
            _call_before(kind, "_next_data", lambda *_: self._reach("loader"))
        register_module_forward_pre_hook(self._on_forward)
        register_module_forward_hook(self._on_forward_end)
        register_optimizer_step_pre_hook(lambda *_: self._reach("optimizer"))
        register_optimizer_step_post_hook(self._on_updated)
        self._follow_fit()
        if any(rule.place == "collective" for rule in self._rules.values()):
            self._watch_collectives()
        for number, rule in self._rules.items():
            if rule.kind == "disk-full":
                fill_disk(functools.partial(self._is_full, number, rule))

    # --- The current place and step of this rank

    @property
    def _step(self) -> int:
        """The step of this rank; between two steps of ``fit``, the previous one."""
        return self._fit_step or max(self._num_updates.values(), default=0) + 1

    def _follow_fit(self) -> None:
        step = Trainer.step

        @functools.wraps(step)
        def followed(loop: Trainer) -> Any:
            self._fit_step, self._is_in_fit_step = loop.num_steps_done + 1, True
            try:
                record = step(loop)
                self._reach("update")
                return record
            finally:
                self._is_in_fit_step = False

        # On the class, because the trainer of a run is created long after the ranks are armed.
        Trainer.step = followed  # type: ignore[method-assign, assignment]

    def _on_forward(self, module: nn.Module, _args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._model_step != self._step and any(found.requires_grad for found in module.parameters()):
            self._model_step, self._model = self._step, weakref.ref(module)
        self._reach("forward")

    def _on_forward_end(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """Prepare faults that strike during backward, when the gradient of one parameter is computed."""
        model = self._model() if self._model is not None else None
        if model is None or not torch.is_grad_enabled():
            return
        for number, rule in self._due("backward"):
            path, name = middle_parameter(model)
            owner = model.get_submodule(path)
            parameter = owner._parameters[name]
            # A parameter of fully_shard is whole only while its own module computes, and hooks run only on the whole
            # parameter. Other parameters may be used by a different module, so the model's end is included.
            if module in (owner, model) and parameter is not None and not _is_sharded(parameter):
                self._last_step[number] = self._step
                self._act_on_gradient(number, rule, parameter, f"gradient of {_without_wrappers(path, name)}")

    def _act_on_gradient(self, number: int, rule: Rule, parameter: Tensor, detail: str) -> None:
        def act(gradient: Tensor) -> Tensor | None:
            handle.remove()
            if self._is_spent(number, rule):
                return None
            self._act(number, rule, detail)
            if rule.kind != "nan":
                return None
            broken = gradient.clone()
            broken.view(-1)[:1] = float("nan")
            return broken

        # On the parameter instead of an output: the reducer's hooks run after it, and reduce its result.
        handle = parameter.register_hook(act)

    def _on_updated(self, optimizer: Any, *_: Any) -> None:
        if self._fit_step is None:  # before counting: this still belongs to the previous step
            self._reach("update")
        self._num_updates[optimizer] = self._num_updates.get(optimizer, 0) + 1

    # --- Faults

    def _due(self, place: str) -> list[tuple[int, Rule]]:
        """Return the faults that have to strike now."""
        if self._fit_step is not None and not self._is_in_fit_step:
            return []  # work between the steps of fit, such as evaluation, does not belong to a step
        found = []
        for number, rule in self._rules.items():
            is_here = place == rule.place and self._step >= rule.step
            has_struck = self._last_step.get(number) == self._step and rule.kind != "nan"
            if is_here and not has_struck and not self._is_spent(number, rule):
                found.append((number, rule))
        return found

    def _is_spent(self, number: int, rule: Rule) -> bool:
        """Return whether the fault is spent; a straggler is slow in every step, also after a restart."""
        if rule.kind == "nan" and self._last_step.get(number) == self._step:
            return False  # if the step is computed again to find the cause, the fault strikes again
        return rule.kind != "straggler" and fault_rules.is_spent(self._folder, number)

    def _reach(self, place: str) -> None:
        for number, rule in self._due(place):
            self._last_step[number] = self._step
            model = self._model() if self._model is not None else None
            if rule.kind != "bitflip":
                self._act(number, rule)
            elif model is not None:
                self._act(number, rule, flip_bit(model))

    def _act(self, number: int, rule: Rule, detail: str = "") -> None:
        self._note(number, rule, detail)
        if rule.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        if rule.kind == "oom":
            raise torch.OutOfMemoryError(OOM_TEXT)
        seconds = rule.amount / 1000 if rule.kind == "straggler" else rule.amount
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(left_s, 3600.0))  # sleep does not accept infinity

    def _watch_collectives(self) -> None:
        """Hook all collectives, to delay them; the hooks are not removed."""
        for kind in (Group, CpuProcessGroup):
            for name in filter(_COLLECTIVE.match, list(vars(kind))):
                _call_before(kind, name, functools.partial(self._before_collective, name))

        def hook_torchs(module: nn.Module, _args: Any) -> None:
            # torch's class starts its collectives in C++, unless it has a hook: this hook does the same from Python.
            kind = type(module)
            is_torchs = kind.__module__.startswith("torch.") and kind.__name__ == "DistributedDataParallel"
            if is_torchs and not module._comm_hooks:
                module.register_comm_hook(module.process_group, stock_comm_hooks().allreduce_hook)  # type: ignore[operator]

        register_module_forward_pre_hook(hook_torchs)

    def _before_collective(self, name: str, group: Any, *args: Any, **kwargs: Any) -> None:
        for number, rule in self._rules.items():
            if rule.place != "collective" or self._step < rule.step:
                continue
            if rule.kind == "slowlink":
                self._note(number, rule)
                # An all-reduce sends the data twice, except for a rank's own share; other collectives once.
                num_bits = 8 * _num_bytes((*args, *kwargs.values())) * (2 if name.startswith("allreduce") else 1)
                time.sleep(num_bits * (group.size() - 1) / group.size() / (rule.amount * 1e6))
            elif not fault_rules.is_spent(self._folder, number):
                self._act(number, rule, name)

    def _is_full(self, number: int, rule: Rule) -> bool:
        if self._step >= rule.step:
            self._note(number, rule)
        return self._step >= rule.step

    def _note(self, number: int, rule: Rule, detail: str = "") -> None:
        step = self._step
        # Logged only the first time: a straggler, or a full disk, would be logged in every step.
        if fault_rules.write(self._folder, number, rank=self._rank, step=step):
            where = f" ({detail})" if detail else ""
            place = f", {rule.place}" if rule.place else ""
            sys.stderr.write(f"rehearse: {rule.text} strikes rank {self._rank} in step {step}{place}{where}\n")
            sys.stderr.flush()  # the next thing may be SIGKILL


def _call_before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Call ``action`` with the arguments of a method before each call of it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, called)


def middle_parameter(model: nn.Module) -> tuple[str, str]:
    """Return the module and the name within it of a parameter in the middle of the model."""
    trained = [name for name, found in model.named_parameters() if found.requires_grad and found.numel()]
    path, _, name = trained[len(trained) // 2].rpartition(".")
    return path, name


def _without_wrappers(path: str, name: str) -> str:
    return ".".join([*(part for part in path.split(".") if part not in ("", "module")), name])


def _is_sharded(parameter: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # slow to import; if not imported, nothing is sharded
    return module is not None and isinstance(parameter, module.DTensor)


def flip_bit(model: nn.Module) -> str:
    """Flip one bit of one number of a parameter in the middle of the model; return which."""
    path, name = middle_parameter(model)
    parameter: Any = model.get_submodule(path)._parameters[name]
    numbers = (parameter.to_local() if _is_sharded(parameter) else parameter).detach()
    first = (0,) * numbers.ndim
    changed = numbers[first].clone().reshape(1)
    # Of the second most significant byte: large enough to see, far too small to become infinite.
    changed.view(torch.uint8)[-2] ^= 0b0100_0000
    numbers[first] = changed[0]
    return _without_wrappers(path, name)


# A full disk: files can be created, but writes fail with the same error.

# The launcher's own folder, which the report needs, and folders that are not on a disk.
_SPARED = (f"{tempfile.gettempdir()}{os.sep}lockstep-", "/dev/", "/proc/")


def fill_disk(is_full: Callable[[], bool]) -> None:
    """Make writes to files fail in this process once ``is_full`` returns true.

    The descriptor is redirected to /dev/full, so that the error is the kernel's own. Files that native code opens by
    name are not covered, except for those of torch and safetensors.
    """
    import safetensors.torch

    open_descriptor, save = os.open, torch.save

    def lead_nowhere(original: Callable[..., Any], writes: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(file, *args, **kwargs)
            # "mode" has another meaning if there are flags.
            mode = args[0] if args else kwargs.get("flags", kwargs.get("mode", "r"))
            descriptor = found if isinstance(found, int) else found.fileno()
            if writes(mode) and _is_on_disk(descriptor) and is_full():
                nowhere = open_descriptor("/dev/full", os.O_WRONLY)
                os.dup2(nowhere, descriptor, inheritable=False)
                os.close(nowhere)
            return found

        return opened

    # Files that torch and safetensors write in native code are written by Python's files instead.
    @functools.wraps(save)
    def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, str | os.PathLike):
            return save(obj, f, *args, **kwargs)
        with open(f, "wb") as file:
            return save(obj, file, *args, **kwargs)

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        Path(filename).write_bytes(safetensors.torch.save(tensors, metadata))

    builtins.open = io.open = lead_nowhere(open, lambda mode: set(mode) & set("wax+"))
    os.open = lead_nowhere(open_descriptor, lambda flags: flags & (os.O_WRONLY | os.O_RDWR))
    torch.save = saved
    safetensors.torch.save_file = save_file


def _is_on_disk(descriptor: int) -> bool:
    if sys.platform != "linux" or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    return not os.readlink(f"/proc/self/fd/{descriptor}").startswith(_SPARED)


def _num_bytes(args: Any) -> int:
    """Return the size of the largest tensor among nested arguments: for an all-gather, that is the result."""
    if isinstance(args, Tensor):
        return args.nbytes
    if isinstance(args, list | tuple):
        sizes = [_num_bytes(arg) for arg in args]
        return sum(sizes) if all(isinstance(arg, Tensor) for arg in args) else max(sizes, default=0)
    return 0
