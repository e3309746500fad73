"""What ``nvidia-smi`` says, asked with a time limit, and read."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Sequence

from lockstep.study.doctor.topics.gpus import Gpu
from lockstep.study.doctor.topics.links import Pair

TIMEOUT_S = 4.0

FIELDS = (
    *("index", "name", "uuid", "pci.bus_id", "memory.total", "memory.used", "power.limit", "power.default_limit"),
    *("pcie.link.width.current", "pcie.link.width.max", "pcie.link.gen.max", "pcie.link.gen.gpumax"),
)

QUERY = (f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")

_STYLES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d+)$")


class Unanswered(Exception):
    """The program is not there, failed, or took too long; the message says which."""


def ask(*arguments: str) -> str:
    """Return what ``nvidia-smi`` prints. Blocks some seconds at most.

    Raises:
        Unanswered: It printed nothing of use.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise Unanswered("there is no nvidia-smi")
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Unanswered(f"nvidia-smi did not answer within {TIMEOUT_S:g} s") from None
    except OSError as error:
        raise Unanswered(f"nvidia-smi cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        told = (done.stdout + done.stderr).strip().splitlines()
        raise Unanswered(f"nvidia-smi failed: {told[0] if told else f'exit code {done.returncode}'}")
    return done.stdout


def read_gpus(text: str) -> tuple[Gpu, ...]:
    """Read the answer to ``nvidia-smi`` with `QUERY`; what a GPU does not tell is ``None``."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if len(row) == len(FIELDS)]
    return tuple(_gpu(dict(zip(FIELDS, row, strict=True))) for row in rows)


def _gpu(row: dict[str, str]) -> Gpu:
    return Gpu(
        index=int(row["index"]),
        name=row["name"],
        uuid=row["uuid"],
        bus_id=row["pci.bus_id"],
        memory_bytes=int((_number(row["memory.total"]) or 0) * 2**20),
        used_bytes=int((_number(row["memory.used"]) or 0) * 2**20),
        power_limit_w=_number(row["power.limit"]),
        default_power_w=_number(row["power.default_limit"]),
        link_width=_whole(row["pcie.link.width.current"]),
        max_link_width=_whole(row["pcie.link.width.max"]),
        system_generation=_whole(row["pcie.link.gen.max"]),
        gpu_generation=_whole(row["pcie.link.gen.gpumax"]),
    )


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:  # such as [N/A]
        return None


def _whole(cell: str) -> int | None:
    number = _number(cell)
    return None if number is None else int(number)


def read_matrix(text: str) -> dict[Pair, str]:
    """Read the pairs of GPUs ``i < j`` in a table of ``nvidia-smi topo``, as of ``-m`` or ``-p2p r``."""
    columns: list[int] = []
    found: dict[Pair, str] = {}
    for line in _STYLES.sub("", text).splitlines():
        cells = line.split()
        heads = [_GPU.match(cell) for cell in cells]
        if not columns:
            # The first line names the columns; behind the GPUs come network cards and affinities.
            for head in heads:
                if head is None:
                    break
                columns.append(int(head[1]))
        elif heads and heads[0] is not None and len(cells) > len(columns):
            row = int(heads[0][1])
            pairs = zip(columns, cells[1:], strict=False)
            found.update({(row, column): link for column, link in pairs if row < column})
    return found


def visible(gpus: Sequence[Gpu], chosen: str | None) -> tuple[Gpu, ...]:
    """Return those of ``gpus`` that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; all if it is not set."""
    if chosen is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for name in chosen.split(","):
        wanted = name.strip()
        match = [
            gpu
            for gpu in gpus
            if str(gpu.index) == wanted or (wanted[:4] == "GPU-" and gpu.uuid[: len(wanted)] == wanted)
        ]
        if not match:  # CUDA, too, stops at the first that is not there
            break
        found += match
    return tuple(found)
