"""`Plan`: the run that the machine is examined for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Plan:
    """What is to be run.

    Attributes:
        devices: Ranks on this machine.
        machines: Machines of the job.
        on_gpus: Whether each rank has a GPU.
        workers: Loader processes of each rank; ``None`` if nobody said.
        master_addr: Where the ranks of several machines meet.
        master_port: The port there; ``None`` if the launcher is to find one.
        checkpoint: Folder that checkpoints are to go to.
        target: The script or task, as it was named.
        is_running: Whether this process is a rank of a job that has begun.
    """

    devices: int
    machines: int = 1
    on_gpus: bool = False
    workers: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    checkpoint: Path = Path()
    target: str | None = None
    is_running: bool = False

    @property
    def world_size(self) -> int:
        """The number of ranks, if all machines have equally many."""
        return self.devices * self.machines

    def describe(self) -> str:
        """Say what is planned, such as ``2 ranks on CPU cores``."""
        where = ("GPU" if self.on_gpus else "CPU core") + "s" * (self.devices != 1)
        if self.machines > 1:
            return f"{self.world_size} ranks on {self.machines} machines with {self.devices} {where} each"
        return f"{self.devices} rank{'s' * (self.devices != 1)} on {where}"
