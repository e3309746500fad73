"""How a group on shm comes about, and what happens where it cannot."""

import contextlib
import io
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import hierarchy
from lockstep.comm.shm import process_group, segment
from lockstep.comm.shm.process_group import ShmProcessGroup
from lockstep.comm.world import World
from tests.shm import shm_group
from tests.unit.comm.test_rendezvous import CountedStore


def test_one_rank_that_cannot_map_puts_all_on_gloo(ranks):
    def body(world):
        def elsewhere(offer):
            return None, "not all ranks run on one host, in one container and as one user"

        original, told = segment.map_segment, io.StringIO()
        segment.map_segment = elsewhere if world.rank == 2 else original
        try:
            with contextlib.redirect_stderr(told), shm_group() as group:
                tensor = torch.ones(1)
                dist.all_reduce(tensor, group=group)
                return isinstance(group, ShmProcessGroup), tensor.item(), told.getvalue()
        finally:
            segment.map_segment = original

    line = (
        "lockstep: this group uses Gloo instead of shm: "
        "not all ranks run on one host, in one container and as one user.\n"
    )
    assert ranks(3)(body) == [(False, 3.0, line), (False, 3.0, ""), (False, 3.0, "")]


def test_a_group_that_gloo_serves_says_so(ranks):
    def body(world):
        original = process_group.library
        process_group.library = lambda: "its C library was not built"
        try:
            with contextlib.redirect_stderr(io.StringIO()), shm_group() as group:
                return World.from_group(group, device="cpu").backend
        finally:
            process_group.library = original

    assert ranks(2)(body) == ["gloo", "gloo"]


def test_a_library_that_was_not_built_puts_all_on_gloo(ranks):
    def body(world):
        original, told = process_group.library, io.StringIO()
        hierarchy._log_once.cache_clear()  # the worker may have said it in another test
        process_group.library = lambda: "its C library was not built" if world.rank == 1 else original()
        try:
            with contextlib.redirect_stderr(told), shm_group() as group:
                return isinstance(group, ShmProcessGroup), told.getvalue()
        finally:
            process_group.library = original

    line = "lockstep: this group uses Gloo instead of shm: its C library was not built.\n"
    assert ranks(2)(body) == [(False, line), (False, "")]


def test_too_little_memory_puts_all_on_gloo(ranks):
    def body(world, limit):
        original = segment.os.posix_fallocate

        def limited(fd, start, length):
            if length > limit:
                raise OSError(28, "No space left on device")
            original(fd, start, length)

        segment.os.posix_fallocate, told = limited, io.StringIO()
        try:
            with contextlib.redirect_stderr(told), shm_group() as group:
                tensor = torch.full((1_000_003,), 2.0)
                dist.all_reduce(tensor, group=group)
                return isinstance(group, ShmProcessGroup), tensor.sum().item(), told.getvalue()
        finally:
            segment.os.posix_fallocate = original

    (used, total, told), other = ranks(2)(body, 100_000)
    assert not used and not other[0] and total == 4.0 * 1_000_003
    assert told == (
        "lockstep: this group uses Gloo instead of shm: 2.3 MiB of shared memory cannot be allocated (No space left "
        "on device); if there is no room, raise the memory limit of the container, or start fewer ranks.\n"
    )


def test_a_forked_process_is_no_member(ranks):
    def body(world):
        with shm_group() as group:
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    dist.all_reduce(torch.ones(1), group=group)
                except BaseException as error:
                    os.write(writer, str(error).encode())
                os._exit(0)
            os.waitpid(pid, 0)
            told = os.read(reader, 1000).decode()
            os.close(reader), os.close(writer)
            tensor = torch.ones(1)  # its parent is one still
            dist.all_reduce(tensor, group=group)
            return told.replace(str(pid), "PID"), tensor.item()

    for rank, (told, total) in enumerate(ranks(2)(body)):
        assert told == (
            f"Process PID was forked from rank {rank} and calls all_reduce on its group.\n"
            "A forked process is not a member of the group. Start processes that communicate with the spawn method."
        )
        assert total == 2.0


def test_importing_lockstep_makes_the_name_known_without_importing_torch_and_a_rank_may_end_without_leaving():
    code = """
import sys, lockstep
print("torch" in sys.modules)
import torch, torch.distributed as dist
print(dist.Backend("shm"), dist.is_backend_available("shm"))
dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(*(device.type for device in dist.group.WORLD._device_types), *tensor.tolist())
work = dist.all_reduce(tensor, async_op=True)
work.get_future().wait()
print("end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "shm", "True", "cpu", "1.0", "1.0", "end"]


def on_shm():
    import lockstep

    with lockstep.init(backend="shm", device="cpu") as world:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        world.barrier()
        return world.backend, type(world.group).__name__, world.group.comm.timeout_s, tensor.tolist()


@pytest.mark.soak
def test_init_takes_it_by_name():
    from lockstep import launch

    assert launch(on_shm, devices=2) == [("shm", "ShmProcessGroup", 1800.0, [2.0] * 3)] * 2


@pytest.mark.parametrize(("size", "most"), [(4, 10), (32, 10), (65, 2)])
def test_a_rank_asks_the_store_as_often_in_a_large_group_as_in_a_small_one(size, most):
    shared = dist.HashStore()
    stores = [CountedStore(shared) for _ in range(size)]

    def meet(rank):
        hierarchy.find_machines(stores[rank], rank, size)
        process_group.share_memory(stores[rank], rank, size)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    first, *others = [store.num_requests for store in stores]
    assert max(others) <= most
    assert first <= most + size + 1, "rank 0 reads each rank's machine once"


def test_the_segment_grows_with_the_ranks_not_with_their_square():
    native = process_group.library()
    sizes = {
        n: native.lockstep_segment_bytes(n, process_group.CHUNK_BYTES, process_group._ring_bytes(n))
        for n in (2, 16, 32, 64)
    }
    assert sizes[32] <= 40 * 2**20, "96 MiB with rings of one size"
    assert all(sizes[n] / n < 1.4 * sizes[2] / 2 for n in sizes)
