"""Leave a process group without hanging, whatever state the other ranks are in."""

from __future__ import annotations

import sys
import threading
import warnings

import torch.distributed as dist

LEAVE_TIMEOUT_S = 10.0


def destroy_default_group(*, abort: bool) -> None:
    """Destroy the default process group and all made from it.

    Args:
        abort: Give up what is in flight, since a peer may have failed; else wait for it.

    Blocks at most `LEAVE_TIMEOUT_S`: the work is done by a thread that is left behind when it takes longer, as NCCL
    may wait for a peer that will never answer.
    """
    if not dist.is_initialized():
        return

    def leave() -> None:
        if abort:
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()

    failure: list[BaseException] = []

    def guarded() -> None:
        try:
            leave()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=guarded, name="lockstep-teardown", daemon=True)
    thread.start()
    thread.join(LEAVE_TIMEOUT_S)
    if thread.is_alive():
        print(
            f"lockstep: the process group could not be closed within {LEAVE_TIMEOUT_S:g} s; "
            "another rank may be stuck. It is left to the end of this process.",
            file=sys.stderr,
        )
    elif failure:
        warnings.warn(f"closing the process group failed: {failure[0]}", RuntimeWarning, stacklevel=2)
