"""What `lockstep rehearse` makes of what a job logged after a fault."""

import pytest

from lockstep.study.rehearse.fault_rules import Note, parse
from lockstep.study.rehearse.runner import Line, judge, judge_all, ranks_in

STRUCK = Note(1, 5, 1_000_000_000)


def logged(*lines, at_s=2.0):
    return [Line(int(at_s * 1e9) + number, text) for number, text in enumerate(lines)]


def outcome(text, lines, code, note=STRUCK):
    found = judge(parse(text), note, lines, code)
    return found.outcome, found.is_good, found.noticed_s and round(found.noticed_s, 3), found.message


@pytest.mark.parametrize(
    ("text", "lines", "code", "expected"),
    [
        (
            "kill:rank=1,step=5",
            logged("lockstep: Rank 1 was killed by SIGKILL (signal 9): ..."),
            1,
            ("ended with code 1", True, 1.0, "Rank 1 was killed by SIGKILL (signal 9): ..."),
        ),
        (
            "kill:rank=1,step=5",
            logged("lockstep: rank 1 was killed by SIGKILL (signal 9); restart 1 of 2"),
            0,
            ("recovered by a restart", True, 1.0, "rank 1 was killed by SIGKILL (signal 9); restart 1 of 2"),
        ),
        (  # the wrong rank is named
            "kill:rank=1,step=5",
            logged("lockstep: Rank 0 was killed by SIGKILL"),
            1,
            ("ended with code 1, without naming rank 1", False, None, ""),
        ),
        (  # what was said before does not count, nor what the rehearsal itself says
            "straggler:rank=1,ms=50",
            [
                *logged("rank 1 is slow", at_s=0.5),
                *logged("rehearse: rank 1 is slow", "[rank 1] rehearse: rank 1 is slow"),
            ],
            0,
            ("not noticed", False, None, ""),
        ),
        ("drop:rank=1,seconds=2", [], 0, ("survived", True, None, "")),
        (  # the report takes more than one line
            "hang:rank=1,step=5",
            logged("lockstep: The job hangs:", "ranks 0, 2 wait in barrier", "rank 1 sleeps (train.py:3)"),
            83,
            ("ended with code 83", True, 1.0, "rank 1 sleeps (train.py:3)"),
        ),
        (
            "bitflip:rank=1,step=5",
            logged("parameter 3.bias differs: ranks 0, 2-3 have one value, rank 1 another"),
            0,
            (
                "reported, the run went on",
                True,
                1.0,
                "parameter 3.bias differs: ranks 0, 2-3 have one value, rank 1 another",
            ),
        ),
    ],
)
def test_outcomes(text, lines, code, expected):
    assert outcome(text, lines, code) == expected


def test_a_slow_link_is_not_blamed_for_what_another_fault_did():
    rules = [parse("slowlink:mbit=1"), parse("kill:rank=1,step=5"), parse("straggler:rank=0,ms=5")]
    found = judge_all(rules, [STRUCK] * 3, logged("lockstep: Rank 1 was killed by SIGKILL"), 1)
    assert [(each.outcome, each.is_good) for each in found] == [
        ("survived, until the job ended with code 1", True),
        ("ended with code 1", True),
        ("ended with code 1, without naming rank 0", False),
    ]


SUMMARY = "a step took 57 ms: exchange 49%; slowest was rank 0 (30 ms of work in a step), fastest rank 1 (25 ms)"


def test_the_slowest_and_the_fastest_rank_of_a_run_are_no_report_of_a_gradient():
    lines = logged("1 step skipped:", "  The gradient is not finite (epoch 1, step 5).", SUMMARY)
    message = "The gradient is not finite (epoch 1, step 5)."
    assert outcome("nan:rank=1,step=5", lines, 0) == ("reported without its rank, the run went on", True, 1.0, message)
    assert outcome("nan:rank=0,step=5", lines, 1) == ("ended with code 1, without naming rank 0", False, None, "")


def test_of_a_straggler_the_slowest_rank_is_a_report_and_the_fastest_none():
    found = outcome("straggler:rank=0,ms=5", logged(SUMMARY), 0)
    assert found == ("reported, the run went on", True, 1.0, SUMMARY)
    assert outcome("straggler:rank=1,ms=5", logged(SUMMARY), 0) == ("not noticed", False, None, "")


def test_a_fault_that_never_struck_is_no_success():
    never = "did not strike: rank 1 never came to loader in step 5"
    assert outcome("hang:rank=1,step=5,in=loader", [], 0, None) == (never, False, None, "")
    early = "did not strike: the job had ended with code 1"
    assert outcome("hang:rank=1,step=5,in=loader", [], 1, None) == (early, False, None, "")


def test_ranks_in_a_line():
    assert ranks_in("Rank 3 waits; ranks 0-2, 5 and 7 do not; [rank11]: x; frank 9") == {0, 1, 2, 3, 5, 7, 11}
