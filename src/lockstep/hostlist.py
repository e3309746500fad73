"""SLURM's compressed notations: ``gpu[003-005,9],login`` for hosts and ``4(x2),1`` for tasks on each node."""

from __future__ import annotations

import re

from lockstep.errors import ConfigurationError

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def first_host(hosts: str, *, variable: str) -> str:
    """Return the first host of a SLURM host list.

    Args:
        hosts: As in SLURM_NODELIST.
        variable: The environment variable that it came from, for the message.

    Raises:
        ConfigurationError: The list has no first host.
    """
    name = ""
    rest = hosts
    while rest and rest[0] != ",":
        if rest[0] == "[":
            inside, closed, rest = rest[1:].partition("]")
            # Of "003-005,9" the first is 003: as text, since the zeros are part of the name.
            first = re.split(r"[-,]", inside)[0]
            if not closed or not first.isdigit():
                raise ConfigurationError(_unreadable(variable, hosts))
            name += first
        else:
            name, rest = name + rest[0], rest[1:]
    if not name or "]" in name:
        raise ConfigurationError(_unreadable(variable, hosts))
    return name


def tasks_on_node(layout: str, node: int, *, variable: str) -> int:
    """Return the number of tasks on the node of index ``node`` from SLURM's count per node.

    Raises:
        ConfigurationError: The notation cannot be read, or has fewer nodes than that.
    """
    seen = 0
    for part in layout.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise ConfigurationError(_unreadable(variable, layout))
        seen += int(match[2] or 1)
        if node < seen:
            return int(match[1])
    raise ConfigurationError(
        f"{variable}={layout} counts {seen} nodes, but SLURM_NODEID={node}.\n"
        "Start the ranks with srun, so that these variables belong to the same step."
    )


def _unreadable(variable: str, value: str) -> str:
    return (
        f"{variable}={value!r} cannot be read.\nSet MASTER_ADDR to the host of rank 0 yourself, and unset {variable}."
    )
