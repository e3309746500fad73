"""Threads that use a device, connecting devices, and leaving a world whose ranks end far apart."""

import os
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from lockstep.base import accelerator, activity, torch_internals
from lockstep.base.env import RankEnv
from lockstep.comm.collectives import cpu_group
from lockstep.comm.network import cut_links
from lockstep.comm.world import destroy_default_group, form_group
from lockstep.errors import CollectiveError
from lockstep.health.heartbeat import recorded_call
from lockstep.loop.recovery import exchange_state


def current_device_of_a_thread(world):
    seen = []

    def note(text):
        event = accelerator.recorded_event(world.device)
        accelerator.synchronize(event)
        seen.append((text, torch.accelerator.current_device_index()))

    thread = accelerator.start_thread(partial(note, "here"), name="noting", device=world.device)
    thread.join()
    assert (thread.name, thread.daemon) == ("noting", True)
    accelerator.start_thread(lambda: seen.append("cpu"), name="cpu", device=torch.device("cpu")).join()
    accelerator.start_thread(lambda: seen.append("none"), name="none", device=None).join()
    assert seen == [("here", world.rank), "cpu", "none"]


def test_a_thread_uses_the_device_that_it_was_started_with(on_sim):
    on_sim(2)(current_device_of_a_thread)


def read_the_record(world):
    """As the heartbeat does, in a thread that was started before there was a device."""
    event, asked = accelerator.recorded_event(world.device), []

    def dump():
        asked.append(event.query())
        return b"{}"

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
        thread = threading.Thread(target=recorded_call)
        thread.start()
        thread.join()
    assert len(asked) == 1


def test_reading_the_record_of_collectives_opens_no_context_on_another_device(on_sim):
    """NCCL's record asks for the events of the collectives under way."""
    on_sim(2)(read_the_record)


def connect_without_a_peer(world, limit_s):
    env, (met, _) = RankEnv.from_environ(os.environ), world.owned
    destroy_default_group(abort=True, at_exit=False)
    began_s = time.monotonic()

    def form(name, is_over):
        with ExitStack() as stack:
            return form_group(env, dist.PrefixStore(name, met.store), "simccl", world.device, 5.0, stack, is_over)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch_internals, "default_timeout", lambda _: timedelta(seconds=(limit_s or 600) - 5))
        if world.rank == 1:
            monkeypatch.setattr("lockstep.comm.world.start_thread", lambda *_, **__: None)
        with pytest.raises(CollectiveError) as raised:
            form("lost", lambda: limit_s is None and time.monotonic() > began_s + 0.5)
    assert not dist.is_initialized()
    found, _ = str(raised.value).split("\n")
    tensor = torch.ones(2, device=world.device)
    form("next", bool).allreduce([tensor]).wait()
    return found.partition("over ")[2], tensor.tolist()


@pytest.mark.parametrize(("limit_s", "text"), [(None, "600"), (0.5, "0.5")])
def test_ranks_do_not_hang_if_one_is_lost_while_their_devices_connect(on_sim, limit_s, text):
    """NCCL has no limit here: neither a newer generation nor the time would end its call."""
    expected = f"simccl: a rank was lost, or the devices have not connected within {text} s."
    assert on_sim(2)(connect_without_a_peer, limit_s) == [(expected, [2.0, 2.0])] * 2


def cut_a_group_for_the_cpu(world):
    made = cpu_group(world.group)
    cut_links()
    with pytest.raises(RuntimeError):
        made.barrier(dist.BarrierOptions()).wait()


def test_the_connections_of_a_group_that_serves_the_cpu_are_cut_as_well(on_sim):
    on_sim(2)(cut_a_group_for_the_cpu)


def leave_apart(world):
    seen = set()
    watcher = accelerator.start_thread(partial(watch, seen), name="watcher", device=None)
    time.sleep(1.5 * (world.rank == 0))  # it evaluates, or uploads a checkpoint
    came = time.monotonic()
    world.close()
    left = time.monotonic()
    watcher.join()
    return came, left, seen


def watch(seen):
    for _ in range(200):
        seen.add(activity.now.collective)
        time.sleep(0.01)


def test_ranks_with_devices_leave_together(on_sim):
    """With NCCL, destroying the group is a collective, and waits for the last rank."""
    times = on_sim(3)(leave_apart)
    assert max(came for came, _, _ in times) <= min(left for _, left, _ in times)
    assert all("World.close" in seen for _, _, seen in times[1:])  # the watchdog counts them as gone


def leave_after_a_failure(world, folder):
    how = []
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("lockstep.comm.world.destroy_default_group", lambda **given: how.append(given))
    left = folder / "left"
    try:
        if world.rank == 0:
            world.__exit__(ValueError, ValueError("boom"), None)
        elif world.rank == 2:
            deadline = time.monotonic() + 30
            while not left.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert left.exists(), "rank 1 waits for this rank, although rank 0 has failed"
        world.close()
        left.touch()
    finally:
        monkeypatch.undo()
        activity.now.failure = ""
        torch.distributed.destroy_process_group()
    return how


def test_nobody_waits_for_the_others_once_a_rank_has_failed(on_sim, tmp_path):
    how = on_sim(3)(leave_after_a_failure, tmp_path)
    assert how == [[{"abort": True, "at_exit": False}]] * 3


def exchange(world):
    """Send a state from rank 1 to rank 0 over a group that serves the device only, as NCCL's does."""
    state = {"weight": torch.arange(6.0, device=world.device), "step": 3} if world.rank == 1 else {}
    received, _ = exchange_state(state, 1, 0, dist.new_group(), world.device, bool)
    return [(str(each.device), each.tolist()) for each in received.values() if isinstance(each, torch.Tensor)]


def test_a_state_is_sent_between_devices(on_sim):
    assert on_sim(2)(exchange) == [[("sim:0", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])], []]
