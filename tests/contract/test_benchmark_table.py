"""The README's table of figures is that of the newest run in bench/results."""

from bench.report.run import newest
from bench.report.table import README, between_marks, block


def test_the_table_is_that_of_the_newest_run():
    assert between_marks(README.read_text()) == block(newest())
