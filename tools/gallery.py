"""Take the pictures of docs/gallery.md: what each command shows, from real runs. `make gallery` takes all of them.

Usage: python -m tools.gallery [NAME ...]
"""

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from unittest.mock import patch

from rich.console import Console
from rich.text import Text

import lockstep
from lockstep.telemetry.figures import Snapshot
from lockstep.telemetry.live_view import picture
from lockstep.telemetry.record import Event
from lockstep.telemetry.sinks import Subscriber
from lockstep.train.task import load_task

REPO = Path(__file__).parents[1]
PICTURES = REPO / "docs" / "pictures"
WIDTH, HEIGHT = 100, 30
MAX_BYTES = 60_000

# --- a command as a terminal shows it when it has ended --------------------------------------------------------------

SCRIPT = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def check(labels, step):
    if (rank, step) == (1, 3):  # a label that only this rank gets
        raise ValueError("label 11 of sample 29: there are 10 classes")


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 8), torch.randint(10, (64,)))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
for epoch in range(2):
    for step, (x, labels) in enumerate(loader):
        check(labels, step)
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        dist.all_reduce(loss)
        print(epoch, loss.item())
"""


@dataclass(frozen=True)
class Shot:
    """A command, in a folder with `train.py`, `task.py` and the examples, after other commands that are not shown."""

    command: str
    before: tuple[str, ...] = ()


SHOTS = {
    "run": Shot("run --devices 2 train.py"),
    "evaluate": Shot(
        "evaluate runs/digits examples/digits.py --best --devices 2",
        ("train examples/digits.py --devices 2 --epochs 4 --checkpoint runs/digits --keep-best accuracy:max",),
    ),
    "compare": Shot("compare examples/gpt.py --devices 2 --steps 6"),
    "tune": Shot("tune examples/digits.py --devices 2 --minutes 1"),
    "predict": Shot("predict examples/gpt.py --machines 4 --link 1Gb"),
    "verify": Shot("verify task.py --devices 2"),
    "doctor": Shot("doctor task.py --devices 2 --nnodes 2 --master-addr localhost"),
    "rehearse": Shot(
        "rehearse examples/digits.py --devices 4 --quiet --inject kill:rank=2,step=20"
        " --max-restarts 1 --checkpoint runs/a --checkpoint-every 10"
    ),
    "examples": Shot("examples mine"),
    "report-text": Shot(
        "report runs/digits", ("train examples/digits.py --devices 2 --epochs 4 --run-dir runs/digits",)
    ),
}


def capture(command: str, folder: Path) -> list[str]:
    """Run ``lockstep COMMAND`` on a terminal; return the lines that it leaves there, with their colours."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (HEIGHT, WIDTH))
    words = [sys.executable, "-m", "lockstep", *command.split()]
    environ = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(REPO / "src")}
    process = subprocess.Popen(words, cwd=folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    try:
        while data := os.read(ours, 65536):
            written += data
    except OSError:  # Linux's end of file, once the last process has closed the terminal
        process.wait()
    os.close(ours)
    return left_by(written.decode().replace(f"{folder}/", "").replace(sys.prefix, ".venv"))


def left_by(written: str) -> list[str]:
    """Return the lines that stay: going up, or back to the start of a line, is taken to begin what replaces them."""
    lines = [""]
    for token in re.split(r"(\r\n|\r|\x1b\[\d*A|\x1b\[\??\d*[JKhl])", written):
        if token == "\r\n":
            lines.append("")
        elif token == "\r" or re.fullmatch(r"\x1b\[\d*[JK]", token):
            lines[-1] = ""
        elif up := re.fullmatch(r"\x1b\[(\d*)A", token):
            del lines[len(lines) - int(up[1] or 1) :]
        elif not token.startswith("\x1b[?"):
            lines[-1] += token
    return lines


def take(name: str, shot: Shot) -> None:
    """Run the command in a folder of its own, and draw what it leaves."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copytree(REPO / "examples", folder / "examples")
        shutil.copy(REPO / "tests" / "faults" / "sample_weighting.py", folder / "task.py")
        (folder / "train.py").write_text(SCRIPT)
        for command in shot.before:
            capture(command, folder)
        without_progress = dropwhile(lambda line: line.startswith("\x1b[2m"), capture(shot.command, folder))
        lines = map(Text.from_ansi, without_progress)
        prompt = Text(f"$ lockstep {shot.command}", style="bold green")
        draw([prompt, *lines], PICTURES / f"{name}.svg")


def draw(lines: Iterable[Text], file: Path) -> None:
    """Write lines of a terminal as an SVG, which takes nothing from the network."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(line, overflow="fold", highlight=False)
    page = console.export_svg(title="", unique_id=file.stem)
    page = re.sub(r"@font-face \{.*?\}\s*", "", page, flags=re.DOTALL)  # which come from the network
    write(file, page.replace("Fira Code,", ""))


def write(file: Path, text: str) -> None:
    """Write a picture, which must be small."""
    assert len(text) < MAX_BYTES, f"{file.name} has {len(text)} bytes: show fewer lines"
    file.write_text(text)
    print(f"{file.relative_to(REPO)}: {len(text) / 1000:.0f} kB")


# --- the live view, in the middle of a run with a slow rank ----------------------------------------------------------

SLOW_RANK, SLOW_S = 2, 0.03
AT_STEP = 150


class LastPicture(Subscriber):
    """Keeps the picture of one snapshot in the middle of the run."""

    def __init__(self) -> None:
        self.lines: list[Text] = []
        self._events: list[Event] = []

    def event(self, event: Event) -> None:
        """Keep the event for the picture."""
        self._events.append(event)

    def update(self, snapshot: Snapshot) -> None:
        """Keep the first picture after some steps."""
        if not self.lines and snapshot.step >= AT_STEP and len(snapshot.ranks) == snapshot.world_size:
            self.lines = picture(snapshot, self._events, width=WIDTH, height=HEIGHT)

    def log(self, text: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def train() -> list[Text]:
    """Train on each rank; return the lines of the picture on rank zero."""
    from lockstep.base.env import RankEnv

    rank = RankEnv.from_environ(os.environ).rank
    task, display = load_task(str(REPO / "examples" / "digits.py")), LastPicture()
    compute = task.loss

    def loss(model, batch):  # type: ignore[no-untyped-def]
        time.sleep(SLOW_S if rank == SLOW_RANK else 0.001)
        return compute(model, batch)

    object.__setattr__(task, "loss", loss)
    with patch("lockstep.telemetry.live_view.Display", lambda view, silent: display):
        lockstep.fit(task, strategy="ddp", steps=400, clip=1.0, eval_every=10_000)
    return display.lines


def live() -> None:
    """Train with a slow rank, and draw the view."""
    prompt = Text("$ lockstep train examples/digits.py --devices 4", style="bold green")
    draw([prompt, *lockstep.launch(train, devices=4, timeout_s=300.0)[0]], PICTURES / "live.svg")


def main() -> None:
    """Take the pictures that are named, or all."""
    takers: dict[str, Callable[[], None]] = {"live": live}
    takers |= {name: (lambda name=name, shot=shot: take(name, shot)) for name, shot in SHOTS.items()}
    for name in sys.argv[1:] or takers:
        takers[name]()


if __name__ == "__main__":
    main()
