"""The names of everything that the doctor can find; `docs/doctor.md` has a heading for each."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """One kind of finding; the value is its heading in the docs."""

    # Devices and the links between them
    GPU_UNUSABLE = "gpu-unusable"
    GPUS_TOO_FEW = "gpus-too-few"
    GPUS_DIFFER = "gpus-differ"
    GPU_BUSY = "gpu-busy"
    GPU_POWER_CAPPED = "gpu-power-capped"
    PCIE_NARROW = "pcie-narrow"
    PCIE_OLD_SLOT = "pcie-old-slot"
    NO_PEER_ACCESS = "no-peer-access"
    LINKS_UNEVEN = "links-uneven"
    LINKS_ACROSS_SOCKETS = "links-across-sockets"
    ACS_ON = "acs-on"

    # Network
    HOSTNAME_LOOPBACK = "hostname-loopback"
    HOSTNAME_UNRESOLVED = "hostname-unresolved"
    MASTER_ADDRESS = "master-address"
    INTERFACE_MISSING = "interface-missing"
    INTERFACE_LOOPBACK = "interface-loopback"
    INTERFACE_VIRTUAL = "interface-virtual"
    INTERFACES_DIFFER = "interfaces-differ"
    INTERFACE_SLOW = "interface-slow"
    INFINIBAND_DOWN = "infiniband-down"
    PORT_TAKEN = "port-taken"
    RANKS_DO_NOT_MEET = "ranks-do-not-meet"

    # Memory, cores and limits
    SHARED_MEMORY_SMALL = "shared-memory-small"
    MEMORY_SMALL = "memory-small"
    THREADS_TOO_MANY = "threads-too-many"
    THREADS_TOO_FEW = "threads-too-few"
    RANKS_OVER_CORES = "ranks-over-cores"
    WORKERS_OVER_CORES = "workers-over-cores"
    CPU_QUOTA = "cpu-quota"
    CPU_AFFINITY = "cpu-affinity"
    MACHINE_BUSY = "machine-busy"
    OPEN_FILES = "open-files"
    LOCKED_MEMORY = "locked-memory"
    PROCESSES_LIMIT = "processes-limit"
    TEMP_FOLDER = "temp-folder"

    # Software and storage
    VERSIONS_DIFFER = "versions-differ"
    MACHINES_DIFFER = "machines-differ"
    DEBUG_SWITCH = "debug-switch"
    DISK_SLOW = "disk-slow"
    DISK_FULL = "disk-full"
    CHECKPOINT_FOLDER = "checkpoint-folder"

    # A task
    TASK_FAILS = "task-fails"
    BATCH_NOT_DIVISIBLE = "batch-not-divisible"
    DATASET_TOO_SMALL = "dataset-too-small"
    LAST_BATCH_TINY = "last-batch-tiny"

    # A script (BatchNorm and seeds are looked at in tasks, too)
    BATCHNORM_NOT_SYNCHRONISED = "batchnorm-not-synchronised"
    SEED_BY_RANK = "seed-by-rank"
    SPLIT_BY_CHANCE = "split-by-chance"
    SAMPLER_MISSING = "sampler-missing"
    SHUFFLE_WITHOUT_SAMPLER = "shuffle-without-sampler"
    SET_EPOCH_MISSING = "set-epoch-missing"
    SAMPLER_SEED_BY_RANK = "sampler-seed-by-rank"
    DEVICE_NOT_SET = "device-not-set"
    DEVICE_FIXED = "device-fixed"
    BACKEND_WITHOUT_GPU = "backend-without-gpu"
    SAVES_ON_ALL_RANKS = "saves-on-all-ranks"
    DOWNLOADS_ON_ALL_RANKS = "downloads-on-all-ranks"
    COLLECTIVE_ON_ONE_RANK = "collective-on-one-rank"
    MODEL_ON_ONE_RANK = "model-on-one-rank"
    UNSAFE_LOAD = "unsafe-load"
    LOADS_ON_GPU_ZERO = "loads-on-gpu-zero"
    UNUSED_PARAMETERS_SEARCH = "unused-parameters-search"
    ACCUMULATION_WITH_SYNC = "accumulation-with-sync"
    DATA_PARALLEL = "data-parallel"
