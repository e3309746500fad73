"""`lockstep.save` and `lockstep.load`: round trips, interrupted saves, damage and hostile files."""

import hashlib
import json
import math
import os
import pickle

import pytest
import torch
from torch import nn

import lockstep
from lockstep.train.checkpoint import CheckpointError
from lockstep.train.checkpoints import folder as folders

pytestmark = pytest.mark.timeout(60)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("wrap", [nn.Sequential, nn.DataParallel], ids=["bare", "wrapped"])
def test_round_trip(tmp_path, wrap):
    model, optimizer = trained()
    extra = {"step": 3, "lr": 0.1, "most": math.inf, "by": {1: ("a", None, True), "1": [torch.get_rng_state()]}}
    given = nn.DataParallel(model) if wrap is nn.DataParallel else model
    lockstep.save(tmp_path / "c", model=given, optimizer=optimizer, **extra)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=7.0)
    found = lockstep.load(tmp_path / "c", model=other, optimizer=other_optimizer)
    assert same(found, extra)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(other_optimizer.state_dict(), optimizer.state_dict())


def test_killed_at_every_byte_leaves_the_one_before(tmp_path, monkeypatch):
    lockstep.save(tmp_path, step=1)
    real, written = folders._write, []
    monkeypatch.setattr(folders, "_write", lambda path, content: (real(path, content), written.append(len(content))))
    lockstep.save(tmp_path, step=1)
    total = sum(written)
    for limit in range(total):
        left = [limit]

        def stop(path, content, left=left):
            real(path, content[: left[0]])
            if len(content) > left[0]:
                raise KeyboardInterrupt
            left[0] -= len(content)

        monkeypatch.setattr(folders, "_write", stop)
        with pytest.raises(KeyboardInterrupt):
            lockstep.save(tmp_path, step=2)
        assert lockstep.load(tmp_path) == {"step": 1}
    monkeypatch.setattr(folders, "_write", real)
    lockstep.save(tmp_path, step=2)
    assert lockstep.load(tmp_path) == {"step": 2}
    assert len(files(tmp_path)) == 4  # what the killed ones left is gone


def test_full_disk(tmp_path, monkeypatch):
    lockstep.save(tmp_path, step=1)

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "_write", full)
    with pytest.raises(CheckpointError) as caught:
        lockstep.save(tmp_path, step=2)
    message = f"Cannot write the checkpoint {tmp_path}: No space left on device.\nThe one before it is as it was."
    assert str(caught.value) == message
    assert lockstep.load(tmp_path) == {"step": 1}


def test_every_flipped_byte_and_lost_file_is_noticed(tmp_path):
    lockstep.save(tmp_path, step=1, tensor=torch.arange(3))
    for path in [path for path in tmp_path.iterdir() if path.name != "lock"]:
        whole = path.read_bytes()
        for place in range(len(whole) - (path.name == "manifest.json")):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(CheckpointError, match=f"damaged: {path.name} does not match its checksum"):
                lockstep.load(tmp_path)
        path.write_bytes(whole[:-2])
        with pytest.raises(CheckpointError, match=f"damaged: {path.name}"):
            lockstep.load(tmp_path)
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{path.name} is not there|There is no checkpoint"):
            lockstep.load(tmp_path)
        path.write_bytes(whole)
    assert lockstep.load(tmp_path)["step"] == 1


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb",)


def forge(folder, name, content):
    """Write ``content`` in place of a file, with a manifest that vouches for it."""
    _, body = (folder / "manifest.json").read_text().split("\n", 1)
    manifest = json.loads(body)
    entry = manifest["files"][name]
    (folder / entry["file"]).write_bytes(content)
    entry |= {"bytes": len(content), "blake2b": hashlib.blake2b(content, digest_size=32).hexdigest()}
    sign(folder, json.dumps(manifest))


def sign(folder, body):
    checksum = hashlib.blake2b(body.encode(), digest_size=32).hexdigest()
    (folder / "manifest.json").write_text(f"{checksum}\n{body}\n")


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize(
    "content", [pickle.dumps(Bomb()), b"\xff" * 7 + b"\x7f", b"[" * 100_000, b'{"a":{"tensor":1}}']
)
def test_hostile_content_is_refused(tmp_path, monkeypatch, name, content):
    monkeypatch.chdir(tmp_path)
    lockstep.save("c", step=1)
    forge(tmp_path / "c", name, content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        lockstep.load("c")
    assert files(tmp_path) == ["c"]


def test_names_out_of_the_folder_are_refused(tmp_path):
    lockstep.save(tmp_path / "c", step=1)
    entry = {"file": "../secret", "bytes": 1, "blake2b": ""}
    sign(tmp_path / "c", json.dumps({"format": folders.FORMAT, "files": {"state.json": entry}}))
    with pytest.raises(CheckpointError, match=r"manifest\.json is not of the form that Lockstep writes"):
        lockstep.load(tmp_path / "c")


def test_what_cannot_be_held_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        lockstep.save(tmp_path / "c", good=1, bad=[object()])
    assert str(caught.value) == (
        f"The checkpoint {tmp_path / 'c'} cannot hold builtins.object at state.bad.0.\n"
        "Give numbers, strings, None, dense tensors, and lists, tuples and dicts of them."
    )
    assert files(tmp_path) == []


def test_two_writers_at_once(tmp_path):
    lockstep.save(tmp_path, step=1)
    with folders._locked(tmp_path), pytest.raises(CheckpointError) as caught:
        lockstep.save(tmp_path, step=2)
    assert str(caught.value) == (
        f"Another process is writing the checkpoint {tmp_path}.\nGive each run a folder of its own."
    )
    assert lockstep.load(tmp_path) == {"step": 1}
