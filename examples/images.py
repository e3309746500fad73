"""Fine-tune an image classifier on your own folder, with a sub-folder of pictures for each class.

IMAGES=~/pictures lockstep train examples/images.py --devices 2 --workers 2 --export first.safetensors
IMAGES=~/others WEIGHTS=first.safetensors lockstep train examples/images.py --epochs 3
"""

import os
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep

SIZE = 64
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp"}


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Pictures and the number of their class; a fifth, picked by file name, is kept for the test."""

    def __init__(self, folder: Path, *, train: bool) -> None:
        self.train = train
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        files = [(path, label) for label, name in enumerate(self.classes) for path in sorted((folder / name).iterdir())]
        pictures = [item for item in files if item[0].suffix.lower() in SUFFIXES]
        self.items = [item for item in pictures if (zlib.crc32(item[0].name.encode()) % 5 > 0) == train]

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return a picture (3, SIZE, SIZE) from -1 to 1, in training mirrored at random, and its class."""
        path, label = self.items[index]
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB").resize((SIZE, SIZE)), dtype=np.float32)
        picture = torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1
        return (picture.flip(2) if self.train and torch.rand(()) < 0.5 else picture), label


class Residual(nn.Module):
    """Two convolutions beside a shortcut; halves the picture."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(num_in, num_out, 3, stride=2, padding=1), nn.BatchNorm2d(num_out)
        self.second, self.norm2 = nn.Conv2d(num_out, num_out, 3, padding=1), nn.BatchNorm2d(num_out)
        self.shortcut = nn.Conv2d(num_in, num_out, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of half the height and width."""
        return F.relu(self.shortcut(x) + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


def network(num_classes: int, weights: str | None) -> nn.Module:
    """Return the network, with what fits of ``weights``: of another data set's, all but the last layer."""
    widths = [3, 16, 32, 64, 128]
    body = [Residual(*pair) for pair in pairwise(widths)]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes))
    if weights:
        own = model.state_dict()
        fitting = {name: value for name, value in load_file(weights).items() if value.shape == own[name].shape}
        model.load_state_dict(fitting, strict=False)
    return model


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def task() -> lockstep.Task:
    """Return the task for the folder that the environment variable IMAGES names."""
    named = os.environ.get("IMAGES", "")
    folder = Path(named).expanduser()
    if not named or not folder.is_dir() or not ImageFolder(folder, train=True).items:
        found = f"IMAGES={named} is no folder of pictures" if named else "IMAGES is not set"
        advice = "Name a folder with a sub-folder of pictures for each class: IMAGES=~/pictures lockstep train ..."
        raise lockstep.errors.ConfigurationError(f"{found}.\n{advice}")
    classes = ImageFolder(folder, train=True).classes
    return lockstep.Task(
        name="images",
        model=lambda: network(len(classes), os.environ.get("WEIGHTS")),
        dataset=lambda: ImageFolder(folder, train=True),
        eval_dataset=lambda: ImageFolder(folder, train=False),
        loss=loss,
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(dim=1) == batch[1]},
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        global_batch_size=32,
        epochs=5,
    )
