"""Children of ranks, such as loader processes, run whatever the threads and the garbage of the rank are."""

import gc
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


def exit_code_of_child(run, timeout_s=20.0):
    """Run ``run()`` in a forked child; return its exit code, or that it hangs."""
    pid = os.fork()
    if pid == 0:
        run()
        os._exit(7)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


def test_a_child_does_not_collect_a_process_group_that_its_parent_dropped(ranks):
    """Its destructor would join threads that only the parent has."""

    def fork(world):
        gc.disable()
        try:
            other = dist.new_group()
            dist.all_reduce(torch.ones(1), group=other)
            cycle = [other]
            cycle.append(cycle)
            dist.destroy_process_group(other)
            del other, cycle
            return exit_code_of_child(gc.collect)
        finally:
            gc.enable()
            gc.collect()

    assert ranks(2)(fork) == [7, 7]
