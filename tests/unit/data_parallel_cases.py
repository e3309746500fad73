"""What the tests of DataParallel share: replicas that are kept apart as if on several devices, and a comparison."""

import torch
from torch import Tensor, nn

from lockstep.parallel.dp.wrapper import DataParallel
from tests.models import dense

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
