"""DataParallel.forward: the outputs and gradients of one process, for a dozen model families."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.parallel.dp.wrapper import DataParallel
from tests.models import FAMILIES, build, dense, global_batch

# --- what the tests of DataParallel share: replicas that are kept apart as if on several devices, and a comparison

TOLERANCE = 1e-12


class Apart(DataParallel[nn.Module]):
    """Replicas beyond the first believe to be on other devices, so that weights and gradients travel in flat copies.

    The CPU answers to "cpu:1" as well; tensors there say "cpu".
    """

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(
            torch.device("cpu", index) if index else torch.device("cpu") for index in range(len(self.device_ids))
        )


KINDS = {"together": DataParallel, "apart": Apart}
"""Replicas on one device, which use the module's memory; and each on its own, with copies."""


def wrap(kind: str, module: nn.Module, num_replicas: int) -> DataParallel[nn.Module]:
    return KINDS[kind](module, ["cpu"] * num_replicas)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else dense(parameter.grad).clone()
        for name, parameter in module.named_parameters()
    }


def assert_same_gradients(module: nn.Module, reference: nn.Module) -> None:
    actual, expected = gradients(module), gradients(reference)
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        got = actual[name]
        assert (got is None) == (wanted is None), name
        if got is not None and wanted is not None:
            scale = max(wanted.abs().max().item(), 1e-3)
            assert (got - wanted).abs().max().item() <= TOLERANCE * scale, name
    assert any(gradient is not None for gradient in actual.values())


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-12 if actual.dtype is torch.double else 1e-5
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


JOINABLE = sorted(set(FAMILIES) - {"structured"})  # its output holds a string


@pytest.mark.parametrize(("kind", "num_replicas"), [("together", 2), ("apart", 3)])
@pytest.mark.parametrize("family", JOINABLE)
def test_gradients_are_those_of_one_process(family, kind, num_replicas):
    module, reference = build(family), build(family)
    model = wrap(kind, module, num_replicas)
    for step, samples in enumerate([7, 4, 1]):
        batch = global_batch(family, samples, seed=step)
        FAMILIES[family].loss(model, batch).backward()
        FAMILIES[family].loss(reference, batch).backward()
        assert_same_gradients(module, reference)
        with torch.no_grad():
            for one, other in zip(module.parameters(), reference.parameters(), strict=True):
                if one.grad is not None and step == 0:
                    one.sub_(0.1 * one.grad.to_dense() if one.grad.is_sparse else 0.1 * one.grad)
                    other.copy_(one)


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_gradients_are_kept(kind):
    module = build("channels_last")
    model = wrap(kind, module, 2)
    FAMILIES["channels_last"].loss(model, global_batch("channels_last", 4, 0)).backward()
    weight = module.convolutions[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)


@dataclass
class Result:
    logits: Tensor
    details: dict


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2).double()

    def forward(self, x, *, scale, flag=False):
        assert flag
        y = self.layer(x) * scale["value"]
        return Result(y, {"all": [y, (y.sum(1), None)]})


def test_keyword_inputs_and_dataclass_outputs():
    module = Structured()
    model = DataParallel(module, ["cpu", "cpu"])
    x, scale = torch.randn(5, 3).double(), {"value": torch.randn(5, 1).double()}
    result, expected = model(x, scale=scale, flag=True), module(x, scale=scale, flag=True)
    assert type(result) is Result
    close(result.logits, expected.logits)
    close(result.details["all"][1][0], expected.details["all"][1][0])
    assert result.details["all"][1][1] is None


def test_only_keyword_inputs_with_empty_containers():
    class Net(nn.Module):
        def forward(self, input):
            return input["data"] + 1

    model = DataParallel(Net(), ["cpu", "cpu"])
    for empty in ([], {}, ()):
        assert model(input={"data": torch.zeros(3), "unused": empty}).tolist() == [1.0, 1.0, 1.0]


def test_without_inputs_one_replica_runs():
    calls = []

    class Net(nn.Module):
        def forward(self):
            calls.append(1)
            return torch.ones(2)

    assert DataParallel(Net(), ["cpu", "cpu"])().tolist() == [1.0, 1.0]
    assert len(calls) == 1


def test_dim_is_the_batch_dimension():
    class Net(nn.Module):
        def forward(self, x):
            assert x.shape[0] == 2 and x.shape[1] in (2, 3)
            return x * 2

    x = torch.randn(2, 5, 3)
    close(DataParallel(Net(), ["cpu", "cpu"], dim=1)(x), x * 2)


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.norm(self.convolution(x)).mean((2, 3)))


@pytest.mark.parametrize("kind", KINDS)
def test_batch_norm_keeps_the_statistics_of_the_first_replica(kind):
    module = Normalized().double()
    reference = copy.deepcopy(module)
    model = wrap(kind, module, 2)
    x = torch.randn(6, 1, 8, 8, dtype=torch.double)
    outputs = model(x)
    expected = torch.cat([reference(x[:3]), copy.deepcopy(reference)(x[3:])])
    outputs.square().sum().backward()
    expected.square().sum().backward()
    close(outputs, expected)
    for (name, buffer), (_, wanted) in zip(module.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(buffer, wanted), name
    assert module.norm.num_batches_tracked == 1

    module.eval()
    reference.load_state_dict(module.state_dict())
    reference.eval()
    module.zero_grad()
    reference.zero_grad()
    F.mse_loss(model(x), torch.zeros(6, 2, dtype=torch.double)).backward()
    F.mse_loss(reference(x), torch.zeros(6, 2, dtype=torch.double)).backward()
    assert_same_gradients(module, reference)


def test_dropout_is_off_in_eval():
    module = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5))
    model = DataParallel(module, ["cpu", "cpu"])
    x = torch.randn(6, 3)
    assert (model(x) == 0).any()
    model.eval()
    close(model(x), module(x))


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_grad_reaches_the_parameters(kind):
    module = build("mlp")
    model = wrap(kind, module, 2)
    x, y = global_batch("mlp", 5, 0)
    actual = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
    expected = torch.autograd.grad(F.mse_loss(module(x), y), list(module.parameters()))
    for got, wanted in zip(actual, expected, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-15)
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind):
    module, reference = build("mlp"), build("mlp")
    x = global_batch("mlp", 5, 0)[0].requires_grad_()
    for network in (wrap(kind, module, 2), reference):
        (slope,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
        slope.square().mean().backward()
    assert_same_gradients(module, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_the_gradients_of_parameters(kind):
    module, reference = build("mlp"), build("mlp")
    x, y = global_batch("mlp", 5, 0)
    for network in (wrap(kind, module, 3), reference):
        slopes = torch.autograd.grad(F.mse_loss(network(x), y), list(network.parameters()), create_graph=True)
        sum(slope.square().sum() for slope in slopes).backward()
    assert_same_gradients(module, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_several_forwards_before_one_backward(kind):
    module, reference = Normalized().double(), Normalized().double()
    reference.load_state_dict(module.state_dict())
    model = wrap(kind, module, 2)
    parts = [torch.randn(4, 1, 6, 6, dtype=torch.double) for _ in range(3)]
    for part in parts:
        model(part)
    module.eval()
    reference.load_state_dict(module.state_dict())
    reference.eval()
    sum(model(part).square().sum() for part in parts).backward()
    sum(reference(part).square().sum() for part in parts).backward()
    assert_same_gradients(module, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_that_requires_a_gradient_gets_it(kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.randn(3, dtype=torch.double, requires_grad=True))
            self.register_buffer("shift", torch.randn(3, dtype=torch.double))

        def forward(self, x):
            return x * self.scale + self.shift

    module = Net()
    model = wrap(kind, module, 2)
    x = torch.randn(5, 3, dtype=torch.double)
    model(x).sum().backward()
    assert torch.allclose(module.scale.grad, x.sum(0), rtol=1e-12)
    module.scale.grad = None
    model.backward(lambda replica, part: replica(part).sum(), [x[:3], x[3:]], [1.0, 1.0])
    assert torch.allclose(module.scale.grad, x.sum(0), rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_old_and_new_weight_norm(kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            with pytest.warns(FutureWarning):
                self.old = nn.utils.weight_norm(nn.Linear(3, 4))
            self.new = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
            self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))

        def forward(self, x):
            return self.spectral(self.new(self.old(x)))

    module = Net().double().eval()
    model = wrap(kind, module, 2)
    x = torch.randn(5, 3, dtype=torch.double)
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    actual = torch.autograd.grad(model(x).square().sum(), list(module.parameters()))
    for got, wanted in zip(actual, expected, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-11, atol=1e-14)
