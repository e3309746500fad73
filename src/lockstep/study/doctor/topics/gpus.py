"""GPUs: are they there, usable, alike and free?"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.quantities import listed, plural, size

_IN_USE = 0.1
"""A GPU with so much of its memory taken is used by somebody else; a desktop takes less."""

_CAPPED = 0.95


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver describes it."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int = 0
    bus_id: str = ""
    uuid: str = ""
    power_limit_w: float | None = None
    default_power_w: float | None = None
    link_width: int | None = None
    max_link_width: int | None = None
    system_generation: int | None = None
    gpu_generation: int | None = None


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs of this machine that the run may use.

    Attributes:
        gpus: As the driver lists them; empty without one.
        num_usable: How many torch can use.
        torch_cuda: The CUDA version that torch was built for, if any.
        has_nvidia: Whether an NVIDIA GPU is on the bus or its driver is loaded.
        num_wanted: How many ranks the run has on this machine.
        hidden: Whether CUDA_VISIBLE_DEVICES hides all GPUs, as one does to train on the CPU.
    """

    gpus: tuple[Gpu, ...] = ()
    num_usable: int = 0
    torch_cuda: str | None = None
    has_nvidia: bool = False
    num_wanted: int = 1
    hidden: bool = False


def look(facts: GpuFacts) -> list[Finding]:
    """Return what is wrong with the GPUs."""
    if facts.has_nvidia and facts.num_usable == 0 and not facts.hidden:
        return [_unusable(facts)]
    found = []
    if 0 < facts.num_usable < facts.num_wanted:
        found.append(_too_few(facts))
    used = facts.gpus[: facts.num_wanted]
    if len({(gpu.name, gpu.memory_bytes) for gpu in used}) > 1:
        found.append(_differ(used))
    for gpu in used:
        found += _of_one(gpu)
    return found


def seen(facts: GpuFacts) -> str:
    """Say in a line what there is."""
    if facts.num_usable == 0:
        return "no GPU that torch can use" + (": CUDA_VISIBLE_DEVICES hides them" if facts.hidden else "")
    if not facts.gpus:
        return plural(facts.num_usable, "GPU")
    names = [gpu.name for gpu in facts.gpus]
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return f"{listed(kinds)}, at least {size(min(gpu.memory_bytes for gpu in facts.gpus))} of memory each"


def _unusable(facts: GpuFacts) -> Finding:
    is_cpu_build = facts.torch_cuda is None
    why = "this torch was built without CUDA" if is_cpu_build else f"its CUDA {facts.torch_cuda} finds no usable driver"
    return Finding(
        Kind.GPU_UNUSABLE,
        Severity.SLOW,
        f"There is an NVIDIA GPU, but torch cannot use it: {why}.",
        "Training runs on the CPU, tens of times slower.",
        "Install a torch that has CUDA." if is_cpu_build else "Update the driver to one that knows this CUDA version.",
        "python -m pip install --upgrade --force-reinstall torch" if is_cpu_build else "nvidia-smi  # shows the driver",
    )


def _too_few(facts: GpuFacts) -> Finding:
    return Finding(
        Kind.GPUS_TOO_FEW,
        Severity.HANG,
        f"{plural(facts.num_wanted, 'rank')} on this machine, but torch sees {plural(facts.num_usable, 'GPU')}.",
        "The run is refused at the start; with other launchers two ranks share a GPU, and NCCL fails or hangs.",
        "Ask for as many as there are.",
        f"lockstep run --devices {facts.num_usable} train.py",
    )


def _differ(gpus: tuple[Gpu, ...]) -> Finding:
    kinds = [f"GPU {gpu.index} {gpu.name} with {size(gpu.memory_bytes)}" for gpu in gpus]
    best = max(gpus, key=lambda gpu: gpu.memory_bytes)
    alike = [str(gpu.index) for gpu in gpus if (gpu.name, gpu.memory_bytes) == (best.name, best.memory_bytes)]
    return Finding(
        Kind.GPUS_DIFFER,
        Severity.SLOW,
        f"The GPUs are not alike: {listed(kinds)}.",
        "Every step takes as long as on the slowest, and the batch must fit the smallest.",
        "Train on those that are alike, or give the fast ones a larger part: --shares 2,1 in the order of the GPUs.",
        f"export CUDA_VISIBLE_DEVICES={','.join(alike)}",
    )


def _of_one(gpu: Gpu) -> list[Finding]:
    found = []
    if gpu.used_bytes > _IN_USE * gpu.memory_bytes:
        found.append(
            Finding(
                Kind.GPU_BUSY,
                Severity.SLOW,
                f"GPU {gpu.index} has {size(gpu.used_bytes)} of {size(gpu.memory_bytes)} in use already.",
                "That memory is missing, and if the other process computes, all ranks wait for this one.",
                "See whose process it is, and end it or leave this GPU out.",
                "nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv",
            )
        )
    if gpu.power_limit_w and gpu.default_power_w and gpu.power_limit_w < _CAPPED * gpu.default_power_w:
        found.append(
            Finding(
                Kind.GPU_POWER_CAPPED,
                Severity.SLOW,
                f"GPU {gpu.index} may use {gpu.power_limit_w:.0f} W; {gpu.default_power_w:.0f} W is its default.",
                "Under load its clock falls; all ranks wait for the slowest.",
                "Set the default again, if power and cooling allow it.",
                f"sudo nvidia-smi -i {gpu.index} -pl {gpu.default_power_w:.0f}",
            )
        )
    if gpu.link_width and gpu.max_link_width and gpu.link_width < gpu.max_link_width:
        part = f"1/{gpu.max_link_width // gpu.link_width}"
        found.append(
            Finding(
                Kind.PCIE_NARROW,
                Severity.SLOW,
                f"GPU {gpu.index} is linked by {gpu.link_width} PCIe lanes of {gpu.max_link_width}.",
                f"Copies from the host, and between GPUs without NVLink, have {part} of the bandwidth.",
                "Seat the card again, or move it to a slot with all lanes; look at the mainboard's manual for which.",
                f"nvidia-smi -i {gpu.index} --query-gpu=pcie.link.width.current,pcie.link.width.max --format=csv",
            )
        )
    if gpu.system_generation and gpu.gpu_generation and gpu.system_generation < gpu.gpu_generation:
        found.append(
            Finding(
                Kind.PCIE_OLD_SLOT,
                Severity.NOTE,
                f"GPU {gpu.index} could use PCIe {gpu.gpu_generation}; its slot gives {gpu.system_generation}.",
                f"Copies run at 1/{2 ** (gpu.gpu_generation - gpu.system_generation)} of what the card could do.",
                "Look for a setting of the slot's speed in the firmware.",
                f"nvidia-smi -i {gpu.index} --query-gpu=pcie.link.gen.hostmax,pcie.link.gen.gpumax --format=csv",
            )
        )
    return found
