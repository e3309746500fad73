"""Is what `lockstep predict` says true? Predicted and measured steps over slow links, on 2 and 4 machines.

Machines are network namespaces on this one, each with a cable to a bridge; ``tc ... tbf`` limits what each may send.
They have a core each on two cores in turns, so the task sleeps where it would compute: only sending and encoding
compete. `lockstep predict` runs as a job on 2 of them, once for each link: it probes the link with all-reduces, and
what it says of 2 and of 4 machines is compared with the median step of `lockstep train` there. "given" is what it says
of a link whose rate it was told.

Needs root, iproute2, and a quiet machine. Usage: python bench/predict.py > bench/results/predict.txt
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.study.links import Computing, Cost, Link, Method, Profile, ReadyBucket, given_link, predict_step
from lockstep.telemetry.provenance import gather
from lockstep.telemetry.record import read_run

# --- the task: 10.5 MB of gradients, and 100 ms of sleep for a global batch of 8 -------------------------------------

WIDTH, NUM_LAYERS, BATCH, SECONDS = 512, 10, 8, 0.1


class Sleep(torch.autograd.Function):
    """Takes a time in proportion to the samples, twice as long in backward, and no processor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        """Sleep."""
        time.sleep(SECONDS * len(x) / BATCH / NUM_LAYERS / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Sleep."""
        time.sleep(2 * SECONDS * len(gradient) / BATCH / NUM_LAYERS / 3)
        return gradient


class Sleepy(nn.Module):
    """Linear layers with a pause behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Return vectors (batch, width)."""
        for layer in self.layers:
            x = Sleep.apply(layer(x))  # type: ignore[no-untyped-call]
        return x


task = lockstep.Task(
    name="sleepy",
    model=Sleepy,
    dataset=lambda: TensorDataset(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))),
    loss=lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    global_batch_size=BATCH,
)

# --- machines ---------------------------------------------------------------------------------------------------------

MOST_MACHINES, TIMEOUT_S = 4, 280.0
BRIDGE = f"lsb{os.getpid()}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)


@contextmanager
def machines() -> Iterator[list[str]]:
    """Make namespaces with the addresses 10.79.0.1, 10.79.0.2 ... on one bridge."""
    names = [f"{BRIDGE}m{index}" for index in range(MOST_MACHINES)]
    made = []
    try:
        for name in (BRIDGE, *names):
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", BRIDGE, "link", "add", "hub", "type", "bridge")
        ip("-n", BRIDGE, "link", "set", "hub", "up")
        for index, name in enumerate(names):
            cable = f"m{index}"
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", cable, "netns", BRIDGE)
            ip("-n", BRIDGE, "link", "set", cable, "master", "hub", "up")
            ip("-n", name, "address", "add", f"10.79.0.{index + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def limit(names: Sequence[str], rate: str) -> None:
    """Let each machine send so much, in bursts of 10 ms at most."""
    burst = max(32_000, int(given_link(rate).bytes_per_s / 100))
    for name in names:
        words = ("qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{rate}it", "burst", str(burst))
        subprocess.run(["tc", "-n", name, *words, "latency", "100ms"], check=True, timeout=20)


def run_job(names: Sequence[str], *words: str, module: str = "lockstep") -> None:
    """Run `python -m MODULE WORDS` as a job with a rank on each machine; each has memory and processes of its own."""
    processes = []
    for index, name in enumerate(names):
        where = ["--nnodes", str(len(names)), "--node-rank", str(index), "--master-addr", "10.79.0.1", "--devices", "1"]
        command = [sys.executable, "-m", "lockstep", "run", *where, "-m", module, *words]
        inside = ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        core = str(index % (os.cpu_count() or 1))
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process that writes to it
        made = subprocess.Popen([*inside, "taskset", "-c", core, *command], env=environ, stdout=output, stderr=output)
        processes.append((made, output))
    try:
        ends_at = time.monotonic() + TIMEOUT_S
        while any(process.poll() is None for process, _ in processes):
            failed = [output for process, output in processes if process.poll()]
            if failed or time.monotonic() > ends_at:
                failed[0].seek(0) if failed else None
                raise SystemExit(failed[0].read().decode() if failed else f"not over within {TIMEOUT_S:.0f} s")
            time.sleep(0.05)
    finally:
        for process, output in processes:
            process.kill()  # `unshare` heeds nothing less, and takes its child along
            output.close()


# --- predicted and measured -------------------------------------------------------------------------------------------


def predict(names: Sequence[str], folder: Path) -> dict[str, Any]:
    file = folder / "predicted.json"
    run_job(names, "predict", __file__, "--json", str(file))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def measure(names: Sequence[str], folder: Path, flags: Sequence[str], every: int, num_steps: int) -> float:
    """Return the median seconds of a step, without the first ones; of the second period the mean, if there are such."""
    run = folder / f"run{time.monotonic_ns()}"
    run_job(names, "train", __file__, "--steps", str(num_steps), "--view", "none", "--run-dir", str(run), *flags)
    seconds = [step.lasted_s for step in read_run(run).zero.steps]
    return fmean(seconds[every : 2 * every]) if every > 1 else median(seconds[2:-1])


def again(record: dict[str, Any], row: dict[str, Any], link: Link, num_machines: int) -> float:
    """Return the seconds of a step over a link, by what was measured of the task."""
    known = dict(record["profile"])
    known["computing"] = {int(share): Computing(**each) for share, each in known["computing"].items()}
    for name in ("buckets", "small_buckets"):
        known[name] = [ReadyBucket(**bucket) for bucket in known[name]]
    method = dict(row["method"])
    method["cost"] = Cost(**method["cost"])
    return predict_step(Profile(**known), Method(**method), link, num_machines).seconds


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="20Mb,100Mb,1Gb")
    parser.add_argument("--methods", default="ddp,bf16")
    parser.add_argument("--machines", default="2,4")
    options = parser.parse_args()
    for name, text in gather().facts():
        print(f"{name:16} {text}")
    print(f"{'busy before':16} {psutil.cpu_percent(2.0) / 100 * (psutil.cpu_count() or 1):.2f} cores\n")
    print(
        f"{'link':>6}  {'probed':>10}  {'machines':>8}  {'method':<12}{'measured':>10}{'predicted':>11}{'ratio':>7}",
        end="",
    )
    print(f"{'given':>9}{'ratio':>7}  busy")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that machines are taken away
    with machines() as names, tempfile.TemporaryDirectory() as folder:
        for rate in options.links.split(","):
            limit(names, rate)
            record = predict(names[:2], Path(folder))
            link = Link(**record["link"])
            rows = {row["method"]["name"]: row for row in record["rows"]}
            for method in options.methods.split(","):
                row = rows[method]
                for count in map(int, options.machines.split(",")):
                    predicted, given = (again(record, row, each, count) for each in (link, given_link(rate)))
                    every = row["method"]["sync_every"]
                    num_steps = 2 * every + 1 if every > 1 else 3 + max(3, min(20, int(6 / predicted)))
                    psutil.cpu_percent()
                    took = measure(names[:count], Path(folder), row["method"]["flags"].split(), every, num_steps)
                    busy = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
                    line = f"{rate:>6}  {link.bytes_per_s / 1e6:>6.2f} MB/s  {count:>8}  {method:<12}{took:>9.3f}s"
                    line += f"{predicted:>10.3f}s{predicted / took:>7.2f}{given:>8.3f}s{given / took:>7.2f}  {busy:.1f}"
                    print(line, flush=True)


if __name__ == "__main__":
    main()
