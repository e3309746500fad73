"""What the errors of NCCL, Gloo and the store mean, in plain words, and what to do. The same list: docs/failures.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """What one of several marks in an error's text means, and what to do about it."""

    marks: tuple[str, ...]
    means: str
    do: str


MEANINGS = (
    Meaning(
        ("Connection closed by peer", "Connection reset by peer", "remote process exited", "ncclRemoteError"),
        "Another rank's process has ended, or the network has dropped the connection to it.",
        "Look for the rank that failed first, here or on the other machines; this one only noticed.",
    ),
    Meaning(
        ("Duplicate GPU detected",),
        "Two ranks use the same GPU.",
        "Let each rank use the GPU of its LOCAL_RANK, as lockstep.init() does, and start at most one rank a GPU.",
    ),
    Meaning(
        ("unhandled system error", "ncclSystemError"),
        "A call of the operating system failed inside NCCL: mostly the network, or too little shared memory.",
        "Set NCCL_DEBUG=WARN to see which; check `df /dev/shm` (docker run --shm-size=8g) and NCCL_SOCKET_IFNAME.",
    ),
    Meaning(
        ("unhandled cuda error", "ncclUnhandledCudaError"),
        "CUDA failed inside NCCL: often an earlier error of the same process, or GPUs that cannot reach each other.",
        "Set NCCL_DEBUG=INFO and CUDA_LAUNCH_BLOCKING=1 to see where; NCCL_P2P_DISABLE=1 tells whether it is the link.",
    ),
    Meaning(
        ("ncclInternalError", "NCCL internal error"),
        "NCCL itself failed: mostly different versions of it or of the driver on the machines.",
        "Compare torch.cuda.nccl.version() and `nvidia-smi` on all machines; set NCCL_DEBUG=INFO.",
    ),
    Meaning(
        (
            "Watchdog caught collective operation timeout",
            "CollectiveFingerPrint",
            "Detected mismatch between collectives",
        ),
        "The ranks did not all call the same collective: one was skipped, or stuck elsewhere.",
        "Look for code behind `if rank == 0`, and use `lockstep run`, whose watchdog names the rank and the line.",
    ),
    Meaning(
        ("op.preamble.length <= op.nbytes",),
        "Two ranks sent tensors of different sizes in the same collective.",
        "Look for collectives behind `if rank == 0`, and for shapes that depend on a rank's own data.",
    ),
    Meaning(
        ("Socket Timeout", "wait timeout after", "Timed out waiting", "Timed out after"),
        "A rank or the store did not answer in time: it never started, has died, or is stuck.",
        "Look for the rank that is missing; check that all were started with the same MASTER_ADDR and MASTER_PORT.",
    ),
    Meaning(
        ("no socket interface found", "Unable to find interface", "Unable to find address for"),
        "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names a network interface that this machine does not have.",
        "Take the name from `ip -brief address`, or unset the variable.",
    ),
    Meaning(
        ("No route to host", "Network is unreachable"),
        "The address of another machine cannot be reached from here: a wrong interface, or a firewall.",
        "Choose the interface with NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME; try `ping` to MASTER_ADDR.",
    ),
    Meaning(
        ("Connection refused",),
        "Nothing listens at that address: rank zero has not started, has ended, or has another address.",
        "Check MASTER_ADDR and MASTER_PORT on every machine, and that the first machine's job runs.",
    ),
    Meaning(
        ("Connection timed out",),
        "No answer came from that address: mostly a firewall that drops what it does not know.",
        "Open the ports between the machines, or choose another interface with NCCL_SOCKET_IFNAME.",
    ),
    Meaning(
        ("Address already in use", "EADDRINUSE"),
        "Another program, maybe an earlier run of this one, listens on that port.",
        "End it, or choose another port with --master-port; on one machine `lockstep run` finds a free one.",
    ),
    Meaning(
        ("Name or service not known", "Temporary failure in name resolution"),
        "A machine's name leads to no address.",
        "Use an IP address for --master-addr, or put the name into /etc/hosts on all machines.",
    ),
    Meaning(
        ("out of memory",),
        "The device's memory is full.",
        "Use a smaller batch or more micro-batches (accumulate); `nvidia-smi` shows who else uses the device.",
    ),
    Meaning(
        ("device-side assert", "illegal memory access"),
        "A kernel on the GPU failed some time ago; the line above is only where that was noticed.",
        "Run again with CUDA_LAUNCH_BLOCKING=1 to see the right line; mostly an index is out of range.",
    ),
    Meaning(
        ("Too many open files",),
        "This process may not open more files: mostly many DataLoader workers that share tensors.",
        "Raise the limit with `ulimit -n 65536`, or use fewer workers.",
    ),
    Meaning(
        ("No space left on device",),
        "A disk, or shared memory, is full.",
        "Look at `df` and `df /dev/shm`; DataLoader workers need shared memory (docker run --shm-size=8g).",
    ),
    Meaning(
        ("Expected to have finished reduction in the prior iteration",),
        "torch's DistributedDataParallel waits for gradients of parameters that took no part in the loss.",
        "Run the script with --adopt, as Lockstep's engine needs no flag, or pass find_unused_parameters=True.",
    ),
)


def meaning_of(error: str) -> str:
    """Return what the text of an error means and what to do, in two lines; empty if it is none of these."""
    for meaning in MEANINGS:
        if any(mark in error for mark in meaning.marks):
            return f"What that means: {meaning.means}\n{meaning.do}"
    return ""
