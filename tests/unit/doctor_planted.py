"""Facts with a fault planted in each, and what the doctor must find in them; no machine is looked at."""

from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.study.doctor.finding import Severity
from lockstep.study.doctor.gather.nvidia import read_gpus, read_matrix
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.quantities import GIB, MIB
from lockstep.study.doctor.topics import (
    cores,
    disk,
    gpus,
    hostname,
    limits,
    links,
    memory,
    network,
    port,
    switches,
    task,
    versions,
)

HANG, WRONG, SLOW, NOTE = Severity.HANG, Severity.WRONG, Severity.SLOW, Severity.NOTE

# In the form of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`: four GPUs without a fault.
SOUND_GPUS = """\
0, NVIDIA A100-SXM4-80GB, GPU-aaaa0000, 00000000:07:00.0, 81920, 4, 400.00, 400.00, 16, 16, 4, 4
1, NVIDIA A100-SXM4-80GB, GPU-bbbb1111, 00000000:0B:00.0, 81920, 4, 400.00, 400.00, 16, 16, 4, 4
2, NVIDIA A100-SXM4-80GB, GPU-cccc2222, 00000000:48:00.0, 81920, 4, 400.00, 400.00, 16, 16, 4, 4
3, NVIDIA A100-SXM4-80GB, GPU-dddd3333, 00000000:4C:00.0, 81920, 4, 400.00, 400.00, 16, 16, 4, 4
"""

# In the form of `nvidia-smi topo -m`, with the escape codes of its heading.
NVLINK_IN_PAIRS = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31,64-95\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31,64-95\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63,96-127\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63,96-127\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = (what it stands for)
"""

TWO_SOCKETS = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tSYS\t0-15\t0
GPU1\tSYS\t X \t16-31\t1
"""

ONE_SWITCH = TWO_SOCKETS.replace("SYS", "PIX")
ALL_NVLINK = TWO_SOCKETS.replace("SYS", "NV18")

# In the form of `nvidia-smi topo -p2p r`.
CHIPSET_REFUSES = """\
 \tGPU0\tGPU1\t
 GPU0\tX\tCNS\t
 GPU1\tCNS\tX\t

Legend:

  X    = Self
  OK   = (what it stands for)
"""
GPU_REFUSES = CHIPSET_REFUSES.replace("CNS", "GNS")

SOUND = {
    "gpus": gpus.GpuFacts(read_gpus(SOUND_GPUS), 4, "12.8", True, 4),
    "links": links.LinkFacts(read_matrix(ALL_NVLINK), read_matrix(CHIPSET_REFUSES.replace("CNS", "OK"))),
    "network": network.NetworkFacts(
        (
            network.Interface("lo", ("127.0.0.1", "::1")),
            network.Interface("eth0", ("10.0.0.1",), speed_mbps=25_000),
            network.Interface("docker0", ("172.17.0.1",)),
        ),
        gloo="eth0",
        machines=2,
    ),
    "hostname": hostname.HostFacts("node1", ("10.0.0.1",), "10.0.0.1", "eth0", 2, "10.0.0.1", ("10.0.0.1",)),
    "port": port.PortFacts(29500),
    "cores": cores.CoreFacts(logical=32, affinity=32, physical=16, ranks=4, workers=4),
    "memory": memory.MemoryFacts(16 * GIB, 16 * GIB, 64 * GIB, ranks=4, workers=4, batch_bytes=MIB),
    "limits": limits.LimitFacts(65536, 65536, 8 * MIB, 4096, ranks=4, world_size=8, workers=4, running=100),
    "disk": disk.DiskFacts("runs", None, "ext4", 100 * GIB, 63 * MIB, 0.1, GIB),
    "switches": switches.SwitchFacts({"NCCL_DEBUG": "WARN", "PATH": "/usr/bin"}),
    "task": task.TaskFacts("net", 64, 4, 1000, False, (), 4 * MIB, 4 * MIB, 1000),
    "versions": [versions.VersionFacts(rank, "node1", "3.12.1", "2.13.0", "0.1.0") for rank in range(2)],
}
"""Facts of each topic without a fault."""

LOOKS: dict[str, Any] = {
    "gpus": gpus.look,
    "links": links.look,
    "network": network.look,
    "hostname": hostname.look,
    "port": port.look,
    "cores": cores.look,
    "memory": memory.look,
    "limits": limits.look,
    "disk": disk.look,
    "switches": switches.look,
    "task": task.look,
    "versions": versions.look,
}


class Fault(NamedTuple):
    """Facts with one fault, and the one finding."""

    topic: str
    facts: Any
    kind: Kind
    severity: Severity
    found: str


def fault(topic: str, kind: Kind, severity: Severity, found: str, **changed: Any) -> Fault:
    return Fault(topic, replace(SOUND[topic], **changed), kind, severity, found)


def with_gpu(index: int, **changed: Any) -> dict[str, Any]:
    """The sound GPUs with one of them changed."""
    sound = SOUND["gpus"].gpus
    return {"gpus": (*sound[:index], replace(sound[index], **changed), *sound[index + 1 :])}


def with_links(text: str, peers: str = "") -> dict[str, Any]:
    return {"links": read_matrix(text), "peers": read_matrix(peers)}


def with_interfaces(*interfaces: network.Interface) -> dict[str, Any]:
    return {"interfaces": interfaces}


def with_versions(**second: str) -> Fault:
    first = SOUND["versions"][0]
    return [first, replace(first, rank=1, **second)]


LO, ETH = SOUND["network"].interfaces[:2]
PORTS = (network.InfinibandPort("mlx5_0", 1, "ACTIVE"), network.InfinibandPort("mlx5_1", 1, "DOWN"))

FAULTS = [
    fault(
        "gpus",
        Kind.GPU_UNUSABLE,
        SLOW,
        "There is an NVIDIA GPU, but torch cannot use it: this torch was built without CUDA.",
        num_usable=0,
        torch_cuda=None,
    ),
    fault(
        "gpus",
        Kind.GPU_UNUSABLE,
        SLOW,
        "There is an NVIDIA GPU, but torch cannot use it: its CUDA 12.8 finds no usable driver.",
        num_usable=0,
        gpus=(),
    ),
    fault(
        "gpus",
        Kind.GPUS_TOO_FEW,
        HANG,
        "8 ranks on this machine, but torch sees 4 GPUs.",
        num_wanted=8,
    ),
    fault(
        "gpus",
        Kind.GPUS_DIFFER,
        SLOW,
        "The GPUs are not alike: GPU 0 NVIDIA A100-SXM4-80GB with 80 GiB, GPU 1 NVIDIA A100-SXM4-40GB with 40 GiB.",
        num_wanted=2,
        **with_gpu(1, name="NVIDIA A100-SXM4-40GB", memory_bytes=40 * GIB),
    ),
    fault(
        "gpus",
        Kind.GPU_BUSY,
        SLOW,
        "GPU 2 has 30 GiB of 80 GiB in use already.",
        **with_gpu(2, used_bytes=30 * GIB),
    ),
    fault(
        "gpus",
        Kind.GPU_POWER_CAPPED,
        SLOW,
        "GPU 1 may use 250 W; 400 W is its default.",
        **with_gpu(1, power_limit_w=250.0),
    ),
    fault("gpus", Kind.PCIE_NARROW, SLOW, "GPU 3 is linked by 4 PCIe lanes of 16.", **with_gpu(3, link_width=4)),
    fault(
        "gpus",
        Kind.PCIE_OLD_SLOT,
        NOTE,
        "GPU 0 could use PCIe 4; its slot gives 3.",
        **with_gpu(0, system_generation=3),
    ),
    fault(
        "links",
        Kind.NO_PEER_ACCESS,
        SLOW,
        "1 of 1 pair of GPUs cannot reach each other's memory (GPU 0 and 1): the chipset does not support it.",
        **with_links(ONE_SWITCH, CHIPSET_REFUSES),
    ),
    fault(
        "links",
        Kind.NO_PEER_ACCESS,
        NOTE,
        "1 of 1 pair of GPUs cannot reach each other's memory (GPU 0 and 1): the GPUs do not support it.",
        **with_links(ONE_SWITCH, GPU_REFUSES),
    ),
    fault(
        "links",
        Kind.LINKS_UNEVEN,
        SLOW,
        "2 of 6 pairs of GPUs have NVLink; GPU 0 and 2, GPU 0 and 3, GPU 1 and 2, GPU 1 and 3 do not.",
        **with_links(NVLINK_IN_PAIRS),
    ),
    fault(
        "links",
        Kind.LINKS_ACROSS_SOCKETS,
        SLOW,
        "1 of 1 pair of GPUs reach each other over the link between the CPU sockets only (GPU 0 and 1).",
        **with_links(TWO_SOCKETS),
    ),
    fault(
        "links",
        Kind.ACS_ON,
        HANG,
        "ACS redirects peer-to-peer traffic at 2 PCI bridges: 0000:00:01.0, 0000:00:03.0.",
        redirecting=("0000:00:01.0", "0000:00:03.0"),
        **with_links(ONE_SWITCH),
    ),
    fault(
        "network",
        Kind.INTERFACE_MISSING,
        HANG,
        "GLOO_SOCKET_IFNAME=eno1, but no interface of that name is up here; there are lo, eth0, docker0.",
        environ={"GLOO_SOCKET_IFNAME": "eno1"},
        gloo="eno1",
    ),
    fault(
        "network",
        Kind.INTERFACE_MISSING,
        HANG,
        "NCCL_SOCKET_IFNAME==bond0, but no interface of that name is up here; there are lo, eth0, docker0.",
        environ={"NCCL_SOCKET_IFNAME": "=bond0"},
        on_gpus=True,
        machines=1,
    ),
    fault(
        "network",
        Kind.INTERFACE_MISSING,
        NOTE,
        "GLOO_SOCKET_IFNAME=eth0,eth1, but no interface of that name is up here; there are lo, eth0, docker0.",
        environ={"GLOO_SOCKET_IFNAME": "eth0,eth1"},
        machines=1,
    ),
    fault(
        "memory",
        Kind.SHARED_MEMORY_SMALL,
        HANG,
        "There is no /dev/shm.",
        shm_bytes=None,
        shm_free_bytes=0,
        batch_bytes=None,
    ),
    fault(
        "network",
        Kind.INTERFACE_LOOPBACK,
        HANG,
        "Gloo will use lo, which leads to this machine only, but 2 machines are to take part.",
        gloo="lo",
    ),
    fault(
        "network",
        Kind.INTERFACE_VIRTUAL,
        HANG,
        "NCCL will use virbr0, which looks like a bridge to containers or a tunnel.",
        on_gpus=True,
        gloo="virbr0",
        **with_interfaces(LO, network.Interface("virbr0", ("192.168.122.1",)), ETH),
    ),
    fault(
        "network",
        Kind.INTERFACES_DIFFER,
        NOTE,
        "NCCL will use ib0, Gloo eth0.",
        on_gpus=True,
        **with_interfaces(LO, ETH, network.Interface("ib0", ("10.1.0.1",), speed_mbps=200_000)),
    ),
    fault(
        "network",
        Kind.INTERFACE_SLOW,
        SLOW,
        "eth0 runs at 1000 Mbit/s.",
        **with_interfaces(LO, replace(ETH, speed_mbps=1000)),
    ),
    fault(
        "network",
        Kind.INFINIBAND_DOWN,
        SLOW,
        "1 of 2 InfiniBand ports cannot be used: mlx5_1 port 1 is DOWN.",
        infiniband=PORTS,
        on_gpus=True,
    ),
    fault(
        "network",
        Kind.INFINIBAND_DOWN,
        NOTE,
        "NCCL_IB_DISABLE=1, although there are InfiniBand ports that are active.",
        infiniband=PORTS,
        environ={"NCCL_IB_DISABLE": "1"},
    ),
    fault(
        "hostname",
        Kind.HOSTNAME_LOOPBACK,
        HANG,
        "The name of this host, node1, leads to 127.0.1.1, which no other machine can reach; its address for them is "
        "10.0.0.1.",
        addresses=("127.0.1.1",),
    ),
    fault(
        "hostname",
        Kind.HOSTNAME_LOOPBACK,
        NOTE,
        "The name of this host, node1, leads to 127.0.1.1, which no other machine can reach; its address for them is "
        "10.0.0.1.",
        addresses=("127.0.1.1",),
        machines=1,
    ),
    fault(
        "hostname",
        Kind.HOSTNAME_UNRESOLVED,
        HANG,
        "The name of this host, node1, leads to no address.",
        addresses=(),
    ),
    fault(
        "hostname",
        Kind.MASTER_ADDRESS,
        HANG,
        "The ranks are to meet at localhost, which leads to 127.0.0.1 on this machine.",
        master_addr="localhost",
        master_addresses=("127.0.0.1",),
    ),
    fault(
        "port",
        Kind.PORT_TAKEN,
        HANG,
        "Port 29500 on this machine is already in use by process 42.",
        problem="is already in use",
        holder="process 42",
        was_chosen=True,
    ),
    fault(
        "port",
        Kind.PORT_TAKEN,
        NOTE,
        "Port 29500 on this machine is already in use.",
        problem="is already in use",
    ),
    fault(
        "memory",
        Kind.SHARED_MEMORY_SMALL,
        HANG,
        "/dev/shm has 1 GiB free of 1 GiB; 2.2 GiB is needed for 4 x 4 loader workers.",
        shm_bytes=GIB,
        shm_free_bytes=GIB,
        batch_bytes=50_000_000,
    ),
    fault(
        "memory",
        Kind.SHARED_MEMORY_SMALL,
        NOTE,
        "/dev/shm has 64 MiB, as containers have by default.",
        shm_bytes=64 * MIB,
        shm_free_bytes=64 * MIB,
        workers=None,
    ),
    fault(
        "memory",
        Kind.SHARED_MEMORY_SMALL,
        HANG,
        "/dev/shm has 64 MiB free of 64 MiB; 256 MiB is needed for NCCL.",
        shm_bytes=64 * MIB,
        shm_free_bytes=64 * MIB,
        workers=None,
        on_gpus=True,
    ),
    fault(
        "memory",
        Kind.MEMORY_SMALL,
        HANG,
        "4 ranks with 8 GiB of weights need 129 GiB at least, before activations; 64 GiB are available.",
        weight_bytes=8 * GIB,
        trained_bytes=8 * GIB,
    ),
    fault(
        "cores",
        Kind.THREADS_TOO_MANY,
        SLOW,
        "OMP_NUM_THREADS=32 on 4 ranks are 128 threads for 32 cores.",
        omp=32,
    ),
    fault("cores", Kind.THREADS_TOO_FEW, SLOW, "MKL_NUM_THREADS=1 on 4 ranks use 4 of 32 cores.", mkl=1, omp=8),
    fault("cores", Kind.RANKS_OVER_CORES, SLOW, "64 ranks compute on 32 CPU cores.", ranks=64, workers=None),
    fault(
        "cores",
        Kind.WORKERS_OVER_CORES,
        SLOW,
        "4 ranks with 12 loader workers each are 52 processes for 32 cores: 0.62 of a core for each.",
        workers=12,
        on_gpus=True,
    ),
    fault(
        "cores",
        Kind.CPU_QUOTA,
        NOTE,
        "The container may use 24 cores' worth of time, but programs see 32 cores.",
        quota=24.0,
    ),
    fault(
        "cores",
        Kind.CPU_QUOTA,
        SLOW,
        "The container may use 2.5 cores' worth of time, but programs see 32 cores.",
        quota=2.5,
        ranks=1,
        workers=None,
        started_threads=32,
    ),
    fault(
        "cores",
        Kind.CPU_AFFINITY,
        SLOW,
        "This process may run on 1 of the machine's 32 cores, for 5 processes.",
        affinity=1,
        ranks=1,
        workers=4,
        on_gpus=True,
    ),
    fault(
        "cores",
        Kind.MACHINE_BUSY,
        NOTE,
        "20.5 processes wanted to run over the last minute, on 32 cores.",
        load=20.5,
    ),
    fault(
        "limits",
        Kind.OPEN_FILES,
        HANG,
        "A process may have 256 files open; a rank of this run needs about 608.",
        open_files=256,
        workers=16,
    ),
    fault(
        "limits",
        Kind.OPEN_FILES,
        NOTE,
        "A process may have 1024 files open; a rank of this run needs about 224.",
        open_files=1024,
    ),
    fault(
        "limits",
        Kind.LOCKED_MEMORY,
        HANG,
        "A process may lock 8 MiB of memory, and there is an InfiniBand card.",
        has_infiniband=True,
    ),
    fault(
        "limits",
        Kind.PROCESSES_LIMIT,
        HANG,
        "This container may have 200 processes and threads; 100 run, and the ranks need about 180 more.",
        processes=200,
        processes_of="this container",
    ),
    fault(
        "limits",
        Kind.TEMP_FOLDER,
        HANG,
        f"The folder for temporary files has a name of 80 characters: /{'x' * 79}.",
        long_temp_folder=f"/{'x' * 79}",
    ),
    Fault(
        "versions",
        with_versions(torch="2.11.0"),
        Kind.VERSIONS_DIFFER,
        HANG,
        "The ranks have different versions of torch: 2.13.0 on rank 0; 2.11.0 on rank 1.",
    ),
    Fault(
        "versions",
        with_versions(nccl="2.29.7"),
        Kind.VERSIONS_DIFFER,
        HANG,
        "The ranks have different versions of nccl: none on rank 0; 2.29.7 on rank 1.",
    ),
    Fault(
        "versions",
        with_versions(python="3.11.7"),
        Kind.VERSIONS_DIFFER,
        NOTE,
        "The ranks have different versions of python: 3.12.1 on rank 0; 3.11.7 on rank 1.",
    ),
    Fault(
        "versions",
        with_versions(processor="Old CPU"),
        Kind.MACHINES_DIFFER,
        SLOW,
        "The ranks compute on different processors: none on rank 0; Old CPU on rank 1.",
    ),
    fault(
        "switches",
        Kind.DEBUG_SWITCH,
        SLOW,
        "CUDA_LAUNCH_BLOCKING=1 is set.",
        environ={"CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "OFF"},
    ),
    fault("switches", Kind.DEBUG_SWITCH, NOTE, "NCCL_ALGO=Ring is set.", environ={"NCCL_ALGO": "Ring"}),
    fault(
        "disk", Kind.DISK_SLOW, SLOW, "runs takes 10 MiB/s, measured with 10 MiB.", written_bytes=10 * MIB, seconds=1.0
    ),
    fault(
        "disk",
        Kind.DISK_SLOW,
        NOTE,
        "runs takes 10 MiB/s, measured with 10 MiB.",
        written_bytes=10 * MIB,
        seconds=1.0,
        checkpoint_bytes=None,
    ),
    fault(
        "disk", Kind.DISK_FULL, HANG, "runs has 2 GiB left, too little for 3 checkpoints of 1 GiB.", free_bytes=2 * GIB
    ),
    fault(
        "disk",
        Kind.CHECKPOINT_FOLDER,
        HANG,
        "Nothing can be written to runs: Permission denied.",
        problem="Permission denied",
    ),
    fault("disk", Kind.CHECKPOINT_FOLDER, WRONG, "runs lies in memory (tmpfs).", filesystem="tmpfs"),
    fault(
        "task",
        Kind.BATCH_NOT_DIVISIBLE,
        HANG,
        "The global batch of 66 samples does not divide by 4 devices.",
        global_batch_size=66,
    ),
    fault(
        "task",
        Kind.DATASET_TOO_SMALL,
        SLOW,
        "The data set has 50 samples, fewer than a global batch of 64.",
        num_samples=50,
    ),
    fault(
        "task",
        Kind.DATASET_TOO_SMALL,
        HANG,
        "The data set has 1 sample, fewer than a global batch of 64.",
        num_samples=1,
        drop_last=True,
    ),
    fault(
        "task",
        Kind.BATCHNORM_NOT_SYNCHRONISED,
        NOTE,
        "2 BatchNorm layers (norm1, norm2) will normalise with the 16 samples of their own device, of 64.",
        batchnorms=("norm1", "norm2"),
    ),
    fault(
        "task",
        Kind.BATCHNORM_NOT_SYNCHRONISED,
        WRONG,
        "1 BatchNorm layer (norm) will normalise with the 2 samples of their own device, of 8.",
        batchnorms=("norm",),
        global_batch_size=8,
    ),
]
"""One finding each."""
