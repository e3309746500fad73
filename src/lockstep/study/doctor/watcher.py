"""A training script, started on two CPU ranks, which write down what they do.

    doctor                      each rank
    mirror the folder
    start ------------------->  Watcher.install: torch's entry points report their calls
    follow <---- one line an event: forward, backward, step, save, ...; loaders give few batches an epoch
    end the ranks when enough was seen

The script runs again on one rank, to see what changes with the number of ranks, and a third time if it has saved a
checkpoint, to see what it restores; both runs end after their first optimizer step.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import chain, islice
from operator import length_hint
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from traceback import extract_stack
from typing import Any
from unittest.mock import patch

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from lockstep.activity import one_line
from lockstep.comm.collectives import Group
from lockstep.comm.shm.process_group import CpuProcessGroup
from lockstep.errors import ConfigurationError, RankFailed
from lockstep.launcher import bootstrap
from lockstep.launcher.api import environment_restored, launch_with
from lockstep.launcher.output import LogSettings
from lockstep.launcher.reaper import Reaper
from lockstep.parallel.ddp.reducer import Reducer
from lockstep.parallel.ddp.wrapper import DistributedDataParallel
from lockstep.parallel.module_io import find_tensors
from lockstep.study.doctor.findings import HANG, NotChecked, judge
from lockstep.study.doctor.script import Event, Script
from lockstep.study.verify.sandbox import digest

# Longest run of the script, and how long it continues when enough was seen, so that it may reach its end.
_LIMIT_S, _END_S = 25.0, 2.0
_POLL_S = 0.1
# A rank that has been in a call for so long, while the other rank is in another one or has ended, waits forever.
_STUCK_S = 2.0
_WAITS = {"forward", "backward", "collective", "ended"}
# Enough steps for a script without epochs.
_MANY_STEPS = 12
# Batches of an epoch: at least, at most; and the longest list of batches that is read ahead.
_FEW, _MOST, _READ_AHEAD = 2, 64, 10_000
# The mirror has links to single files down to this depth, in folders with at most so many entries.
_ENTRIES, _DEPTH = 300, 3
_COLLECTIVE = re.compile(r"_?(all|reduce|broadcast|barrier|gather|scatter|monitored)")
_TORCHS = torch.nn.parallel.DistributedDataParallel

# --- the doctor -------------------------------------------------------------------------------------------------------


def watch_script(target: str, args: Sequence[str]) -> tuple[Script, list[NotChecked]]:
    """Return what was seen of a script on CPU ranks of this machine, and what was not. Blocks under a minute.

    Raises:
        ConfigurationError: It is not valid Python; names the line.
    """
    path = Path(target)
    try:
        compile(path.read_bytes(), target, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ConfigurationError(f"{path}, line {error.lineno}: SyntaxError: {error.msg}\n    {line}") from None
    with Reaper() as reaper:  # removes its folder however this process ends
        run = functools.partial(_run, reaper.run_dir, path.absolute(), args)
        ranks, is_cut, output = run("mirror", 2)
        script = Script(ranks, is_cut=is_cut)
        if script.is_distributed:
            script = replace(script, alone=run("alone", 1, limit=1)[0][0])
        if script.all("save") and any(step["has_state"] for step in script.all("step")):
            script = replace(script, again=run("mirror", 2, limit=1)[0][0])
    return script, _not_seen(script, output)


def _not_seen(script: Script, output: str) -> list[NotChecked]:
    ends = script.all("ended", 0) + script.all("ended", 1)
    errors = [event["error"] for event in ends if event["error"]]
    missed = []
    if any(finding.severity is HANG for finding in judge(script)):
        pass  # the finding explains the end
    elif errors:
        why = errors[0] + output * errors[0].startswith("exit code")
        missed.append(NotChecked("the script after the line where it failed", why))
    elif not script.all("step"):
        missed.append(NotChecked("the training loop of the script", "no optimizer made a step while it was watched"))
    elif len(ends) < 2:
        missed.append(NotChecked("the end of the script", "enough was seen before it"))
    if not script.is_distributed:
        missed.append(NotChecked("samplers and collectives of the script", "it has no DistributedDataParallel"))
    return missed


def _mirror(folder: Path, place: Path, depth: int = _DEPTH) -> None:
    """Create a folder with the same folders, and links to the same files."""
    place.mkdir()
    for entry in os.scandir(folder):
        is_small = depth and entry.is_dir(follow_symlinks=False) and len(os.listdir(entry)) <= _ENTRIES
        if is_small and not entry.name.startswith("."):
            _mirror(Path(entry), place / entry.name, depth - 1)
        else:
            (place / entry.name).symlink_to(entry.path)


def _run(
    folder: Path, script: Path, args: Sequence[str], name: str, num_ranks: int, limit: int = 0
) -> tuple[list[list[Event]], bool, str]:
    """Start ranks and watch them; return their events, whether they were ended early, and their last line of output."""
    facts, mirror, here = Path(mkdtemp(dir=folder)), folder / name, Path.cwd()
    if not mirror.exists():
        _mirror(here, mirror)
    path = mirror / script.relative_to(here) if script.is_relative_to(here) else script
    follower, is_over = Follower([facts / str(rank) for rank in range(num_ranks)], mirror), threading.Event()
    threading.Thread(target=follower.follow, args=(is_over,), name="lockstep-doctor", daemon=True).start()
    with environment_restored(), contextlib.chdir(mirror):
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
        watcher = Watcher(facts, mirror, here, limit)
        logs = LogSettings(level="error", folder=facts)
        try:
            with contextlib.suppress(RankFailed):  # the events say what ended a rank
                launch_with(watcher.run, (str(path), args), devices=num_ranks, watchdog_s=0, logs=logs)
        finally:
            is_over.set()
    lines = [line for log in sorted(facts.glob("*.log")) for line in log.read_text(errors="replace").splitlines()]
    return follower.read(), follower.is_cut, f" ({lines[-1]})" if lines else ""


@dataclass
class Follower:
    """Reads the events of ranks, and ends the ranks when enough was seen.

    Attributes:
        files: The events of each rank.
        mirror: The script's working folder; in events it is replaced by the user's.
        is_cut: Whether the ranks were ended early, although they did not wait for each other.
    """

    files: Sequence[Path]
    mirror: Path
    is_cut: bool = False

    def read(self) -> list[list[Event]]:
        """Return the events of each rank until now."""
        texts = [file.read_text().replace(f"{self.mirror}/", "") if file.exists() else "" for file in self.files]
        return [[json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"] for text in texts]

    def follow(self, is_over: threading.Event) -> None:
        """End the ranks in time. Blocks until then, or until ``is_over``."""
        ends_at, moved_at, num_before = time.monotonic() + _LIMIT_S, time.monotonic(), 0
        while not is_over.wait(_POLL_S):
            ranks, now = self.read(), time.monotonic()
            if (num_events := sum(map(len, ranks))) > num_before:
                moved_at, num_before = now, num_events
            if all(map(_has_seen_enough, ranks)):
                ends_at = min(ends_at, now + _END_S)
            last = {(events[-1]["what"], events[-1].get("name")) if events else ("", None) for events in ranks}
            is_stuck = now - moved_at > _STUCK_S and len(last) > 1 and {what for what, _ in last} <= _WAITS
            if now > ends_at or is_stuck:
                self.is_cut = not is_stuck
                for events in filter(None, ranks):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(events[0]["pid"], signal.SIGKILL)
                return


def _has_seen_enough(events: Sequence[Event]) -> bool:
    """Return whether a rank has made two steps of the second epoch, or many."""
    epochs = [event["epoch"] for event in events if event["what"] == "step"]
    return len(epochs) >= _MANY_STEPS or (len(set(epochs)) > 1 and epochs.count(epochs[-1]) > 1)


# --- in a rank --------------------------------------------------------------------------------------------------------


class Watcher:
    """Runs the script in a rank, reports what it does, and protects the user's files.

    Args:
        facts: Folder for the events.
        mirror: The script's working folder.
        folder: The user's working folder, which the mirror replaces.
        limit: Leave after so many optimizer steps; 0 for no limit.
    """

    def __init__(self, facts: Path, mirror: Path, folder: Path, limit: int) -> None:
        self._facts, self._mirror, self._folder, self._limit = facts, mirror, folder, limit
        self._counts: Counter[Any] = Counter()
        self._params: list[nn.Parameter] = []
        self._is_wrapped = self._is_inside = False
        self._made: dict[int, str] = {}
        self._forwards: list[dict[str, Any]] = []
        self._samples = 0
        self._batch: dict[str, Any] = {"epoch": None, "batch": None}
        self._trained: set[Any] = set()

    def run(self, script: str, args: Sequence[str]) -> None:
        """Run a script in this rank."""
        self._file = open(self._facts / os.environ["RANK"], "w", buffering=1)  # noqa: SIM115 - until the process ends
        self.put("began", pid=os.getpid())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv, sys.dont_write_bytecode = [script, *args], True
        import torch._dynamo  # takes long, so only in a rank: compiled code could not be watched

        torch._dynamo.config.disable = True
        self.install()
        error = None
        try:
            bootstrap.run_script(script)
        except SystemExit as leaving:
            error = f"exit code {leaving.code}" if leaving.code else None
        except BaseException as raised:
            error = one_line(raised)
        self.put("ended", error=error)

    def put(self, what: str, **facts: Any) -> None:
        """Write an event."""
        self._counts[what] += 1
        self._file.write(json.dumps({"what": what, **facts}) + "\n")

    def install(self) -> None:
        """Wrap torch's entry points until the process ends."""
        for kind in (_TORCHS, DistributedDataParallel):
            _wrap(kind, "__init__", self._on_wrapper)
            _wrap(kind, "join", functools.partial(self._note, "join"))
        for group in (Group, CpuProcessGroup):
            for name in filter(_COLLECTIVE.match, list(vars(group))):
                _wrap(group, name, functools.partial(self._on_collective, name))
        _wrap(Reducer, "set_weight", functools.partial(self._note, "weight"))
        _wrap(nn.utils, "clip_grad_norm_", functools.partial(self._note, "clip"))
        _wrap(nn.utils, "clip_grad_value_", functools.partial(self._note, "clip"))
        _wrap(nn.Module, "load_state_dict", functools.partial(self._note, "model restored"))
        _wrap(Optimizer, "load_state_dict", functools.partial(self._note, "optimizer restored"))
        _wrap(Optimizer, "__init__", self._on_optimizer)
        _wrap(nn.Module, "__call__", self._on_call)
        _wrap(torch.autograd, "backward", self._on_backward)
        _wrap(torch, "save", self._on_save)
        _wrap(safetensors.torch, "save_file", self._on_save)
        _wrap(torch, "load", self._on_load)
        _wrap(DataLoader, "__init__", self._on_loader)
        batches: Any = DataLoader._index_sampler
        few: Any = property(lambda loader: FewBatches(self, loader, batches.fget(loader)))
        DataLoader._index_sampler = few  # type: ignore[method-assign]
        register_optimizer_step_post_hook(self._on_step)
        sys.addaudithook(self._guard)

    def _note(self, what: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.put(what, where=_where(), grads=self._grads())
        return original(*args, **kwargs)

    def _grads(self) -> str:
        return digest([parameter.grad for parameter in self._params if type(parameter.grad) is Tensor]).hex()

    # Models.

    def _on_wrapper(self, original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> None:
        with self._inside():
            original(wrapper, *args, **kwargs)
        self._params = (self._params if self._is_wrapped else []) + list(wrapper.parameters())
        self._is_wrapped = True
        self.put("wrapped", where=_where())

    def _inside(self) -> Any:
        """Return a context in which calls are not reported."""
        return patch.object(self, "_is_inside", True)

    def _on_call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_wrapper = isinstance(module, _TORCHS)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return original(module, *args, **kwargs)
        if self._is_inside or not any(parameter.requires_grad for parameter in module.parameters()):
            if is_wrapper and self._forwards:
                self._forwards[-1]["past"] = False
            return original(module, *args, **kwargs)
        inner: Any = module.module if is_wrapper else module
        tensors = list(find_tensors((args, kwargs)))
        facts = {
            "of": _where(),
            "past": not is_wrapper,
            "training": inner.training,
            "modes": any(_has_modes(part) and not part.training for part in inner.modules()),
            "inputs": digest(tensors).hex(),
        }
        self._forwards.append(facts)
        self._samples += tensors[0].shape[0] if tensors and tensors[0].dim() else 1
        self.put("forward", where=facts["of"])
        with self._inside():
            output = original(module, *args, **kwargs)
        self.put("done")
        return output

    def _on_backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self._is_inside:
            original(tensors, *args, **kwargs)
            return
        # The mean over a micro-batch, neither divided nor weighted.
        node = next(find_tensors(tensors)).grad_fn
        while node is not None and "Add" in node.name():
            node = node.next_functions[0][0]
        is_mean = node is not None and ("MeanBackward" in node.name() or getattr(node, "_saved_reduction", 0) == 1)
        forwards, self._forwards = self._forwards, []
        self.put("backward", where=_where(), is_mean=is_mean, forwards=forwards, **self._batch)
        self._trained.add(self._batch["epoch"])
        with self._inside():
            original(tensors, *args, **kwargs)
        self.put("done", grads=self._grads())

    # Optimizers.

    def _on_optimizer(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._made[id(optimizer)] = _where()
        original(optimizer, *args, **kwargs)
        if not self._is_wrapped:
            self._params += _params_of(optimizer)

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_inside:
            return
        params = _params_of(optimizer)
        self.put(
            "step",
            of=self._made.get(id(optimizer), ""),
            name=type(optimizer).__name__,
            is_used=not params or any(parameter.grad is not None for parameter in params),
            has_state=any(isinstance(value, Tensor) for kept in optimizer.state.values() for value in kept.values()),
            lr=float(optimizer.param_groups[0].get("lr", 0.0)),
            samples=self._samples,
            grads=self._grads(),
            **self._batch,
        )
        self._samples = 0
        if self._counts["step"] == self._limit:
            os._exit(0)

    # Data.

    def _on_loader(self, original: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> None:
        where = _where()
        self._counts[where] += 1
        original(loader, *args, **kwargs)
        loader.lockstep_doctor = where, self._counts[where], loader.num_workers
        # Without workers: the first batches come at once, and none is loaded ahead.
        vars(loader).update(num_workers=0, prefetch_factor=None, timeout=0, persistent_workers=False)

    def batches_of(self, loader: Any, sampler: Any) -> Iterator[Any]:
        """Yield the first batches of ``sampler`` for an epoch, enough for two steps, and the last batch."""
        where, number, num_workers = loader.lockstep_doctor
        self._counts[where, number] += 1
        epoch = f"{where} {number} {self._counts[where, number]}"
        length = length_hint(sampler, _READ_AHEAD + 1)
        batches = list(islice(sampler, length)) if length <= _READ_AHEAD else None
        chosen = getattr(loader.batch_sampler, "sampler", loader.sampler)
        facts = {"where": where, "workers": num_workers, "sampler": id(chosen)}
        if batches is not None and hasattr(loader.dataset, "__getitem__"):
            facts["order"] = digest(batches).hex() if getattr(chosen, "shuffle", False) else None
            facts["indices"] = len(set(map(str, chain(*(one if isinstance(one, list) else [one] for one in batches)))))
            facts["samples"], facts["first"] = length_hint(loader.dataset), _first(loader.dataset)
        self.put("epoch", epoch=epoch, **facts)
        num_backwards, num_steps = self._counts["backward"], self._counts["step"]
        few = _FEW if len(self._trained) <= 2 else 1
        for number, batch in enumerate(batches if batches is not None else sampler):
            trains = self._counts["backward"] > num_backwards and self._counts["step"] - num_steps < few
            if number >= few and (not trains or number >= _MOST):
                if batches is None:
                    return
                if number < len(batches) - 1:
                    continue
            self._batch = {"epoch": epoch, "batch": number}
            self.put("batch", **self._batch)
            yield batch

    # Collectives.

    def _on_collective(self, name: str, original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        is_whole = not self._is_inside and group.size() == int(os.environ["WORLD_SIZE"])
        if not is_whole or threading.current_thread() is not threading.main_thread():
            return original(group, *args, **kwargs)
        # As the function of torch.distributed is called: allreduce, _allgather_base and alltoall are the group's names.
        name = re.sub("^all_?(to)?_?(?=[a-z])", lambda found: "all_to_" if found[1] else "all_", name.strip("_"))
        self.put("collective", name=name.removesuffix("_base"), where=_where())  # the script may wait for its end later
        with self._inside():
            return original(group, *args, **kwargs)

    # Files.

    def _on_save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        call = signature(original).bind(*args, **kwargs)
        name = list(call.arguments)[1]
        path, own = self._place_of(call.arguments[name])
        self.put("save", path=path, where=_where())
        self._counts["saved", own] += own is not None
        if self._counts["saved", own] < 2:  # the third run of the script starts from the first save
            call.arguments[name] = f"{own}.{os.environ['RANK']}" if own else call.arguments[name]
            original(*call.args, **call.kwargs)
            if own:
                os.replace(call.arguments[name], own)

    def _on_load(self, original: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        path, own = self._place_of(f)
        found = original(own if own and os.path.exists(own) else f, *args, **kwargs)
        parts = found.values() if isinstance(found, dict) else ()
        has_optimizer = any(isinstance(part, dict) and "param_groups" in part for part in parts)
        self.put("load", path=path, has_optimizer=has_optimizer, where=_where())
        return found

    def _place_of(self, file: Any) -> tuple[str | None, str | None]:
        """Return the path of a file, if it has one, and the place in the mirror to save it, unless it is open."""
        name = getattr(file, "name", None) if hasattr(file, "read") or hasattr(file, "write") else file
        if not isinstance(name, str | os.PathLike):
            return None, None
        path = Path(name).absolute()
        own = path if path.parent.resolve().is_relative_to(self._mirror) else self._mirror / str(path).replace("/", ".")
        return str(path), str(own) if name is file else None

    def _guard(self, event: str, args: Any) -> None:
        """Protect the user's files: before a write, the mirror's links become copies; other files cannot be written."""
        if event not in ("open", "os.remove", "os.rename", "os.truncate", "shutil.rmtree") or isinstance(args[0], int):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return
        path = Path(os.fsdecode(args[event == "os.rename"])).absolute()
        if path.is_symlink() and path.parent.resolve().is_relative_to(self._mirror):
            content = path.resolve()
            if event == "open":
                path.unlink()
                if content.is_file() and not args[2] & os.O_TRUNC:
                    shutil.copyfile(content, path)
            return
        real = path.resolve()
        is_temporary = real.is_relative_to(gettempdir()) and not real.is_relative_to(self._folder)
        is_free = is_temporary or str(path).startswith(("/dev/", "/proc/"))
        if not (is_free or real.is_relative_to(self._mirror) or any(part[0] == "." for part in real.parts)):
            raise PermissionError(f"lockstep doctor does not let the script write {path}")


@dataclass
class FewBatches:
    """A sampler with few batches in an epoch; its length is unchanged."""

    watcher: Watcher
    loader: Any
    sampler: Any

    def __len__(self) -> int:
        """Return the number of batches without the watcher."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of an epoch."""
        return self.watcher.batches_of(self.loader, self.sampler)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by ``around``, which gets the function before its arguments."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(lambda *args, **kwargs: around(original, *args, **kwargs)))


def _where() -> str:
    return bootstrap.user_line(extract_stack())


def _params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_modes(module: nn.Module) -> bool:
    """Return whether a module computes something else in evaluation mode."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or getattr(module, "p", 0) > 0  # of dropout


def _first(dataset: Any) -> str | None:
    """Return a digest of the first sample; data sets that differ only in their random numbers have the same."""
    with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
        torch.manual_seed(0)
        return digest(dataset[0]).hex()
    return None
