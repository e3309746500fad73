"""The bare weights as a file."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn

from lockstep.checkpoints.model_state import check_export, export_weights
from lockstep.errors import ConfigurationError


def tied():
    model = nn.Sequential(nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    return model


def test_parameters_and_buffers_come_back_and_tied_ones_are_written_once(tmp_path):
    model, other = tied(), tied()
    model[1].running_mean.fill_(7)
    export_weights(model, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == [
            "0.weight",
            "1.bias",
            "1.num_batches_tracked",
            "1.running_mean",
            "1.running_var",
            "1.weight",
        ]
    load_model(other, tmp_path / "model.safetensors")
    assert other[2].weight is other[0].weight
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_same_weights_are_the_same_bytes(tmp_path):
    """Also of several tied ones, which safetensors' own function lists in an order that changes from call to call."""
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    for layer in model[1:]:
        layer.weight, layer.bias = model[0].weight, model[0].bias
    path, contents = tmp_path / "model.safetensors", set()
    for _ in range(8):
        export_weights(model, path)
        contents.add(path.read_bytes())
    assert len(contents) == 1


def test_a_place_where_it_cannot_be_written_is_found_before_the_training(tmp_path):
    with pytest.raises(ConfigurationError) as error:
        check_export(tmp_path / "no" / "model.safetensors")
    assert str(error.value) == f"There is no folder {tmp_path / 'no'} to export the weights to.\nCreate it first."
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(ConfigurationError) as error:
        check_export(tmp_path / "folder.safetensors")
    assert str(error.value) == f"export={tmp_path / 'folder.safetensors'} is a folder.\nName a file."
