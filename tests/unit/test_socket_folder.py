"""Loader processes whose sockets would have names that are too long."""

import multiprocessing.process
import multiprocessing.util
import tempfile
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.data.loader import LoadOptions
from lockstep.env import check_socket_folder
from lockstep.errors import ConfigurationError

careless = pytest.mark.skipif(
    hasattr(multiprocessing.util, "_SUN_PATH_MAX"), reason="this version of Python takes a shorter folder itself"
)


@pytest.fixture
def long_folder(tmp_path, monkeypatch):
    """A folder for temporary files with a long name, and no other one made so far."""
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    config = multiprocessing.process.current_process()._config
    monkeypatch.setitem(config, "tempdir", None)
    return folder


@careless
@pytest.mark.parametrize(("length", "expected"), [(75, False), (76, True)])
def test_how_long_it_may_be(monkeypatch, length, expected):
    config = multiprocessing.process.current_process()._config
    monkeypatch.setitem(config, "tempdir", f"/{'x' * (length - 1)}/pymp-12345678")
    with pytest.raises(ConfigurationError) if expected else nullcontext():
        check_socket_folder()


@careless
def test_loader_processes_that_could_not_make_theirs_are_an_error(long_folder):
    with pytest.raises(ConfigurationError) as error:
        LoadOptions(None, workers=1, pin_memory=False).open(TensorDataset(torch.arange(4.0)))
    (made,) = long_folder.iterdir()
    assert str(error.value) == (
        "The name of the folder for temporary files is too long for loader processes, which pass tensors through "
        f"sockets in it: {made}\nSet a shorter one, such as TMPDIR=/tmp, or load in the rank itself (workers=0)."
    )


def test_the_folder_that_a_launcher_has_chosen_counts(long_folder, monkeypatch):
    config = multiprocessing.process.current_process()._config
    monkeypatch.setitem(config, "tempdir", "/tmp/pymp-12345678")
    check_socket_folder()
