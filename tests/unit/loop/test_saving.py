"""`lockstep.save` and `lockstep.load`: round trips, interrupted saves, damage and hostile files."""

import contextlib
import hashlib
import io
import json
import math
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import nn

import lockstep
from lockstep.checkpoints import checkpoint
from lockstep.checkpoints.checkpoint import lock_folder
from lockstep.checkpoints.checkpoint_storage import FORMAT
from lockstep.errors import CheckpointError

# --- a process that ends in the middle of a save: nothing reaches the disk from some byte or operation on

OPERATIONS = ("mkdir", "replace", "unlink", "rmdir")


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it, and clearing up does not work either."""


class Killer:
    """Counts what reaches the disk, a byte or an operation at a time, and lets nothing through once that is enough."""

    def __init__(self, monkeypatch, limit):
        self.count, self.has_killed = 0, False
        self._limit, self._lock = limit, threading.Lock()
        real = {name: getattr(os, name) for name in OPERATIONS}
        spend, write, open_file = self._spend, self._write, io.open

        def operation(name):
            def run(*args, **kwargs):
                spend(1)
                return real[name](*args, **kwargs)

            return run

        class Counted(io.FileIO):
            def write(self, piece):
                return write(super().write, piece)

        def create(path, mode="r", *args, **kwargs):
            if not set(mode) & set("wx"):
                return open_file(path, mode, *args, **kwargs)
            spend(1)
            return Counted(path, mode.replace("b", ""))

        for name in OPERATIONS:
            monkeypatch.setattr(os, name, operation(name))
        monkeypatch.setattr(io, "open", create)
        # As this changes nothing that the process can see, it need not be counted, nor cost time.
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def _write(self, write, piece):
        with self._lock:
            left = self._limit - self.count
            self.count += min(left, len(piece))
        if len(piece) > left:
            write(piece[:left])
            self._kill()
        return write(piece)

    def _spend(self, number):
        with self._lock:
            has_left = self.count + number <= self._limit
            self.count = self.count + number if has_left else self._limit
        if not has_left:
            self._kill()

    def _kill(self):
        self.has_killed = True
        raise Killed


def kill_everywhere(monkeypatch, original, scratch, save, check, stride=1):
    """Save into a copy of the folder ``original``, killed at each byte and operation; ``check(copy)`` after each.

    Returns how often it was killed, and what the checks returned, the last after a save that came through. With a
    ``stride``, only at each so many.
    """
    found, limit = [], 0
    while True:
        copy = scratch / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(original, copy)
        with monkeypatch.context() as patch:
            killer = Killer(patch, limit)
            with contextlib.suppress(Killed, CheckpointError):
                save(copy)
        found.append(check(copy))
        if not killer.has_killed:
            return len(found) - 1, found
        limit += stride


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
    lockstep.save(tmp_path / "c", step=1, tensor=torch.ones(2))
    for stride in (7, 29):  # the second time over what a killed save has left
        num_points, found = kill_everywhere(
            monkeypatch,
            tmp_path / "c",
            tmp_path,
            lambda folder: lockstep.save(folder, step=2, tensor=torch.ones(2)),
            lambda folder: lockstep.load(folder)["step"],
            stride,
        )
        assert num_points > 500 / stride
        changes = found.index(2)
        assert found == [1] * changes + [2] * (num_points + 1 - changes)
        shutil.rmtree(tmp_path / "c")
        with monkeypatch.context() as patch, pytest.raises(Killed):
            lockstep.save(tmp_path / "c", step=1)
            Killer(patch, 300)
            lockstep.save(tmp_path / "c", step=2)
        assert len(files(tmp_path / "c")) > 4
    lockstep.save(tmp_path / "c", step=2)
    assert len(files(tmp_path / "c")) == 4  # what the killed one left is gone


FORKS = """
import os, random, signal, sys, time
import torch, lockstep
path, last = sys.argv[1], 0
lockstep.save(path, step=0, tensor=torch.zeros(1000))
reading, writing = os.pipe()
for round in range(6):
    child = os.fork()
    if child == 0:
        step = last
        while True:
            step += 1
            lockstep.save(path, step=step, tensor=torch.full([1000], float(step)))
            os.write(writing, b"1")
    os.read(reading, 1)
    time.sleep(random.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.set_blocking(reading, False)
    try:
        os.read(reading, 1000)
    except BlockingIOError:
        pass
    os.set_blocking(reading, True)
    state = lockstep.load(path)
    assert state["step"] >= last and state["tensor"].unique().tolist() == [state["step"]], state
    last = state["step"]
print(last)
"""


@pytest.mark.soak
def test_processes_that_are_killed_leave_a_whole_one(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path / "c")], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 6


def test_full_disk(tmp_path, monkeypatch):
    lockstep.save(tmp_path, step=1)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    message = f"Cannot write the checkpoint {tmp_path}: {{}}.\nEarlier checkpoints were not changed."
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 30))
        with pytest.raises(CheckpointError) as caught:
            lockstep.save(tmp_path, step=2)
    assert str(caught.value) == (
        f"{message.format('No space left on device')} It needs 0 MiB; the disk has 3.0 GiB free.\n"
        "Make room on the disk, or write to another one."
    )
    assert lockstep.load(tmp_path) == {"step": 1}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))  # the kernel's own refusal, in the middle of a file
    try:
        with pytest.raises(CheckpointError) as caught:
            lockstep.save(tmp_path, step=2, tensor=torch.ones(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == message.format("File too large")
    assert lockstep.load(tmp_path) == {"step": 1}
    lockstep.save(tmp_path, step=3)
    assert len(files(tmp_path)) == 4


def test_a_manifest_that_cannot_be_read_now_keeps_its_files(tmp_path, monkeypatch):
    lockstep.save(tmp_path, step=1)
    before, manifest = files(tmp_path), (tmp_path / "manifest.json").read_bytes()
    sign(tmp_path, json.dumps({"format": "lockstep checkpoint 3", "files": {}, "about": {}}))  # of a later version
    with monkeypatch.context() as patch, pytest.raises(Killed):
        Killer(patch, 200)
        lockstep.save(tmp_path, step=2)
    assert set(before) < set(files(tmp_path))
    (tmp_path / "manifest.json").write_bytes(manifest)
    assert lockstep.load(tmp_path) == {"step": 1}


def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path, monkeypatch):
    lockstep.save(tmp_path, step=1)
    real, saves = checkpoint.storage.verify_files, [2, 3]

    def verify(folder, manifest, **share):
        if saves:
            lockstep.save(folder, step=saves.pop(0))
        real(folder, manifest, **share)

    monkeypatch.setattr(checkpoint, "_RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(checkpoint.storage, "verify_files", verify)
    assert lockstep.load(tmp_path) == {"step": 3}
    saves = [4] * 9
    with pytest.raises(CheckpointError) as caught:
        lockstep.load(tmp_path)
    assert str(caught.value) == f"The checkpoint {tmp_path} was replaced while it was read.\nTry again."


def test_every_flipped_byte_and_lost_file_is_noticed(tmp_path):
    lockstep.save(tmp_path, step=1, tensor=torch.arange(3))
    for path in [path for path in tmp_path.iterdir() if path.name != "lock"]:
        whole = path.read_bytes()
        for place in range(0, len(whole) - (path.name == "manifest.json"), 5):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(CheckpointError, match=f"damaged: {path.name} does not match its checksum"):
                lockstep.load(tmp_path)
        path.write_bytes(whole[:-2])
        with pytest.raises(CheckpointError, match=f"damaged: {path.name}"):
            lockstep.load(tmp_path)
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{path.name} is missing|There is no checkpoint"):
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


@pytest.mark.parametrize("name", ["0", "state"])
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
    sign(tmp_path / "c", json.dumps({"format": FORMAT, "files": {"state": entry}, "about": {}}))
    with pytest.raises(CheckpointError, match=r"cannot be read: ValueError: it names the file \.\./secret"):
        lockstep.load(tmp_path / "c")


def test_what_cannot_be_held_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        lockstep.save(tmp_path / "c", good=1, bad=[object()])
    assert str(caught.value) == (
        f"The checkpoint {tmp_path / 'c'} cannot contain builtins.object at state.bad.0.\n"
        "Pass numbers, strings, bytes, None, dense tensors, and lists, tuples and dicts of them."
    )
    assert files(tmp_path) == []


LOCKED = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
input()
"""


def test_two_writers_at_once(tmp_path):
    lockstep.save(tmp_path, step=1)
    message = f"Another process is writing the checkpoint {tmp_path}.\nUse a separate folder for each run."
    with lock_folder(tmp_path), pytest.raises(CheckpointError) as caught:
        lockstep.save(tmp_path, step=2)
    assert str(caught.value) == message
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", LOCKED, tmp_path / "lock"], stdin=pipe, stdout=pipe) as other:
        other.stdout.readline()
        with pytest.raises(CheckpointError) as caught:
            lockstep.save(tmp_path, step=2)
        other.communicate(b"\n", timeout=10)
    assert str(caught.value) == message
    assert lockstep.load(tmp_path) == {"step": 1}
    lockstep.save(tmp_path, step=2)


def test_complex_numbers_bytes_and_keys_of_all_kinds(tmp_path):
    state = {
        "bytes": b"\x00\xff",
        "complex": complex(1, -math.inf),
        "tensors": [
            torch.tensor([1 + 2j, 3 - 1j]),
            torch.tensor([[1 + 2j]]).conj(),
            torch.tensor(3, dtype=torch.uint64),
            torch.zeros(0, 3),
            torch.tensor([1.5, -2.0]).to(torch.float8_e5m2),
        ],
        "keys": {1: 1, "1": 2, 2.5: 3, None: 4, False: 5, "\ud800": torch.ones(1)},
    }
    lockstep.save(tmp_path, **state)
    found = lockstep.load(tmp_path)
    float8, same_float8 = (each["tensors"].pop().to(torch.float32) for each in (state, found))
    assert torch.equal(float8, same_float8)
    assert same(found, state)
    for value, text in (
        ({"key": {(1, "a"): 1}}, "tuple as a key of state.key"),
        ({"sparse": torch.eye(2).to_sparse()}, "Tensor of layout torch.sparse_coo at state.sparse"),
        ({"x": {"deep": [torch.ones(1, device="meta")]}}, "tensor of torch.float32 on meta at state.x.deep.0"),
    ):
        with pytest.raises(CheckpointError, match=f"cannot contain {re.escape(text)}"):
            lockstep.save(tmp_path, **value)
    assert lockstep.load(tmp_path).keys() == state.keys()


def compiled(model):
    return torch.compile(model, backend="eager")


def test_compiled_models_have_the_names_of_bare_ones(tmp_path):
    model, _ = trained()
    part = nn.Sequential(*model)
    part[0] = compiled(part[0])
    assert "0._orig_mod.weight" in part.state_dict()
    for number, given in enumerate((compiled(model), nn.DataParallel(compiled(model)), part)):
        lockstep.save(tmp_path / str(number), model=given)
        for into in (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), compiled(trained()[0])):
            with torch.no_grad():
                for parameter in into.parameters():
                    parameter.zero_()
            lockstep.load(tmp_path / str(number), model=into)
            assert all(torch.equal(*pair) for pair in zip(into.parameters(), model.parameters(), strict=True))
        compiled_inside = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        compiled_inside[2] = compiled(compiled_inside[2])
        lockstep.load(tmp_path / str(number), model=compiled_inside)
        assert torch.equal(compiled_inside[2].weight, model[2].weight)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    model, optimizer = trained()
    lockstep.save(tmp_path, model=model, optimizer=optimizer, step=1)

    def refuse(*_args, **_kwargs):
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    assert lockstep.load(tmp_path, model=model, optimizer=optimizer) == {"step": 1}
    assert not any(path.read_bytes().startswith(b"\x80") for path in tmp_path.iterdir())


def test_tensors_are_what_other_libraries_read(tmp_path):
    model, _ = trained()
    lockstep.save(tmp_path, model=model)
    (shard,) = tmp_path.glob("shard-00000-*.safetensors")
    found = safetensors.torch.load_file(shard)
    expected = {f"model.{name}": value for name, value in model.state_dict().items()}
    assert same(dict(sorted(found.items())), dict(sorted(expected.items())))


def test_a_tensor_of_which_chunks_are_missing_is_refused(tmp_path):
    lockstep.save(tmp_path, tensor=torch.arange(6.0))
    (state,) = tmp_path.glob("state-*.json")
    content = json.loads(state.read_text())
    content["tensors"]["state.tensor"]["chunks"][0][3] = [4]
    forge(tmp_path, "state", json.dumps(content).encode())
    with pytest.raises(CheckpointError, match=r"state\.tensor has chunks of 4 of its 6 elements"):
        lockstep.load(tmp_path)


def test_another_format_is_refused(tmp_path):
    lockstep.save(tmp_path, step=1)
    sign(tmp_path, json.dumps({"format": "lockstep checkpoint 1", "files": {}, "about": {}}))
    with pytest.raises(CheckpointError) as caught:
        lockstep.load(tmp_path)
    assert str(caught.value) == (
        f"The checkpoint {tmp_path} is damaged: manifest.json has the format 'lockstep checkpoint 1' of another "
        f"version of Lockstep, not '{FORMAT}'.\nLoad another one."
    )
    lockstep.save(tmp_path, step=2)
    assert lockstep.load(tmp_path) == {"step": 2}
