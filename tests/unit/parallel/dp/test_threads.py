"""The threads of DataParallel: they persist, share the cores, end with their owner, and survive forks and Ctrl-C."""

import gc
import os
import signal
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import nn

from lockstep.parallel.dp.wrapper import DataParallel
from tests.models import build, global_batch

of_others = set()  # threads of models that earlier tests have left


def replica_threads():
    threads = set(threading.enumerate()) - of_others
    return [thread for thread in threads if thread.name.startswith("lockstep-replica")]


def wait_for_no_more_than(count):
    deadline = time.monotonic() + 30
    while len(replica_threads()) > count and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(replica_threads())


@pytest.fixture
def only_own_threads():
    gc.collect()
    of_others.update(replica_threads())


def test_threads_end_with_their_owner(only_own_threads):
    x = global_batch("mlp", 4, 0)[0]
    for _ in range(8):
        model = DataParallel(build("mlp"), ["cpu"] * 3)
        for _ in range(3):
            model(x)
            model.backward(lambda replica, part: replica(part).sum(), [x, x, x], [1.0] * 3)
        assert len([thread for thread in replica_threads() if thread.is_alive()]) >= 3
        del model
    assert wait_for_no_more_than(0) == 0


def test_no_reference_cycle_keeps_memory(only_own_threads):
    gc.collect()
    gc.disable()
    try:
        model = DataParallel(build("mlp"), ["cpu", "cpu"])
        x = global_batch("mlp", 4, 0)[0]
        model(x).sum().backward()
        model.backward(lambda replica, part: replica(part).sum(), [x, x], [1.0, 1.0])
        replicas = model.replicate(model.module, model.device_ids)
        held = [weakref.ref(thing) for thing in (model, model.module, model.module[0].weight, *replicas)]
        del model, replicas
        assert wait_for_no_more_than(0) == 0
        assert [ref() for ref in held] == [None] * 5
    finally:
        gc.enable()


def test_an_idle_thread_holds_no_inputs():
    model = DataParallel(nn.Identity(), ["cpu", "cpu"])
    x = torch.zeros(4, 1000)
    storage = weakref.ref(x)
    output = model(x)
    del x, output
    deadline = time.monotonic() + 30
    while storage() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert storage() is None


@pytest.mark.parametrize(("total", "replicas", "share"), [(4, 2, 2), (1, 2, 1), (8, 3, 2)])
def test_cores_are_divided(total, replicas, share):
    before = torch.get_num_threads()
    seen = []
    model = DataParallel(Recorder(seen), ["cpu"] * replicas)
    try:
        torch.set_num_threads(total)
        model(torch.zeros(replicas, 1))
        assert seen == [share] * replicas
        assert torch.get_num_threads() == total
        started_later = []
        thread = threading.Thread(target=lambda: started_later.append(torch.get_num_threads()))
        thread.start()
        thread.join(30)
        assert started_later == [total]
    finally:
        torch.set_num_threads(before)
    model(torch.zeros(replicas, 1))
    assert seen[replicas:] == [max(1, before // replicas)] * replicas


class Recorder(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def forward(self, x):
        self.seen.append(torch.get_num_threads())
        return x


def test_several_threads_may_call():
    module = build("mlp")
    model = DataParallel(module, ["cpu", "cpu"])
    batches = [global_batch("mlp", 4, seed)[0] for seed in range(4)]
    expected = [module(batch).detach() for batch in batches]
    wrong = []

    def call(index):
        for _ in range(20):
            with torch.no_grad():
                if not torch.allclose(model(batches[index]), expected[index], rtol=1e-12):
                    wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers) and wrong == []


def test_a_forked_child_has_threads_of_its_own():
    model = DataParallel(build("mlp"), ["cpu", "cpu"])
    x = global_batch("mlp", 4, 0)[0]
    expected = model(x).detach()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks of threaded processes
        pid = os.fork()
    if pid == 0:
        os.write(write, b"1" if torch.allclose(model(x), expected) else b"0")
        os._exit(0)
    deadline = time.monotonic() + 60
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the child did not end")
        time.sleep(0.01)
    assert os.read(read, 1) == b"1"
    os.close(read)
    os.close(write)
    torch.testing.assert_close(model(x), expected)


def test_an_interrupted_call_leaves_the_replicas_behind(only_own_threads):
    """Ctrl-C while replicas compute: the next call must not meet the calls that still run."""
    entered, release = threading.Event(), threading.Event()
    module = build("mlp")
    model = DataParallel(module, ["cpu", "cpu"])
    x = global_batch("mlp", 4, 0)[0]

    def slow(replica, part):
        entered.set()
        release.wait(30)
        return replica(part).sum()

    def fast(replica, part):
        return replica(part).sum()

    def interrupt():
        entered.wait(30)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    killer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            model.backward(slow, [x[:2], x[2:]], [1.0, 1.0])
        left_behind = replica_threads()
        model.backward(fast, [x[:2], x[2:]], [1.0, 1.0])
    finally:
        release.set()
        killer.join(30)
    for thread in left_behind:
        thread.join(30)
        assert not thread.is_alive()
    reference = build("mlp")
    reference(x).sum().backward()
    torch.testing.assert_close(module[0].weight.grad, reference[0].weight.grad)
    module.zero_grad()
    model.backward(fast, [x[:2], x[2:]], [1.0, 1.0])  # what the old calls computed meanwhile is not in it
    torch.testing.assert_close(module[0].weight.grad, reference[0].weight.grad)
    assert len(replica_threads()) == 2
