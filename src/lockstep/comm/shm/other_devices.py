"""The backends of a group for devices other than the CPU, made when the first tensor of that device comes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lockstep.errors import ConfigurationError


class OtherDevices:
    """What ``cuda:nccl`` in ``cpu:shm,cuda:nccl`` asks for.

    torch replaces the whole group by one that is written in Python, so its other backends are made here, each in a
    native group of its own, by the same store.
    """

    def __init__(self, owner: dist.ProcessGroup, store: dist.Store, options: Any) -> None:
        self._owner, self._store, self._options = owner, store, options
        self._groups: dict[str, dist.ProcessGroup] = {}

    def devices(self) -> list[torch.device]:
        """Return the devices for which the group was made with another backend."""
        return [torch.device(device) for device in self._wanted()]

    def group_for(self, device: torch.device) -> dist.ProcessGroup:
        """Return the native group for ``device``. Collective at the first call for that device: every rank.

        Raises:
            ConfigurationError: The group was not made for that device.
        """
        if device.type not in self._groups:
            name = self._wanted().get(device.type)
            if name is None:
                raise ConfigurationError(
                    f"The backend shm moves CPU tensors, but this one is on {device}.\n"
                    f"Make the group with init_process_group('cpu:shm,{device.type}:nccl')."
                )
            self._groups[device.type] = self._make(device, name)
        return self._groups[device.type]

    def _wanted(self) -> dict[str, str]:
        config = dist.distributed_c10d._world.pg_backend_config.get(self._owner, "")
        pairs = (part.split(":") for part in str(config).split(",") if ":" in part)
        return {device: name for device, name in pairs if device != "cpu" and name != "shm"}

    def _make(self, device: torch.device, name: str) -> dist.ProcessGroup:
        given = self._options
        store = PrefixStore(f"lockstep/{device.type}", self._store)
        group = dist.ProcessGroup(store, given.group_rank, given.group_size)
        if name == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = given.timeout
            options.global_ranks_in_group = given.global_ranks_in_group
            options.group_name = given.group_id
            backend: Any = dist.ProcessGroupNCCL(store, given.group_rank, given.group_size, options)
            kind = dist.ProcessGroup.BackendType.NCCL
        elif name == "gloo":
            backend = dist.ProcessGroupGloo(store, given.group_rank, given.group_size, timeout=given.timeout)
            kind = dist.ProcessGroup.BackendType.GLOO
        else:
            raise ConfigurationError(f"Beside shm there can be nccl and gloo, not {name!r}.")
        backend._set_sequence_number_for_group()
        group._set_default_backend(kind)
        group._register_backend(torch.device(device.type), kind, backend)
        group._set_group_name(dist.distributed_c10d.GroupName(f"{given.group_id}/{device.type}"))
        return group

    def close(self, *, abort: bool) -> None:
        """Leave the native groups; with ``abort`` without waiting for other ranks."""
        while self._groups:
            group = self._groups.popitem()[1]
            if abort:
                group.abort()
            else:
                group.shutdown()
