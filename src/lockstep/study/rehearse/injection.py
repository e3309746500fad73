"""Inject faults inside a rank: kill, hang, slow down, run out of memory or disk, cut the network, corrupt numbers."""

from __future__ import annotations

import builtins
import io
import os
import signal
import stat
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from lockstep import activity
from lockstep.study.rehearse import fault_rules
from lockstep.study.rehearse.fault_rules import Rule
from lockstep.telemetry.instrument import Instrument
from lockstep.torch_internals import LoaderIters
from lockstep.train.trainer import Trainer

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
        self._is_in_fit_step = False
        self._num_updates: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # The outermost module of the step's first forward that has parameters to train.
        self._model: weakref.ref[nn.Module] | None = None
        self._model_step = 0
        # By fault, the last step in which it struck, or is prepared to strike.
        self._last_step: dict[int, int] = {}

    def arm(self) -> None:
        """Install all hooks; they are not removed."""
        instrument = Instrument()
        # Within the loader, as a loader that hangs does.
        for kind in LoaderIters:
            instrument.before(kind, "_next_data", lambda *_: self._reach("loader"))
        instrument.all_forwards(self._on_forward, self._on_forward_end)
        instrument.optimizers(lambda *_: self._reach("optimizer"), self._on_updated)
        # On the class, because the trainer of a run is created long after the ranks are armed.
        instrument.wrap(Trainer, "step", self._on_fit_step)
        if any(rule.place == "collective" for rule in self._rules.values()):
            instrument.collectives(self._before_collective)
        for number, rule in self._rules.items():
            if rule.kind == "disk-full":
                fill_disk(instrument, partial(self._is_full, number, rule))

    # --- The current place and step of this rank

    @property
    def _step(self) -> int:
        """The step of this rank; between two steps of ``fit``, the previous one."""
        fit_step = activity.now.step
        return (max(self._num_updates.values(), default=0) if fit_step is None else fit_step) + 1

    def _on_fit_step(self, step: Callable[[Trainer], Any], loop: Trainer) -> Any:
        self._is_in_fit_step = True
        try:
            record = step(loop)
            self._reach("update")
            return record
        finally:
            self._is_in_fit_step = False

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
            owner, name, full_name = middle_parameter(model)
            parameter = getattr(owner, name)
            # A parameter of fully_shard is whole only while its own module computes, and hooks run only on the whole
            # parameter. Other parameters may be used by a different module, so the model's end is included.
            if module in (owner, model) and not _is_sharded(parameter):
                self._last_step[number] = self._step
                self._act_on_gradient(number, rule, parameter, f"gradient of {full_name}")

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
        if activity.now.step is None:  # before counting: this still belongs to the previous step
            self._reach("update")
        self._num_updates[optimizer] = self._num_updates.get(optimizer, 0) + 1

    # --- Faults

    def _due(self, place: str) -> list[tuple[int, Rule]]:
        """Return the faults that have to strike now."""
        if activity.now.step is not None and not self._is_in_fit_step:
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
        time.sleep(min(seconds, 1e6))  # not infinity, which sleep refuses

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


def middle_parameter(model: nn.Module) -> tuple[nn.Module, str, str]:
    """Return the module of a parameter in the middle of the model, its name there, and its name without wrappers."""
    trained = [name for name, found in model.named_parameters() if found.requires_grad and found.numel()]
    path, _, name = trained[len(trained) // 2].rpartition(".")
    full_name = ".".join(part for part in (*path.split("."), name) if part not in ("", "module"))
    return model.get_submodule(path), name, full_name


def _is_sharded(parameter: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # slow to import; if not imported, nothing is sharded
    return module is not None and isinstance(parameter, module.DTensor)


def flip_bit(model: nn.Module) -> str:
    """Flip one bit of one number of a parameter in the middle of the model; return which."""
    owner, name, full_name = middle_parameter(model)
    parameter = getattr(owner, name)
    numbers = (parameter.to_local() if _is_sharded(parameter) else parameter).detach()
    first = (0,) * numbers.ndim
    changed = numbers[first].clone().reshape(1)
    # Of the second most significant byte: large enough to see, far too small to become infinite.
    changed.view(torch.uint8)[-2] ^= 0b0100_0000
    numbers[first] = changed[0]
    return full_name


# A full disk: files can be created, but writes fail with the same error.

# The launcher's own folder, which the report needs, and folders that are not on a disk.
_SPARED = (f"{tempfile.gettempdir()}{os.sep}lockstep-", "/dev/", "/proc/")


def fill_disk(instrument: Instrument, is_full: Callable[[], bool]) -> None:
    """Make writes to files fail in this process once ``is_full`` returns true.

    The descriptor is redirected to /dev/full, so that the error is the kernel's own. Files that native code opens by
    name are not covered, except for those of torch and safetensors.
    """
    open_plain = os.open

    def opened(original: Callable[..., Any], file: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(file, *args, **kwargs)
        # "mode" has another meaning if there are flags.
        mode = args[0] if args else kwargs.get("flags", kwargs.get("mode", "r"))
        writes = set(mode) & set("wax+") if isinstance(mode, str) else mode & (os.O_WRONLY | os.O_RDWR)
        descriptor = found if isinstance(found, int) else found.fileno()
        if writes and _is_on_disk(descriptor) and is_full():
            nowhere = open_plain("/dev/full", os.O_WRONLY)
            os.dup2(nowhere, descriptor, inheritable=False)
            os.close(nowhere)
        return found

    # Files that torch and safetensors write in native code are written by Python's files instead.
    def saved(save: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, str | os.PathLike):
            return save(obj, f, *args, **kwargs)
        with open(f, "wb") as file:
            return save(obj, file, *args, **kwargs)

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        Path(filename).write_bytes(safetensors.torch.save(tensors, metadata))

    for owner in (builtins, io, os):
        instrument.wrap(owner, "open", opened)
    instrument.wrap(torch, "save", saved)
    instrument.replace(safetensors.torch, "save_file", save_file)


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
