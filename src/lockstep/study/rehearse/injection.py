"""Inject faults inside a rank: kill, hang, slow down, run out of memory or disk, cut the network, corrupt numbers."""

import builtins
import fcntl
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

import torch
from torch import Tensor, nn

from lockstep.base import activity
from lockstep.base.containers import find_tensors
from lockstep.base.torch_internals import LoaderIters
from lockstep.comm.fully_shard import is_sharded
from lockstep.loop.instrument import Instrument
from lockstep.study.rehearse import fault_rules
from lockstep.study.rehearse.fault_rules import Rule
from lockstep.train.trainer import Trainer


class FaultInjector:
    """Follows the training steps of a task or of any script, and makes the faults of this rank strike in them.

    Steps are counted from 1. ``fit`` knows its step, also after a resume. In other programs the step is one more than
    the number of optimizer steps in this process; of several optimizers, the one with the most steps counts.

    The launcher's bootstrap creates one before the program starts.

    Args:
        folder: The folder for the notes about faults that struck.
        rules: All rules, as `lockstep.study.rehearse.runner` writes them; rules of other ranks are ignored.
    """

    def __init__(self, folder: str, rules: list[dict[str, Any]]) -> None:
        self._folder, self._rank = Path(folder), int(os.environ.get("RANK", 0))
        self._rules = [Rule(**rule) for rule in rules if rule["rank"] in (None, self._rank)]
        self._is_in_fit_step = False
        self._num_updates: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # The outermost module of the step's first forward that has parameters to train.
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._model_step = 0
        # By rule, the last step in which it struck, or is prepared to strike.
        self._last_step: dict[Rule, int] = {}
        if self._rules:
            self._arm(Instrument())

    def _arm(self, instrument: Instrument) -> None:
        """Install all hooks; they are not removed."""
        # Within the loader, as a loader that hangs does.
        for kind in filter(None, LoaderIters):
            instrument.before(kind, "_next_data", lambda *_: self._reach("loader"))
        instrument.all_forwards(self._on_forward, self._on_forward_end)
        instrument.optimizers(lambda *_: self._reach("optimizer"), self._on_updated)
        # On the class, because the trainer of a run is created long after the ranks are armed.
        instrument.wrap(Trainer, "step", self._on_fit_step)
        if any(rule.place == "collective" for rule in self._rules):
            instrument.collectives(self._before_collective)
        for rule in self._rules:
            if rule.kind == "disk-full":
                fill_disk(instrument, partial(self._is_full, rule))

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
        if self._model_step != self._step and any(parameter.requires_grad for parameter in module.parameters()):
            self._model_step, self._model = self._step, weakref.ref(module)
        self._reach("forward")

    def _on_forward_end(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """Prepare faults that strike during backward, when the gradient of one parameter is computed."""
        if (model := self._model()) is None or not torch.is_grad_enabled():
            return
        for rule in self._due("backward"):
            owner, parameter, full_name = middle_parameter(model)
            # A parameter of fully_shard is whole only while its own module computes, and hooks run only on the whole
            # parameter. Other parameters may be used by a different module, so the model's end is included.
            if module in (owner, model) and not is_sharded(parameter):
                self._last_step[rule] = self._step
                self._act_on_gradient(rule, parameter, f"gradient of {full_name}")

    def _act_on_gradient(self, rule: Rule, parameter: Tensor, detail: str) -> None:
        def act(gradient: Tensor) -> Tensor | None:
            handle.remove()
            if self._is_spent(rule):
                return None
            self._act(rule, detail)
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

    def _due(self, place: str) -> list[Rule]:
        """Return the faults that have to strike now."""
        if activity.now.step is not None and not self._is_in_fit_step:
            return []  # work between the steps of fit, such as evaluation, does not belong to a step
        here = [rule for rule in self._rules if rule.place == place and rule.step <= self._step]
        # Once in a step; a NaN strikes again if the step is computed again to find the cause.
        left = [rule for rule in here if rule.kind == "nan" or self._last_step.get(rule) != self._step]
        return [rule for rule in left if not self._is_spent(rule)]

    def _is_spent(self, rule: Rule) -> bool:
        """Return whether the fault is spent; a straggler is slow in every step, also after a restart."""
        if rule.kind == "nan" and self._last_step.get(rule) == self._step:
            return False
        return rule.kind != "straggler" and fault_rules.is_spent(self._folder, rule)

    def _reach(self, place: str) -> None:
        for rule in self._due(place):
            self._last_step[rule] = self._step
            if rule.kind != "bitflip":
                self._act(rule)
            elif (model := self._model()) is not None:
                self._act(rule, flip_bit(model))

    def _act(self, rule: Rule, detail: str = "") -> None:
        self._note(rule, detail)
        if rule.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        if rule.kind == "oom":
            raise torch.OutOfMemoryError("Tried to allocate 20 GiB: out of memory (made up by lockstep rehearse).")
        seconds = rule.amount / 1000 if rule.kind == "straggler" else rule.amount
        time.sleep(min(seconds, 1e6))  # not infinity, which sleep refuses

    def _before_collective(self, name: str, group: Any, *args: Any, **kwargs: Any) -> None:
        for rule in self._rules:
            if rule.place != "collective" or self._step < rule.step:
                continue
            if rule.kind == "slowlink":
                self._note(rule)
                # The largest argument: for an all-gather, that is the result.
                sizes = [sum(tensor.nbytes for tensor in find_tensors(value)) for value in (*args, *kwargs.values())]
                # An all-reduce sends the data twice, except for a rank's own share; other collectives once.
                num_bits = 8 * max(sizes, default=0) * (2 if name.startswith("allreduce") else 1)
                time.sleep(num_bits * (group.size() - 1) / group.size() / (rule.amount * 1e6))
            elif not fault_rules.is_spent(self._folder, rule):
                self._act(rule, name)

    def _is_full(self, rule: Rule) -> bool:
        if self._step >= rule.step:
            self._note(rule)
        return self._step >= rule.step

    def _note(self, rule: Rule, detail: str = "") -> None:
        # Logged only the first time: a straggler, or a full disk, would be logged in every step.
        if fault_rules.write(self._folder, rule, rank=self._rank, step=self._step):
            where = (f", {rule.place}" if rule.place else "") + (f" ({detail})" if detail else "")
            text = f"rehearse: {rule.text} strikes rank {self._rank} in step {self._step}{where}"
            print(text, file=sys.stderr, flush=True)  # the next thing may be SIGKILL


def middle_parameter(model: nn.Module) -> tuple[nn.Module, Any, str]:
    """Return the module of a parameter in the middle of the model, the parameter, and its name without wrappers."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad and p.numel()]
    path, _, name = trained[len(trained) // 2].rpartition(".")
    full_name = ".".join(part for part in (*path.split("."), name) if part not in ("", "module"))
    owner = model.get_submodule(path)
    return owner, getattr(owner, name), full_name


def flip_bit(model: nn.Module) -> str:
    """Flip one bit of one number of a parameter in the middle of the model; return which."""
    _, parameter, full_name = middle_parameter(model)
    numbers = (parameter.to_local() if is_sharded(parameter) else parameter).detach()
    # Of the first number's second most significant byte: large enough to see, far too small to become infinite.
    numbers.as_strided((1,), (1,)).view(torch.uint8)[-2] ^= 0b0100_0000
    return full_name


# A full disk: files can be created, but writes fail with the same error.

# The launcher's own folder, which the report needs, and folders that are not on a disk.
_SPARED = (f"{tempfile.gettempdir()}{os.sep}lockstep-", "/dev/", "/proc/")


def fill_disk(instrument: Instrument, is_full: Callable[[], bool]) -> None:
    """Make writes to files fail in this process once ``is_full`` returns true.

    The descriptor is redirected to /dev/full, so that the error is the kernel's own. Files that native code opens by
    name are not covered, except for those of torch.
    """
    open_plain = os.open

    def opened(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        file = original(*args, **kwargs)
        descriptor = file if isinstance(file, int) else file.fileno()
        if _writes_to_disk(descriptor) and is_full():
            nowhere = open_plain("/dev/full", os.O_WRONLY)
            os.dup2(nowhere, descriptor, inheritable=False)
            os.close(nowhere)
        return file

    # Files that torch writes in native code are written by Python's files instead.
    def saved(save: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, str | os.PathLike):
            return save(obj, f, *args, **kwargs)
        with open(f, "wb") as file:
            return save(obj, file, *args, **kwargs)

    for owner in (builtins, io, os):
        instrument.wrap(owner, "open", opened)
    instrument.wrap(torch, "save", saved)


def _writes_to_disk(descriptor: int) -> bool:
    writes = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE and stat.S_ISREG(os.fstat(descriptor).st_mode)
    return bool(writes) and not os.readlink(f"/proc/self/fd/{descriptor}").startswith(_SPARED)
