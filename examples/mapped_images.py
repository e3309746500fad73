"""Train on augmented images from a memory-mapped file that may be larger than memory; the script makes the file.

python examples/mapped_images.py --images 8192                # 100 MB, in seconds; 4000000 images are 49 GB
lockstep train examples/mapped_images.py --devices 2 --workers 2
"""

import argparse
import os
from functools import cache
from pathlib import Path

import numpy as np
import torch
from images import loss, network
from numpy.lib.format import open_memmap
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep

FILE = Path(os.environ.get("MAPPED_IMAGES", "runs/images.npy"))
SIZE, PART = 64, 1024
SHAPES = ("disc", "ring", "square", "diamond", "stripes")
RECORD = np.dtype([("pixels", np.uint8, (3, SIZE, SIZE)), ("label", np.int64)])  # of one image: one read


def make(num_images: int) -> None:
    """Write the file: shapes of random place, size and colours under noise; a few MB of memory at a time."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    file = open_memmap(partial := f"{FILE}.partial", mode="w+", dtype=RECORD, shape=(num_images,))
    for start in range(0, num_images, PART):
        random = np.random.default_rng(start)
        part = file[start : start + PART]
        size = (len(part), 1, 1)
        y, x = np.mgrid[:SIZE, :SIZE][:, None] - random.uniform(20, 44, (2, *size))
        radius, label = random.uniform(8, 20, size), random.integers(len(SHAPES), size=size)
        distance, square, diamond = np.hypot(x, y), np.maximum(abs(x), abs(y)), abs(x) + abs(y)
        stripes, ring = (square < radius) & (y.astype(int) % 6 < 3), abs(distance - radius) < 3
        inside = np.choose(label, [distance < radius, ring, square < radius, diamond < radius, stripes])
        front, back = random.uniform(0, 255, (2, len(part), 3, 1, 1)).astype(np.float32)
        noise = 20 * random.standard_normal((len(part), 3, SIZE, SIZE), np.float32)
        part["pixels"], part["label"] = (np.where(inside[:, None], front, back) + noise).clip(0, 255), label.ravel()
    os.replace(partial, FILE)


@cache
def mapped(file: Path) -> np.ndarray:
    """Return the records. Pages are read when they are touched, and the system drops them when memory is short."""
    return np.load(file, mmap_mode="r")  # once in each process: a pickled map would be the whole file


class Images(Dataset[tuple[Tensor, int]]):
    """Images (3, SIZE, SIZE) from -1 to 1 and their classes; in training each is augmented."""

    def __init__(self, *, train: bool) -> None:
        num_test = min(512, len(mapped(FILE)) // 8)
        self.train, self.numbers = train, range(len(mapped(FILE)))[num_test:] if train else range(num_test)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Read one image; ranks and workers do not change what is drawn for it in an epoch."""
        pixels, label = mapped(FILE)[self.numbers[index]]
        image = torch.from_numpy(pixels.astype(np.float32)) / 127.5 - 1
        return (augmented(image) if self.train else image), int(label)


def augmented(image: Tensor) -> Tensor:
    """Return the image shifted, mirrored or not, and with other brightness and contrast."""
    top, left = torch.randint(9, (2,)).tolist()
    image = F.pad(image[None], (4, 4, 4, 4), mode="reflect")[0, :, top : top + SIZE, left : left + SIZE]
    image = image.flip(2) if torch.rand(()) < 0.5 else image
    return image * (0.7 + 0.6 * torch.rand(3, 1, 1)) + 0.2 * torch.randn(3, 1, 1)


def task() -> lockstep.Task:
    """Return the task for the file."""
    if not FILE.exists():
        raise lockstep.errors.ConfigurationError(f"{FILE} does not exist.\nRun: python {__file__} --images 8192")
    return lockstep.Task(
        name="mapped_images",
        model=lambda: network(len(SHAPES), None),
        dataset=lambda: Images(train=True),
        eval_dataset=lambda: Images(train=False),
        loss=loss,
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(dim=1) == batch[1]},
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
        global_batch_size=64,
        drop_last=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=8192, metavar="N", help="12 KB each")
    make(parser.parse_args().images)
