"""What workers of the pool are forked off, and a worker: waits for calls on a pipe, runs each in a fresh process group.

Started as ``python -m tests.pool_worker FD PID`` by tests/pool_process.py, and by nobody else.
"""

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import random
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

import cloudpickle
import numpy
import torch
import torch._dynamo  # the first optimizer would import it
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp

import lockstep.train.fit  # noqa: F401
from lockstep.comm import world
from tests import simulated_device
from tests.pool_messages import IDLE, MOST_BYTES, READY, Call, Reply

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the test session dies, however busy this process is."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def run(call: Call) -> Reply:
    """Run one call in a process group of its own; the group is still up when this returns."""
    # Ranks differ on purpose: a test that needs equal models must say so, or rely on the broadcast it tests.
    torch.manual_seed(1000 + call.rank)
    random.seed(1000 + call.rank)
    if hasattr(torch, "sim"):
        torch.sim.take_errors()
        torch.sim.forget_contexts()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(call.warnings)
            connect(call)
            fn, args = cloudpickle.loads(call.payload)
            device = f"sim:{call.rank}" if hasattr(torch, "sim") else "cpu"
            result = fn(world.World.from_group(device=device), *args)
            if hasattr(torch, "sim") and (errors := torch.sim.take_errors()):
                raise AssertionError("\n".join(errors))  # raised where nobody saw it
            return Reply(False, cloudpickle.dumps(result), "", time.monotonic())
    except BaseException as error:
        ended_at = time.monotonic()
        trace = traceback.format_exc()
        return Reply(True, pickle_error(error), trace, ended_at)


def connect(call: Call) -> None:
    """Make the default process group and wait until all ranks have it: who leaves earlier breaks that of the others."""
    timeout = timedelta(seconds=call.group_timeout_s)
    store = dist.FileStore(call.store_path, call.world_size)
    backend = "cpu:gloo,sim:simccl" if hasattr(torch, "sim") else "gloo"
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


def tear_down() -> None:
    """Leave no group and no socket, so that ranks that still wait for this one learn at once that it is gone.

    Gloo's destructor waits for threads that may wait for the interpreter's lock. Called from Python it lets go of that;
    called from the destructor of torch's reducer it does not, so that must not have the last reference.
    """
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
    backends.clear()


def work(connection: Connection) -> None:
    """Serve calls until the session closes its end of the pipe."""
    connection.send(READY)
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        connection.send(run(call))
        tear_down()
        connection.send(IDLE)


def serve(listener: socket.socket) -> Callable[[], None]:
    """Fork a worker for each connection, and kill it when that is closed; returns in the worker, with what to do.

    Who connects gets the worker's process number and, when it has ended, its exit status.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        pids: dict[socket.socket, int] = {}
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    message, descriptors, _, _ = socket.recv_fds(key.fileobj, MOST_BYTES, 2)
                    if not message:  # the session has ended
                        selector.unregister(key.fileobj)
                        kill(pids.pop(key.fileobj, None))
                        key.fileobj.close()
                        continue
                    if (pid := os.fork()) == 0:
                        for other in list(selector.get_map().values()):
                            os.close(other.fd)
                        return partial(begin, descriptors, **json.loads(message))
                    for descriptor in descriptors:
                        os.close(descriptor)
                    pids[key.fileobj] = pid
                    with contextlib.suppress(OSError):
                        key.fileobj.send(str(pid).encode())
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, key.fileobj))
                else:
                    pid, session = key.data
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    if pids.pop(session, None) is not None:
                        with contextlib.suppress(OSError):
                            session.send(str(code).encode())


def kill(pid: int | None) -> None:
    """End a worker, if there is one, and its children."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def begin(descriptors: list[int], environ: dict[str, str], simulated: bool) -> None:
    """Be a worker that writes to the first of the descriptors and gets calls from the second."""
    log, pipe = descriptors
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    os.environ.clear()
    os.environ.update(environ)
    random.seed()
    numpy.random.seed()
    if simulated:
        simulated_device.load()
        gc.freeze()
    work(Connection(pipe))


def main(fd: int, parent_pid: int) -> None:
    """Import what nearly all tests need, once; then `serve`."""
    die_with_parent(parent_pid)
    torch.set_num_threads(1)
    # What has been imported stays, so the collections after each call need not look at it.
    gc.collect()
    gc.freeze()
    template = os.getpid()
    begin_worker = serve(socket.socket(fileno=fd))
    os.setsid()  # a kill reaches the worker's children too
    die_with_parent(template)
    faulthandler.register(signal.SIGQUIT, all_threads=True)  # fit takes over others while it runs
    begin_worker()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
