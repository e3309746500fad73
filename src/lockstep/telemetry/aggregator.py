"""The figures of ranks as they post them."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from lockstep.telemetry.metrics import RankFigures


def decode(note: Mapping[str, Any]) -> RankFigures:
    """Return the figures that a rank posted as a dictionary.

    Raises:
        TypeError: A name or a type is wrong.
    """
    figures = RankFigures(**note)
    # Otherwise a text in place of a number would fail later, in the thread of the live view.
    for name, value in asdict(figures).items():
        kind = str if name in ("host", "device", "link_peer") else int | float
        if not isinstance(value, kind) and (value is not None or name in ("rank", "step", "num_steps")):
            raise TypeError(f"{name} is {value!r}")
    return figures


def with_waits(ranks: Iterable[RankFigures]) -> tuple[RankFigures, ...]:
    """Return ``ranks`` with ``peers_s``: by how much each waited longer than the rank that waited least.

    All ranks leave a reduction together, so the last rank waits only for the transfer; see stragglers.py.
    """
    ranks = tuple(ranks)
    # Ranks whose engine does not measure the waiting keep None.
    least_s = min((each.exposed_s for each in ranks if each.exposed_s is not None), default=0.0)
    return tuple(each if each.exposed_s is None else replace(each, peers_s=each.exposed_s - least_s) for each in ranks)
