"""The checkpoints of a run: whole or not there, the newest whole one is loaded, some are kept, written on the side."""

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import lockstep
from lockstep.checkpoints import checkpoint
from lockstep.checkpoints.best import Monitor
from lockstep.checkpoints.checkpoint import (
    Checkpoints,
    FoundCheckpoint,
    find_checkpoints,
    lock_folder,
)
from lockstep.checkpoints.checkpoint_storage import plan_slabs
from lockstep.checkpoints.model_state import read_tensors, whole_file
from lockstep.checkpoints.object_store import place_of
from lockstep.errors import CheckpointError
from tests.training import read_state
from tests.unit.loop.test_saving import kill_everywhere

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def world():
    with lockstep.init(device="cpu") as world:
        yield world


@pytest.fixture(params=["folder", "store"])
def place(request, tmp_path, monkeypatch):
    """Give a folder, and one in an object store."""
    if request.param == "folder":
        return tmp_path
    MemoryFileSystem.store.clear()
    # fsspec's lends the buffer, so a listing makes another thread's write fail at the same moment.
    monkeypatch.setattr(MemoryFile, "size", property(lambda file: len(file.getvalue())))
    return place_of("memory://bucket")


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(("lock", "best")))


def state_of(step):
    return {"model": {"weight": torch.full((4,), float(step))}, "optimizer": {"lr": 0.1}, "step": step}


def save(world, folder, *steps, **how):
    """Save one after the other, each to its end."""
    with Checkpoints(folder, world, **how) as checkpoints:
        for step in steps:
            checkpoints.save(state_of(step), step=step)
        checkpoints.finish()


def load(world, folder, **how):
    """Return the step of what is loaded, and what was passed over for it."""
    with Checkpoints(folder, world, **how) as checkpoints:
        state = read_tensors(checkpoints.load(required=False))
    if state is not None:
        assert state["model"]["weight"].tolist() == [float(state["step"])] * 4
        assert state["optimizer"] == {"lr": 0.1}
    return None if state is None else state["step"], checkpoints.passed_over


def test_a_file_is_there_in_whole_or_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write_half():
        with whole_file(path) as temporary:
            temporary.write_text("half of the new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert (names(tmp_path), path.read_text()) == (["file"], "old")
    with whole_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert (names(tmp_path), path.read_text()) == (["file"], "new")


def test_the_last_ones_are_kept_and_the_newest_is_loaded(place, world):
    folder = place / "made" / "here"
    assert load(world, folder) == (None, [])
    save(world, folder, 5, 10, 15)
    assert names(folder) == ["step-0000000010", "step-0000000015"]
    assert load(world, folder) == (15, [])
    save(world, folder, 20, 25, 30, keep=3)
    assert names(folder) == ["step-0000000020", "step-0000000025", "step-0000000030"]
    save(world, folder, 31, keep=1)
    assert names(folder) == ["step-0000000031"]
    assert lockstep.load(folder / "step-0000000031") == {"step": 31}
    assert read_state(folder / "step-0000000031")["optimizer"] == {"lr": 0.1}


def test_which_are_to_go():
    def found(step, loss=None, problem=None):
        metrics = {} if loss is None else {"loss": loss, "accuracy": -loss}
        return FoundCheckpoint(checkpoint.Path(f"step-{step}"), step, step, metrics, problem=problem)

    all_of_them = [found(6, problem="bad"), found(5), found(4, 0.3), found(3, 0.2), found(2, 0.1), found(1, 0.1)]

    def steps(**how):
        return [each.step for each in checkpoint.to_remove(all_of_them, **how)]

    loss = Monitor.of(True)
    assert steps(keep=2, best=None) == [3, 2, 1]
    assert steps(keep=2, best=loss) == [3, 2]
    assert steps(keep=3, best=loss) == [2], "of two equally good ones the older stays"
    assert steps(keep=3, best=Monitor.of("accuracy:max")) == [2]
    assert steps(keep=3, best=Monitor.of("accuracy:min")) == [2, 1], "it is among the newest"
    assert steps(keep=3, best=Monitor.of("another")) == [2, 1]
    assert steps(keep=9, best=None) == []
    assert steps(keep=1, best=None, damaged=[checkpoint.Path("step-5")]) == [3, 2, 1]


def test_a_start_keeps_as_many_as_a_save_does(place, world):
    with Checkpoints(place, world, keep=9) as checkpoints:
        for step, loss in ((1, 0.1), (2, 0.5), (3, 0.4), (4, 0.3)):
            checkpoints.save(state_of(step), step=step, metrics=None if loss is None else {"loss": loss})
        checkpoints.finish()
    newest = place / "step-0000000004"
    (shard,) = (path for path in newest.iterdir() if path.name.startswith("shard"))
    shard.unlink()
    damaged = (3, [f"step-0000000004: {shard.name} is missing"])
    assert load(world, place, keep=1, best=Monitor.of("loss")) == damaged
    assert names(place) == ["step-0000000001", "step-0000000003", "step-0000000004"], (
        "the best, the last whole, and newer"
    )
    assert load(world, place, keep=1) == damaged
    assert names(place) == ["step-0000000003", "step-0000000004"]
    assert load(world, place, keep=1, fresh=True) == (None, [])
    assert names(place) == ["step-0000000003", "step-0000000004"], "the last whole one, until there is a new one"


@pytest.fixture
def small_disk(tmp_path):
    """Give a folder on a disk of 20 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_no_dead_end(small_disk, world):
    def save_large(step, **how):
        with Checkpoints(small_disk / "kept", world, **how) as checkpoints:
            if step > 10:
                checkpoints.load(required=True)
            checkpoints.save({"model": {"weight": torch.zeros(6 * 2**18)}, "step": step}, step=step)
            checkpoints.finish()

    for step in (10, 20, 30):  # 6 MiB each
        save_large(step, keep=3)
    with pytest.raises(CheckpointError) as error:
        save_large(40, keep=3)
    path = small_disk / "kept"
    held = ", ".join(f"step-00000000{step} (6 MiB)" for step in (10, 20, 30))
    assert str(error.value) == (
        f"Cannot write the checkpoint {path}/step-0000000040: No space left on device.\n"
        f"Earlier checkpoints were not changed. It needs 6 MiB; the disk has 2 MiB free, and {path} holds {held}.\n"
        "Remove step-0000000010, step-0000000020, or keep fewer (--keep N): the next start removes the others first."
    )
    save_large(40, keep=1)
    assert names(path) == ["step-0000000040"]
    (small_disk / "other").write_bytes(bytes(12 * 2**20))
    with pytest.raises(CheckpointError, match=r"holds step-0000000040 .*\nMake room on the disk, or write to another"):
        save_large(50, keep=1)


def test_the_best_is_kept(place, world):
    with Checkpoints(place, world, keep=1, best=Monitor.of("loss")) as checkpoints:
        for step, loss in ((1, 0.5), (2, 0.3), (3, float("nan")), (4, None), (5, 0.4)):
            checkpoints.save(state_of(step), step=step, metrics=None if loss is None else {"loss": loss})
        checkpoints.finish()
    assert names(place) == ["step-0000000002", "step-0000000005"]
    assert json.loads((place / "best.json").read_bytes()) == {
        "checkpoint": "step-0000000002",
        "metric": "loss",
        "value": 0.3,
    }
    assert load(world, place) == (5, [])
    url = str(place)
    assert lockstep.load(url)["step"] == 5
    assert lockstep.load(url, best=True)["step"] == 2


def test_resuming_from_nothing_is_an_error_only_if_insisted_on(place, world):
    with Checkpoints(place, world) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.load(required=True)
    assert str(error.value) == (
        f"There is no checkpoint in {place} to resume from.\nName another folder, or omit resume."
    )


def test_a_fresh_run_removes_the_old_ones_once_it_has_one_of_its_own(place, world, monkeypatch):
    save(world, place, 50, 60)
    assert load(world, place, fresh=True) == (None, [])
    assert names(place) == ["step-0000000050", "step-0000000060"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_remove_checkpoint", lambda path: None)  # killed just before
        save(world, place, 1, fresh=True)
    assert load(world, place) == (1, []), "the newest is that of the last save, not that of most steps"
    save(world, place, 2, fresh=True)
    assert names(place) == ["step-0000000002"]
    old = names(place / "step-0000000002")
    save(world, place, 2, fresh=True)
    assert names(place) == ["step-0000000002"]
    new = names(place / "step-0000000002")
    assert len(new) == len(old) == 3
    assert set(new) & set(old) == {"manifest.json"}, "nothing of the old run is taken for the new one's"


def test_a_fresh_run_that_is_restarted_goes_on_from_what_it_has_saved_itself(place, world, monkeypatch):
    save(world, place, 50)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert load(world, place, fresh=True) == (None, []), "that of another job"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_remove_checkpoint", lambda path: None)  # killed just before
        save(world, place, 3, fresh=True)
    assert names(place) == ["step-0000000003", "step-0000000050"]
    assert load(world, place, fresh=True) == (3, [])
    save(world, place, 4, fresh=True)
    assert names(place) == ["step-0000000003", "step-0000000004"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert load(world, place, fresh=True) == (None, []), "the first start of a job begins anew"


def test_what_is_damaged_is_passed_over_and_named(tmp_path, world):
    save(world, tmp_path / "run", 1, 2, keep=3)
    newest = "step-0000000002"
    expected = {
        "shard": "{} does not match its checksum",
        "state": "{} does not match its checksum",
        "manifest": "manifest.json does not match its checksum",
    }
    for file in sorted((tmp_path / "run" / newest).iterdir()):
        why = expected[file.name[: file.name.index("." if file.name.startswith("manifest") else "-")]]
        why = f"{newest}: {why.format(file.name)}"
        size = file.stat().st_size
        for place in range(0, size - 1, 41):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(tmp_path / "run", copy)
            content = bytearray(file.read_bytes())
            content[place] ^= 1 << place % 8
            (copy / newest / file.name).write_bytes(content)
            assert load(world, copy) == (1, [why])
        (copy / newest / file.name).write_bytes(content[: size // 2])
        step, passed_over = load(world, copy)
        assert (step, len(passed_over)) == (1, 1)
        (copy / newest / file.name).unlink()
        assert load(world, copy) == (1, [f"{newest}: {file.name} is missing"])
        save(world, copy, 2, 3)  # takes its place, and goes on
        assert load(world, copy) == (3, [])
        assert names(copy) == ["step-0000000002", "step-0000000003"]


def test_if_none_is_whole_the_run_does_not_start_anew(tmp_path, world):
    save(world, tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / f"step-000000000{step}" / "manifest.json").unlink()
    with Checkpoints(tmp_path, world) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.load(required=False)
    assert str(error.value) == (
        f"All checkpoints in {tmp_path} are damaged.\n"
        "step-0000000002: manifest.json is missing\nstep-0000000001: manifest.json is missing\n"
        "Restore the files of one checkpoint, or start a new run with resume=False (--no-resume)."
    )
    save(world, tmp_path, 1, fresh=True)
    assert load(world, tmp_path) == (1, [])


def test_killed_at_every_byte_a_whole_one_is_left(tmp_path, world, monkeypatch):
    """With one that is there, and with one of the same step that is damaged and leftovers of another kill."""
    save(world, tmp_path / "run", 1)

    def killed_in(folder, step):
        with Checkpoints(folder, world, keep=1, blocking=True) as checkpoints:
            checkpoints.save(state_of(step), step=step)

    def loaded(folder):
        return load(world, folder)[0]

    num_points, found = kill_everywhere(
        monkeypatch, tmp_path / "run", tmp_path, lambda copy: killed_in(copy, 2), loaded, stride=23
    )
    assert num_points > 40
    changes = found.index(2)
    assert found == [1] * changes + [2] * (num_points + 1 - changes)

    save(world, tmp_path / "run", 2)
    (tmp_path / "run" / "step-0000000002" / "manifest.json").write_text("junk")
    (tmp_path / "run" / "step-0000000009").mkdir()
    (tmp_path / "run" / "step-0000000009" / f"shard-00000-{16 * '0'}.safetensors").write_text("half")

    def resumed(folder):
        with Checkpoints(folder, world, keep=1, blocking=True) as checkpoints:
            assert checkpoints.load(required=True)["step"] == 1
            checkpoints.save(state_of(2), step=2)

    num_points, found = kill_everywhere(monkeypatch, tmp_path / "run", tmp_path, resumed, loaded, stride=23)
    changes = found.index(2)
    assert found == [1] * changes + [2] * (num_points + 1 - changes)
    assert names(tmp_path / "copy") == ["step-0000000002"], "and nothing is left of the others"


def test_what_cannot_be_kept_is_told_to_all(tmp_path, world):
    with Checkpoints(tmp_path, world) as checkpoints:
        checkpoints.save({"model": {"bad": object()}}, step=1)
        assert checkpoints.failure
        with pytest.raises(CheckpointError) as error:
            checkpoints.agree()
    assert str(error.value) == (
        f"The checkpoint {tmp_path / 'step-0000000001'} cannot contain builtins.object at model.bad.\n"
        "Pass numbers, strings, bytes, None, dense tensors, and lists, tuples and dicts of them."
    )
    assert load(world, tmp_path) == (None, [])


@pytest.mark.parametrize("kind", ["full", "gone"])
def test_a_write_that_fails_is_told_to_all_and_leaves_the_one_before(tmp_path, world, monkeypatch, kind):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    folder, reason, advice = tmp_path / "run", "No space left on device", ""
    save(world, folder, 1)
    with Checkpoints(folder, world) as checkpoints:
        with monkeypatch.context() as patch:
            if kind == "full":
                patch.setattr(os, "fsync", full)
                patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 30))
                advice = (
                    f" It needs 0 MiB; the disk has 3.0 GiB free, and {folder} holds step-0000000001 (0 MiB).\n"
                    "Make room on the disk, or write to another one."
                )
            else:
                folder.rename(tmp_path / "elsewhere")
                reason = "No such file or directory"
            checkpoints.save(state_of(2), step=2)
            with pytest.raises(CheckpointError) as error:
                checkpoints.finish()
        assert checkpoints.failure
    assert str(error.value) == (
        f"Cannot write the checkpoint {folder / 'step-0000000002'}: {reason}.\n"
        f"Earlier checkpoints were not changed.{advice}"
    )
    if kind == "gone":
        (tmp_path / "elsewhere").rename(folder)
    assert load(world, folder) == (1, [])


def slow_commit(monkeypatch):
    """Have checkpoints wait for an event before they are made of their parts; return it, and the steps made."""
    go_on, made = threading.Event(), []
    commit = checkpoint.storage.commit

    def slow(*args):
        assert go_on.wait(10)
        commit(*args)
        made.append(args[-1]["step"])

    monkeypatch.setattr(checkpoint.storage, "commit", slow)
    return go_on, made


BLOCK = [768 * 2304, 2304, 768 * 768, 768, 768 * 3072, 3072, 3072 * 768, 768, 768, 768, 768, 768]
# GPT-2 with Adam in float32; layers just above a power of two; many small tensors.
SIZES_BYTES = {
    "gpt": ([4 * numel for numel in [50257 * 768, 1024 * 768, 768, 768, *BLOCK * 12]] * 3 + [4] * 148, 5, 1.003),
    "equal": ([9 * 2**20] * 53, 5, 1.040),
    "small": ([4] * 100_000, 3, 1.147),
    "one": ([2**20 + 4], 1, 2.0),
    "none": ([], 0, 1.0),
}


@pytest.mark.parametrize("name", SIZES_BYTES)
def test_pinned_memory_is_taken_in_a_few_slabs(name):
    """Each is a power of two, as the allocator rounds up to one."""
    sizes, most, factor = SIZES_BYTES[name]
    slabs, places = plan_slabs(sizes)
    assert len(slabs) <= most and all(size == 1 << size.bit_length() - 1 for size in slabs)
    needed = sum(max(64, size) for size in sizes)
    assert sum(slabs) <= factor * needed
    ends = [0] * len(slabs)
    for (slab, start), size in sorted(zip(places, sizes, strict=True)):
        assert start >= ends[slab] and start % 64 == 0
        ends[slab] = start + size
    assert all(end <= size for end, size in zip(ends, slabs, strict=True))


def test_the_step_waits_for_the_copy_only_and_the_next_save_for_the_one_before(place, world, monkeypatch):
    go_on, made = slow_commit(monkeypatch)
    state = state_of(1)
    with Checkpoints(place, world) as checkpoints:
        checkpoints.save(state, step=1)
        memory = checkpoints._stager._copies[0].data_ptr()
        state["model"]["weight"].fill_(7.0)  # as the next step would
        assert made == []
        threading.Timer(0.1, go_on.set).start()
        checkpoints.save(state_of(2), step=2)
        assert made[:1] == [1]
        assert checkpoints._stager._copies[0].data_ptr() == memory, "the same memory takes each copy"
        checkpoints.finish()
        assert made == [1, 2]
        assert find_checkpoints(place)[1].path == place / "step-0000000001"
    assert read_state(place / "step-0000000001")["model"]["weight"].tolist() == [1.0] * 4
    assert read_state(place / "step-0000000002")["model"]["weight"].tolist() == [2.0] * 4
    with Checkpoints(place, world, blocking=True) as checkpoints:
        checkpoints.save(state_of(3), step=3)
        assert made == [1, 2, 3]


def test_the_next_save_does_not_wait_for_a_part_that_could_not_be_written(tmp_path, world, monkeypatch):
    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr("lockstep.checkpoints.checkpoint_storage.write_shard", fail)
    with Checkpoints(tmp_path, world) as checkpoints:
        checkpoints.save(state_of(1), step=1)
        checkpoints.save(state_of(2), step=2)
        with pytest.raises(CheckpointError, match="the disk is gone"):
            checkpoints.agree()


def test_a_write_that_hangs_is_an_error_in_the_end(tmp_path, world, monkeypatch):
    go_on, _ = slow_commit(monkeypatch)
    monkeypatch.setattr("lockstep.checkpoints.checkpoint.WRITE_TIMEOUT_S", 0.2)
    with Checkpoints(tmp_path, world) as checkpoints:
        checkpoints.save(state_of(1), step=1)
        with pytest.raises(CheckpointError) as error:
            checkpoints.finish()
        go_on.set()
    assert str(error.value) == (
        f"The checkpoint {tmp_path / 'step-0000000001'} has not been written within 0.2 s.\n"
        "Check the disk or its network: it does not respond. Earlier checkpoints were not changed."
    )


def test_a_folder_has_one_run_at_a_time(tmp_path, world):
    with Checkpoints(tmp_path, world):
        with pytest.raises(CheckpointError) as error:
            Checkpoints(tmp_path, world)
        assert str(error.value) == (
            f"Another process is writing the checkpoint {tmp_path}.\nUse a separate folder for each run."
        )
    assert load(world, tmp_path) == (None, [])


def test_ranks_that_are_started_again_wait_for_the_folder(tmp_path, world, monkeypatch):
    lock = contextlib.ExitStack()
    lock.enter_context(lock_folder(tmp_path))
    threading.Timer(0.3, lock.close).start()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert load(world, tmp_path) == (None, [])


def test_a_folder_is_given_up_once_nothing_is_written_any_more(tmp_path, world, monkeypatch):
    go_on, made = slow_commit(monkeypatch)
    monkeypatch.setattr("lockstep.checkpoints.checkpoint.CTRL_C_TIMEOUT_S", 1.0)
    with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path, world) as checkpoints:
        checkpoints.save(state_of(1), step=1)
        raise KeyboardInterrupt
    with pytest.raises(CheckpointError, match="Another process is writing the checkpoint"):
        Checkpoints(tmp_path, world)
    go_on.set()
    checkpoints.finish()
    assert made == [1]
    deadline = time.monotonic() + 20
    while os.path.realpath(tmp_path) in checkpoint._held:  # given up by the thread that has written
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert load(world, tmp_path) == (1, [])


def test_a_folder_that_cannot_be_made_is_named(tmp_path, world):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as error:
        Checkpoints(tmp_path / "file" / "folder", world)
    assert str(error.value) == (
        f"Cannot write the checkpoint {tmp_path / 'file' / 'folder'}: Not a directory.\n"
        "Earlier checkpoints were not changed."
    )
