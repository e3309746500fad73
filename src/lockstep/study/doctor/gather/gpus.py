"""The facts of GPUs and of the links between them."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lockstep.study.doctor.finding import NotChecked
from lockstep.study.doctor.gather.nvidia import QUERY, Unanswered, ask, read_gpus, read_matrix, visible
from lockstep.study.doctor.gather.pci import has_nvidia_gpu, redirecting_bridges
from lockstep.study.doctor.plan import Plan
from lockstep.study.doctor.topics.gpus import Gpu, GpuFacts
from lockstep.study.doctor.topics.links import LinkFacts, Pair

_DRIVER = Path("/proc/driver/nvidia/version")


def gpu_facts(plan: Plan) -> tuple[GpuFacts, list[NotChecked]]:
    """Return what there is; asks the driver, which takes up to some seconds."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    num_usable = torch.cuda.device_count()
    has_nvidia = _DRIVER.exists() or has_nvidia_gpu()
    gpus: tuple[Gpu, ...] = ()
    missed = []
    if has_nvidia or num_usable:
        try:
            gpus = visible(read_gpus(ask(*QUERY)), chosen)
        except Unanswered as error:
            missed.append(NotChecked("memory in use, power limits and PCIe lanes of the GPUs", str(error)))
            gpus = tuple(_from_torch(index) for index in range(num_usable))
        missed.append(
            NotChecked(
                "the PCIe generation that the GPUs run at", "an idle link is slower to save power, so only load tells"
            )
        )
    facts = GpuFacts(
        gpus=gpus,
        num_usable=num_usable,
        torch_cuda=torch.version.cuda,
        has_nvidia=has_nvidia,
        num_wanted=plan.devices,
        hidden=chosen is not None and (not chosen.strip() or chosen.strip().startswith("-")),
    )
    return facts, missed


def _from_torch(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(index, properties.name, properties.total_memory)


def link_facts(gpus: GpuFacts) -> tuple[LinkFacts, list[NotChecked]]:
    """Return how the GPUs that the run uses reach each other; asks the driver only where there are two."""
    used = {gpu.index for gpu in gpus.gpus[: gpus.num_wanted]}
    if len(used) < 2:
        because = "torch can use no GPU" if gpus.num_usable == 0 else "the run uses one GPU"
        return LinkFacts(), [NotChecked("links between GPUs: peer access, NVLink, PCIe lanes, ACS", because)]
    missed = []
    tables: list[dict[Pair, str]] = [{}, {}]
    for place, arguments in enumerate((("topo", "-m"), ("topo", "-p2p", "r"))):
        try:
            table = read_matrix(ask(*arguments))
            tables[place] = {pair: link for pair, link in table.items() if used.issuperset(pair)}
        except Unanswered as error:
            missed.append(NotChecked(("links", "peer access")[place] + " between GPUs", str(error)))
    redirecting: tuple[str, ...] = ()
    try:
        redirecting = redirecting_bridges()
    except OSError as error:
        why = error.strerror or str(error)
        missed.append(NotChecked("ACS on the PCI bridges", f"{why}; sudo lockstep doctor can"))
    return LinkFacts(tables[0], tables[1], redirecting), missed
