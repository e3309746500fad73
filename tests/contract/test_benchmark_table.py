"""The figures in README and docs are those of the newest runs in bench/results."""

import pytest

from bench import programs, programs_page
from bench.conformance import DEADLINE_S, ONLY, PEERS, ROWS, read
from bench.conformance_page import PAGE, page
from bench.report import gpu
from bench.report.run import newest
from bench.report.table import README, SPEED, between_marks, blocks


@pytest.mark.parametrize("page", [README, SPEED], ids=lambda page: page.name)
def test_the_table_is_that_of_the_newest_run(page):
    assert between_marks(page.read_text()) == blocks(newest())[page]


def test_the_gpu_results_are_those_of_the_filed_runs():
    assert between_marks(SPEED.read_text(), gpu.MARKS) == gpu.block(gpu.runs())


def test_the_comparison_is_that_of_the_filed_runs():
    assert PAGE.read_text() == "\n".join(page(read()["rows"], ROWS, PEERS, ONLY, DEADLINE_S)) + "\n"


def test_the_programs_are_those_of_the_filed_runs():
    rows = programs.read()["programs"]
    assert programs_page.PAGE.read_text() == "\n".join(programs_page.page(rows)) + "\n"
    assert set(rows) <= {program.name for program in programs.PROGRAMS}
