"""Checkpoints: whole or not there, read without running code, the last two kept."""

import pickle

import pytest
import torch

import lockstep
from lockstep.train.atomic import whole_file
from lockstep.train.checkpoint import CheckpointError, Checkpoints, find, read


@pytest.fixture(scope="module")
def world():
    with lockstep.init(device="cpu") as world:
        yield world


def names(folder):
    return sorted(path.name for path in folder.iterdir())


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


def test_the_last_two_are_kept_and_the_newest_is_loaded(tmp_path, world):
    checkpoints = Checkpoints(tmp_path / "made" / "here", world)
    assert checkpoints.load(required=False) is None
    for step in (5, 10, 900, 15):
        checkpoints.save({"step": step, "tensor": torch.ones(3)}, step=step)
    assert names(tmp_path / "made" / "here") == ["step-0000000015.pt", "step-0000000900.pt"]
    assert Checkpoints(tmp_path / "made" / "here", world).load(required=True)["step"] == 900


def test_resuming_from_nothing_is_an_error_only_if_insisted_on(tmp_path, world):
    with pytest.raises(CheckpointError) as error:
        Checkpoints(tmp_path, world).load(required=True)
    assert str(error.value) == (
        f"There is no checkpoint in {tmp_path} to resume from.\nName another folder, or leave out resume."
    )


def test_a_fresh_run_removes_the_old_ones_once_it_has_one_of_its_own(tmp_path, world):
    for step in (50, 60):
        Checkpoints(tmp_path, world).save({"run": "old"}, step=step)
    fresh = Checkpoints(tmp_path, world, fresh=True)
    assert fresh.load(required=False) is None
    assert len(find(tmp_path)) == 2
    fresh.save({"run": "new"}, step=1)
    assert names(tmp_path) == ["step-0000000001.pt"]


def test_what_a_killed_run_left_half_written_is_no_checkpoint_and_is_removed(tmp_path, world):
    (tmp_path / "step-0000000007.pt.123.partial").write_bytes(b"half")
    checkpoints = Checkpoints(tmp_path, world)
    assert checkpoints.load(required=False) is None
    checkpoints.save({}, step=1)
    assert names(tmp_path) == ["step-0000000001.pt"]


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty"])
def test_a_broken_file_is_named_and_the_one_before_it_stays_loadable(tmp_path, world, damage):
    checkpoints = Checkpoints(tmp_path, world)
    for step in (1, 2):
        checkpoints.save({"step": step, "tensor": torch.ones(1000)}, step=step)
    newest = tmp_path / "step-0000000002.pt"
    content = bytearray(newest.read_bytes())
    if damage == "one bit":
        content[len(content) // 2] ^= 1
    newest.write_bytes({"truncated": content[: len(content) // 2], "one bit": content, "empty": b""}[damage])
    with pytest.raises(CheckpointError) as error:
        Checkpoints(tmp_path, world).load(required=False)
    cause, advice = str(error.value).splitlines()
    assert cause.startswith(f"The checkpoint {newest} is broken: ")
    assert advice == "Remove it to go on from step-0000000001.pt."
    newest.unlink()
    assert Checkpoints(tmp_path, world).load(required=False)["step"] == 1
    (tmp_path / "step-0000000001.pt").write_bytes(b"junk")
    with pytest.raises(CheckpointError) as error:
        Checkpoints(tmp_path, world).load(required=False)
    assert str(error.value).endswith(" is broken: File is not a zip file.\nRemove it to start anew.")


class Malicious:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return print, ("code was run",)


def test_a_file_that_would_run_code_does_not(tmp_path, capsys):
    path = tmp_path / "step-0000000001.pt"
    torch.save({"model": Malicious()}, path)
    with pytest.raises(CheckpointError) as error:
        read(path)
    assert str(error.value).startswith(
        f"The checkpoint {path} holds more than tensors, numbers and strings, which is not read for safety.\n"
    )
    assert "code was run" not in capsys.readouterr().out
    pickle.loads(pickle.dumps(Malicious()))
    assert "code was run" in capsys.readouterr().out


def test_a_state_that_could_not_be_read_again_is_found_when_it_is_first_written(tmp_path, world):
    with pytest.raises(CheckpointError, match="holds more than tensors, numbers and strings"):
        Checkpoints(tmp_path, world).save({"model": Malicious()}, step=1)
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path, world):
    (tmp_path / "file").write_text("")
    with pytest.raises(lockstep.errors.ConfigurationError) as error:
        Checkpoints(tmp_path / "file" / "folder", world)
    assert str(error.value) == (
        f"Cannot make the checkpoint folder {tmp_path / 'file' / 'folder'}: Not a directory.\nName another one."
    )
