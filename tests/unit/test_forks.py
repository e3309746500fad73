"""A fork waits until the other threads sleep."""

import sys
import threading
import time

import pytest
import torch

from lockstep.comm.process import wait_for_sleep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def busy_thread():
    """Run a thread that computes without the interpreter's lock; call what this gives to end it."""
    matrix, stop = torch.randn(1500, 1500), threading.Event()

    def compute():
        while not stop.is_set():
            matrix @ matrix

    def end():
        stop.set()
        thread.join()

    thread = threading.Thread(target=compute)
    thread.start()
    yield end
    end()


def test_all_threads_that_sleep_are_not_waited_for():
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    try:
        assert wait_for_sleep(20.0)
    finally:
        waiting.set()
        thread.join()


def test_a_thread_that_computes_is_waited_for_but_not_for_ever(busy_thread):
    start = time.monotonic()
    assert not wait_for_sleep(0.1)
    assert time.monotonic() - start >= 0.1
    busy_thread()
    assert wait_for_sleep(20.0)
