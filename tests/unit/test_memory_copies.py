"""A copy of a run's state in memory: whole or none, damage is seen, and hosts without room or launcher say so."""

import os
from pathlib import Path

import pytest
import torch

from lockstep.errors import CheckpointError, ConfigurationError
from lockstep.launcher import reaper
from lockstep.train import memory_copies
from lockstep.train.checkpoints import slot as slots
from lockstep.train.checkpoints.slot import Slot, parts_in, read_copy, read_mark


def parts(value):
    """Return a state with dtypes of all widths, a count and a text."""
    tensors = {"w": torch.full((3, 5), value), "half": torch.full((3,), value, dtype=torch.bfloat16)}
    return {"model": {**tensors, "flag": torch.tensor(True), "empty": torch.empty(0)}, "state": {"num_steps_done": 4}}


def nothing(num_bytes):
    """Find that there is room."""


def written(path, value, step):
    slot = Slot(path, nothing)
    slot.take(parts(value), step)()
    return slot


def test_a_copy_comes_back_and_the_next_one_takes_the_same_memory(tmp_path):
    slot = written(tmp_path / "copy", 1.5, 4)
    inode = slot.path.stat().st_ino
    slot.take(parts(2.5), 5)()
    slot.close()
    mark = read_mark(slot.path)
    found = parts_in(read_copy(slot.path, mark), mark)
    assert (mark.step, slot.path.stat().st_ino, slot.path.stat().st_mode & 0o777) == (5, inode, 0o600)
    assert found["state"] == {"num_steps_done": 4}
    expected = parts(2.5)["model"]
    assert found["model"].keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found["model"][name], tensor)
        assert found["model"][name].dtype == tensor.dtype


def test_a_copy_that_grows_gets_a_larger_file(tmp_path):
    slot = written(tmp_path / "copy", 1.5, 4)
    asked = []
    slot._make_room = asked.append
    large = {"model": {"w": torch.arange(20_000.0)}, "state": {}}
    slot.take(large, 5)()
    mark = read_mark(slot.path)
    assert asked == [slot.path.stat().st_size]
    assert torch.equal(parts_in(read_copy(slot.path, mark), mark)["model"]["w"], torch.arange(20_000.0))


def test_a_process_that_ends_while_it_copies_leaves_no_copy_rather_than_half_of_one(tmp_path, monkeypatch):
    slot = written(tmp_path / "copy", 1.5, 4)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(slots, "copy_tensors", killed)
    with pytest.raises(KeyboardInterrupt):
        slot.take(parts(2.5), 5)
    assert read_mark(slot.path) is None
    monkeypatch.undo()
    slot.take(parts(2.5), 5)  # all is copied, but not what makes it count
    assert read_mark(slot.path) is None


@pytest.mark.parametrize("place", [0, 10, 70, 4096 + 3, 4096 + 300, 4096 + 420])
def test_any_flipped_bit_is_seen(tmp_path, place):
    path = written(tmp_path / "copy", 1.5, 4).path
    mark = read_mark(path)
    assert mark.num_bytes > 430
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    if place < 4096:
        assert read_mark(path) is None
    else:
        assert read_mark(path) == mark
        with pytest.raises(CheckpointError) as found:
            read_copy(path, mark)
        assert str(found.value) == "does not match its checksum"


def test_a_file_that_was_cut_off_is_seen(tmp_path):
    path = written(tmp_path / "copy", 1.5, 4).path
    mark = read_mark(path)
    os.truncate(path, 4096 + 40)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        read_copy(path, mark)
    path.unlink()
    assert read_mark(path) is None


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Stand for a launcher: its folder, a file system in memory, and a process that has not done any run yet."""
    (tmp_path / "lockstep-run").mkdir()
    monkeypatch.setenv("LOCKSTEP_RUN_DIR", str(tmp_path / "lockstep-run"))
    monkeypatch.setattr(reaper, "MEMORY", str(tmp_path / "memory"))
    monkeypatch.setattr(memory_copies, "MEMORY", str(tmp_path / "memory"))
    monkeypatch.setattr(memory_copies.os.path, "ismount", lambda path: path == str(tmp_path / "memory"))
    monkeypatch.setattr(memory_copies, "_numbers", iter(range(9)))
    (tmp_path / "memory").mkdir()
    return tmp_path


def test_each_run_of_a_process_has_a_folder_until_the_next_one_and_the_guardian_removes_all(launcher):
    first = memory_copies.claim_folder()
    assert first == launcher / "memory" / "lockstep-run.memory" / "0"
    assert first.parent.stat().st_mode & 0o777 == 0o700
    later = first.parent / "2"
    later.mkdir()
    assert memory_copies.claim_folder() == first.parent / "1"
    assert not first.exists()
    assert later.exists()  # of this process before it was started again: it comes to it
    reaper.remove_folders(str(launcher / "lockstep-run"))
    assert sorted(path.name for path in launcher.iterdir()) == ["memory"]
    assert list((launcher / "memory").iterdir()) == []


def test_somebody_elses_folder_is_not_used(launcher):
    (launcher / "elsewhere").mkdir()
    link = Path(reaper.memory_of(str(launcher / "lockstep-run")))
    link.symlink_to(launcher / "elsewhere")
    with pytest.raises(ConfigurationError) as found:
        memory_copies.claim_folder()
    assert str(found.value) == (
        f"Cannot make the folder {link} for memory_checkpoint_every: it belongs to somebody else.\n"
        "Check its permissions."
    )
    assert list((launcher / "elsewhere").iterdir()) == []


def test_without_a_launcher_or_memory_it_is_said_what_to_do(launcher, monkeypatch):
    monkeypatch.setattr(memory_copies.os.path, "ismount", lambda _: False)
    monkeypatch.setattr(memory_copies.socket, "gethostname", lambda: "host7")
    with pytest.raises(ConfigurationError) as found:
        memory_copies.claim_folder()
    assert str(found.value) == (
        f"memory_checkpoint_every needs a file system in memory, and there is none at {launcher / 'memory'} on host7.\n"
        "Mount a tmpfs there, or use checkpoints on disk instead."
    )
    monkeypatch.delenv("LOCKSTEP_RUN_DIR")
    with pytest.raises(ConfigurationError) as found:
        memory_copies.claim_folder()
    assert str(found.value) == (
        "memory_checkpoint_every keeps copies of the state in memory until ranks are started again, and nobody "
        "would start these again.\nUse lockstep train or lockstep run with --max-restarts N, or leave it out."
    )
