"""Replicas of particular modules: recurrent, traced, compiled, TorchScript; and the copies on other devices."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.errors import ConfigurationError
from lockstep.parallel.dp import replicas
from lockstep.parallel.dp.replicas import coalesced_copies, sum_gradients, sum_in_tree
from lockstep.parallel.dp.wrapper import DataParallel
from tests.models import build, global_batch
from tests.unit.parallel.dp.test_wrapper import KINDS, assert_same_gradients, wrap

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_use_the_weights_of_their_replica(kind):
    module = build("lstm")
    model = wrap(kind, module, 2)

    def loss(replica, tokens):
        for name, weight in zip(replica.lstm._flat_weights_names, replica.lstm._flat_weights, strict=True):
            assert weight is getattr(replica.lstm, name)
            assert weight is not getattr(module.lstm, name)
        replica.lstm.flatten_parameters()
        return replica(tokens).sum()

    tokens = global_batch("lstm", 4, 0)[0]
    model.backward(loss, [tokens[:2], tokens[2:]], [1.0, 1.0])
    model(tokens).sum().backward()
    assert module.lstm._flat_weights[0] is module.lstm.weight_ih_l0


def test_graph_and_compiled_modules():
    x, y = global_batch("mlp", 4, 0)
    compiled = torch.compile(build("mlp"), backend="eager")
    in_place = build("mlp")
    in_place.compile(backend="eager")
    for module in (torch.fx.symbolic_trace(build("mlp")), compiled, in_place):
        model, reference = DataParallel(module, ["cpu", "cpu"]), build("mlp")
        weights = []

        def loss(replica, shard, weights=weights):
            weights.extend(replica.parameters())
            return F.mse_loss(replica(shard[0]), shard[1])

        model.backward(loss, [(x[:2], y[:2]), (x[2:], y[2:])], [0.5, 0.5])
        F.mse_loss(reference(x), y).backward()
        inner = module._orig_mod if module is compiled else module
        assert_same_gradients(inner, reference)
        own = set(map(id, module.parameters()))
        assert len(weights) == 2 * len(own) and not any(id(weight) in own for weight in weights)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
def test_compiled_replicas_run_their_own_code():
    """Only the first replica writes into the statistics of the module; both would if they ran the original."""
    whole = torch.compile(nn.BatchNorm1d(3), backend="eager")
    in_place = nn.BatchNorm1d(3)
    in_place.compile(backend="eager")
    for module, norm in ((whole, whole._orig_mod), (in_place, in_place)):
        model = DataParallel(module, ["cpu", "cpu"])
        for calls in (1, 2):
            model(torch.randn(6, 3))
            assert norm.num_batches_tracked == calls


def test_copies_keep_types_strides_and_values():
    tensors = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(6, 6)[::2, 1:],
        torch.tensor(3.0),
        torch.empty(0, 2),
        torch.arange(5),
        torch.ones(3, dtype=torch.bool),
        torch.randn(3, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
        nn.Parameter(torch.randn(1, 3, 1)),
    ]
    for row in coalesced_copies(tensors, [CPU, CPU]):
        for tensor, copied in zip(tensors, row, strict=True):
            torch.testing.assert_close(copied, tensor.detach())
            assert not copied.requires_grad
            if tensor.layout is torch.strided:
                assert tensor.numel() == 0 or copied.data_ptr() != tensor.data_ptr()
                if tensor._is_view() is False or tensor.is_contiguous():
                    assert copied.stride() == tensor.stride()
                version = copied._version
                row[0].add_(1)
                assert copied is row[0] or copied._version == version
                row[0].sub_(1)
    strided = coalesced_copies([tensors[0], tensors[1]], [CPU])[0]
    assert strided[0].is_contiguous(memory_format=torch.channels_last) and strided[1].stride() == (1, 6)


def test_modules_that_cannot_be_replicated():
    scripted = nn.Sequential(nn.Linear(2, 2), Scripted())
    with pytest.raises(ConfigurationError) as caught:
        DataParallel(scripted, ["cpu", "cpu"])(torch.zeros(2, 2))
    assert str(caught.value).splitlines()[0] == (
        "DataParallel cannot replicate the module: its submodule '1' is a TorchScript module."
    )
    model = DataParallel(nn.LazyLinear(2), ["cpu", "cpu"])
    with pytest.raises(ConfigurationError) as caught:
        model(torch.zeros(2, 3))
    assert str(caught.value).splitlines()[0] == (
        "DataParallel cannot replicate the module: it has parameters or buffers without a shape."
    )
    model.module(torch.zeros(2, 3))
    assert model(torch.zeros(2, 3)).shape == (2, 2)


class Scripted(torch.jit.ScriptModule):
    def forward(self, x):
        return x


def test_a_module_elsewhere_is_refused():
    for model in (DataParallel(nn.Linear(2, 2), ["cpu", "cpu"]), DataParallel(nn.Linear(2, 2), ["cpu"])):
        model.module.to("meta")
        with pytest.raises(RuntimeError) as caught:
            model(torch.zeros(2, 2))
        assert str(caught.value).splitlines()[0] == (
            "module must have its parameters and buffers on device cpu (device_ids[0]) but found one of them "
            "on device: meta"
        )


def by_nccl(monkeypatch):
    """Put in place of NCCL, which serves GPUs only, what it does; return how often each of its calls was made."""
    calls = Counter()

    class Nccl:
        @staticmethod
        def broadcast(tensors):
            calls["broadcast"] += 1
            for tensor in tensors[1:]:
                tensor.copy_(tensors[0])

        @staticmethod
        def reduce(tensors, output):
            calls["reduce"] += 1
            output.copy_(sum(tensors))

    monkeypatch.setattr(replicas, "_has_ring", lambda devices: True)
    monkeypatch.setattr(replicas, "nccl", Nccl)
    return calls


def test_copies_and_sums_by_nccl_are_those_of_the_tree(monkeypatch):
    wide = torch.randn(2, 3, 4, 4, dtype=torch.float64).to(memory_format=torch.channels_last)
    tensors = [torch.randn(3, 5), wide, torch.randn(5), torch.randn(2, 2).to_sparse(), torch.randn(4)]

    def row_of(replica):
        row = [torch.randn_like(each) if not each.is_sparse else each * 2 for each in tensors]
        return [*row[:4], None if replica == 1 else row[4]]

    rows = [row_of(replica) for replica in range(3)]
    rows[1][1] = rows[1][1].contiguous()  # a gradient need not have the strides of another replica's
    expected = coalesced_copies(tensors, [CPU] * 3), sum_in_tree(rows, [CPU] * 3, in_place=False)
    kept = [[None if each is None else each.clone() for each in row] for row in rows]
    calls = by_nccl(monkeypatch)
    found = coalesced_copies(tensors, [CPU] * 3), sum_gradients(rows, [CPU] * 3, in_place=False)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(rows, kept)
    assert calls == {"broadcast": 2, "reduce": 2}, "a call for each dtype"
    assert found[1][1].stride() == wide.stride() and all(row[1].stride() == wide.stride() for row in found[0])
