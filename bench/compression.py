"""Compressed gradients: error, bytes and time of each codec, an exchange between two ranks, and curves of the loss.

    codecs    on gradients of a GPT of 10.8 million parameters (43 MB): bytes for all of them, milliseconds for a MB of
              gradients to encode and to decode (the fastest time), the error of one step, and that of the sum of 8
              steps with error feedback, over the norm of what is exact. Other sizes of blocks, and rounding at random,
              stand beside those that are used. PowerSGD has no encoder of its own: its time is that of an exchange.
    exchange  of these 43 MB between two ranks over Gloo on this machine: milliseconds, and MB that a rank sends
    curves    the loss of the small GPT of bench/models.py over 200 steps on two ranks, beside fp32, on
              the text of this repository's documentation

    network   only if asked for, as root, with iproute2: seconds of a step between two machines, which are network
              namespaces with a slow cable between them, of one and of two ranks each. 10.8 million parameters in 12
              layers; forward and backward sleep 0.36 s in all, so only sending, encoding and updating take the
              processor. "zero1" is ZeroRedundancyOptimizer with shard_gradients. DiLoCo exchanges every 50
              steps, "streamed" in 5 fragments with a delay of 5 steps; of it the mean of a step over a whole period
              is shown, of the others the median

Usage: python -m bench.compression [--only PART] [--rate RATE] [--methods LIST] [--rounds N] [--quick] [--json FILE]
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import SECTION_TIMEOUT_S, order_of_round, parser, record, slowest
from bench.models import NUM_CHARACTERS, Language, characters, loss_of
from bench.predict import limit, machines
from lockstep import DiLoCo, DistributedDataParallel, ZeroRedundancyOptimizer, init, launch
from lockstep.comm.process import keep_freed_memory
from lockstep.parallel import compression
from lockstep.parallel.compression import Blocks, Cast, CompressedSum, SliceCodec
from lockstep.study.common import Spread

NUM_STEPS = 8
TIMED_NUMEL = 2_000_000
METHODS = ("bf16", "fp16", "int8", "int4", "powersgd:4")
MB = 1e6


# --- codecs ---


class Random(Blocks):
    """The same blocks, rounded up or down at random, so that the error is zero on average; slow, in torch."""

    def encode(self, values: Tensor, to: Tensor) -> None:
        """Leave the error in ``values``; ``to`` gets nothing."""
        whole = len(values) // self.block * self.block
        for rows in (values[:whole].view(-1, self.block), values[whole:].view(1, -1)):
            if rows.numel():
                step = rows.abs().amax(1, keepdim=True).clamp(min=1e-30) / (2 ** (self.bits - 1) - 1)
                rows -= (rows / step + torch.rand_like(rows)).floor() * step


def gradients(model: torch.nn.Module, num_steps: int) -> tuple[list[Tensor], list[torch.Size]]:
    """Return flat gradients of as many batches."""
    found = []
    for _ in range(num_steps):
        model.zero_grad()
        loss_of(model, characters(2, 64)()).backward()
        found.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    return found, [each.shape for each in model.parameters()]


def of_codec(codec: SliceCodec, steps: Sequence[Tensor]) -> dict[str, float]:
    """Return bytes, times and errors of a codec."""
    size, exact = steps[0].numel(), torch.zeros_like(steps[0], dtype=torch.float64)
    data = torch.empty(codec.num_bytes(size), dtype=torch.uint8)
    arrived, residual, first = torch.empty(size), torch.zeros(size), 0.0
    received = torch.zeros_like(exact)
    for number, gradient in enumerate(steps):
        values = (residual + gradient) if codec.keeps_residual else gradient.clone()
        before = values.clone()
        codec.encode(values, data)
        if isinstance(codec, Random):
            arrived = before - values
        else:
            codec.decode(data, arrived)
        residual = values
        received += arrived
        exact += gradient
        if number == 0:
            first = float((arrived - gradient).norm() / gradient.norm())
    encode_s, decode_s = fastest(codec, steps[0][:TIMED_NUMEL])
    megabytes = TIMED_NUMEL * 4 / MB
    return {
        "MB": codec.num_bytes(size) / MB,
        "encode ms/MB": encode_s * 1e3 / megabytes,
        "decode ms/MB": decode_s * 1e3 / megabytes,
        "error of a step": first,
        f"error of {len(steps)} steps": float((received - exact).norm() / exact.norm()),
    }


def fastest(codec: SliceCodec, gradient: Tensor) -> tuple[float, float]:
    """Return the seconds to encode, and to decode and add: the fastest of many, as others use the cores, too."""
    data, total = torch.empty(codec.num_bytes(len(gradient)), dtype=torch.uint8), torch.zeros_like(gradient)
    encode_s, decode_s = [], []
    for _ in range(5 if isinstance(codec, Random) else 40):
        values = gradient.clone()
        began = time.perf_counter()
        codec.encode(values, data)
        middle = time.perf_counter()
        if not isinstance(codec, Random):
            codec.decode(data, total, adds=True)
        encode_s.append(middle - began)
        decode_s.append(time.perf_counter() - middle)
    return min(encode_s), min(decode_s)


def codecs(num_steps: int) -> dict[str, Any]:
    """Return what was measured of each codec."""
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    steps, _ = gradients(Language(384, 6, 64), num_steps)
    tried: dict[str, SliceCodec] = {"bf16": Cast(torch.bfloat16), "fp16": Cast(torch.float16)}
    for bits, blocks in ((8, (64, 256, 1024)), (4, (32, 64, 128, 256))):
        for block in blocks:
            tried[f"int{bits}, blocks of {block}"] = Blocks(bits, block)
        tried[f"int{bits}, at random"] = Random(bits, 256 if bits == 8 else 128)
    found = {name: of_codec(codec, steps) for name, codec in tried.items()}
    print_table(f"one rank, {steps[0].numel() * 4 / MB:.1f} MB of gradients", found)
    return found


def print_table(title: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    """Print figures, a row each."""
    columns = list(next(iter(rows.values())))
    print(f"\n{title}\n  {'':<24}" + "".join(f"{name:>19}" for name in columns))
    for name, row in rows.items():
        print(f"  {name:<24}" + "".join(f"{row[column]:>19.4g}" for column in columns), flush=True)


# --- an exchange ---


def exchanges(num_rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds and MB of an exchange, by method."""
    found: dict[str, dict[str, float]] = launch(exchange, num_rounds, devices=2, timeout_s=SECTION_TIMEOUT_S)[0]
    print_table("an exchange between 2 ranks on Gloo", found)
    return found


def exchange(num_rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds and MB of an exchange, by method. Collective: every rank."""
    torch.set_num_threads(1)
    with init(backend="gloo") as world:
        torch.manual_seed(world.rank)
        steps, shapes = gradients(Language(384, 6, 64), 1)
        flat = steps[0]
        sent_bytes: list[int] = []
        start = compression.start_exchange

        def count(group: Any, sent: Mapping[int, Tensor], *others: Any) -> Any:
            sent_bytes.extend(each.nbytes for each in sent.values())
            return start(group, sent, *others)

        def turn(method: str) -> Callable[[], object]:
            compressed = CompressedSum(flat, shapes, method, world.group)
            return lambda: compressed.start()("exchange")

        turns: dict[str, Callable[[], object]] = {"fp32": lambda: dist.all_reduce(flat)}
        for method in METHODS:
            turns[method] = turn(method)
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        num_bytes = dict.fromkeys(turns, 2 * (world.world_size - 1) / world.world_size * flat.nbytes)
        with mock.patch.object(compression, "start_exchange", count):
            for index in range(num_rounds):
                for name in order_of_round(list(turns), index):
                    flat.copy_(steps[0])
                    sent_bytes.clear()
                    began = time.perf_counter()
                    turns[name]()
                    seconds[name].append(slowest(time.perf_counter() - began))
                    num_bytes[name] = sum(sent_bytes) or num_bytes[name]
        return {
            name: {"ms": Spread.of(each).median * 1e3, "MB": num_bytes[name] / MB} for name, each in seconds.items()
        }


# --- curves ---


def curve(method: str | None, num_steps: int) -> list[float]:
    """Return the losses of a run, the mean over both ranks. Collective: every rank."""
    torch.set_num_threads(1)
    with init(backend="gloo") as world:
        text = "".join(path.read_text() for path in sorted(Path("docs").rglob("*.md")))
        tokens = torch.tensor([min(max(ord(character) - 32, 0), NUM_CHARACTERS - 1) for character in text])
        torch.manual_seed(0)
        model = DistributedDataParallel(Language(128, 3, 64), compression=method)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        places = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(num_steps):
            starts = torch.randint(len(tokens) - 65, (world.world_size, 8), generator=places)[world.rank]
            batch = torch.stack([tokens[start : start + 65] for start in starts.tolist()])
            loss = loss_of(model, (batch[:, :-1], batch[:, 1:]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach() / world.world_size
            dist.all_reduce(mean)
            losses.append(float(mean))
        return losses


def curves(num_steps: int) -> dict[str, list[float]]:
    """Return the losses of each method."""
    found = {}
    for method in (None, *METHODS):
        found[method or "fp32"] = launch(curve, method, num_steps, devices=2, timeout_s=SECTION_TIMEOUT_S)[0]
    marks = [mark for mark in (10, 25, 50, 100, 150, 200) if mark <= num_steps] or [num_steps]
    rows = {}
    for name, losses in found.items():
        means = {f"step {mark}": sum(losses[max(0, mark - 10) : mark]) / min(10, mark) for mark in marks}
        rows[name] = {**means, "over fp32": means[f"step {marks[-1]}"]}
    exact = rows["fp32"]["over fp32"]
    for row in rows.values():
        row["over fp32"] /= exact
    print_table("loss on two ranks, mean of 10 steps", rows)
    return found


# --- a slow network ---

PAUSE_S, PERIOD = 0.01, 50
NETWORK = ("torch", "fp32", "zero1", *METHODS, "diloco", "diloco int8", "diloco streamed", "diloco streamed int8")


class Paused(torch.nn.Linear):
    """A layer that sleeps, twice as long in backward."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, after a while."""
        time.sleep(PAUSE_S)
        y = super().forward(x)
        y.register_hook(lambda _: time.sleep(2 * PAUSE_S))
        return y


def paused_steps(method: str) -> None:
    """Print the seconds of a step, and what this machine sends in it. Collective: every rank."""
    torch.set_num_threads(1)
    with init(backend="gloo" if method == "torch" else None) as world:
        torch.manual_seed(0)
        model: torch.nn.Module = torch.nn.Sequential(*[Paused(948, 948) for _ in range(12)])
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        num_first, num_steps = 2, 8
        if method == "torch":
            model = torch.nn.parallel.DistributedDataParallel(model)
        elif method.startswith("diloco"):
            num_first, num_steps = PERIOD, 2 * PERIOD  # the first exchange makes buffers and connections
            streamed = {"fragments": 5, "sync_delay": 5} if "streamed" in method else {}
            chosen = next((each for each in METHODS if each in method), None)
            DiLoCo(model, optimizer, PERIOD, compression=chosen, **streamed)
        elif method == "zero1":
            model = DistributedDataParallel(model)
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, shard_gradients=True, lr=1e-4)
        else:
            model = DistributedDataParallel(model, compression=None if method == "fp32" else method)
        seconds, sent = [], []
        for _ in range(num_steps):
            optimizer.zero_grad()
            began = time.perf_counter()
            model(torch.randn(1, 948)).sum().backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
            sent.append(psutil.net_io_counters(pernic=True)["eth0"].bytes_sent / 1e6)
            if num_steps < PERIOD:
                world.barrier()  # so that both ranks of a machine count the same
        summary = fmean if num_steps > PERIOD else median
        if world.is_rank_zero:
            sent_mb = (sent[-1] - sent[num_first - 1]) / (num_steps - num_first)
            print(f"found {summary(seconds[num_first:])} {sent_mb}", flush=True)


def network(methods: Sequence[str], rate: str) -> dict[str, dict[str, float]]:
    """Return the seconds of a step by method, on machines of one rank and of two."""
    found: dict[str, dict[str, float]] = {method: {} for method in methods}
    with machines() as names:
        limit(names[:2], rate)
        for num_ranks in (1, 2):
            for method in methods:
                started = []
                for index, name in enumerate(names[:2]):
                    where = ["--nnodes", "2", "--node-rank", str(index), "--master-addr", "10.79.0.1"]
                    command = [sys.executable, "-m", "lockstep", "run", *where, "--devices", str(num_ranks), __file__]
                    started.append(
                        subprocess.Popen(
                            ["ip", "netns", "exec", name, *command, "--as-rank", method],
                            stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL,
                            env=os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
                            text=True,
                        )
                    )
                outputs = [process.communicate(timeout=SECTION_TIMEOUT_S)[0] for process in started]
                seconds, megabytes = map(float, outputs[0].rpartition("found ")[2].split())
                found[method] |= {f"2 x {num_ranks} ranks": seconds, f"MB of 2 x {num_ranks}": megabytes}
    print_table(f"seconds of a step at {rate}it/s, and MB that a machine sends in it", found)
    return found


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "codecs": lambda how: codecs(2 if how.quick else NUM_STEPS),
    "exchange": lambda how: exchanges(2 if how.quick else how.rounds),
    "curves": lambda how: curves(5 if how.quick else 200),
    "network": lambda how: network(("fp32", "int8") if how.quick else how.methods.split(","), how.rate),
}
USUAL = ("codecs", "exchange", "curves")


def main() -> None:
    """Measure what the options ask for."""
    made = parser(__doc__, rounds=10)
    made.add_argument("--only", choices=tuple(PARTS), action="append", help="this part, may be given again")
    made.add_argument("--rate", default="100Mb", help="of the cable of part network (100Mb)")
    made.add_argument("--methods", default=",".join(NETWORK), help="of part network (all)")
    made.add_argument("--as-rank", metavar="METHOD", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.as_rank is not None:
        paused_steps(options.as_rank)
        return
    record(options.json, lambda: {part: PARTS[part](options) for part in options.only or USUAL})


if __name__ == "__main__":
    main()
