"""The rules of faults to inject, written ``kind:key=value,key=value``, and the notes that ranks leave of them."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lockstep.base.rank_files import read_object
from lockstep.errors import ConfigurationError

# Keys of a number with a fraction; a kind has at most one of them.
_UNITS = ("ms", "seconds", "mbit")

# Where in a step a rank can be when a fault strikes.
PLACES = ("loader", "forward", "backward", "optimizer", "collective")


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        what: What it does, for the help.
        example: An example of a rule.
        defaults: Optional keys with their defaults, written as in a rule; the other keys of the example are required.
        places: Where in a step it may strike; if empty, only at the place in ``defaults``.
    """

    what: str
    example: str
    # Every script has a forward, but not all have a loader or an optimizer of torch.
    defaults: str = "in=forward"
    places: tuple[str, ...] = ()


KINDS = {
    "kill": Kind("the rank is killed, as when memory runs out", "kill:rank=2,step=20", places=PLACES),
    "hang": Kind(
        "the rank stops forever, or for this time", "hang:rank=1,step=5,in=loader", "in=forward,seconds=inf", PLACES
    ),
    "straggler": Kind(
        "the rank is so much slower in each step", "straggler:rank=3,ms=50,in=backward", "in=forward,step=1", PLACES[:4]
    ),
    "nan": Kind("the rank's gradient of one parameter is NaN", "nan:rank=0,step=7", "in=backward"),
    # After the update: a bit that flips before it would be shared between the ranks again.
    "bitflip": Kind("one bit of a parameter of the rank flips", "bitflip:rank=1,step=9", "in=update"),
    "oom": Kind("the rank runs out of device memory", "oom:rank=1,step=3", "in=forward,step=3", PLACES[1:4]),
    "slowlink": Kind("messages take as long as over a link of this rate", "slowlink:mbit=100", "step=1,in=collective"),
    "drop": Kind("no message of the rank passes for this time", "drop:rank=2,seconds=5", "step=3,in=collective"),
    "disk-full": Kind("nothing more can be written to files", "disk-full:step=10", "step=1,in="),
}


@dataclass(frozen=True)
class Rule:
    """One fault.

    Attributes:
        text: As it was written.
        rank: The rank that it strikes; every rank if ``None``.
        step: The first step in which it strikes, counted from 1.
        place: Where in the step.
        amount: Milliseconds, seconds or megabits per second, as the kind has it; 0 for other kinds.
        number: Its place among the rules of a rehearsal.
    """

    text: str
    kind: str
    rank: int | None
    step: int
    place: str
    amount: float = 0.0
    number: int = 0


def parse(text: str) -> Rule:
    """Read a rule.

    Raises:
        ConfigurationError: It is invalid; the message names the valid forms.
    """
    name, _, rest = text.strip().partition(":")
    if name not in KINDS:
        raise ConfigurationError(
            f"--inject {text}: there is no fault {name!r}.\nThese can be injected:\n{describe_kinds()}"
        )
    kind = KINDS[name]
    values = {key: value for key, _, value in _pairs(kind.defaults)}
    optional = [key for key in values if key != "in"]
    required = [key for key, _, _ in _pairs(kind.example.partition(":")[2]) if key not in values]
    # ``in`` is refused if there is only one place.
    allowed = [*required, *optional, *(["in"] if kind.places else [])]

    def wrong(reason: str) -> ConfigurationError:
        hint = f"Write it like {kind.example}."
        hint += f" It may also have {' and '.join(optional)}." if optional else ""
        hint += f" in= is one of {', '.join(kind.places)}." if kind.places else ""
        return ConfigurationError(f"--inject {text}: {reason}.\n{hint}")

    def number(key: str, least: float, what: str) -> float:
        try:
            value = float(values[key]) if key in _UNITS else int(values[key])
        except ValueError:
            value = -1
        if not value >= least:  # written so that NaN is also refused
            raise wrong(f"{key}={values[key]} is not {what}")
        return value

    keys = set()
    for key, equals, value in _pairs(rest):
        if key not in allowed:
            raise wrong(f"it has no key {key!r}" if equals else f"{key!r} is not key=value")
        if key in keys:
            raise wrong(f"{key} is given twice")
        keys.add(key)
        values[key] = value
    if missing := [key for key in required if key not in keys]:
        raise wrong(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    if kind.places and values["in"] not in kind.places:
        raise wrong(f"it cannot strike in {values['in']!r}, only in {', '.join(kind.places)}")
    rank = int(number("rank", 0, "the number of a rank, from 0")) if "rank" in values else None
    step = int(number("step", 1, "the number of a step, from 1"))
    amount = next((number(unit, 1e-9, "a number above 0") for unit in _UNITS if unit in values), 0.0)
    return Rule(text.strip(), name, rank, step, values["in"], amount)


def _pairs(text: str) -> list[tuple[str, ...]]:
    return [tuple(part.strip() for part in pair.partition("=")) for pair in text.split(",") if pair]


def check_ranks(rules: Sequence[Rule], num_ranks: int) -> None:
    """Refuse faults in ranks that will not exist."""
    for rule in rules:
        if rule.rank is not None and rule.rank >= num_ranks:
            raise ConfigurationError(
                f"--inject {rule.text}: there is no rank {rule.rank}: {num_ranks} ranks are counted from 0.\n"
                f"Name a rank up to {num_ranks - 1}, or ask for more with --devices."
            )


def describe_kinds() -> str:
    """Return an example of each kind of fault with its effect, a line each."""
    width = max(len(kind.example) for kind in KINDS.values())
    return "\n".join(f"  {kind.example:{width}}  {kind.what}" for kind in KINDS.values())


# The ranks' notes about faults that struck, which the command reads; a file for each rule.


class Note(NamedTuple):
    """When and where a fault struck for the first time."""

    rank: int
    step: int
    time_ns: int


def write(folder: Path, rule: Rule, *, rank: int, step: int) -> bool:
    """Record that the fault strikes now; return whether it is the first time.

    The file outlives the rank, so a rank that was started again can see that the fault is spent.
    """
    try:
        # Exclusively: only one of several ranks or threads may be the first.
        with open(_path(folder, rule), "x") as file:
            json.dump(Note(rank, step, time.time_ns())._asdict(), file)
    except FileExistsError:
        return False
    return True


def is_spent(folder: Path, rule: Rule) -> bool:
    """Return whether the fault has already struck, in this process or an earlier one."""
    return _path(folder, rule).exists()


def read(folder: Path, rule: Rule) -> Note | None:
    """Return the note; ``None`` if the fault has not struck, or killed the rank before it had written anything."""
    return Note(**note) if (note := read_object(_path(folder, rule))) else None


def _path(folder: Path, rule: Rule) -> Path:
    return folder / f"fault-{rule.number}.json"
