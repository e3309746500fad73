"""Loader processes whose sockets would have names that are too long."""

import multiprocessing.process
import tempfile

import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep import env
from lockstep.data.loader import LoadOptions
from lockstep.env import ensure_short_socket_folder, is_socket_folder_too_long
from lockstep.errors import ConfigurationError


@pytest.fixture
def long_folder(tmp_path, monkeypatch):
    """A folder for temporary files with a long name, and no other one made so far."""
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    config = multiprocessing.process.current_process()._config
    monkeypatch.setitem(config, "tempdir", None)
    return folder


@pytest.mark.parametrize(("length", "expected"), [(75, False), (76, True)])
def test_how_long_it_may_be(length, expected):
    assert is_socket_folder_too_long(f"/{'x' * (length - 1)}") is expected


@pytest.mark.timeout(60)
def test_loader_processes_hand_tensors_over_all_the_same(long_folder):
    loader = LoadOptions(None, workers=1, pin_memory=False).open(TensorDataset(torch.arange(4.0)))
    assert [float(value) for (value,) in loader] == [0.0, 1.0, 2.0, 3.0]
    assert tempfile.gettempdir() == str(long_folder)
    assert list(long_folder.iterdir()) == []


def test_without_another_folder_it_is_an_error(long_folder, monkeypatch):
    monkeypatch.setattr(env, "_SHORT", ("/not/there",))
    with pytest.raises(ConfigurationError) as error:
        ensure_short_socket_folder()
    assert str(error.value) == (
        "The folder for temporary files has too long a name for loader processes, which hand tensors over by sockets "
        f"in it: {long_folder}\nName a shorter one, such as TMPDIR=/tmp, or load in the rank itself (workers=0)."
    )


def test_a_folder_that_was_made_before_is_an_error(long_folder, monkeypatch):
    config = multiprocessing.process.current_process()._config
    monkeypatch.setitem(config, "tempdir", str(long_folder / "pymp-12345678"))
    with pytest.raises(ConfigurationError, match="has too long a name for loader processes"):
        ensure_short_socket_folder()
