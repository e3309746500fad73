"""Links between GPUs: NVLink, PCIe, peer-to-peer access, and what redirects it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.quantities import listed, plural

Pair = tuple[int, int]

REASONS = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPUs do not support it",
    "TNS": "the topology does not support it",
    "NS": "it is not supported",
    "DR": "the driver's settings disable it",
    "U": "the driver does not know why",
}
"""What ``nvidia-smi topo -p2p r`` says of a pair that has no peer access."""

SHARED_HOST_PATHS = ("SYS", "SOC")
"""Links that cross from one CPU socket to another."""


@dataclass(frozen=True)
class LinkFacts:
    """How GPUs reach each other.

    Attributes:
        links: For each pair ``i < j`` what ``nvidia-smi topo -m`` says, such as ``NV12`` or ``PHB``.
        peers: For each pair ``i < j`` what ``nvidia-smi topo -p2p r`` says: ``OK``, or why not.
        redirecting: PCI addresses of the bridges that send peer-to-peer traffic up to the CPU (ACS).
    """

    links: Mapping[Pair, str] = field(default_factory=dict)
    peers: Mapping[Pair, str] = field(default_factory=dict)
    redirecting: tuple[str, ...] = ()


def look(facts: LinkFacts) -> list[Finding]:
    """Return what slows the GPUs' way to each other."""
    found = []
    refused = {pair: why for pair, why in facts.peers.items() if why != "OK"}
    if refused:
        found.append(_no_peer_access(refused, len(facts.peers)))
    fast = [pair for pair, link in facts.links.items() if link.startswith("NV")]
    far = [pair for pair, link in facts.links.items() if link in SHARED_HOST_PATHS]
    if fast and len(fast) < len(facts.links):
        found.append(_uneven(facts.links))
    elif far:
        found.append(_across_sockets(far, len(facts.links)))
    if facts.redirecting and facts.links and len(fast) != len(facts.links):
        found.append(_acs(facts.redirecting))
    return found


def seen(facts: LinkFacts) -> str:
    """Say in a line how the GPUs are linked."""
    if not facts.links:
        return "no two GPUs to link"
    kinds = list(facts.links.values())
    counts = [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]
    allowed = sum(why == "OK" for why in facts.peers.values())
    peers = f"; peer access in {allowed} of {plural(len(facts.peers), 'pair')}" if facts.peers else ""
    return f"{plural(len(kinds), 'pair')}: {listed(counts)}{peers}"


def _pairs(pairs: list[Pair]) -> str:
    return listed([f"GPU {first} and {second}" for first, second in pairs])


def _no_peer_access(refused: Mapping[Pair, str], num_pairs: int) -> Finding:
    reasons = [REASONS.get(why, why) for why in dict.fromkeys(refused.values())]
    is_by_nature = set(refused.values()) == {"GNS"}
    return Finding(
        Kind.NO_PEER_ACCESS,
        Severity.NOTE if is_by_nature else Severity.SLOW,
        f"{len(refused)} of {plural(num_pairs, 'pair')} of GPUs cannot reach each other's memory "
        f"({_pairs(list(refused))}): {' and '.join(reasons)}.",
        "Gradients take the way through host memory: two copies instead of one, over the CPU's memory bus.",
        "These GPUs cannot do better: exchange gradients less often, by accumulating, or round them on the way."
        if is_by_nature
        else "Look for virtualisation that comes between: turn the IOMMU and ACS off in the firmware.",
        "lockstep train TASK.py --accumulate 4 --wire bf16"
        if is_by_nature
        else "nvidia-smi topo -p2p r && cat /proc/cmdline  # after changing the firmware: iommu=off or iommu=pt",
    )


def _uneven(links: Mapping[Pair, str]) -> Finding:
    slow = [pair for pair, link in links.items() if not link.startswith("NV")]
    group = _linked_to_first(links)
    return Finding(
        Kind.LINKS_UNEVEN,
        Severity.SLOW,
        f"{len(links) - len(slow)} of {plural(len(links), 'pair')} of GPUs have NVLink; {_pairs(slow)} do not.",
        "An all-reduce over all of them goes at the pace of the slowest link.",
        "For jobs that fit on fewer GPUs, take those that NVLink joins.",
        f"export CUDA_VISIBLE_DEVICES={','.join(map(str, group))}",
    )


def _linked_to_first(links: Mapping[Pair, str]) -> list[int]:
    """Return the GPUs of the first pair with NVLink, and those that NVLink joins to all of them."""
    group: list[int] = []
    for gpu in sorted({gpu for pair in links for gpu in pair}):
        others = [links[min(gpu, other), max(gpu, other)] for other in group]
        is_joined = all(link.startswith("NV") for link in others)
        has_any = any(link.startswith("NV") for pair, link in links.items() if gpu in pair)
        if is_joined and has_any:
            group.append(gpu)
    return group


def _across_sockets(far: list[Pair], num_pairs: int) -> Finding:
    return Finding(
        Kind.LINKS_ACROSS_SOCKETS,
        Severity.SLOW,
        f"{len(far)} of {plural(num_pairs, 'pair')} of GPUs reach each other over the link between the CPU sockets "
        f"only ({_pairs(far)}).",
        "Each all-reduce crosses it; it is shared with all other traffic between the sockets.",
        "For jobs on fewer GPUs, take those of one socket; otherwise keep each rank's CPU work on its GPU's socket.",
        "nvidia-smi topo -m  # then: numactl --cpunodebind=N --membind=N, with N of the column NUMA Affinity",
    )


def _acs(bridges: tuple[str, ...]) -> Finding:
    return Finding(
        Kind.ACS_ON,
        Severity.HANG,
        f"ACS redirects peer-to-peer traffic at {plural(len(bridges), 'PCI bridge')}: {listed(list(bridges))}.",
        "What one GPU sends another goes up to the CPU and back; NCCL becomes slow, and on some machines hangs.",
        "Turn ACS off in the firmware; until the next start of the machine these lines do. Not inside a virtual "
        "machine, where ACS keeps guests apart: there turn on ATS.",
        "\n".join(f"sudo setpci -v -s {bridge} ECAP_ACS+0x6.w=0000" for bridge in bridges),
    )
