"""A process as a member of a group on shared memory: threads that use it, and what stays of it."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest

from lockstep.comm.shm.communicator import Communicator
from lockstep.errors import CollectiveError


@pytest.mark.parametrize("interrupt", [Communicator.stop, lambda comm: comm.give_up(CollectiveError("lost"))])
def test_a_group_is_not_freed_while_another_thread_interrupts_it(interrupt):
    calls = []

    def use(*_):
        calls.append("begins")
        leaving.start()
        leaving.join(0.2)  # it has to wait
        calls.append("ends")

    native = SimpleNamespace(
        lockstep_join=lambda *_: 1, lockstep_stop=use, lockstep_fail=use, lockstep_leave=lambda _: calls.append("freed")
    )
    segment = SimpleNamespace(address=0, fd=-1, close_file=lambda: None)
    comm = Communicator(native, segment, 0, 1, [0], 1.0)
    leaving = threading.Thread(target=comm.leave)
    interrupt(comm)
    leaving.join()
    assert calls == ["begins", "ends", "freed"]
    interrupt(comm)  # of a group that was left
    assert calls == ["begins", "ends", "freed"]


def test_a_group_is_freed_with_the_last_reference():
    """Its mapping would stay after a recovery until the next garbage collection, which may be long after."""
    native = SimpleNamespace(lockstep_join=lambda *_: 1, lockstep_leave=lambda _: None)
    gc.disable()
    try:
        comm = Communicator(native, SimpleNamespace(address=0, fd=-1, close_file=lambda: None), 0, 1, [0], 1.0)
        watched = weakref.ref(comm)
        del comm
        assert watched() is None
    finally:
        gc.enable()
