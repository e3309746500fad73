"""Training steps on all GPUs of this machine, for bench/gpu_proof.py: what synchronisation costs, ours and torch's.

    none, torch, torch-view, torch-zero, ours, ours-zero    see bench/contenders.py, with NCCL
    ours-alone      on one GPU, where ``ours`` has nothing to reduce: with hooks, buckets and collectives like torch's
    fit             the loop of `lockstep.fit`: from batches in the memory of the host, with all that it does besides
    ..., captured   the whole step in a CUDA graph
    dp, torch-dp    lockstep's and torch's DataParallel: one process, all GPUs, as many samples for each; where there is
                    one GPU, it has two replicas, and ``single`` is the same batch without any

All use AdamW(fused=True). A round gives each contender one turn of a few steps, in the same processes; the order
rotates and every other round runs backwards. A turn begins and ends with a synchronisation of the device, and the
slowest rank counts. ``host`` is the time until the call of the first step of a turn returns; ``kernels`` are those of
rank 0 in a step; memory is the most that torch's allocator had handed out while a contender was made and took its first
steps, less what it had before, on the GPU with the most.
"""

import contextlib
import functools
import gc
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import lockstep
from bench.contenders import LEARNING_RATE, Ranks, Step, Trainee, make_trainee, plain_step
from bench.harness import run_rounds, slowest, summarize
from bench.models import GPU_MODELS, TINY_GPU_MODELS, Workload, loss_of
from lockstep import World
from lockstep.base.accelerator import synchronize
from lockstep.train.run import Run
from lockstep.train.settings import FitSettings
from lockstep.train.stopping import StopSignals

EAGER = ("none", "torch", "torch-view", "ours", "ours-zero", "torch-zero", "fit")
CAPTURED = ("none", "torch", "ours")
LEAN = ("none", "torch", "torch-view", "ours", "ours-zero")
"""For the model that is so large that each contender needs gigabytes."""
ALONE = {"ours": "ours-alone"}
"""What a single rank takes as well, and for the largest model instead."""
LARGE, NOT_CAPTURED = "gpt 1B", ("gpt 1B", "gpt 124M, 16k tokens")
"""A graph keeps the memory of all activations."""
BYTES_OF_LARGE = 14
"""A parameter of it, with its gradient, bucket and state of AdamW, and what the steps take, by contender."""
WARM_UP_STEPS = 12
"""torch asks for 11 before a wrapped step is captured."""
TURN_S = 0.25
MOST_STEPS = 20
FAILED, NO_MEMORY = "failed", "no memory for it"
"""How the error of a contender begins."""
AGREE_S = 30.0
"""How long a rank whose contender has failed waits for the others, which may wait for it in a collective."""
Turn = Callable[[], object]
Make = Callable[[contextlib.ExitStack], Turn]
"""Makes a contender, and returns its step; what must be undone before the world closes goes on the stack."""
JOINED = "GPU_PROOF_JOINED"
"""The environment variable with a folder for a file of each rank that has joined."""
Kind = str
"""``cuda``, or to try the script out ``cpu`` or ``sim``."""


def models_of(kind: Kind) -> dict[str, Workload]:
    return GPU_MODELS if kind == "cuda" else TINY_GPU_MODELS


def join(kind: Kind) -> World:
    """Return the world of this rank. Collective: every rank."""
    torch.set_num_threads(1)
    if kind == "sim":
        from tests import simulated_device

        simulated_device.load()
    world = lockstep.init(device="cpu" if kind == "cpu" else None)
    if folder := os.environ.get(JOINED):
        Path(folder, f"{world.rank}").touch()
    return world


def ranks_of(workload: Workload, world: World, control: dist.ProcessGroup) -> Ranks:
    """Return what contenders need; the batch is this rank's own."""
    torch.manual_seed(1 + world.rank)
    batch = tuple(part.to(world.device) for part in workload.batch())
    options: dict[str, Any] = {"lr": LEARNING_RATE, "fused": True}
    return Ranks(world.group, world.group, [batch] * world.world_size, options, world.device)  # type: ignore[list-item]


def fit_run(task: lockstep.Task, world: World, **settings: Any) -> Run:
    """Return a run of `lockstep.fit` whose steps somebody else calls. Collective: every rank."""
    chosen = FitSettings(**{"strategy": "ddp", "steps": 1_000_000, "quiet": True, **settings})
    return Run(task, chosen, world, StopSignals(saves=False, rank=world.rank), None)


def by_fit(workload: Workload, ranks: Ranks, world: World) -> tuple[Run, Step]:
    """Return the run and its step, on as many samples as the others have; to join them into batches costs nothing."""
    batch = workload.batch()
    count = world.world_size * len(batch[0])
    task = lockstep.Task(
        model=workload.model,
        dataset=lambda: range(4 * count),  # type: ignore[arg-type, return-value]
        collate=lambda numbers: batch,
        loss=loss_of,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, **ranks.options),
        global_batch_size=count,
    )
    run = fit_run(task, world)
    return run, lambda batch: run.step()


def captured(name: str, workload: Workload, ranks: Ranks, cleanup: contextlib.ExitStack) -> Turn:
    """Return the replay of a whole step; all was made and warmed up on the stream of its own that the graph needs."""
    ranks = replace(ranks, options={**ranks.options, "capturable": True})
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        trainee = made(name, workload, ranks)
        for _ in range(WARM_UP_STEPS):
            trainee.step(ranks.batches[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        cleanup.callback(graph.reset)  # a graph with collectives keeps NCCL's communicator
        errors: list[Exception] = []
        try:
            # The threads of other contenders may look at their events meanwhile.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                try:
                    trainee.step(ranks.batches[0])
                except Exception as error:
                    errors.append(error)
                    raise
        except Exception as error:
            if torch.cuda.is_current_stream_capturing():
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
            raise [*errors, error][0] from None  # to end a broken capture is an error, too
    torch.cuda.current_stream().wait_stream(side)
    return functools.partial(replay, graph, trainee)


def replay(graph: torch.cuda.CUDAGraph, trainee: Trainee) -> None:
    """Replay; ``trainee`` has the parameters, in memory that is not the graph's own."""
    graph.replay()


def made(name: str, workload: Workload, ranks: Ranks) -> Trainee:
    trainee = make_trainee(name, workload, ranks)
    assert trainee is not None
    return trainee


class Contenders:
    """The contenders of one model on one rank: steps, and what was found of each.

    Args:
        world: Of this rank.
        control: A group of Gloo's, over which ranks agree.
        failed: What broke a job before this one, with the error: contenders that are left out.
        notes: Rank zero notes there which contender has its turn, and what has failed, for a job that does not end.
    """

    def __init__(
        self, world: World, control: dist.ProcessGroup, failed: Mapping[str, str] | None = None, notes: str = ""
    ) -> None:
        self.world, self.control, self.notes = world, control, notes
        self.steps: dict[str, Turn] = {}
        self.host_s: dict[str, list[float]] = {}
        self.peak_mib: dict[str, float] = {}
        self.kernels: dict[str, int] = {}
        self.failed = dict(failed or {})
        self.missing = {name: error.splitlines()[0] for name, error in self.failed.items()}
        self.cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Contenders":
        return self

    def __exit__(self, *exception: object) -> None:
        """Release all, before the world closes."""
        self.steps.clear()
        self.cleanup.close()
        gc.collect()

    def note(self, now: str) -> None:
        """Say whose turn it is."""
        if self.notes and self.world.is_rank_zero:
            whole = Path(self.notes)
            whole.with_suffix(".new").write_text(json.dumps({"now": now, "failed": self.failed}))
            whole.with_suffix(".new").replace(whole)

    def add(self, name: str, make: Make) -> None:
        """Make a contender, which takes its first steps, unless an error prevents that. Collective: every rank.

        Raises:
            RuntimeError: It failed here, and the others do not come, or the device is out of order since.
        """
        if name in self.failed:
            return
        self.note(name)
        device, cleanup, step, error = self.world.device, contextlib.ExitStack(), None, ""
        memory = torch.get_device_module(device) if device.type != "cpu" else None
        synchronize(device)
        before, peak, kernels = 0, 0, 0
        if memory is not None:
            memory.reset_peak_memory_stats(device)
            before = memory.memory_allocated(device)
        try:
            step = make(cleanup)
            for _ in range(WARM_UP_STEPS):
                step()
            synchronize(device)
            if memory is not None:
                peak = memory.max_memory_allocated(device) - before
            kernels = self.count_kernels(step)
        except torch.OutOfMemoryError as problem:
            error = f"{NO_MEMORY} on rank {self.world.rank}: {first_line(problem)}"
        except Exception as problem:
            headline = f"{type(problem).__name__}: {first_line(problem)}"
            error = f"{FAILED} on rank {self.world.rank}: {headline}\n{traceback.format_exc()}"
        errors = self.agree(name, error)
        if step is not None and not errors:
            self.cleanup.enter_context(cleanup)
            self.steps[name], self.host_s[name], self.kernels[name] = step, [], kernels
            if memory is not None:
                self.peak_mib[name] = slowest(peak / 2**20, self.control)
            return
        failures = [each for each in errors if each.startswith(FAILED)]
        self.missing[name] = (failures or errors)[0].splitlines()[0]
        if failures:
            self.failed[name] = failures[0]
        self.note(name)
        step = None  # with its memory
        with contextlib.suppress(Exception):
            cleanup.close()
        gc.collect()
        if memory is not None:
            torch.accelerator.empty_cache()
            synchronize(device)

    def agree(self, name: str, error: str) -> list[str]:
        """Return the errors of the ranks that have one. Collective: every rank."""
        failed, texts = torch.tensor([float(bool(error))]), [""] * self.world.world_size
        work = dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.control, async_op=True)
        try:
            work.wait(timedelta(seconds=AGREE_S)) if error else work.wait()
        except RuntimeError:
            raise RuntimeError(f"{name}: {error}\nThe other ranks have not come within {AGREE_S:.0f} s.") from None
        if failed:
            dist.all_gather_object(texts, error, group=self.control)
        return [each for each in texts if each]

    def count_kernels(self, step: Turn) -> int:
        """Return how many kernels and copies a step launches on this rank's device."""
        device = self.world.device
        if device.type == "sim":
            with torch.sim.counting() as counts:  # type: ignore[attr-defined]
                step()
            return int(counts.kernels)
        if device.type != "cuda":
            step()
            return 0
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        return sum(event.device_type() == torch.autograd.DeviceType.CUDA for event in events)

    def turn(self, name: str, count: int) -> float:
        """Return the seconds of one of ``count`` steps on the slowest rank. Collective: every rank."""
        step = self.steps[name]
        self.note(name)
        synchronize(self.world.device)
        slowest(0.0, self.control)
        start = time.perf_counter()
        step()
        host_s = time.perf_counter() - start
        for _ in range(count - 1):
            step()
        synchronize(self.world.device)
        seconds = slowest((time.perf_counter() - start) / count, self.control)
        self.host_s[name].append(slowest(host_s, self.control))
        return seconds

    def measure(self, title: str, seconds: float) -> dict[str, Any]:
        """Return the figures of all, in as many rounds as there is time for. Collective: every rank."""
        counts = {name: min(max(2, math.ceil(TURN_S / self.turn(name, 2))), MOST_STEPS) for name in self.steps}
        round_s = sum(self.turn(name, count) * count for name, count in counts.items())
        self.host_s = {name: [] for name in self.steps}
        num_rounds = min(max(5, int(seconds / max(round_s, 1e-3))), 40)
        turns = {name: functools.partial(self.turn, name, count) for name, count in counts.items()}
        found = summarize(run_rounds(turns, num_rounds, title, shown=self.world.is_rank_zero))
        return {
            **found,
            "host_s": summarize(self.host_s)["seconds"],
            "peak_mib": self.peak_mib,
            "kernels": self.kernels,
            **self.absent(),
        }

    def absent(self) -> dict[str, Any]:
        """Return why there are no figures of some, and the errors that are not for want of memory."""
        return {"missing": self.missing, "failed": self.failed}


def first_line(problem: Exception) -> str:
    return (str(problem) or type(problem).__name__).splitlines()[0]


def measure(
    name: str, kind: Kind, deadline: float, failed: Mapping[str, str] | None = None, notes: str = ""
) -> dict[str, Any]:
    """Return the figures of a model, about at ``deadline``; the same on all ranks. Collective: every rank.

    Args:
        name: Of the model.
        kind: Of the devices.
        deadline: By the clock `time.time`.
        failed: See `Contenders`.
        notes: Likewise.
    """
    with join(kind) as world:
        control = dist.new_group(backend="gloo")
        workload = models_of(kind)[name]
        ranks = ranks_of(workload, world, control)
        contenders, names = EAGER, CAPTURED
        if world.world_size == 1:
            contenders, names = (*EAGER, *ALONE.values()), (*CAPTURED, *ALONE.values())
        absent = {}
        if name == LARGE:
            need = BYTES_OF_LARGE * sum(parameter.numel() for parameter in on_meta(workload).parameters())
            free = -slowest(-float(torch.cuda.mem_get_info(world.device)[0]), control)
            lean = [ALONE.get(each, each) if world.world_size == 1 else each for each in LEAN]
            contenders = tuple(lean[: int(free // need)]) if free >= 2 * need else ()
            absent = dict.fromkeys(lean[len(contenders) :], "not enough memory")

        def make_by_fit(cleanup: contextlib.ExitStack) -> Turn:
            run, step = by_fit(workload, ranks, world)
            cleanup.callback(run.close)
            return functools.partial(step, ranks.batches[0])

        with Contenders(world, control, failed, notes) as found:
            found.missing |= absent
            for contender in contenders:
                make = functools.partial(eager, contender, workload, ranks)
                found.add(contender, make_by_fit if contender == "fit" else make)
            for contender in names if kind == "cuda" and name not in NOT_CAPTURED else ():
                found.add(f"{contender}, captured", functools.partial(captured, contender, workload, ranks))
            left_s = slowest(deadline - time.time(), control)
            return found.measure(name, left_s) if found.steps else found.absent()


def eager(name: str, workload: Workload, ranks: Ranks, cleanup: contextlib.ExitStack) -> Turn:
    return functools.partial(made(name, workload, ranks).step, ranks.batches[0])


def on_meta(workload: Workload) -> nn.Module:
    with torch.device("meta"):
        return workload.model()


def measure_replicas(
    name: str,
    kind: Kind,
    deadline: float,
    failed: Mapping[str, str] | None = None,
    notes: str = "",
    *,
    num_devices: int,
) -> dict[str, Any]:
    """Return the figures of both classes DataParallel in this process, which uses all devices; a single one twice.

    The arguments are those of `measure`.
    """
    with join(kind) as world:
        workload, indices = models_of(kind)[name], range(num_devices) if num_devices > 1 else [0, 0]
        devices = [torch.device(kind, index) if kind != "cpu" else world.device for index in indices]
        ranks = ranks_of(workload, world, world.group)  # type: ignore[arg-type]
        torch.manual_seed(1)
        parts = [workload.batch() for _ in devices]
        whole = tuple(torch.cat(tensors).to(devices[0]) for tensors in zip(*parts, strict=True))
        shards = [tuple(part.to(device) for part in shard) for device, shard in zip(devices, parts, strict=True)]
        scales = [1 / len(devices)] * len(devices)

        def ours(cleanup: contextlib.ExitStack) -> Turn:
            model = workload.model().to(devices[0])
            wrapped = lockstep.DataParallel(model, devices)
            optimizer = torch.optim.AdamW(model.parameters(), **ranks.options)

            def step() -> None:
                optimizer.zero_grad()
                wrapped.backward(loss_of, shards, scales)
                optimizer.step()

            return step

        def torchs(cleanup: contextlib.ExitStack) -> Turn:
            model = workload.model().to(devices[0])
            wrapped = nn.DataParallel(model, [device.index for device in devices])
            step = plain_step(wrapped, torch.optim.AdamW(model.parameters(), **ranks.options))
            return functools.partial(step, whole)  # type: ignore[arg-type]

        def single(cleanup: contextlib.ExitStack) -> Turn:
            model = workload.model().to(devices[0])
            return functools.partial(plain_step(model, torch.optim.AdamW(model.parameters(), **ranks.options)), whole)  # type: ignore[arg-type]

        with Contenders(world, dist.new_group(backend="gloo"), failed, notes) as found:
            if num_devices == 1:
                found.add("single", single)
            if kind == "cuda":  # torch's refuses the others
                found.add("torch-dp", torchs)
            found.add("dp", ours)
            title = f"{name}, DataParallel"
            return found.measure(title, deadline - time.time()) if found.steps else found.absent()
