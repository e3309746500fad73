"""Four runs with a planted cause each, on two ranks, and the reports of them: does the page alone tell the cause?

Writes a folder for each run: ``run-a`` to ``run-d`` with a page in it, and ``answers.txt`` with what was planted. With
Chromium, also a picture of each page as on a phone and on a desk, light and dark.

Usage: python -m tools.planted FOLDER [--steps N] [--no-pictures]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import lockstep

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WIDTHS = {"phone": 390, "desk": 1280}
TIMEOUT_S = 300.0


def network(width: int, depth: int) -> nn.Module:
    """Return a network of so many layers of so many units."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 10))


def samples() -> TensorDataset:
    """Return random inputs and labels."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(8192, 64, generator=generator), torch.randint(10, (8192,), generator=generator))


class SlowSamples(Dataset[tuple[Tensor, ...]]):
    """The samples, each of which takes its time, as if it were read and decoded."""

    def __init__(self) -> None:
        self._samples = samples()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        time.sleep(2e-4)
        sample: tuple[Tensor, ...] = self._samples[number]
        return sample


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def late_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the same; rank 1 takes longer for it, as on a machine where something else runs."""
    if os.environ.get("RANK") == "1":
        time.sleep(0.02)
    return loss(model, batch)


def make_task(*, width: int = 512, depth: int = 4, batch: int = 256, **changes: object) -> lockstep.Task:
    """Return a task that trains well on two ranks, with ``changes``."""
    fields = {"model": lambda: network(width, depth), "dataset": samples, "loss": loss, **changes}
    return lockstep.Task(
        name="letters",
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        global_batch_size=batch,
        **fields,  # type: ignore[arg-type]
    )


run_a = make_task(dataset=SlowSamples)
run_b = make_task(loss=late_loss)
run_c = make_task(width=96, depth=40, batch=128)
run_d = make_task(width=32, depth=1, batch=32)
sound = make_task()

RUNS: dict[str, tuple[str, list[str]]] = {
    "run-a": ("a slow loader: each sample takes 0.2 ms, and no process loads ahead", []),
    "run-b": ("a slow rank: rank 1 sleeps 20 ms in each forward", []),
    "run-c": ("tiny buckets: --bucket-cap-mb 0.01", ["--bucket-cap-mb", "0.01"]),
    "run-d": ("a model too small to gain: 64 to 32 to 32 to 10 units, 16 samples a rank", []),
    "sound": ("nothing", []),
}


def record(name: str, flags: list[str], folder: Path, num_steps: int) -> None:
    """Train one of them, and write its page."""
    lockstep_command = [sys.executable, "-m", "lockstep"]
    task = f"{Path(__file__)}:{name.replace('-', '_')}"
    train = ["train", task, "--devices", "2", "--steps", str(num_steps), "--threads", "1", "--quiet", *flags]
    subprocess.run([*lockstep_command, *train, "--run-dir", str(folder / name)], check=True, timeout=TIMEOUT_S)
    subprocess.run([*lockstep_command, "report", str(folder / name)], check=True, timeout=TIMEOUT_S)


def picture(page: Path, target: Path, *, width: int, dark: bool) -> None:
    """Take a picture of a page in a frame of that width; a window has a least one."""
    assert BROWSER is not None
    height = 5200 if width < 600 else 3000
    frame = page.with_name("frame.html")
    frame.write_text(
        f'<body style="margin:0"><iframe src="{page.name}" style="border:0;width:{width}px;height:{height}px"></iframe>'
    )
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    flags += [f"--user-data-dir={page.parent}/browser", "--allow-file-access-from-files", "--virtual-time-budget=3000"]
    flags += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={max(500, width)},{height}"]
    subprocess.run([BROWSER, *flags, f"--screenshot={target}", frame.as_uri()], check=True, timeout=90)
    frame.unlink()
    shutil.rmtree(page.parent / "browser", ignore_errors=True)


def main() -> None:
    """Record all, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--no-pictures", action="store_true")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name, (_, flags) in RUNS.items():
        print(f"--- {name}")
        record(name, flags, folder, options.steps)
        if BROWSER is not None and not options.no_pictures:
            for screen, width in WIDTHS.items():
                for ground in ("light", "dark"):
                    target = folder / f"{name}-{screen}-{ground}.png"
                    picture(folder / name / "report.html", target, width=width, dark=ground == "dark")
    answers = "".join(f"{name}: {cause}\n" for name, (cause, _) in RUNS.items())
    (folder / "answers.txt").write_text(answers)
    print(f"what was planted is in {folder / 'answers.txt'}")


if __name__ == "__main__":
    main()
