"""The run that is planned: what was asked for, else what `lockstep run` would do here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from lockstep.env import RankEnv
from lockstep.launcher.api import num_cores
from lockstep.study.doctor.plan import Plan


def make_plan(
    target: str | None,
    env: RankEnv,
    environ: Mapping[str, str],
    *,
    devices: int | None = None,
    machines: int = 1,
    workers: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    checkpoint: Path | None = None,
) -> Plan:
    """Return the plan; what ``env`` says of a job that has begun comes before what was asked for."""
    num_gpus = torch.cuda.device_count()
    port = environ.get("MASTER_PORT", "")
    plan = Plan(
        devices=devices or num_gpus or num_cores(),
        machines=machines,
        on_gpus=num_gpus > 0,
        workers=workers,
        master_addr=master_addr or environ.get("MASTER_ADDR"),
        master_port=master_port or (int(port) if port.isdigit() else None),
        checkpoint=checkpoint or Path(),
        target=target,
    )
    if env.world_size == 1:
        return plan
    return replace(
        plan,
        devices=env.local_world_size,
        machines=-(-env.world_size // env.local_world_size),
        master_addr=env.master_addr,
        master_port=env.master_port,
        is_running=True,
    )
