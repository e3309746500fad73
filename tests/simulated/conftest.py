"""Ranks that `lockstep.init` gives a simulated accelerator each."""

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep


@pytest.fixture
def on_sim(sim_ranks: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``on_sim(n)(fn, *args)``: run ``fn(world, *args)`` on ``n`` ranks, of which each has a device.

    A rank fails if there is an access that nothing puts in order with another, also one whose error somebody caught.
    """

    def ranks(num_ranks: int) -> Callable[..., list[Any]]:
        def run(fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **options: Any) -> list[Any]:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            pool_ranks = sim_ranks(num_ranks, warnings="default")
            results: list[Any] = pool_ranks(with_device, port, fn, args, options, timeout=timeout)
            return results

        return run

    return ranks


def with_device(world: Any, port: int, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run ``fn`` in the world that `lockstep.init` makes of this rank."""
    dist.destroy_process_group()
    place = {"RANK": world.rank, "WORLD_SIZE": world.world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"LOCAL_RANK": world.rank, "LOCAL_WORLD_SIZE": world.world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        with lockstep.init() as found:
            assert (found.device, found.backend) == (torch.device("sim", world.rank), "simccl")
            return fn(found, *args, **options)
    finally:
        for name in place:
            os.environ.pop(name, None)
