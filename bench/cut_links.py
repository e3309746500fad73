"""What becomes of a run whose link is cut for 1, 5 or 30 seconds, or for good? For each strategy, on two machines.

Machines are network namespaces on this one, with a launcher each. A small task trains 60 steps; after step 20 the cable
of the second machine is cut. The run must go on and end with the same weights, bit for bit, as one whose link held; or
end on both machines with the peer or the link named, within the limit, and go on from its checkpoint when it is started
again. "for good" has a limit of 6 s (LOCKSTEP_LINK_TIMEOUT_S), the others the usual one of 60 s. DiLoCo and local SGD
exchange after 30 and 60 steps, so the link is also cut between exchanges: then nothing is lost, not even time.

Needs root and iproute2. Usage: python bench/cut_links.py [--strategies ddp,...] > bench/results/cut_links.txt
"""

import argparse
import hashlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from bench.predict import Sleep, ip, machines
from lockstep.telemetry.provenance import gather

STEPS, CUT_AFTER, TIMEOUT_S = 60, 20, 180.0
MARK = "LOCKSTEP_BENCH_MARK"
STRATEGIES = {
    "ddp": ["--strategy", "ddp"],
    "ddp-zero1": ["--strategy", "ddp-zero1"],
    "int8": ["--strategy", "ddp", "--compression", "int8"],
    "reproducible": ["--strategy", "ddp", "--reproducible", "2"],
    "local-sgd": ["--strategy", "local-sgd", "--sync-every", "30"],
    "diloco": ["--strategy", "diloco", "--sync-every", "30"],
}


class Counted(nn.Module):
    """Layers that take 0.1 s a step, and a file when the link is to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(10))
        self.num_steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return vectors (batch, 64)."""
        self.num_steps += 1
        if self.num_steps == CUT_AFTER and MARK in os.environ:
            Path(os.environ[MARK]).touch()
        for layer in self.layers:
            x = Sleep.apply(layer(x))  # type: ignore[no-untyped-call]
        return x


task = lockstep.Task(
    name="cut links",
    model=Counted,
    dataset=lambda: TensorDataset(torch.randn(64, 64, generator=torch.Generator().manual_seed(0))),
    loss=lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    global_batch_size=8,
)


def start(names: Sequence[str], folder: Path, flags: Sequence[str], **environ: str) -> list[subprocess.Popen[str]]:
    """Start a launcher on each machine; each machine has a folder of its own for checkpoints."""
    processes = []
    for index, name in enumerate(names):
        where = ["--nnodes", str(len(names)), "--node-rank", str(index), "--master-addr", "10.79.0.1", "--devices", "1"]
        train = [
            "-m",
            "lockstep",
            "train",
            __file__,
            "--steps",
            str(STEPS),
            "--checkpoint-every",
            "10",
            "--view",
            "none",
        ]
        files = ["--checkpoint", str(folder / "checkpoint"), "--export", str(folder / "model.safetensors")]
        command = [sys.executable, "-m", "lockstep", "run", *where, *train, *files, *flags]
        # A pid namespace each, as machines have: else they would share memory.
        inside = ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
        made = subprocess.Popen(
            [*inside, *command], env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        processes.append(made)
    return processes


def finish(processes: Sequence[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Return the exit codes and what the launchers printed."""
    try:
        texts = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], texts


def digest(folder: Path) -> str:
    """Return what tells the weights of one run from those of another."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def cut_once(names: Sequence[str], flags: Sequence[str], cut_s: float, expected: str) -> str:
    """Cut the link in one run; return what happened."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = {MARK: str(folder / "mark")} | ({} if math.isfinite(cut_s) else {"LOCKSTEP_LINK_TIMEOUT_S": "6"})
        processes = start(names, folder, flags, **environ)
        while not (folder / "mark").exists():
            if any(process.poll() is not None for process in processes):
                raise SystemExit(f"ended before the link was cut: {finish(processes)[1]}")
            time.sleep(0.02)
        ip("-n", names[1], "link", "set", "eth0", "down")
        cut_at = time.monotonic()
        if math.isfinite(cut_s):
            time.sleep(cut_s)
            ip("-n", names[1], "link", "set", "eth0", "up")
        codes, texts = finish(processes)
        took_s = time.monotonic() - cut_at
        if codes == [0, 0]:
            return f"went on, {took_s:5.1f} s to the end, {same(folder, expected)}"
        causes = [next((line for line in text.splitlines() if line.startswith("lockstep: Rank")), "") for text in texts]
        ip("-n", names[1], "link", "set", "eth0", "up")
        codes, texts = finish(start(names, folder, flags))
        after = same(folder, expected) if codes == [0, 0] else f"failed: {texts}"
        return f"ended after {took_s:5.1f} s; started again: {after}\n" + "\n".join(
            f"{'':28}{cause}" for cause in causes
        )


def same(folder: Path, expected: str) -> str:
    """Say whether a run's weights are those that were expected."""
    return "the same bits" if digest(folder) == expected else "OTHER WEIGHTS"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--cuts", default="1,5,30,inf", help="seconds; inf is for good")
    options = parser.parse_args()
    for name, text in gather().facts():
        print(f"{name:16} {text}")
    print()
    with machines() as found:
        names = found[:2]
        for strategy in options.strategies.split(","):
            with tempfile.TemporaryDirectory() as name:
                codes, texts = finish(start(names, Path(name), STRATEGIES[strategy]))
                if any(codes):
                    raise SystemExit("\n".join(texts))
                expected = digest(Path(name))
            for cut_s in map(float, options.cuts.split(",")):
                what = "for good" if math.isinf(cut_s) else f"{cut_s:.0f} s"
                print(f"{strategy:<14}{what:<14}{cut_once(names, STRATEGIES[strategy], cut_s, expected)}", flush=True)


if __name__ == "__main__":
    main()
