"""``lockstep run --monitor``: finds the training loop of a script that knows nothing of it.

[Note: finding the model]
Until optimizers have stepped some times, every call of a module of the process is looked at. The outermost ones that
train are the models; they get hooks of their own, and nobody looks at calls any more. Global hooks of torch would do
the same, but compiled models warn of those. What is compiled while calls are looked at may be compiled again later, so
as soon as a compiled model is found, no further ones are looked for.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep import progress
from lockstep.comm.clocks import Offset, measure_offsets
from lockstep.comm.collectives import backend_name
from lockstep.observe.forwards import has_compiled_call, in_backward
from lockstep.observe.hook import Hook
from lockstep.observe.observation import Observation
from lockstep.observe.session import Place
from lockstep.telemetry.provenance import Provenance, gather

RUN_DIR = "LOCKSTEP_RUN_DIR"
"""Where the launcher and a rank leave files for each other."""

_NUM_STEPS = 3
"""After so many steps of optimizers all models have been seen."""
_MOST_LOOKS = 20_000

_attached: list[Attached] = []


def attach(folder: str) -> None:
    """Have this process recorded into ``folder`` as soon as it trains; called before the script is."""
    _attached.append(Attached(Path(folder)))


def give_way() -> None:
    """Leave the recording to the script, which calls `monitor` itself."""
    for each in _attached:
        each.stop()


def folder() -> Path | None:
    """Return the folder that was given to ``lockstep run --monitor``."""
    return _attached[-1].folder if _attached else None


class Attached:
    """Waits for the training loop of this process, and records it.

    Args:
        folder: For the record.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rank, self._num_ranks = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
        self._provenance: Provenance | None = gather(Path(sys.argv[0])) if self._rank == 0 else None
        self._models: list[nn.Module] = []
        self._clocks: tuple[Offset, ...] = ()
        self._found: Observation | None = None
        self._num_looks = self._num_steps = 0
        self._is_looking = True
        self._undo = _before_calls(Hook(self._on_call, self._fail))
        self._handle = register_optimizer_step_post_hook(Hook(self._on_step, self._fail))
        if int(os.environ.get("LOCAL_WORLD_SIZE") or 1) < self._num_ranks:
            self._compare_clocks_at_wrapping()

    def stop(self) -> None:
        """Look for no training loop any more; one that was found is not recorded any further."""
        self._look_no_more()
        self._handle.remove()
        if self._found is not None:
            self._found.close()

    def _look_no_more(self) -> None:
        self._is_looking = False
        self._undo()

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Take notice of a call of any module; see [Note: finding the model]."""
        if not self._is_looking or not torch.is_grad_enabled() or not module.training:
            return
        self._num_looks += 1
        if self._num_looks > _MOST_LOOKS:
            self._look_no_more()
            return
        if threading.current_thread() is not threading.main_thread() or in_backward() or module in self._models:
            return
        if self._found is not None and self._found.steps.in_forward:
            return
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return
        if progress.now.step is not None:
            self._look_no_more()
            self._say("nothing is recorded, as the script trains with fit(), which has run_dir for that")
            return
        if self._found is None:
            self._models.append(module)
            self._found = Observation(
                self._models,
                None,
                None,
                run_dir=self.folder,
                place=self._place(),
                provenance=self._provenance,
                failure=_failure,
            )
        else:
            self._found.add_model(module)
        self._found.forward_begins(module, args, kwargs)
        if any(_is_compiled(part) for part in module.modules()):
            self._look_no_more()

    def _on_step(self, *_: Any) -> None:
        """Take notice that any optimizer has stepped: after a few steps all models have been seen."""
        self._num_steps += self._found is not None
        if self._num_steps >= _NUM_STEPS:
            self._look_no_more()

    def _place(self) -> Place:
        # Nothing is said to other ranks: nobody knows where they are in the script.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
        name = f"{os.environ.get('TORCHELASTIC_RUN_ID') or 'run'}-{restart}"
        return Place(self._rank, self._num_ranks, name=name, clocks=self._clocks)

    def _compare_clocks_at_wrapping(self) -> None:
        """Have the clocks of several machines compared when the model is wrapped, which all ranks do together."""
        from lockstep.parallel.distributed import DistributedDataParallel

        for kind in (TorchDistributedDataParallel, DistributedDataParallel):
            _after_init(kind, Hook(self._compare_clocks, self._fail))

    def _compare_clocks(self, wrapper: Any) -> None:
        group = wrapper.process_group
        if self._is_looking and not self._clocks and group.size() == self._num_ranks:
            on_gpu = backend_name(group) == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
            self._clocks = tuple(measure_offsets(group, device))

    def _fail(self, error: Exception) -> None:
        self._look_no_more()
        first = (str(error).splitlines() or [type(error).__name__])[0]
        self._say(f"nothing is recorded: {first}")

    def _say(self, text: str) -> None:
        if self._rank == 0:
            sys.stderr.write(f"lockstep: {text}\n")


def _is_compiled(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return has_compiled_call(module) or (dynamo is not None and isinstance(module, dynamo.OptimizedModule))


def _before_calls(look: Hook) -> Callable[[], None]:
    """Have ``look`` called before any module of the process is; return what undoes that."""
    owner: Any = nn.Module
    original = owner.__call__

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        look(self, args, kwargs)
        return original(self, *args, **kwargs)

    def undo() -> None:
        if owner.__call__ is call:
            owner.__call__ = original

    owner.__call__ = call
    return undo


def _after_init(kind: Any, then: Hook) -> None:
    original = kind.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        then(self)

    kind.__init__ = init


def _failure() -> str | None:
    """Return what ended this rank, as the launcher's bootstrap has written it down; None if nothing did."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((Path(os.environ[RUN_DIR]) / f"failure-{os.environ['RANK']}").read_text())
        return str(found["message"]["message"]).splitlines()[0]
    return None
