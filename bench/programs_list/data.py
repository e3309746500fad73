"""Tiny data for the programs, text of Python's library and noise. Each function writes below a program's folder."""

import argparse
import gzip
import json
import pickle
import struct
import textwrap
import wave
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from PIL import Image


def text(length: int = 20_000) -> str:
    """Return text that every Python has."""
    return (Path(argparse.__file__).read_text() + Path(textwrap.__file__).read_text())[:length]


def characters(root: Path) -> None:
    (root / "input.txt").write_text(text(4000) + "O God, O God!")


def tokens(root: Path) -> None:
    """Write what nanoGPT's prepare.py writes."""
    folder = root / "data" / "tiny"
    folder.mkdir(parents=True)
    for name in ("train", "val"):
        np.frombuffer(text().encode("ascii", "replace"), dtype=np.uint8).astype(np.uint16).tofile(
            folder / f"{name}.bin"
        )


def words(root: Path) -> None:
    """Write the files of a corpus as word_language_model reads them."""
    folder = root / "tiny"
    folder.mkdir()
    for name, length in (("train", 12_000), ("valid", 2500), ("test", 2500)):
        (folder / f"{name}.txt").write_text(text(length))


def pictures(root: Path, *, classes: int = 2, each: int = 4, size: int = 64) -> None:
    """Write a folder of pictures for each class, for training and for validation."""
    noise = np.random.default_rng(0)
    for part in ("train", "val"):
        for label in range(classes):
            folder = root / "tiny" / part / f"class{label}"
            folder.mkdir(parents=True)
            for index in range(each):
                pixels = noise.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).resize((size, size)).save(folder / f"{index}.png")


def digits(root: Path) -> None:
    """Write MNIST's files with few pictures of noise, where pytorch/examples looks for them."""
    folder = root.parent / "data" / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0)
    for name, count in (("train", 64), ("t10k", 32)):
        pixels = noise.integers(0, 256, (count, 28, 28), dtype=np.uint8).tobytes()
        labels = (np.arange(count) % 10).astype(np.uint8).tobytes()
        for kind, head, body in (
            ("images-idx3", struct.pack(">4i", 2051, count, 28, 28), pixels),
            ("labels-idx1", struct.pack(">2i", 2049, count), labels),
        ):
            (folder / f"{name}-{kind}-ubyte").write_bytes(head + body)
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + body))


def sounds(root: Path) -> None:
    """Write short sounds, their lists, and a small configuration, for HiFi-GAN."""
    folder = root / "tiny"
    folder.mkdir()
    noise = np.random.default_rng(0)
    for index in range(8):
        with wave.open(str(folder / f"{index}.wav"), "wb") as file:
            file.setparams((1, 2, 22050, 0, "NONE", ""))
            file.writeframes(noise.integers(-9000, 9000, 12000, dtype=np.int16).tobytes())
    (folder / "train.txt").write_text("\n".join(f"{index}|" for index in range(8)))
    (folder / "valid.txt").write_text("0|")
    config = json.loads((root / "config_v3.json").read_text())
    config |= {"batch_size": 2, "segment_size": 2048, "num_workers": 0, "upsample_initial_channel": 32}
    (folder / "config.json").write_text(json.dumps(config))


def short_text(root: Path) -> None:
    (root / "input.txt").write_text(text(1100))


def pictures_and_unet(root: Path) -> None:
    """Write pictures, and the configuration of a small UNet2DModel of diffusers."""
    pictures(root)
    folder = root / "tiny" / "unet"
    folder.mkdir()
    config = {
        "_class_name": "UNet2DModel",
        "sample_size": 16,
        "in_channels": 3,
        "out_channels": 3,
        "layers_per_block": 1,
        "block_out_channels": [8, 8],
        "norm_num_groups": 4,
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    }
    (folder / "config.json").write_text(json.dumps(config))


def small_pictures(root: Path) -> None:
    pictures(root, size=16)


def boxes(root: Path) -> None:
    """Write pictures with a box in each, their lists, and a small model, as yolov5 reads them."""
    noise = np.random.default_rng(0)
    for part in ("train", "val"):
        for kind in ("images", "labels"):
            (root / "tiny" / part / kind).mkdir(parents=True)
        for index in range(8):
            pixels = noise.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "tiny" / part / "images" / f"{index}.png")
            (root / "tiny" / part / "labels" / f"{index}.txt").write_text(f"{index % 2} 0.5 0.5 0.4 0.6\n")
    (root / "tiny" / "data.yaml").write_text("path: tiny\ntrain: train/images\nval: val/images\nnames: [a, b]\n")
    model = (root / "models" / "yolov5n.yaml").read_text()
    (root / "tiny" / "model.yaml").write_text(model.replace("width_multiple: 0.25", "width_multiple: 0.0625"))
    (root / "tiny" / "Ultralytics").mkdir()
    (root / "tiny" / "Ultralytics" / "Arial.ttf").touch()  # it is downloaded otherwise


def parquet(root: Path) -> None:
    """Write documents and a tokenizer of single bytes, as nanochat's scripts do."""
    folder = root / "tiny" / "base_data_climbmix"
    folder.mkdir(parents=True)
    lines = [line for line in text().splitlines() if len(line) > 10]
    for index in range(2):
        table = pyarrow.table({"text": lines[index::2]})
        pyarrow.parquet.write_table(table, folder / f"shard_{index:05d}.parquet", row_group_size=20)
    folder = root / "tiny" / "tokenizer"
    folder.mkdir()
    state = {
        "name": "bytes",
        "pat_str": r"\s+|\S+",
        "mergeable_ranks": {bytes([value]): value for value in range(256)},
        "special_tokens": {"<|bos|>": 256},
    }
    # A pickle of a tiktoken.Encoding, which need not be installed here: its class, made anew, with this state.
    begin, end = b"\x80\x02ctiktoken.core\nEncoding\n)\x81", b"b."
    (folder / "tokenizer.pkl").write_bytes(begin + pickle.dumps(state, 2)[2:-1] + end)
    torch.save(torch.tensor([1] * 256 + [0], dtype=torch.int32), folder / "token_bytes.pt")


def textures(root: Path) -> None:
    """Write pictures where super_resolution looks for BSDS300."""
    noise = np.random.default_rng(0)
    for part in ("train", "test"):
        folder = root / "dataset" / "BSDS300" / "images" / part
        folder.mkdir(parents=True)
        for index in range(7):
            pixels = noise.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((256, 256)).save(folder / f"{index}.png")


def waves(root: Path) -> None:
    """Write what time_sequence_prediction's generate_sine_wave.py writes, shorter."""
    shifts = np.random.default_rng(0).integers(-80, 80, (11, 1))
    torch.save(np.sin((np.arange(50) + shifts) / 20), root / "traindata.pt")
