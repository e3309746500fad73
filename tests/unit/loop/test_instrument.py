"""The instrument: what its hooks report, and that nothing of them is left behind."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torchs
from torch.optim import optimizer as optim
from torch.utils.data import DataLoader

from lockstep.comm.collectives import Group
from lockstep.comm.shm.process_group import CpuProcessGroup
from lockstep.loop.instrument import Instrument


def train(steps: int = 1) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(torch.ones(2 * steps, 2), batch_size=2):  # type: ignore[arg-type]
        model(batch).sum().backward()
        optimizer.step()
    return model


def global_state() -> list[Any]:
    """All that an instrument can change in this process."""
    kinds = (nn.Module, DataLoader, torch.utils.data.dataloader._BaseDataLoaderIter, Group, CpuProcessGroup)
    hooks = (
        torchs._global_forward_hooks,
        torchs._global_forward_pre_hooks,
        optim._global_optimizer_pre_hooks,
        optim._global_optimizer_post_hooks,
    )
    return [{name: id(value) for name, value in vars(kind).items()} for kind in kinds] + [dict(each) for each in hooks]


def test_events_of_a_step_in_their_order_and_nothing_left_afterwards() -> None:
    before, events = global_state(), []

    def to(event: str) -> Callable[..., None]:
        return lambda *_: events.append(event)

    def around(fetch: Callable[[], Any], size: int | None) -> Any:
        events.append(f"loader {size}")
        return fetch()

    with Instrument() as instrument:
        instrument.loaders(around)
        instrument.all_forwards(lambda module, _: events.append(f"{type(module).__name__} begins"), to("ends"))
        instrument.optimizers(to("update"), to("updated"))
        instrument.collectives(to("collective"))
        train()
    own = ["Sequential begins", "Linear begins", "ends", "Linear begins", "ends", "ends"]
    assert events == ["loader None", "loader 2", *own, "update", "updated", "loader 2"]
    assert global_state() == before
    train()
    assert len(events) == 11


def test_the_end_of_own_work_and_of_a_backward_with_other_callbacks() -> None:
    events: list[str] = []
    queue = torch.autograd.Variable._execution_engine.queue_callback
    instrument = Instrument()
    hook = instrument.backward(
        lambda: events.append("begins"),
        lambda: events.append("own work done"),
        lambda: events.append("ends"),
        is_watching=lambda: len(events) < 5,
    )
    model = nn.Linear(2, 2)
    # As torch's DistributedDataParallel, which waits for its buckets in a callback that the last gradient queues.
    model.weight.register_hook(lambda _: queue(lambda: events.append("reduced")))
    for _ in range(3):
        first, second = model(torch.ones(1, 2)), model(torch.ones(1, 2))
        first.register_hook(hook)
        second.register_hook(hook)
        (first + second).sum().backward()
    once = ["begins", "own work done", "reduced", "ends"]
    assert events == [*once, *once, "reduced"]  # the third is not watched


def test_errors_of_listeners_reach_the_program_or_the_given_function_only() -> None:
    def fault(*_: Any) -> None:
        raise RuntimeError("of a listener")

    with Instrument() as instrument, pytest.raises(RuntimeError, match="of a listener"):
        instrument.optimizers(fault, fault)
        train()
    failures: list[str] = []
    with Instrument(lambda error: failures.append(str(error))) as instrument:
        instrument.optimizers(fault, lambda *_: None)
        instrument.before(nn.Module, "__call__", fault)
        model = train()
        instrument.forwards(model, fault, fault)
        copy.deepcopy(model)(torch.ones(1, 2))  # 3 calls; hooks of copies do nothing
        assert failures == ["of a listener"] * 7
        model(torch.ones(1, 2))
        assert failures == ["of a listener"] * 12


def test_replacements_are_undone_unless_other_code_has_replaced_them_since() -> None:
    class Base:
        value = 1

    class Derived(Base):
        pass

    original, later = random.random, lambda: 0.75
    with Instrument() as instrument:
        instrument.replace(random, "random", lambda: 0.5)
        instrument.replace(Derived, "value", 2)
        instrument.wrap(random, "random", lambda plain: plain() + 1)
        assert (random.random(), Derived.value) == (1.5, 2)
    assert random.random is original
    assert "value" not in vars(Derived)
    try:
        with Instrument() as instrument:
            instrument.replace(random, "random", lambda: 0.5)
            random.random = later
        assert random.random is later
    finally:
        random.random = original
