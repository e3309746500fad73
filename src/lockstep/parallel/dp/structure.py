"""What a module tree consists of, read once and then only checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigurationError
from lockstep.parallel.dp.compiled import is_compiled


@dataclass(frozen=True)
class Node:
    """One module of the tree, in the order of ``modules()``; a module that is used twice is one node.

    Attributes:
        source: The module.
        kind: Its type when it was read; registering a parametrization changes it.
        children: Its ``_modules`` when it was read.
        child_nodes: The node number of each child.
        parameters: Its ``_parameters`` when they were read.
        weight_numbers: Where each parameter is in ``Structure.parameters``; tied parameters have one number.
        copies_itself: Whether the type says itself how it is replicated (recurrent layers do, for one).
        compiled: Whether it is the result of ``torch.compile``.
        recurrent: Whether it keeps its parameters in a list besides, as recurrent layers do.
    """

    source: nn.Module
    kind: type[nn.Module]
    children: dict[str, nn.Module | None]
    child_nodes: dict[str, int | None]
    parameters: dict[str, nn.Parameter | None]
    weight_numbers: dict[str, int | None]
    copies_itself: bool
    compiled: bool
    recurrent: bool

    def is_current(self) -> bool:
        """Whether the module still has the type, the children and the parameters it had."""
        parameters = self.source._parameters
        return (
            type(self.source) is self.kind
            and self.source._modules == self.children
            and len(parameters) == len(self.parameters)
            and all(map(is_, parameters.values(), self.parameters.values()))
            and parameters.keys() == self.parameters.keys()
        )


@dataclass(frozen=True)
class Structure:
    """A module tree: its nodes and its parameters, each once."""

    nodes: tuple[Node, ...]
    parameters: tuple[nn.Parameter, ...]

    def is_current(self) -> bool:
        """Whether no module and no parameter was added, removed or replaced since."""
        return all(node.is_current() for node in self.nodes)

    def buffers(self) -> list[Tensor]:
        """Return the buffers that the tree has now, each once."""
        buffers: dict[int, Tensor] = {}
        for node in self.nodes:
            for buffer in node.source._buffers.values():
                if buffer is not None:
                    buffers[id(buffer)] = buffer
        return list(buffers.values())


def read_structure(module: nn.Module) -> Structure:
    """Read the tree under ``module``.

    Raises:
        ConfigurationError: It holds a TorchScript module or a parameter that has no shape yet.
    """
    sources = list(module.modules())
    node_numbers = {source: number for number, source in enumerate(sources)}
    parameters = list(module.parameters())
    weight_numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    for name, source in module.named_modules():
        _check_replicable(name, source)
    nodes = [
        Node(
            source=source,
            kind=type(source),
            children=dict(source._modules),
            child_nodes={
                name: None if child is None else node_numbers[child] for name, child in source._modules.items()
            },
            parameters=dict(source._parameters),
            weight_numbers={
                name: None if parameter is None else weight_numbers[id(parameter)]
                for name, parameter in source._parameters.items()
            },
            copies_itself=_copies_itself(source),
            compiled=is_compiled(source),
            recurrent=isinstance(source, nn.RNNBase),
        )
        for source in sources
    ]
    return Structure(tuple(nodes), tuple(parameters))


def check_devices(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Check that parameters and buffers are where the first replica runs.

    Raises:
        ConfigurationError: One of them is elsewhere.
    """
    for tensor in tensors:
        if tensor.device != device:
            raise ConfigurationError(
                f"module must have its parameters and buffers on device {device} (device_ids[0]) but found one of them "
                f"on device: {tensor.device}\n"
                f'Move the module with .to("{device}"), or name its device first in device_ids.'
            )


def _check_replicable(name: str, source: nn.Module) -> None:
    where = f"its submodule {name!r}" if name else "it"
    if isinstance(source, torch.jit.ScriptModule):
        raise ConfigurationError(
            f"DataParallel cannot replicate the module: {where} is a TorchScript module.\n"
            "Wrap the Python module, and script or trace the bare module for export."
        )
    own_tensors = [*source._parameters.values(), *source._buffers.values()]
    if any(tensor is not None and nn.parameter.is_lazy(tensor) for tensor in own_tensors):
        raise ConfigurationError(
            f"DataParallel cannot replicate the module: {where} has parameters or buffers without a shape.\n"
            "Run one forward of the bare module first, so that its lazy layers see an input."
        )


def _copies_itself(source: nn.Module) -> bool:
    """Whether the class has its own ``_replicate_for_data_parallel``.

    That of a ``GraphModule`` does not count: it compiles the graph again, while sharing the class does as well.
    """
    method: Any = type(source)._replicate_for_data_parallel
    return method not in (nn.Module._replicate_for_data_parallel, torch.fx.GraphModule._replicate_for_data_parallel)
