"""Which machines form the next generation, from what each of them says."""

import pytest

from lockstep.errors import ConfigurationError
from lockstep.launcher.quorum import Member, check_lighthouse, digest, next_generation

TWO = digest(["a", "b"])


def member(name, number, of, place=None, *, is_broken=False, is_done=False):
    return Member(name, "host:1", number, 2, of, place, "host", is_broken, is_done)


def agreed_by(found):
    """Return the number of the next generation, and its machines."""
    agreed = next_generation(found)
    return None if agreed is None else (agreed[0], [each.name for each in agreed[1]])


def test_the_first_generation_counts_when_all_machines_of_the_start_have_asked():
    assert agreed_by([member("a", -1, TWO, 0)]) is None
    assert agreed_by([member("a", -1, TWO, 0), member("c", -1, "")]) is None
    assert agreed_by([member("a", -1, TWO, 0), member("b", -1, TWO, 1)]) == (0, ["a", "b"])


def test_ranks_that_are_broken_before_all_machines_of_the_start_have_asked_do_not_wait_for_the_rest():
    lost = member("a", -1, TWO, 0, is_broken=True)
    assert agreed_by([lost]) == (1, ["a"])
    assert agreed_by([lost, member("c", -1, "")]) == (1, ["a", "c"])
    assert agreed_by([lost, member("b", -1, digest(["a", "b", "c"]), 1)]) is None
    assert agreed_by([member("c", -1, "", is_broken=True)]) is None  # nobody holds the state
    # The other one asks late.
    assert agreed_by([member("a", 1, digest(["a"]), 0), member("b", -1, TWO, 1)]) == (2, ["a", "b"])


def test_without_a_loss_a_generation_goes_on():
    assert agreed_by([member("a", 3, TWO, 0), member("b", 3, TWO, 1)]) is None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([member("a", 3, TWO, 0), member("b", 3, TWO, 1, is_broken=True)], (4, ["a", "b"])),
        ([member("b", 3, TWO, 1)], (4, ["b"])),
        # It takes the first place that is free; in the order of places, not of names.
        ([member("A", -1, ""), member("a", 3, TWO, 0), member("b", 3, TWO, 1)], (4, ["a", "b", "A"])),
        ([member("b", 3, TWO, 1), member("c", -1, "")], (4, ["c", "b"])),
        ([member("b", 3, TWO, 1), member("c", -1, "", 7)], (4, ["b", "c"])),
        # The others went on without it: it comes again when it has other ranks.
        ([member("a", 4, digest(["a"]), 0), member("b", 3, TWO, 1)], None),
    ],
    ids=["broken", "lost", "joins", "takes a place", "has a place", "left out"],
)
def test_the_next_generation(found, expected):
    assert agreed_by(found) == expected
    assert agreed_by(found[::-1]) == expected


def test_nobody_goes_on_with_a_machine_whose_ranks_have_ended():
    assert agreed_by([member("a", 3, TWO, 0, is_done=True), member("b", 3, TWO, 1, is_broken=True)]) is None


def test_the_address_of_a_lighthouse_is_checked():
    check_lighthouse(None, 1)
    check_lighthouse("host:29510", 2)
    with pytest.raises(ConfigurationError) as caught:
        check_lighthouse("host", 2)
    assert str(caught.value) == "--lighthouse host is not an address.\nPass <host>:<port>."
    with pytest.raises(ConfigurationError) as caught:
        check_lighthouse("host:1", 1)
    assert str(caught.value) == "--lighthouse needs several machines.\nAdd --nnodes, or omit --lighthouse."
