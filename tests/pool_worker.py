"""A worker of the pool: gets calls on its standard input, and runs each in a process group of its own."""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from unittest import mock

import cloudpickle
import torch
import torch._dynamo  # the first optimizer would import it
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp

from lockstep.comm import world
from tests import simulated_device
from tests.pool import IDLE, READY, Call, Reply

PR_SET_PDEATHSIG = 1
NUM_THREADS = torch.get_num_threads()
closing = threading.Thread(target=list)
"""Closes the sockets of the last call, which takes Gloo 10 ms for each other rank: while the next one connects."""
closing.start()
num_modules = 0
"""Of this process, when objects were last left out of collections."""


def run(call: Call) -> Reply:
    """Run one call in a process group of its own; the group is still up when this returns."""
    # Ranks differ on purpose: a test that needs equal models must say so, or rely on the broadcast it tests.
    torch.manual_seed(1000 + call.rank)
    torch.set_num_threads(NUM_THREADS)  # what a test before has set would be another kind of processor
    random.seed(1000 + call.rank)
    if hasattr(torch, "sim"):
        torch.sim.take_errors()
        torch.sim.forget_contexts()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(call.warnings)
            connect(call)
            closing.join()
            fn, args = cloudpickle.loads(call.payload)
            device = f"sim:{call.rank}" if hasattr(torch, "sim") else "cpu"
            result = fn(world.World.from_group(device=device), *args)
            if hasattr(torch, "sim") and (errors := torch.sim.take_errors()):
                raise AssertionError("\n".join(errors))  # raised where nobody saw it
            return Reply(False, cloudpickle.dumps(result), "", time.monotonic())
    except BaseException as error:
        ended_at = time.monotonic()
        trace = traceback.format_exc()
        client.cache_clear()  # a thread that goes on may wait in it
        return Reply(True, pickle_error(error), trace, ended_at)


@functools.cache
def client(port: int) -> dist.TCPStore:
    """Return a connection to the store of the pool; to connect takes longer than what a call asks of it."""
    return dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)


class OnOneDevice(dist.ProcessGroupGloo):
    """Shares the device of Gloo, a thread, with the groups of other calls: the end of the thread takes 10 ms."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [device()], 2, timeout  # 2: as otherwise
        super().__init__(store, rank, size, options)


@functools.cache
def device() -> dist.ProcessGroupGloo.Device:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return (
        dist.ProcessGroupGloo.create_device(interface=interface)
        if interface
        else dist.ProcessGroupGloo.create_default_device()
    )


def connect(call: Call) -> None:
    """Make the default process group and wait until all ranks have it: who leaves earlier breaks that of the others."""
    timeout = timedelta(seconds=call.group_timeout_s)
    store = dist.PrefixStore(call.prefix, client(call.port))
    store.set_timeout(timeout)
    backend = "cpu:gloo,sim:simccl" if hasattr(torch, "sim") else "gloo"
    with mock.patch.object(dist.distributed_c10d, "ProcessGroupGloo", OnOneDevice):
        dist.init_process_group(backend, store=store, rank=call.rank, world_size=call.world_size, timeout=timeout)
    store.set(f"connected/{call.rank}", "")
    store.wait([f"connected/{rank}" for rank in range(call.world_size)], timeout)


def pickle_error(error: BaseException) -> bytes:
    """Pickle an error, without its frames; what does not survive the journey becomes a RuntimeError."""
    try:
        payload = cloudpickle.dumps(error.with_traceback(None))
        cloudpickle.loads(payload)
    except Exception:
        return cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return payload


def tear_down(failed: bool) -> None:
    """Leave no group and no socket, so that ranks that still wait for this one learn at once that it is gone.

    If the call has not failed, nobody waits, and a thread closes the sockets.

    Gloo's destructor waits for threads that may wait for the interpreter's lock. Called from Python it lets go of that;
    called from the destructor of torch's reducer it does not, so that must not have the last reference.
    """
    global closing
    backends = []
    for group in dist.distributed_c10d._world.pg_map:
        with contextlib.suppress(RuntimeError):  # a group without a backend for the CPU
            backends.append(group._get_backend(torch.device("cpu")))
    if dist.is_initialized():
        dist.destroy_process_group()
    # torch numbers groups, and a group that could not be made leaves the number raised on the ranks that tried: ranks
    # that count differently never meet again.
    dist.distributed_c10d._world.group_count = 0
    # Gloo closes its sockets when nothing refers to the group any more, and only then.
    gc.collect()
    closing = threading.Thread(target=backends.clear, daemon=True)
    closing.start()
    if failed:
        closing.join()
    leave_out_imports()
    # What was prepared is not the next call's, even if something still refers to it.
    if passes := sys.modules.get("lockstep.loop.passes"):
        passes.models.clear()
        passes._progresses.clear()
    torch._dynamo.utils.counters.clear()  # some code asks whether this process has compiled anything


def leave_out_imports() -> None:
    """Leave what calls have imported out of all later collections: with torchmetrics or Inductor each takes 0.1 s."""
    global num_modules
    if len(sys.modules) > num_modules:
        num_modules = len(sys.modules)
        gc.freeze()


def work(connection: Connection) -> None:
    """Serve calls until the session closes its end of the pipe."""
    connection.send(READY)
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        reply = run(call)
        connection.send(reply)
        tear_down(reply.failed)
        connection.send(IDLE)


def main(parent_pid: str, simulated: str = "") -> None:
    """Be a worker of the process ``parent_pid``, with the simulated accelerator if there is another argument."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # however busy this process is
    if os.getppid() != int(parent_pid):
        return
    faulthandler.register(signal.SIGQUIT, all_threads=True)  # fit takes over others while it runs
    random.seed()
    if simulated:
        simulated_device.load()
        gc.freeze()
    work(Connection(os.dup(0)))


if __name__ == "__main__":
    main(*sys.argv[1:])
