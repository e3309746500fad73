"""The generators that samplers draw from: their states, and the copies that are equal on all ranks."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch.utils import data

from lockstep.comm.world import shared_seeds
from lockstep.data.order import Purpose, mix, seed_cpu, seed_device

_PYTHON, _NUMPY, _TORCH = object(), object(), object()  # stand for the generators of the process
_OF_PROCESS = (_TORCH, _PYTHON, _NUMPY)
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


def get_state(generator: Any) -> Any:
    """Return the state of a generator, or of an object with ``state_dict``: of numbers, texts and tensors."""
    if generator is _TORCH:
        return torch.get_rng_state()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if generator is _PYTHON or isinstance(generator, random.Random):
        version, words, gauss = (random if generator is _PYTHON else cast(random.Random, generator)).getstate()
        return [version, list(words), gauss]
    if generator is _NUMPY or isinstance(generator, np.random.RandomState):
        state = cast(Any, np.random if generator is _NUMPY else generator).get_state(legacy=False)
        return _without_arrays(state)
    if isinstance(generator, np.random.Generator):
        return _without_arrays(generator.bit_generator.state)
    return generator.state_dict()


def set_state(generator: Any, state: Any) -> None:
    """Set what `get_state` returned."""
    if generator is _TORCH:
        torch.set_rng_state(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif generator is _PYTHON or isinstance(generator, random.Random):
        version, words, gauss = state
        source = random if generator is _PYTHON else cast(random.Random, generator)
        source.setstate((version, tuple(words), gauss))
    elif generator is _NUMPY or isinstance(generator, np.random.RandomState):
        cast(Any, np.random if generator is _NUMPY else generator).set_state(_with_arrays(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _with_arrays(state)
    else:
        generator.load_state_dict(state)


def _without_arrays(state: Any) -> Any:
    if isinstance(state, np.ndarray):
        return {"array": str(state.dtype), "values": state.tolist()}
    return {name: _without_arrays(value) for name, value in state.items()} if isinstance(state, dict) else state


def _with_arrays(state: Any) -> Any:
    if isinstance(state, dict) and "array" in state:
        return np.array(state["values"], dtype=state["array"])
    return {name: _with_arrays(value) for name, value in state.items()} if isinstance(state, dict) else state


@contextmanager
def kept_states() -> Iterator[None]:
    """Leave the CPU's generators as they were before the block."""
    pythons, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)


@contextmanager
def seeded(value: int) -> Iterator[None]:
    """Seed the CPU's generators inside the block, and leave them as they were."""
    with kept_states():
        seed_cpu(value)
        yield


def generators_of(*owners: Any) -> list[Any]:
    """Return the generators that samplers and loaders hold as attributes, and what of them has a state of its own."""
    found: dict[int, Any] = {}
    for owner in owners:
        held = [*vars(owner).values()] if hasattr(owner, "__dict__") else []
        is_stateful = hasattr(owner, "state_dict") and not isinstance(owner, data.DataLoader)
        for item in [value for value in held if isinstance(value, _GENERATORS)] + [owner] * is_stateful:
            found[id(item)] = item
    return list(found.values())


class Draws:
    """What samplers draw from on several ranks: copies of rank zero's generators, which nothing else draws from.

    [Note: the order of samples of a script]
    Samplers draw from the default generators, as models do. But dropout has other random numbers on each rank, and
    draws more of them for larger parts. So on several ranks the samplers of all prepared loaders draw from one copy of
    rank zero's generators, taken in `prepare`; and so does a stream that this process reads. If nothing else draws,
    these are the numbers of the script without `prepare`. A single rank has no copies: its samplers draw what they
    would. If the script sets torch's seed later, as some do in each epoch, the copy follows; the seed must be the same
    on all ranks, or that of `lockstep.seed`.

    Attributes:
        num_taken: How often copies were taken since a pass began.
    """

    def __init__(self) -> None:
        self.num_taken = 0
        self._states: list[Any] | None = None
        self._is_open = False
        self._seed, self._seen = 0, torch.empty(0)  # torch's seed, and its state when the copies were taken

    def take(self, copies: list[Any] | None) -> None:
        """Draw from copies with the states of rank zero from now on; None: a single rank needs none."""
        self._states, self.num_taken = copies, self.num_taken + 1
        self._seed, self._seen = torch.initial_seed(), torch.get_rng_state()

    def follow_seed(self, rank: int, device: torch.device) -> None:
        """Go on from the state of torch's generator if the script has seeded it; this rank's is then its own again."""
        state, seed = torch.get_rng_state(), torch.initial_seed()
        if self._states is None or torch.equal(state, self._seen):
            return
        if seed == self._seed and not torch.equal(state, seeded_state(seed)):
            return  # it has drawn
        shared = shared_seeds.get(seed)
        self._states[0] = state if shared is None else seeded_state(shared)
        if rank and shared is None:
            seed_rank(seed, rank, device)
        self._seed, self._seen = torch.initial_seed(), torch.empty(0)  # the pass that begins draws from it

    def states(self, *, only_torch: bool = False) -> list[Any]:
        """Return the states that the next sampler begins with."""
        number = 1 if only_torch else None
        in_use = self._states is None or self._is_open
        return list(map(get_state, _OF_PROCESS[:number])) if in_use else list(cast(Any, self._states)[:number])

    def set_states(self, states: list[Any]) -> None:
        """Let the next sampler begin with ``states``."""
        if self._states is None or self._is_open:
            for generator, state in zip(_OF_PROCESS, states, strict=False):
                set_state(generator, state)
        else:
            self._states[: len(states)] = states

    @contextmanager
    def open(self, *, only_torch: bool = False) -> Iterator[None]:
        """Let what runs inside draw from the copies; with ``only_torch`` only torch's generator is replaced."""
        if self._states is None or self._is_open:
            yield
            return
        generators = _OF_PROCESS[: 1 if only_torch else None]
        before = list(map(get_state, generators))
        for generator, state in zip(generators, self._states, strict=False):
            set_state(generator, state)
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            self._states[: len(generators)] = map(get_state, generators)
            for generator, state in zip(generators, before, strict=True):
                set_state(generator, state)


draws = Draws()


def seed_rank(seed: int, rank: int, device: torch.device) -> None:
    """Seed torch's generators of this rank, so that they differ from those of the others."""
    torch.default_generator.manual_seed(mix(seed, Purpose.RANK, rank))
    seed_device(device, mix(seed, Purpose.RANK, rank))


def seeded_state(seed: int) -> torch.Tensor:
    """Return the state of torch's generator after ``torch.manual_seed(seed)``."""
    return torch.Generator().manual_seed(seed).get_state()


def process_states() -> list[Any]:
    """Return the states of the CPU's generators: torch's, Python's and numpy's."""
    return list(map(get_state, _OF_PROCESS))


def share_states(states: list[Any]) -> None:
    """Let the script draw from ``random`` and numpy with the ``states`` of rank zero."""
    for generator, state in zip(_OF_PROCESS[1:], states[1:], strict=True):
        set_state(generator, state)
