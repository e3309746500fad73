"""Ranks that `lockstep.init` gives a simulated accelerator each."""

import gc
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from random import SystemRandom
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep


def free_port() -> int:
    """Return a port below those of which the system gives one to a connection of another test in the meantime."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", SystemRandom().randrange(20_000, 32_000))) as probe:
            port: int = probe.getsockname()[1]
            return port


@pytest.fixture
def on_sim(sim_ranks: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``on_sim(n)(fn, *args)``: run ``fn(world, *args)`` on ``n`` ranks, of which each has a device.

    A rank fails if there is an access that nothing puts in order with another, also one whose error somebody caught, or
    if it has a context on a device that is not its own: ``on_sim(n, several_devices=True)`` allows that.
    """

    def ranks(num_ranks: int, *, several_devices: bool = False) -> Callable[..., list[Any]]:
        def run(fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **options: Any) -> list[Any]:
            port = free_port()
            pool_ranks = sim_ranks(num_ranks, warnings="default")
            given = port, several_devices, fn, args, options
            results: list[Any] = pool_ranks(with_device, *given, timeout=timeout)
            return results

        return run

    return ranks


def with_device(
    world: Any, port: int, several_devices: bool, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Run ``fn`` in the world that `lockstep.init` makes of this rank."""
    dist.destroy_process_group()
    torch.sim.forget_contexts()
    place = {"RANK": world.rank, "WORLD_SIZE": world.world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"LOCAL_RANK": world.rank, "LOCAL_WORLD_SIZE": world.world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        with lockstep.init() as found:
            assert (found.device, found.backend) == (torch.device("sim", world.rank), "simccl")
            result = fn(found, *args, **options)
        if not several_devices:
            check_contexts(world.rank)
        return result
    finally:
        for name in place:
            os.environ.pop(name, None)


def check_contexts(rank: int) -> None:
    """Raise an AssertionError if this rank has a context on a device of another, which on CUDA takes 0.5 GB there."""
    gc.collect()  # the release of an event opens one, too
    others = [f"on sim:{index}, by {place}" for index, place in torch.sim.contexts().items() if index != rank]
    assert not others, f"rank {rank} opened a context {'; '.join(others)}"
