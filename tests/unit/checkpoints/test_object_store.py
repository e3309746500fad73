"""Checkpoints in object stores: saves that are killed, leases, a store that does not answer, and URLs."""

import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import lockstep
from lockstep.checkpoints import checkpoint, object_store
from lockstep.checkpoints.checkpoint import Checkpoints
from lockstep.checkpoints.object_store import Lease, place_of
from lockstep.errors import CheckpointError, ConfigurationError
from lockstep.train.settings import FitSettings
from tests.object_store import folder_store
from tests.unit.checkpoints.test_checkpoint import load, names, save, state_of
from tests.unit.loop.test_saving import Killed

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def world():
    with lockstep.init(device="cpu") as world:
        yield world


@pytest.fixture
def place():
    """Give an empty place in memory."""
    MemoryFileSystem.store.clear()
    return place_of("memory://bucket/run")


def content():
    return {name: file.getvalue() for name, file in MemoryFileSystem.store.items()}


def fill(objects):
    MemoryFileSystem.store.clear()
    for name, value in objects.items():
        MemoryFile(MemoryFileSystem(), name, value).commit()


class KillingStore(MemoryFileSystem):
    """A store whose process ends at some request; a request that makes an object may end in the middle of it."""

    limit, count = 0, 0
    cachable = False

    def _spend(self):
        if self.count >= self.limit:
            raise Killed
        self.count += 1

    def _open(self, path, mode="rb", **how):
        if mode != "rb":
            self._spend()
        return super()._open(path, mode, **how)

    def rm_file(self, path):
        self._spend()
        super().rm_file(path)


def killed_save(world, place, step, limit):
    """Save, until so many requests were made; return whether that was before the end."""
    store = KillingStore()
    store.limit = limit
    with (
        contextlib.suppress(Killed, CheckpointError),
        Checkpoints(replace(place, store=store), world, keep=1, blocking=True) as checkpoints,
    ):
        checkpoints.save(state_of(step), step=step)
    checkpoint._held.clear()  # as the end of the process would, and the time that goes by
    for path in place.iterdir():
        if path.name.startswith("lock"):
            path.unlink()
    return store.count == limit


def test_killed_at_every_request_a_whole_one_is_left(place, world):
    """With one that is there, and then also with what a killed save of the same step has left."""
    save(world, place, 1)
    for _ in range(2):
        fill_before = content()
        found, limit, was_killed = [], 0, True
        while was_killed:
            fill(fill_before)
            was_killed = killed_save(world, place, 2, limit)
            found.append((*load(world, place), names(place)))
            limit += 1
        assert limit > 8
        changes = [step for step, *_ in found].index(2)
        assert [each[:2] for each in found] == [(1, [])] * changes + [(2, [])] * (limit - changes)
        assert found[-1][2] == ["step-0000000002"]
        assert len(names(place / "step-0000000002")) == 3
        fill(fill_before)
        killed_save(world, place, 2, 4)  # the lease, in the place of the one before, the shard, and its record
        assert names(place / "step-0000000002")


def test_a_damaged_one_is_passed_over_and_named(place, world):
    save(world, place, 1, 2)
    shard = next(path for path in (place / "step-0000000002").iterdir() if path.name.startswith("shard"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    assert load(world, place) == (1, [f"step-0000000002: {shard.name} does not match its checksum"])
    shard.unlink()
    assert load(world, place) == (1, [f"step-0000000002: {shard.name} is missing"])


def test_a_store_that_does_not_answer_is_no_damage(place, world, monkeypatch):
    save(world, place, 1, 2)

    def fail(self, path, *args, **kwargs):
        if "step" in path:
            raise ConnectionError("connection reset")
        return open_object(self, path, *args, **kwargs)

    open_object = MemoryFileSystem._open
    text = (
        f"The object store does not give {place}/step-0000000001/manifest.json: ConnectionError: connection reset.\n"
        "Start again when the store responds."
    )
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "_open", fail)
        for act in (lambda: Checkpoints(place, world), lambda: lockstep.load(f"{place}/step-0000000001")):
            with pytest.raises(CheckpointError) as error:
                act()
            assert str(error.value) == text
    with Checkpoints(place, world) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, "_open", fail)
            with pytest.raises(CheckpointError) as error:
                checkpoints.load(required=False)
        assert (str(error.value), checkpoints.passed_over) == (text.replace("0001/", "0002/"), [])
    assert load(world, place) == (2, [])


def test_tensors_come_back_of_any_type_and_size(place, monkeypatch):
    monkeypatch.setattr("lockstep.checkpoints.checkpoint_storage._READ_BYTES", 64)
    dtypes = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.uint16, torch.bool]
    model = torch.nn.Linear(7, 11)
    state = {str(dtype): (torch.arange(60) % 2).view(3, 4, 5).to(dtype) for dtype in dtypes}
    state |= {"none": torch.ones(0, 3), "number": torch.tensor(3.0)}
    lockstep.save(str(place), model=model, **state)
    other = torch.nn.Linear(7, 11)
    found = lockstep.load(str(place), model=other)
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert found[name].tolist() == value.tolist() if "float8" not in name else found[name].float().sum() == 30
    assert torch.equal(other.weight, model.weight)


# --- leases ---


@pytest.fixture
def quick(monkeypatch):
    """Have leases end after a second without a renewal."""
    monkeypatch.setattr(object_store, "RENEW_S", 0.1)
    monkeypatch.setattr(object_store, "LEASE_S", 1.0)


def test_two_jobs_do_not_write_one_place(place, world, quick):
    with Checkpoints(place, world):
        for lease in (Lease(place), Lease(place)):
            began_at = time.monotonic()
            assert not lease.take()
            assert time.monotonic() - began_at < 0.9, "it saw a renewal"
    lease = Lease(place)
    began_at = time.monotonic()
    assert lease.take(), "it was given up"
    assert time.monotonic() - began_at < 0.5
    lease.close()
    assert names(place) == []
    assert [path.name for path in place.iterdir()] == ["lock-0000000002"]


def test_of_several_that_want_it_one_gets_it(place, quick):
    leases, taken = [Lease(place) for _ in range(8)], []
    threads = [threading.Thread(target=lambda lease=lease: taken.append(lease.take())) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [False] * 7 + [True]
    for lease in leases:
        lease._closed.set()


def test_a_holder_that_stood_still_loses_it_and_makes_no_checkpoint(place, world, quick, monkeypatch):
    save(world, place, 1)
    with Checkpoints(place, world) as checkpoints:
        monkeypatch.setattr(Lease, "_renew", lambda self: None)  # for those that begin from now on
        checkpoints._check_lock.__self__._closed.set()  # it stands still
        other = Lease(place)
        began_at = time.monotonic()
        assert other.take()
        assert time.monotonic() - began_at >= 1.0
        checkpoints.save(state_of(2), step=2)
        with pytest.raises(CheckpointError) as error:
            checkpoints.finish()
    assert str(error.value) == (
        f"Another process has taken over the checkpoint {place}, because this process had not renewed its lease for "
        "1 s.\nUse a separate folder for each run."
    )
    other.check()
    other.close()
    assert load(world, place) == (1, [])


def test_a_lease_of_a_process_that_is_gone_is_free_at_once(tmp_path):
    place = place_of(folder_store(tmp_path))
    child = os.fork()
    if child == 0:
        has_it = Lease(place).take()
        os.kill(os.getpid(), signal.SIGKILL if has_it else signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    lease, began_at = Lease(place), time.monotonic()
    assert lease.take()
    assert time.monotonic() - began_at < 1.0
    lease.close()


# --- URLs ---


def test_what_is_in_an_object_store_and_what_is_not(tmp_path):
    assert place_of(f"file://{tmp_path}") == tmp_path
    assert place_of(str(tmp_path)) == tmp_path
    assert str(place_of("memory://bucket/run/")) == "memory://bucket/run"
    with pytest.raises(ConfigurationError) as error:
        place_of("nowhere://bucket/run")
    assert str(error.value) == (
        "nowhere://bucket/run is in an object store that cannot be used here: Protocol not known: nowhere.\n"
        "Install its package on every machine, such as s3fs for s3:// or gcsfs for gs://."
    )
    with pytest.raises(ConfigurationError) as error:
        place_of(Path("s3://bucket/run"))
    assert str(error.value) == (
        "s3:/bucket/run is a URL without its second slash, which pathlib.Path removes.\nGive a str."
    )


@pytest.mark.parametrize("name", ["run_dir", "export", "profile_dir"])
def test_only_checkpoints_can_be_in_an_object_store(name):
    FitSettings(checkpoint="s3://bucket/run")
    with pytest.raises(ConfigurationError) as error:
        FitSettings(**{name: "s3://bucket/run"})
    assert str(error.value) == (
        f"{name}='s3://bucket/run' is not allowed.\n"
        "Give a path on this machine: only checkpoints can be in an object store."
    )
