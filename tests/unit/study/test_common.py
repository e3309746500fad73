import io
import mmap
import sys

import pytest
from rich.console import Console

from lockstep.study.common import (
    MIB,
    Spread,
    Table,
    console,
    num_trimmed,
    paired_ratio,
    peak_bytes,
    reset_peak,
)


def test_spread_of_few_rounds_is_lowest_to_highest() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 5.0, 4.0]) == Spread(3.0, 1.0, 5.0)


def test_one_value_is_its_own_spread() -> None:
    assert Spread.of([2.5]) == Spread(2.5, 2.5, 2.5)


def test_one_outlier_in_eight_rounds_is_cut_off() -> None:
    assert Spread.of([10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 900.0]) == Spread(13.5, 11.0, 16.0)


@pytest.mark.parametrize(("rounds", "trim"), [(1, 0), (2, 0), (5, 0), (7, 0), (8, 1), (10, 1), (11, 2), (20, 5)])
def test_trimming_follows_the_sign_test(rounds: int, trim: int) -> None:
    # From tables of order-statistic intervals for the median at 90%: n=8 -> (2, 7), n=11 -> (3, 9), n=20 -> (6, 15).
    assert num_trimmed(rounds) == trim


def test_paired_ratio_cancels_what_hits_a_whole_round() -> None:
    slow_machine = [1.0, 0.5, 1.0, 0.25, 1.0]
    ours = [200.0 * factor for factor in slow_machine]
    theirs = [100.0 * factor for factor in slow_machine]
    assert paired_ratio(ours, theirs) == Spread(2.0, 2.0, 2.0)


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="no median for empty data"):
        Spread.of([])


def test_ratio_of_unequal_numbers_of_rounds_is_refused() -> None:
    with pytest.raises(ValueError):
        paired_ratio([1.0], [1.0, 2.0])


def test_width_and_holding() -> None:
    spread = Spread(2.0, 1.5, 2.5)
    assert spread.relative_width == 0.5
    assert spread.holds(1.5) and spread.holds(2.5) and not spread.holds(2.51)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak can be reset on Linux only")
def test_the_peak_is_of_what_was_held_since_the_reset() -> None:
    def hold(num_bytes: int) -> None:
        with mmap.mmap(-1, num_bytes) as block:
            for start in range(0, num_bytes, mmap.PAGESIZE):
                block[start] = 1

    hold(400 * MIB)
    reset_peak()
    before = peak_bytes()
    hold(200 * MIB)  # much, as this process may give memory of other tests back meanwhile
    assert 150 * MIB < peak_bytes() - before < 250 * MIB


def test_brackets_in_a_cell_are_text_and_no_markup(capsys) -> None:
    console().print(Table("[red]title", ("what",), [("a[b]c[/b]",)]).rich())
    assert "a[b]c[/b]" in capsys.readouterr().out


def test_a_table_that_is_wider_than_a_terminal_wraps_its_numbers_and_has_all_names() -> None:
    columns = [f"{2**k} machines" for k in range(8)]
    wide = Table("", ["", *columns], [[name, *["17.44 s  100%"] * 8] for name in ("ddp", "accumulate 4*")], columns)
    printed = io.StringIO()
    Console(file=printed, width=100).print(wide.rich())
    text = printed.getvalue()
    assert "accumulate 4*" in text and "ddp" in text and text.count("100%") == 16
