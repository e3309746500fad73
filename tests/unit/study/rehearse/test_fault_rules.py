"""The rules of `lockstep rehearse`: how they are read, and what is said of wrong ones."""

import pytest

from lockstep.errors import ConfigurationError
from lockstep.study.rehearse.fault_rules import KINDS, Rule, check_ranks, describe_kinds, parse


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("kill:rank=2,step=20", Rule("kill:rank=2,step=20", "kill", 2, 20, "forward")),
        ("hang:rank=1,step=5,in=loader", Rule("hang:rank=1,step=5,in=loader", "hang", 1, 5, "loader", float("inf"))),
        ("straggler:rank=3,ms=50", Rule("straggler:rank=3,ms=50", "straggler", 3, 1, "forward", 50.0)),
        ("nan:rank=0,step=7", Rule("nan:rank=0,step=7", "nan", 0, 7, "backward")),
        ("slowlink:mbit=0.5", Rule("slowlink:mbit=0.5", "slowlink", None, 1, "collective", 0.5)),
        (" drop:rank=2, seconds=5 ", Rule("drop:rank=2, seconds=5", "drop", 2, 3, "collective", 5.0)),
        ("disk-full", Rule("disk-full", "disk-full", None, 1, "")),
    ],
)
def test_rules_are_read(text, rule):
    assert parse(text) == rule


def test_every_example_is_a_rule():
    assert [parse(kind.example).kind for kind in KINDS.values()] == list(KINDS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "kil:rank=1",
            f"--inject kil:rank=1: there is no fault 'kil'.\nThese can be injected:\n{describe_kinds()}",
        ),
        (
            "kill:rank=1",
            "--inject kill:rank=1: step is missing.\nWrite it like kill:rank=2,step=20. "
            "in= is one of loader, forward, backward, optimizer, collective.",
        ),
        ("slowlink", "--inject slowlink: mbit is missing.\nWrite it like slowlink:mbit=100. It may also have step."),
        (
            "straggler:rank=0,ms=5,in=collective",
            "--inject straggler:rank=0,ms=5,in=collective: it cannot strike in 'collective', only in loader, forward, "
            "backward, optimizer.\nWrite it like straggler:rank=3,ms=50,in=backward. It may also have step. "
            "in= is one of loader, forward, backward, optimizer.",
        ),
        (
            "nan:rank=0,step=0",
            "--inject nan:rank=0,step=0: step=0 is not the number of a step, from 1.\nWrite it like nan:rank=0,step=7.",
        ),
        (
            "nan:rank=0,step=7,in=forward",
            "--inject nan:rank=0,step=7,in=forward: it has no key 'in'.\nWrite it like nan:rank=0,step=7.",
        ),
        (
            "nan:rank=0,step=7,step=8",
            "--inject nan:rank=0,step=7,step=8: step is given twice.\nWrite it like nan:rank=0,step=7.",
        ),
        (
            "nan:rank=0,step=7,8",
            "--inject nan:rank=0,step=7,8: '8' is not key=value.\nWrite it like nan:rank=0,step=7.",
        ),
        (
            "drop:rank=0,seconds=nan",
            "--inject drop:rank=0,seconds=nan: seconds=nan is not a number above 0.\n"
            "Write it like drop:rank=2,seconds=5. It may also have step.",
        ),
    ],
)
def test_wrong_rules_teach(text, message):
    with pytest.raises(ConfigurationError) as caught:
        parse(text)
    assert str(caught.value) == message


def test_ranks_that_will_not_be_there():
    with pytest.raises(ConfigurationError) as caught:
        check_ranks([parse("disk-full"), parse("nan:rank=2,step=1")], 2)
    assert str(caught.value) == (
        "--inject nan:rank=2,step=1: there is no rank 2: 2 ranks are counted from 0.\n"
        "Name a rank up to 1, or ask for more with --devices."
    )
