"""One CUDA device: what a world of one costs over a bare loop, eager and captured, and DataParallel with one GPU twice.

    none      the bare loop: forward, loss, backward and AdamW
    again     the bare loop once more: how well this machine can tell two things apart that are the same
    torch     torch.nn.parallel.DistributedDataParallel, NCCL with one rank
    ours      lockstep.DistributedDataParallel, likewise
    captured  each of these with its whole step in a CUDA graph: "none, captured" and so on
    dp twice  lockstep.DataParallel on the same GPU named twice, each replica with half of the batch
    dp        the same on all GPUs, where there are several

Interleaved in one process: the order rotates and every other round runs backwards; a turn ends with a synchronisation
of the devices. Peak memory is the most that torch's allocator had handed out in a step, less what it had before the
contender was made; of several GPUs each has a line, which shows how even it is. Without a CUDA device there is nothing
to measure, and the script says so.

Usage: python -m bench.gpu [--quick] [--rounds N] [--json FILE]
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from bench.harness import Rounds, parser, record, run_rounds, show, summarize
from bench.models import MODELS, Batch, Workload, loss_of
from lockstep import World, init

LEARNING_RATE = 1e-4
WARM_UP_STEPS = 12
"""torch asks for 11 before a wrapped step is captured."""
STEPS_OF_A_TURN = 20
Step = Callable[[], object]


def on_gpu(batch: Batch) -> Batch:
    return batch[0].cuda(), batch[1].cuda()


def eager(model: nn.Module, batch: Batch) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, capturable=True)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    return step


def captured(make: Callable[[], Step]) -> Step:
    """Return the step that ``make`` returns as a CUDA graph; made and warmed up on the stream that captures it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step = make()
        for _ in range(WARM_UP_STEPS):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            step()
    torch.cuda.current_stream().wait_stream(side)
    return graph.replay


def replicated(model: nn.Module, batch: Batch, devices: list[int]) -> Step:
    wrapped, count = lockstep.DataParallel(model, devices), len(devices)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    parts = zip(*(part.chunk(count) for part in batch), strict=True)
    shards = [tuple(part.to(device) for part in shard) for device, shard in zip(wrapped.devices, parts, strict=True)]

    def step() -> None:
        optimizer.zero_grad()
        wrapped.backward(loss_of, shards, [1 / count] * count)
        optimizer.step()

    return step


def makers(workload: Workload, world: World) -> dict[str, Callable[[], Step]]:
    """Return what makes each contender."""
    torch.manual_seed(1)
    batch = on_gpu(workload.batch())

    def plain(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], Step]:
        return lambda: eager(wrap(workload.model().cuda()), batch)

    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {
        "none": lambda model: model,
        "torch": lambda model: TorchDDP(model, device_ids=[world.device.index]),
        "ours": lambda model: lockstep.DistributedDataParallel(model, device_ids=[world.device.index]),
    }
    made = {name: plain(wrap) for name, wrap in wraps.items()}
    made["again"] = made["none"]
    made |= {f"{name}, captured": functools.partial(captured, made[name]) for name in wraps}
    made["dp twice"] = lambda: replicated(workload.model().cuda(), batch, [0, 0])
    if torch.cuda.device_count() > 1:
        every = list(range(torch.cuda.device_count()))
        made["dp"] = lambda: replicated(workload.model().to("cuda:0"), batch, every)
    return made


def measure(name: str, num_rounds: int, world: World) -> tuple[Rounds, dict[str, list[float]]]:
    """Return the seconds of a step, a round each, and the peak MiB of each GPU, by contender."""
    steps: dict[str, Step] = {}
    mib: dict[str, list[float]] = {}
    gpus = range(torch.cuda.device_count())
    for contender, make in makers(MODELS[name], world).items():
        synchronize()
        before = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        steps[contender] = make()
        for _ in range(WARM_UP_STEPS):
            steps[contender]()
        synchronize()
        mib[contender] = [
            (torch.cuda.max_memory_allocated(gpu) - held) / 2**20 for gpu, held in zip(gpus, before, strict=True)
        ]
    turns = {contender: functools.partial(turn, step) for contender, step in steps.items()}
    return run_rounds(turns, num_rounds, name), mib


def synchronize() -> None:
    for gpu in range(torch.cuda.device_count()):
        torch.cuda.synchronize(gpu)


def turn(step: Step) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(STEPS_OF_A_TURN):
        step()
    synchronize()
    return (time.perf_counter() - start) / STEPS_OF_A_TURN


def main() -> None:
    options = parser(__doc__, rounds=40).parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device here, so there is nothing to measure.")
        return

    def measure_all() -> dict[str, Any]:
        figures = {}
        with init(backend="nccl") as world:
            print(torch.cuda.get_device_name(world.device))
            for name in MODELS:
                seconds, mib = measure(name, 3 if options.quick else options.rounds, world)
                figures[name] = {**summarize(seconds), "peak_mib": mib}
                show(f"{name}: one GPU", seconds, ("none", "torch"))
                for gpu in range(torch.cuda.device_count()):
                    peaks = ", ".join(f"{contender} {peaks[gpu]:.0f}" for contender, peaks in mib.items())
                    print(f"  peak MiB of GPU {gpu}: {peaks}")
        return {"models": figures}

    record(options.json, measure_all)


if __name__ == "__main__":
    main()
