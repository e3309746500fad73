"""GPUs: are they usable, alike and free, and do they reach each other?"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lockstep.study.doctor.findings import (
    HANG,
    MIB,
    NOTE,
    SLOW,
    Facts,
    NotChecked,
    Plan,
    Problem,
    check,
    listed,
    plural,
    size,
)

_TIMEOUT_S = 4.0
_QUERY = ("index", "name", "uuid", "memory.total", "memory.used", "pcie.link.width.current", "pcie.link.width.max")

_IN_USE = 0.1
"""A GPU with so much of its memory taken is used by somebody else; a desktop takes less."""

_DRIVER, _PCI_DEVICES = Path("/proc/driver/nvidia/version"), Path("/sys/bus/pci/devices")

_REFUSALS = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPUs do not support it",
    "TNS": "the topology does not support it",
    "DR": "the driver's settings disable it",
}
"""What ``nvidia-smi topo -p2p r`` says of a pair that has no peer access."""

Pair = tuple[int, int]


class NoAnswer(Exception):
    """``nvidia-smi`` is not there, failed, or took too long; the message says which."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver describes it; 0 for what it does not say."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int = 0
    uuid: str = ""
    link_width: int = 0
    max_link_width: int = 0


@dataclass(frozen=True)
class Gpus(Facts):
    """The GPUs of this machine that the run may use.

    Attributes:
        gpus: As the driver lists them; empty without one.
        num_usable: How many torch can use.
        torch_cuda: The CUDA version that torch was built for, if any.
        has_nvidia: Whether an NVIDIA GPU is on the bus or its driver is loaded.
        num_wanted: How many ranks the run has on this machine.
        hidden: Whether CUDA_VISIBLE_DEVICES hides all GPUs, as one does to train on the CPU.
        peers: For each pair ``i < j`` what ``nvidia-smi topo -p2p r`` says: ``OK``, or why not.
    """

    section, topic = "Devices", "devices"

    gpus: tuple[Gpu, ...] = ()
    num_usable: int = 0
    torch_cuda: str | None = None
    has_nvidia: bool = False
    num_wanted: int = 1
    hidden: bool = False
    peers: Mapping[Pair, str] = field(default_factory=dict)

    @property
    def used(self) -> tuple[Gpu, ...]:
        """Those that the run uses."""
        return self.gpus[: self.num_wanted]

    @property
    def summary(self) -> str:
        """What there is."""
        if self.num_usable == 0:
            return "no GPU that torch can use" + (": CUDA_VISIBLE_DEVICES hides them" if self.hidden else "")
        if not self.gpus:
            return plural(self.num_usable, "GPU")
        names = [gpu.name for gpu in self.gpus]
        kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
        return f"{listed(kinds)}, at least {size(min(gpu.memory_bytes for gpu in self.gpus))} of memory each"


def read_gpus(plan: Plan) -> tuple[Gpus, list[NotChecked]]:
    """Return what GPUs there are, and how they reach each other; asks the driver, which takes up to some seconds."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = chosen is not None and (not chosen.strip() or chosen.strip().startswith("-"))
    num_usable = torch.cuda.device_count()
    has_nvidia = _DRIVER.exists() or has_nvidia_gpu()
    gpus: tuple[Gpu, ...] = ()
    peers: dict[Pair, str] = {}
    missed = []
    if has_nvidia or num_usable:
        try:
            text = ask_driver(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
            gpus = visible(parse_gpus(text), chosen)
            used = {gpu.index for gpu in gpus[: plan.devices]}
            if len(used) > 1:
                matrix = parse_matrix(ask_driver("topo", "-p2p", "r"))
                peers = {pair: answer for pair, answer in matrix.items() if used.issuperset(pair)}
        except NoAnswer as error:
            missed.append(NotChecked("memory in use, PCIe lanes and peer access of the GPUs", str(error)))
    return Gpus(gpus, num_usable, torch.version.cuda, has_nvidia, plan.devices, hidden, peers), missed


def ask_driver(*arguments: str) -> str:
    """Return what ``nvidia-smi`` prints. Blocks some seconds at most.

    Raises:
        NoAnswer: It printed nothing of use.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise NoAnswer("there is no nvidia-smi")
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"nvidia-smi did not answer within {_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise NoAnswer(f"nvidia-smi cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise NoAnswer(f"nvidia-smi failed: {lines[0] if lines else f'exit code {done.returncode}'}")
    return done.stdout


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Read the answer of ``nvidia-smi``, a GPU a line."""

    def whole(cell: str) -> int:
        return int(float(cell)) if cell.replace(".", "", 1).isdigit() else 0  # such as [N/A]

    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if len(row) == len(_QUERY)]
    return tuple(
        Gpu(int(index), name, whole(total) * MIB, whole(used) * MIB, uuid, whole(width), whole(widest))
        for index, name, uuid, total, used, width, widest in rows
    )


def parse_matrix(text: str) -> dict[Pair, str]:
    """Read the pairs of GPUs ``i < j`` in a table of ``nvidia-smi topo``."""
    columns: list[int] = []
    found: dict[Pair, str] = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        cells = line.split()
        heads = [re.fullmatch(r"GPU(\d+)", cell) for cell in cells]
        if not columns:
            # The first line names the columns; behind the GPUs come network cards and affinities.
            columns = [int(head[1]) for head in heads if head is not None]
        elif heads and heads[0] is not None and len(cells) > len(columns):
            row = int(heads[0][1])
            found |= {(row, column): cell for column, cell in zip(columns, cells[1:], strict=False) if row < column}
    return found


def visible(gpus: Sequence[Gpu], chosen: str | None) -> tuple[Gpu, ...]:
    """Return those of ``gpus`` that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; all if it is not set."""
    if chosen is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for name in (part.strip() for part in chosen.split(",")):
        is_uuid = name.startswith("GPU-")
        match = [gpu for gpu in gpus if str(gpu.index) == name or (is_uuid and gpu.uuid.startswith(name))]
        if not match:  # CUDA, too, stops at the first that is not there
            break
        found += match
    return tuple(found)


def has_nvidia_gpu(devices: Path = _PCI_DEVICES) -> bool:
    """Say whether an NVIDIA display or 3D controller is on the PCI bus."""

    def read(file: Path) -> str:
        try:
            return file.read_text().strip()
        except OSError:
            return ""

    folders = devices.iterdir() if devices.is_dir() else ()
    return any(read(one / "vendor") == "0x10de" and read(one / "class").startswith("0x03") for one in folders)


@check(Gpus)
def gpu_unusable(facts: Gpus) -> Iterator[Problem]:
    """An NVIDIA GPU is on the bus, or its driver is loaded, but torch sees none.

    The installed torch was built for CPUs, or its CUDA is newer than the driver. ``CUDA_VISIBLE_DEVICES`` set to
    nothing is taken as a wish, and not reported.

    Cost: Training runs on the CPU, tens of times slower.
    Fix: Install a torch that has CUDA, or update the driver to one that knows its version.
    """
    if facts.has_nvidia and facts.num_usable == 0 and not facts.hidden:
        is_cpu_build = facts.torch_cuda is None
        why = "this torch was built without CUDA" if is_cpu_build else f"its CUDA {facts.torch_cuda} finds no driver"
        paste = "python -m pip install --upgrade --force-reinstall torch" if is_cpu_build else "nvidia-smi"
        yield Problem(SLOW, f"There is an NVIDIA GPU, but torch cannot use it: {why}.", paste)


@check(Gpus)
def gpus_too_few(facts: Gpus) -> Iterator[Problem]:
    """More ranks were asked for than torch sees GPUs.

    Cost: The run is refused at the start; with other launchers two ranks share a GPU, and NCCL fails or hangs.
    Fix: Ask for as many as there are.
    """
    if 0 < facts.num_usable < facts.num_wanted:
        ranks, usable = plural(facts.num_wanted, "rank"), plural(facts.num_usable, "GPU")
        found = f"{ranks} on this machine, but torch sees {usable}."
        yield Problem(HANG, found, f"lockstep run --devices {facts.num_usable} train.py")


@check(Gpus)
def gpus_differ(facts: Gpus) -> Iterator[Problem]:
    """The GPUs that the run would use differ in model or memory.

    ``--shares`` gives each device a part of the batch that fits its speed; ``fit`` weighs the parts so that the
    gradient stays exact.

    Cost: Every step takes as long as on the slowest, and the batch must fit the smallest.
    Fix: Train on those that are alike, or give the fast ones a larger part: --shares 2,1 in the order of the GPUs.
    """
    kinds = [(gpu.name, gpu.memory_bytes) for gpu in facts.used]
    if len(set(kinds)) > 1:
        best = max(kinds, key=lambda kind: kind[1])
        alike = [str(gpu.index) for gpu, kind in zip(facts.used, kinds, strict=True) if kind == best]
        described = [f"GPU {gpu.index} {gpu.name} with {size(gpu.memory_bytes)}" for gpu in facts.used]
        paste = f"export CUDA_VISIBLE_DEVICES={','.join(alike)}"
        yield Problem(SLOW, f"The GPUs are not alike: {listed(described)}.", paste)


@check(Gpus)
def gpu_busy(facts: Gpus) -> Iterator[Problem]:
    """Over a tenth of a GPU's memory is taken before the run begins.

    On a machine with a desktop that may be the screen; otherwise it is another job, or a process that a crash left.

    Cost: That memory is missing, and if the other process computes, all ranks wait for this one.
    Fix: See whose process it is, and end it or leave this GPU out.
    """
    for gpu in facts.used:
        if gpu.used_bytes > _IN_USE * gpu.memory_bytes:
            found = f"GPU {gpu.index} has {size(gpu.used_bytes)} of {size(gpu.memory_bytes)} in use already."
            yield Problem(SLOW, found, "nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv")


@check(Gpus)
def pcie_narrow(facts: Gpus) -> Iterator[Problem]:
    """A card uses fewer PCIe lanes than it and the slot have.

    It is not seated well, sits behind a riser, or shares lanes with another slot. The number of lanes does not depend
    on load, unlike the generation, which drops on an idle link and is therefore not checked.

    Cost: Copies from the host, and between GPUs without NVLink, have a part of the bandwidth.
    Fix: Seat the card again, or move it to a slot with all lanes; look at the mainboard's manual for which.
    """
    for gpu in facts.used:
        if 0 < gpu.link_width < gpu.max_link_width:
            found = f"GPU {gpu.index} is linked by {gpu.link_width} PCIe lanes of {gpu.max_link_width}."
            yield Problem(SLOW, found, f"nvidia-smi -i {gpu.index} -q -d PCIE")


@check(Gpus)
def no_peer_access(facts: Gpus) -> Iterator[Problem]:
    """``nvidia-smi topo -p2p r`` says that one GPU cannot reach another's memory.

    Consumer cards do not have it (``GNS``), which is a note, as nothing mends it; with ``CNS`` and ``TNS`` it is the
    machine that prevents it: virtualisation, an IOMMU, ACS, or the way the slots are wired.

    Cost: Gradients take the way through host memory: two copies instead of one, over the CPU's memory bus.
    Fix: Turn the IOMMU and ACS off in the firmware; where the GPUs cannot do better, exchange gradients less often.
    """
    refused = {pair: answer for pair, answer in facts.peers.items() if answer != "OK"}
    if refused:
        is_by_nature = set(refused.values()) == {"GNS"}
        reasons = " and ".join(_REFUSALS.get(answer, answer) for answer in dict.fromkeys(refused.values()))
        pairs = listed([f"GPU {first} and {second}" for first, second in refused])
        count = f"{len(refused)} of {plural(len(facts.peers), 'pair')} of GPUs"
        found = f"{count} cannot reach each other's memory ({pairs}): {reasons}."
        accumulate = "lockstep train TASK.py --accumulate 4 --wire bf16"
        look = "nvidia-smi topo -p2p r && cat /proc/cmdline  # after changing the firmware: iommu=off or iommu=pt"
        yield Problem(NOTE if is_by_nature else SLOW, found, accumulate if is_by_nature else look)
