"""Which parameters are in the buckets of torch's DistributedDataParallel, which does not say what it waits for.

[Note: without wrapping anything]
While its forward runs, torch's class keeps the instance in an attribute of its own; the beacon looks there now and
then. A few steps later it asks for what the reducer logs: the sizes of the buckets, and the numbers of their parameters
once they have been built anew. That takes a lock which backward holds while it waits for other ranks; so it is asked
for early, and in a thread of its own, which may wait for ever without any harm.

Afterwards, a collective that a rank waits in is told by its size, and by the sizes of those before it: backward sends
the buckets in their order, so the k-th is the one behind the first k. If that leaves a choice, no bucket is named.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.progress import name_of_bucket
from lockstep.telemetry.flight import Call
from lockstep.telemetry.imported import imported

_ASK_AFTER = (3, 12)
"""Optimizer steps: by then buckets were built anew, which is logged in the second step or, after a warm-up, later."""


class Parameter(NamedTuple):
    """A parameter that is trained."""

    name: str
    numel: int
    num_bytes: int


class Bucket(NamedTuple):
    """A bucket of torch's reducer."""

    names: tuple[str, ...]
    numel: int


class TorchBuckets:
    """The buckets of the program's model, as soon as they are known."""

    def __init__(self) -> None:
        self._model: weakref.ref[Any] | None = None
        self._num_asked = 0
        self._plan: list[Bucket] = []

    def look(self, num_steps: int) -> None:
        """Look for the model, and ask it once it has trained for some steps. Does not block.

        Args:
            num_steps: Optimizer steps so far.
        """
        if self._model is None:
            active = getattr(_class(), "_active_ddp_module", None)
            self._model = None if active is None else weakref.ref(active)
        elif self._num_asked < len(_ASK_AFTER) and num_steps >= _ASK_AFTER[self._num_asked] and not self._plan:
            self._num_asked += 1
            threading.Thread(target=self._ask, name="lockstep-buckets", daemon=True).start()

    def _ask(self) -> None:
        model = None if self._model is None else self._model()
        if model is None:
            return
        with contextlib.suppress(Exception):  # an interface of torch's own, which changes
            ignored = set(getattr(model, "parameters_to_ignore", ()))
            parameters = [
                Parameter(name, each.numel(), each.numel() * each.element_size())
                for name, each in model.module.named_parameters()
                if each.requires_grad and name not in ignored
            ]
            self._plan = plan_of(model._get_ddp_logging_data(), parameters)

    def name(self, calls: Sequence[Call], place: int) -> str:
        """Return a name for the collective at ``place``, such as ``bucket 4 (layers.7.mlp.*)``, if it is a bucket."""
        found = buckets_at(calls, place, self._plan)
        return f"bucket {found[0]} ({name_of_bucket(self._plan[found[0]].names)})" if len(found) == 1 else ""


def plan_of(logged: Mapping[str, Any], parameters: Sequence[Parameter]) -> list[Bucket]:
    """Return the buckets that a reducer logs after some steps, in the order in which they leave.

    They are built anew after the first step, unless it looks for unused parameters. What does not add up is left out.
    """
    if logged.get("find_unused_parameters") and not logged.get("static_graph"):
        sizes = [int(size) for size in str(logged.get("bucket_sizes", "")).split(",") if size.strip()]
        return _runs(sizes, parameters)
    rebuilt = str(logged.get("rebuilt_per_bucket_param_indices", ""))
    numbers = [[int(number) for number in part.split()] for part in rebuilt.split(",") if part.strip()]
    if sorted(number for part in numbers for number in part) != list(range(len(parameters))):
        return []
    return [_bucket([parameters[number] for number in part]) for part in numbers]


def _runs(sizes: Sequence[int], parameters: Sequence[Parameter]) -> list[Bucket]:
    """Return the buckets of ``sizes`` in bytes: runs of parameters, of which the last ones are in the first bucket."""
    buckets, place = [], 0
    for size in reversed(sizes):
        run: list[Parameter] = []
        while place < len(parameters) and sum(each.num_bytes for each in run) < size:
            run.append(parameters[place])
            place += 1
        if sum(each.num_bytes for each in run) != size:
            return []
        buckets.append(_bucket(run))
    return buckets[::-1] if place == len(parameters) else []


def _bucket(parameters: Sequence[Parameter]) -> Bucket:
    return Bucket(tuple(each.name for each in parameters), sum(each.numel for each in parameters))


def buckets_at(calls: Sequence[Call], place: int, plan: Sequence[Bucket]) -> list[int]:
    """Return the numbers of the buckets that the collective at ``place`` may be, going by those before it."""
    found = []
    for number in range(min(len(plan), place + 1)):
        begin = place - number
        if all(_carries(*pair) for pair in zip(calls[begin : place + 1], plan, strict=False)):
            found.append(number)
    if len(found) == 1:
        return found
    return [number for number in found if _may_begin(calls, place - number, plan)]


def _may_begin(calls: Sequence[Call], place: int, plan: Sequence[Bucket]) -> bool:
    """Return whether a step may begin at ``place``: before it come whole steps, back to something else."""
    while place > 0 and _carries(calls[place - 1], plan[-1]):
        before = calls[max(0, place - len(plan)) : place]
        if not all(_carries(*pair) for pair in zip(reversed(before), reversed(plan), strict=False)):
            return False
        place -= len(before)
    return True


def _carries(call: Call, bucket: Bucket) -> bool:
    return call.name == "all_reduce" and call.numel == bucket.numel


def _class() -> Any:
    return getattr(imported("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
