"""The facts of cores, threads and control groups."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil
import torch

from lockstep.env import cpu_quota
from lockstep.study.doctor.plan import Plan
from lockstep.study.doctor.topics.cores import CoreFacts


def core_facts(plan: Plan, environ: Mapping[str, str]) -> CoreFacts:
    """Return what there is, and what is to run on it."""
    logical = psutil.cpu_count() or os.cpu_count() or 1
    return CoreFacts(
        logical=logical,
        affinity=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical,
        physical=psutil.cpu_count(logical=False),
        quota=cpu_quota(),
        load=os.getloadavg()[0],
        ranks=plan.devices,
        workers=plan.workers,
        on_gpus=plan.on_gpus,
        omp=_number(environ.get("OMP_NUM_THREADS")),
        mkl=_number(environ.get("MKL_NUM_THREADS")),
        started_threads=torch.get_num_threads(),
    )


def _number(text: str | None) -> int | None:
    # OMP_NUM_THREADS may be a list, one number for each level of nesting.
    first = (text or "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None
