"""Threads that use a group on shared memory while another one leaves it."""

import threading
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
