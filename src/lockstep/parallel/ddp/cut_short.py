"""A step that an exception has ended on this rank: the others wait in its collectives all the same."""

from __future__ import annotations

from typing import Any

from lockstep.parallel.ddp.reducer import Reducer


def end_step_after_error(model: Any) -> None:
    """Take part in what the other ranks still exchange in a step whose forward or backward failed here.

    To be called on a `DistributedDataParallel` after an exception in a synchronised forward or backward, or in a
    ``no_sync`` one before it. The gradients that this leaves are of no use on any rank.

    Collective: every rank that has data runs its synchronised backward. Blocks until complete.
    """
    reducer: Reducer = model._reducer
    try:
        reducer.check_finished()
    except RuntimeError:
        reducer._close_step()  # which autograd would have called; sends what has come, and zeros
    else:
        reducer.shadow_step()
    # As after a synchronised forward that came to its end: buffers are broadcast before the next one.
    model.require_forward_param_sync = True
