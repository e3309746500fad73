"""Leave a process group without hanging, whatever state the other ranks are in."""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings

import torch.distributed as dist

LEAVE_TIMEOUT_S = 10.0


def destroy_default_group(*, abort: bool, at_exit: bool = False) -> None:
    """Destroy the default process group and all made from it.

    Blocks at most `LEAVE_TIMEOUT_S`: the work is done by a thread that is left behind when it takes longer, as NCCL
    may wait for a peer that will never answer.

    Args:
        abort: Give up what is in flight, since a peer may have failed; else wait for it.
        at_exit: This process is about to end.
    """
    if not dist.is_initialized():
        return
    if abort or at_exit:
        _never_destruct(list(dist.distributed_c10d._world.pg_map))
    failure: list[Exception] = []

    def leave() -> None:
        try:
            if abort:
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=leave, name="lockstep-teardown", daemon=True)
    thread.start()
    thread.join(LEAVE_TIMEOUT_S)
    if thread.is_alive():
        print(
            f"lockstep: the process group could not be closed within {LEAVE_TIMEOUT_S:g} s, as another rank may be "
            "stuck; it is left to the end of this process.",
            file=sys.stderr,
        )
    elif failure:
        warnings.warn(f"closing the process group failed: {failure[0]}", RuntimeWarning, stacklevel=2)


def _never_destruct(groups: list[dist.ProcessGroup]) -> None:
    """Leak process groups on purpose.

    Gloo cannot abort: its destructor waits for what is in flight, up to the timeout of a collective (half an hour), and
    so would hold up the end of a process whose peer is stuck. What ends with the process needs no destructor.
    """
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
