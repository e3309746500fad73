"""SyncBatchNorm in one process: conversion, what it is to others, and how statistics are merged."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.uneven_inputs import SyncLayerShadow
from lockstep.parallel.ddp.weighting import Weights
from lockstep.parallel.sync_batchnorm import measure, merge
from tests.batchnorm import WITHOUT_BIAS

convert = lockstep.SyncBatchNorm.convert_sync_batchnorm


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
@pytest.mark.parametrize(
    "options",
    [
        {"eps": 0.1, "momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        *WITHOUT_BIAS,
        {"dtype": torch.bfloat16},
    ],
)
def test_a_converted_layer_has_the_settings_and_the_very_tensors_of_the_old_one(kind, options):
    old = kind(3, **options).eval()
    old.qconfig = "int8"
    new = convert(old)
    assert type(new) is lockstep.SyncBatchNorm
    names = ("num_features", "eps", "momentum", "affine", "track_running_stats", "training", "qconfig", "process_group")
    expected = nn.SyncBatchNorm.convert_sync_batchnorm(old)
    assert [getattr(new, name) for name in names] == [getattr(expected, name) for name in names]
    assert list(new.state_dict()) == list(expected.state_dict()) == list(old.state_dict())
    for name, tensor in old.state_dict(keep_vars=True).items():
        assert new.state_dict(keep_vars=True)[name] is tensor
    assert repr(new) == repr(expected)


def test_a_model_is_converted_in_place_and_other_layers_stay():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4)), norm, nn.LayerNorm(4))
    linear, layer_norm = model[0], model[4]
    assert convert(model) is model
    assert model[0] is linear and model[4] is layer_norm
    assert type(model[1]) is type(model[2][1]) is lockstep.SyncBatchNorm
    assert model[1] is model[3], "a layer that is used twice stays one layer"
    assert model[1].weight is norm.weight


def test_a_layer_keeps_its_group_unless_one_is_given():
    old = nn.SyncBatchNorm(3, process_group="some ranks")
    assert convert(old).process_group == "some ranks"
    assert convert(old, "others").process_group == "others"
    assert convert(convert(old), "others").process_group == "others"
    assert convert(nn.BatchNorm2d(3)).process_group is None


def test_a_lazy_layer_is_converted_once_it_has_seen_a_batch():
    model = nn.Sequential(nn.LazyBatchNorm2d())
    with pytest.raises(ConfigurationError) as caught:
        convert(model)
    assert str(caught.value) == (
        "0 is a LazyBatchNorm2d that has not seen a batch, so its number of channels is not known yet.\n"
        "Run one batch through the model before converting it."
    )
    model(torch.ones(2, 3, 2, 2))
    assert convert(model)[0].num_features == 3


def test_a_forward_that_gets_lost_is_mentioned():
    class WithActivation(nn.BatchNorm2d):
        def forward(self, input):
            return super().forward(input).relu()

    with pytest.warns(UserWarning, match="a forward of its own") as caught:
        convert(nn.Sequential(WithActivation(3)))
    assert str(caught[0].message) == (
        "0 is a WithActivation with a forward of its own, which the layer in its place does not have."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(convert(nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3))))


def test_libraries_take_it_for_torchs_layer():
    layer = lockstep.SyncBatchNorm(3)
    assert isinstance(layer, nn.SyncBatchNorm | nn.modules.batchnorm._BatchNorm)
    assert type(nn.SyncBatchNorm.convert_sync_batchnorm(layer)) is nn.SyncBatchNorm


def test_without_other_ranks_it_is_batch_norm():
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3, dtype=torch.float64)
    ours = convert(copy.deepcopy(plain))
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours.eval()(x), plain.eval()(x))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), plain.buffers(), strict=True))


def test_state_is_exchanged_with_batch_norm_and_survives_pickle_and_copy():
    plain = nn.BatchNorm2d(3)
    plain(torch.randn(4, 3, 2, 2))
    layer = lockstep.SyncBatchNorm(3)
    layer.load_state_dict(plain.state_dict())
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        assert type(other) is lockstep.SyncBatchNorm
        plain.load_state_dict(other.state_dict())
        assert torch.equal(plain.running_var, layer.running_var)


def test_the_engine_refuses_torchs_layer_on_the_cpu():
    from lockstep.parallel.ddp.setup import check_batch_norms

    check_batch_norms(nn.Sequential(lockstep.SyncBatchNorm(3)), "cpu")
    check_batch_norms(nn.Sequential(nn.SyncBatchNorm(3)), "cuda")
    with pytest.raises(ValueError) as caught:
        check_batch_norms(nn.Sequential(nn.SyncBatchNorm(3)), "cpu")
    assert str(caught.value) == (
        "SyncBatchNorm layers only work with GPU modules, and 0 is torch's.\n"
        "Convert the model: model = lockstep.SyncBatchNorm.convert_sync_batchnorm(model)."
    )


class TwoRanks:
    """As much of a process group as is asked for before anything is sent."""

    def rank(self):
        return 0

    def size(self):
        return 2


def test_torchs_layer_cannot_be_followed_nor_weighed():
    group = TwoRanks()
    weights = Weights(group, torch.device("cpu"))
    layers = nn.Sequential(nn.SyncBatchNorm(3))
    follow = SyncLayerShadow(layers, group=group, device=torch.device("cpu"), weights=weights)
    advice = "Convert the model: model = lockstep.SyncBatchNorm.convert_sync_batchnorm(model)."
    with pytest.raises(ConfigurationError) as caught:
        follow.open(has_batch=True)
    assert str(caught.value) == (
        f"0 is a torch.nn.SyncBatchNorm, which would wait forever for ranks without a batch.\n{advice}"
    )
    with pytest.raises(ConfigurationError) as caught:
        weights.open_window([], []).set_weight(2.0)
    assert str(caught.value) == (
        f"0 is a torch.nn.SyncBatchNorm, which mixes the ranks' gradients regardless of weights.\n{advice}"
    )


def follow_of(layer, device):
    weights = Weights(TwoRanks(), torch.device(device))
    return SyncLayerShadow(nn.Sequential(layer), group=TwoRanks(), device=torch.device(device), weights=weights)


@pytest.mark.parametrize(
    ("device", "uneven", "expected"), [("cpu", False, True), ("cuda", False, False), ("cuda", True, True)]
)
def test_buckets_wait_where_they_could_meet_an_exchange(device, uneven, expected):
    for layer, holds in ((lockstep.SyncBatchNorm(3), expected), (nn.BatchNorm1d(3), False)):
        follow = follow_of(layer, device)
        assert follow.must_delay_buckets(uneven=uneven) is holds
    follow = follow_of(lockstep.SyncBatchNorm(3), device)
    follow._check_layers = lambda: None  # there is no such group
    follow.open(has_batch=True)
    assert follow.must_delay_buckets(uneven=False)


@pytest.mark.parametrize("sizes", [[7], [3, 4], [0, 7, 0], [1, 5, 1]])
def test_merged_statistics_are_those_of_all_values(sizes):
    values = torch.randn(7, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1000.0
    merged = merge(torch.stack([measure(part) for part in values.split(sizes)]))
    var, mean = torch.var_mean(values, (0, 2), correction=0)
    torch.testing.assert_close(merged.mean, mean, rtol=1e-15, atol=0)
    torch.testing.assert_close(merged.var, var, rtol=1e-13, atol=0)
    assert merged.total == 35


def test_statistics_of_half_precision_are_not_rounded_to_it():
    values = (torch.randn(64, 2, generator=torch.Generator().manual_seed(0)) * 3 + 5).bfloat16()
    merged = merge(measure(values).unsqueeze(0))
    torch.testing.assert_close(merged.mean, values.double().mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(merged.var, values.double().var(0, correction=0), rtol=1e-6, atol=0)


def test_statistics_of_nothing_are_zeros():
    merged = merge(torch.stack([measure(torch.ones(0, 3, 4))] * 2))
    assert (merged.mean.tolist(), merged.var.tolist(), merged.total) == ([0.0] * 3, [0.0] * 3, 0)
