"""The simulated device has the current device of a thread, contexts, waits of the host and captures that CUDA has."""

import threading

import pytest
import torch
from torch import nn

from tests.pool import PoolError


def in_thread(fn, name="a thread"):
    """Run ``fn`` in a thread of its own; return what it returns, or raise what it raises."""
    results = []

    def run():
        try:
            results.append((fn(), None))
        except Exception as error:
            results.append((None, error))

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    ((result, error),) = results
    if error is not None:
        raise error
    return result


def recorded(timing=False):
    event = torch.Event("sim:1", enable_timing=timing)
    event.record(torch.accelerator.current_stream(1))
    return event


# --- Contexts


def new_process():
    """Have a context on sim:1 only, which is current, as rank 1 has."""
    torch.sim.synchronize()
    torch.sim.forget_contexts()
    assert torch.accelerator.current_device_index() == 0 and torch.sim.contexts() == {}
    torch.sim.set_device(1)
    torch.ones(2, device="sim").add_(1)
    assert list(torch.sim.contexts()) == [1]


def record_elsewhere():
    recorded()


def wait_elsewhere():
    torch.accelerator.current_stream(1).wait_event(EVENTS[0])


def elapsed():
    EVENTS[0].elapsed_time(EVENTS[1])


def release():
    EVENTS.pop()


OPENING = {
    "Event.query": lambda: EVENTS[0].query(),
    "Event.synchronize": lambda: EVENTS[0].synchronize(),
    "Event.record": record_elsewhere,
    "Event.wait": wait_elsewhere,
    "Event.elapsed_time": elapsed,
    "the release of an event": release,
    "synchronize": lambda: torch.accelerator.synchronize(1),
    "an allocation": lambda: torch.empty(3, device="sim"),
    "an allocation of pinned memory": lambda: torch.empty(3).pin_memory(),
}
# Guards go back to the device of the thread, but not so that a context is opened there.
NOT_OPENING = {
    "an operator": lambda: torch.ones(2, device="sim:1").add_(1),
    "a copy": lambda: torch.ones(2).to("sim:1"),
    "a read": lambda: torch.ones(2, device="sim:1").sum().item(),
    "Stream.synchronize": lambda: torch.accelerator.current_stream(1).synchronize(),
    "Stream.query": lambda: torch.accelerator.current_stream(1).query(),
    "a new stream": lambda: torch.Stream("sim:1"),
    "get_memory_info": lambda: torch.sim.mem_get_info(1),
    "memory_allocated": lambda: torch.accelerator.memory_allocated(1),
    "a random seed": lambda: torch.sim.manual_seed_all(3),
    "a current device": lambda: torch.accelerator.set_device_index(1),
}
EVENTS: list[torch.Event] = []


def contexts_of_thread(world, actions, sets_device):
    found = {}
    for name, act in actions.items():
        new_process()
        EVENTS[:] = recorded(True), recorded(True)
        source = torch.ones(2).pin_memory()
        copied = source.to("sim:1", non_blocking=True)  # so that the allocator of pinned memory has an event to query
        torch.sim.synchronize()
        del source, copied

        def run(act=act):
            assert torch.accelerator.current_device_index() == 0, "in a new thread"
            if sets_device:
                torch.accelerator.set_device_index(1)
            act()
            return torch.accelerator.current_device_index()

        assert in_thread(run) == (1 if sets_device or name == "a current device" else 0)
        assert torch.accelerator.current_device_index() == 1
        found[name] = torch.sim.contexts()
        EVENTS.clear()
    return found


def test_a_thread_without_a_device_opens_a_context_on_the_first(sim_ranks):
    (found,) = sim_ranks(1)(contexts_of_thread, OPENING, False)
    for name, places in found.items():
        assert sorted(places) == [0, 1], name
        assert " at " in places[0] and "test_device_as_cuda.py" in places[0], name
    (found,) = sim_ranks(1)(contexts_of_thread, NOT_OPENING, False)
    assert {name: sorted(places) for name, places in found.items()} == {name: [1] for name in NOT_OPENING}


def test_a_thread_with_the_device_of_the_rank_opens_none(sim_ranks):
    (found,) = sim_ranks(1)(contexts_of_thread, OPENING | NOT_OPENING, True)
    assert {name: sorted(places) for name, places in found.items()} == {name: [1] for name in OPENING | NOT_OPENING}


def test_training_on_one_device_opens_one_context(sim_ranks):
    """Autograd starts a thread for each device that there is; they set it only if it has a context."""

    def run(world):
        torch.sim.synchronize()
        torch.sim.forget_contexts()
        model = nn.Linear(4, 4, device="sim:2")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(3, 4).pin_memory().to("sim:2", non_blocking=True)).sum().backward()
            optimizer.step()
        with torch.accelerator.device_index(2):
            assert torch.empty(1, device="sim").device == torch.device("sim:2")
        return (
            torch.accelerator.current_device_index(),
            list(torch.sim.contexts()),
            str(torch.empty(1, device="sim").device),
        )

    # Device 0 was current in name only.
    assert sim_ranks(1)(run) == [(0, [2], "sim:0")]


def test_a_rank_with_more_than_one_context_fails(on_sim):
    def run(world):
        event = torch.Event(world.device)
        event.record()
        in_thread(event.query)

    on_sim(2, several_devices=True)(run)
    with pytest.raises(
        AssertionError, match=r"^rank 1 opened a context on sim:0, by Event.query at \S+test_device_as_c"
    ):
        on_sim(2)(run)


def leave(world):
    tensor, side = torch.ones(64, device="sim"), torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        tensor * 2


def test_a_call_leaves_nothing_on_the_device_to_the_next_in_its_worker(sim_ranks):
    sim_ranks(1)(leave)
    assert sim_ranks(1)(lambda world: torch.zeros(64, device="sim").sum().item()) == [0.0]


def empty_the_cache(world):
    side = torch.Stream("sim")
    with side:
        address = torch.ones(2**16, device="sim").data_ptr()
    torch.accelerator.empty_cache()
    given = torch.ones(2**16, device="sim")
    assert given.data_ptr() == address
    with side:
        torch.ones(2**16, device="sim")
    return given.sum().item()


def test_memory_of_an_emptied_cache_belongs_to_whom_it_is_given(sim_ranks):
    """And not to the stream that had it before, whose next allocation does not reuse it."""
    assert sim_ranks(1)(empty_the_cache) == [2.0**16]


# --- Waits of the host


def waits(world):
    device = torch.device("sim", world.rank)
    torch.sim.set_device(device)
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    tensor, pinned = torch.ones(4, device=device), torch.ones(4).pin_memory()
    queued, before = recorded_on(main), recorded_on(main)
    torch.sim.synchronize()
    kinds = {
        "event": lambda: recorded_on(main).synchronize(),
        "stream": main.synchronize,
        "device": torch.sim.synchronize,
        "item": lambda: tensor.sum().item() if tensor.numel() else None,
        "result": lambda: tensor.nonzero(),
        "copy to pageable memory": tensor.tolist,
        "copy from pageable memory": lambda: torch.ones(4).to(device, non_blocking=True),
        "blocking copy": lambda: pinned.to(device),
        "barrier": lambda: torch.distributed.barrier(device_ids=[world.rank]),
    }
    for kind, wait in kinds.items():
        tensor.add_(1)
        with torch.sim.counting() as counts:
            wait()
        assert [(each.kind, each.queued) for each in counts.waits] == [(kind, 0)], kind
        assert "test_device_as_cuda.py" in counts.waits[0].line and " waits" in counts.waits[0].line
        assert counts.waits[0].thread == threading.current_thread().name
    # How much of what the host has launched is still to be done when it goes on.
    with torch.sim.counting() as counts:
        tensor.add_(1)
        queued.record()
        for _ in range(3):
            tensor.mul_(1)
        before.record()
        queued.synchronize()
        queued.synchronize()  # which is over, as the host knows
        tensor.add_(1)
        in_thread(before.synchronize, "another")
        with side:
            torch.zeros(2, device=device).add_(1)
        main.synchronize()
        side.synchronize()
    assert [(each.kind, each.queued, each.thread) for each in counts.waits] == [
        ("event", 3, "MainThread"),
        ("event", 1, "another"),
        ("stream", 2, "MainThread"),
        ("stream", 0, "MainThread"),
    ]
    # What needs no wait.
    mask = tensor > 0
    with torch.sim.counting() as counts:
        pinned.to(device, non_blocking=True)
        there = tensor.to("cpu", non_blocking=True)
        recorded_on(main).query()
        side.wait_stream(main)
        tensor[mask] = 3.0
        torch.where(mask, tensor, 0 * tensor)
    assert counts.waits == [], counts.waits
    del there


def recorded_on(stream):
    event = torch.Event("sim")
    event.record(stream)
    return event


def test_every_wait_of_the_host_is_counted_with_what_it_leaves_to_do(sim_ranks):
    sim_ranks(1)(waits)


# --- Captures


def capture(world):
    tensor, event, side = torch.ones(4, device="sim"), torch.Event("sim"), torch.Stream("sim")
    event.record()
    questions = {
        "Event.query": event.query,
        "Event.synchronize": event.synchronize,
        "Stream.synchronize": lambda: torch.accelerator.current_stream().synchronize(),
        "synchronize": torch.sim.synchronize,
        "aten::_local_scalar_dense": lambda: tensor.sum().item(),
        "aten::copy_": lambda: torch.ones(4).to("sim", non_blocking=True),
        "aten::nonzero": tensor.nonzero,
    }
    refused = "operation not permitted when stream is capturing: "
    broken = "operation failed due to a previous error during capture: "
    for name, ask in questions.items():
        with pytest.raises(RuntimeError, match=broken + f"{name} at ") as hidden, torch.sim.capturing():
            ask()
        assert refused + name in str(hidden.value.__context__)
    # Caught by whoever asked, also in another thread: the capture is broken all the same.
    with pytest.raises(RuntimeError, match=broken), torch.sim.capturing(), pytest.raises(RuntimeError, match=refused):
        in_thread(event.query)
    uncaptured = "dependency created on uncaptured work in another stream"
    with pytest.raises(RuntimeError, match=broken) as hidden, torch.sim.capturing():
        torch.accelerator.current_stream().wait_event(event)
    assert uncaptured in str(hidden.value.__context__)
    # The user's own error: hidden by what is not joined, else as it is.
    for joins in (False, True):
        raised, text = (ValueError, "mine") if joins else (RuntimeError, "capturing stream has unjoined work: it did")
        with pytest.raises(raised, match=text) as caught, torch.sim.capturing():
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                tensor.add_(1)
            if joins:
                torch.accelerator.current_stream().wait_stream(side)
            raise ValueError("mine")
        assert joins or isinstance(caught.value.__context__, ValueError)
    torch.sim.synchronize()
    tensor.fill_(1)
    with torch.sim.capturing():
        assert torch.sim.is_current_stream_capturing()
        event.record()
    assert not torch.sim.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="not permitted on an event last recorded in a capturing stream"):
        event.query()


def test_the_host_asks_nothing_while_a_graph_is_captured(sim_ranks):
    sim_ranks(1)(capture)


def replay(world):
    torch.sim.set_device(world.rank)
    tensor, pinned, side = torch.ones(4, device="sim"), torch.zeros(4).pin_memory(), torch.Stream("sim")
    with torch.sim.capturing() as graph:
        main = torch.accelerator.current_stream()
        pinned_copy = pinned.to("sim", non_blocking=True)
        side.wait_stream(main)
        with side:
            tensor.add_(pinned_copy)
            torch.distributed.all_reduce(tensor, async_op=True).wait()
        main.wait_stream(side)
        doubled = 2 * tensor
    assert tensor.tolist() == [1.0] * 4, "nothing runs before the first replay"
    found = []
    for value in (1.0, 2.0, 3.0):
        torch.sim.synchronize()
        pinned.fill_(value)
        with torch.sim.counting() as counts:
            graph.replay()
        assert (counts.allocations, counts.collectives, counts.synchronizations) == (0, 1, 0)
        found.append((tensor.tolist()[0], doubled.tolist()[0]))
    with side, pytest.raises(RuntimeError, match="two streams touch a tensor with no event between them"):
        tensor.mul_(2)
        with torch.sim.default_stream():
            graph.replay()
    torch.sim.take_errors()
    return found


def test_a_replay_runs_what_was_captured_again_in_the_same_memory(sim_ranks):
    assert sim_ranks(2)(replay) == [[(4.0, 8.0), (12.0, 24.0), (30.0, 60.0)]] * 2


def train_in_a_graph(world):
    """As torch's own example of a whole step in a graph; returns the parameters after it and after a plain loop."""
    found = []
    for captured in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to("sim")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        inputs = torch.zeros(3, 4, device="sim")

        def step(model=model, optimizer=optimizer, inputs=inputs):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        step()
        if captured:
            with torch.sim.capturing() as graph:
                step()
        for number in range(3):
            inputs.fill_(number)
            graph.replay() if captured else step()
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
    return all(map(torch.equal, *found))


def test_a_whole_step_can_be_captured(sim_ranks):
    assert sim_ranks(1)(train_in_a_graph) == [True]


# --- Multiprocessors


def beside_a_collective(world):
    torch.sim.set_device(world.rank)
    tensor, other = torch.ones(4, device="sim"), torch.ones(4, device="sim")
    torch.distributed.barrier(device_ids=[world.rank])
    store = torch.distributed.distributed_c10d._get_default_store()
    if world.rank == 1:
        store.wait(["computed"])
        torch.distributed.all_reduce(tensor)
        torch.sim.synchronize()
        return None
    work = torch.distributed.all_reduce(tensor, async_op=True)
    while not torch.sim.occupied():  # until a thread has begun it
        pass
    with torch.sim.counting() as beside:
        for _ in range(3):
            other.mul_(2)
    store.set("computed", "")
    work.wait()
    torch.sim.synchronize()
    with torch.sim.counting() as alone:
        other.mul_(2)
    return beside.slowed_kernels, beside.slowed_s > 0, alone.slowed_kernels, alone.slowed_s


def test_a_collective_takes_multiprocessors_from_the_kernels_beside_it(sim_ranks):
    assert sim_ranks(2)(beside_a_collective)[0] == (3, True, 0, 0.0)


def test_an_operator_goes_on_when_its_time_for_a_collective_is_over(sim_ranks):
    """So that the host gets to the wait in which it would be on a real device; and that one does not end."""

    def run(world):
        device = torch.device("sim", world.rank)
        torch.sim.set_device(device)
        if world.rank == 1:
            threading.Event().wait(60)
        torch.sim.set_patience(0.1)
        tensor = torch.ones(4, device=device)
        torch.distributed.all_reduce(tensor, async_op=True).wait()
        event = torch.Event(device)
        tensor.mul_(2)
        event.record()
        print("the host is at its wait", flush=True)
        event.synchronize()

    with pytest.raises(PoolError, match=r"ranks \[0, 1\] of 2 did not finish within 6 s") as caught:
        sim_ranks(2)(run, timeout=6.0)
    assert "the host is at its wait" in str(caught.value)
