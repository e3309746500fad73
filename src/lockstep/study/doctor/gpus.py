"""GPUs: are they usable, enough, alike and free?"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lockstep.study.doctor.findings import HANG, MIB, SLOW, Facts, NotChecked, Plan, Problem, check, listed, plural
from lockstep.telemetry.live_view import size

_TIMEOUT_S = 4.0
# A GPU with so much of its memory taken is used by somebody else; a desktop takes less.
_IN_USE = 0.1


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver describes it; 0 for what it does not report."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int = 0


@dataclass(frozen=True)
class Gpus(Facts):
    """The GPUs of this machine that the run may use.

    Attributes:
        gpus: As the driver lists them; empty without one.
        num_usable: How many torch can use.
        torch_cuda: The CUDA version that torch was built for, if any.
        has_driver: Whether NVIDIA's driver is installed.
        num_wanted: How many ranks the run has on this machine.
        is_hidden: Whether CUDA_VISIBLE_DEVICES hides all GPUs, as one does to train on the CPU.
    """

    section, topic = "Devices", "devices"

    gpus: tuple[Gpu, ...] = ()
    num_usable: int = 0
    torch_cuda: str | None = None
    has_driver: bool = False
    num_wanted: int = 1
    is_hidden: bool = False

    @property
    def used(self) -> tuple[Gpu, ...]:
        """Those that the run uses."""
        return self.gpus[: self.num_wanted]

    @property
    def summary(self) -> str:
        """How many there are of each model."""
        if self.num_usable == 0:
            return "no GPU that torch can use" + ": CUDA_VISIBLE_DEVICES hides them" * self.is_hidden
        names = [gpu.name for gpu in self.gpus]
        kinds = listed([f"{names.count(name)} x {name}" for name in dict.fromkeys(names)])
        return kinds or plural(self.num_usable, "GPU")


def read_gpus(plan: Plan) -> tuple[Gpus, list[NotChecked]]:
    """Return what GPUs there are. Blocks some seconds at most."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_hidden = chosen is not None and (not chosen.strip() or chosen.strip().startswith("-"))
    num_usable, has_driver = torch.cuda.device_count(), shutil.which("nvidia-smi") is not None
    gpus: tuple[Gpu, ...] = ()
    missed = []
    if num_usable or has_driver:
        try:
            # Not torch.cuda.mem_get_info: that needs a context of our own on every GPU, which a full one refuses.
            query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.used"]
            query.append("--format=csv,noheader,nounits")
            text = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
            gpus = parse_gpus(text, chosen)
        except (OSError, subprocess.SubprocessError) as error:
            missed.append(NotChecked("models and memory of the GPUs", f"nvidia-smi gave no answer: {error}"))
    return Gpus(gpus, num_usable, torch.version.cuda, has_driver, plan.devices, is_hidden), missed


def parse_gpus(text: str, chosen: str | None) -> tuple[Gpu, ...]:
    """Read the answer of ``nvidia-smi``, a GPU a line; those that ``CUDA_VISIBLE_DEVICES`` leaves, in its order."""

    def mib(cell: str) -> int:
        return int(cell) * MIB if cell.isdigit() else 0  # such as [N/A]

    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    found = [Gpu(int(index), uuid, name, mib(total), mib(used)) for index, uuid, name, total, used in rows]
    if chosen is None:
        return tuple(found)
    # nvidia-smi knows nothing of the variable: it lists all, by PCI address.
    by_name = {str(gpu.index): gpu for gpu in found} | {gpu.uuid: gpu for gpu in found}
    return tuple(by_name[name.strip()] for name in chosen.split(",") if name.strip() in by_name)


@check(Gpus)
def gpu_unusable(facts: Gpus) -> Iterator[Problem]:
    """NVIDIA's driver is installed, but torch finds no GPU.

    The installed torch was built for CPUs, or its CUDA is newer than the driver. ``CUDA_VISIBLE_DEVICES`` set to
    nothing is on purpose, and not reported.

    Cost: Training runs on the CPU, tens of times slower.
    Fix: Install a torch that has CUDA, or update the driver to one that knows its version.
    """
    if facts.has_driver and facts.num_usable == 0 and not facts.is_hidden:
        is_cpu_build = facts.torch_cuda is None
        why = "this torch was built without CUDA" if is_cpu_build else f"its CUDA {facts.torch_cuda} finds no driver"
        paste = "python -m pip install --upgrade --force-reinstall torch" if is_cpu_build else "nvidia-smi"
        yield Problem(SLOW, f"There is NVIDIA's driver, but torch can use no GPU: {why}.", paste)


@check(Gpus)
def gpus_too_few(facts: Gpus) -> Iterator[Problem]:
    """More ranks were asked for than torch finds GPUs.

    Cost: The run is refused at the start; with other launchers two ranks share a GPU, and NCCL fails or hangs.
    Fix: Ask for as many as there are.
    """
    if 0 < facts.num_usable < facts.num_wanted:
        ranks, usable = plural(facts.num_wanted, "rank"), plural(facts.num_usable, "GPU")
        found = f"{ranks} on this machine, but torch finds {usable}."
        yield Problem(HANG, found, f"lockstep run --devices {facts.num_usable} train.py")


@check(Gpus)
def gpus_differ(facts: Gpus) -> Iterator[Problem]:
    """The GPUs that the run would use differ in model or memory.

    ``--shares`` gives each device a part of the batch that fits its speed; ``fit`` weighs the parts so that the
    gradient stays exact.

    Cost: Every step takes as long as on the slowest, and the batch must fit the smallest.
    Fix: Train on those that are alike, or give the fast ones a larger part: --shares 2,1 in the order of the GPUs.
    """
    kinds = [(gpu.memory_bytes, gpu.name) for gpu in facts.used]
    if len(set(kinds)) > 1:
        alike = [str(gpu.index) for gpu, kind in zip(facts.used, kinds, strict=True) if kind == max(kinds)]
        described = [f"GPU {gpu.index} {gpu.name} with {size(gpu.memory_bytes)}" for gpu in facts.used]
        paste = f"export CUDA_VISIBLE_DEVICES={','.join(alike)}"
        yield Problem(SLOW, f"The GPUs are not alike: {listed(described)}.", paste)


@check(Gpus)
def gpu_busy(facts: Gpus) -> Iterator[Problem]:
    """Over a tenth of a GPU's memory is taken before the run begins.

    On a machine with a desktop that may be the screen; otherwise it is another job, or a process that a crash left.

    Cost: That memory is missing, and if the other process computes, all ranks wait for this one.
    Fix: Find out whose process it is, and end it or leave this GPU out.
    """
    for gpu in facts.used:
        if gpu.used_bytes > _IN_USE * gpu.memory_bytes:
            found = f"GPU {gpu.index} has {size(gpu.used_bytes)} of {size(gpu.memory_bytes)} in use already."
            yield Problem(SLOW, found, "nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv")
