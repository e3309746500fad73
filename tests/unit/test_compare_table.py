import io
from dataclasses import replace

from rich.console import Console

from lockstep.study.common import console
from lockstep.study.compare.comparison import LeftOut
from lockstep.study.compare.table import cells, footnotes, number, render
from lockstep.study.compare.verdict import judge
from tests.unit.compare_planted import MIB, comparison, contender

LEFT_OUT = LeftOut("torch-dp", "it does nothing on CPUs.")


def planted():
    # Rates of six digits, memory of five.
    fast = {"peak_bytes": (80_000 * MIB, 79_000 * MIB)}
    return comparison(
        contender("single", 0.2, peak_bytes=(20_000 * MIB,)),
        contender("dp", 0.12, exposed_ms=0.01, **fast),
        contender("torch-ddp", 0.115, exposed_ms=0.02, losses=(2.0, 1.00001), **fast),
        contender("ddp", 0.11, exposed_ms=0.01, data_ms=0.02, losses=(2.0, 0.9), **fast),
        left_out=[LEFT_OUT],
    )


def text_of(found, width):
    stream = io.StringIO()
    terminal = Console(file=stream, width=width, force_terminal=False, highlight=False)
    terminal.print(render(found, judge(found), width=width))
    return stream.getvalue()


def test_the_tables_fit_100_columns_with_no_figure_cut():
    text = text_of(planted(), 100)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    rows = [line.split() for line in text.splitlines()]
    assert ["single", "320k", "317k", "-", "323k", "1.00x", "-", "20,000", "-", "1.0000", "-"] in rows
    assert ["dp", "533k", "528k", "-", "539k", "1.67x", "83%", "80,000", "1.01x", "1.0000", "0"] in rows
    assert ["torch-ddp", "557k", "551k", "-", "562k", "1.74x", "87%", "80,000", "1.01x", "1.0000", "+1.0e-05"] in rows
    assert ["single", "0.20", "0.00", "0.05", "0.10", "-", "0.05", "0.00"] in rows
    assert ["ddp", "0.11", "0.02", "0.02", "0.04", "0.01", "0.02", "0.00"] in rows
    assert "torch-dp was left out: it does nothing on CPUs." in text


def test_80_columns_get_the_same_figures_in_narrower_tables():
    text = text_of(planted(), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    rows = [line.split() for line in text.splitlines()]
    assert ["ddp", "582k", "576k", "-", "588k", "1.82x", "91%"] in rows
    assert ["ddp", "80,000", "1.01x", "0.9000", "-1.0e-01"] in rows


def test_steps_of_seconds_fit_80_columns():
    slow = {"exposed_ms": 1111.0, "data_ms": 1111.0}
    text = text_of(comparison(contender("single", 99_999.0), contender("torch-ddp", 88_888.0, **slow)), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "99,999" in text


def test_a_pipe_gets_plain_text_of_100_columns(capsys):
    terminal = console()
    terminal.print(render(planted(), judge(planted()), width=terminal.width))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "- Use ddp: 1.82x single's speed (1.82x to 1.82x)." in text
    assert 80 < max(map(len, text.splitlines())) <= 100


def test_long_sentences_hang_below_their_bullet():
    lines = text_of(planted(), 60).splitlines()
    verdict = lines[lines.index("Verdict".ljust(60).rstrip()) + 1 :]
    assert [line for line in verdict if not line.startswith(("- ", "  "))] == []


def test_without_memory_there_is_a_dash():
    found = comparison(contender("single", 20.0), contender("ddp", 11.0, peak_bytes=(MIB,)))
    texts = cells(found, found.contenders[1])
    assert (texts["peak MiB"], texts["imbalance"]) == ("1", "-")


def test_the_footnotes_say_how_the_cores_were_shared_and_what_a_peak_is():
    found = comparison(contender("single", 20.0), contender("ddp", 11.0), device="cpu")
    assert footnotes(found)[1:] == [
        "The loss is that of step 55, on the same samples for all.",
        "Threads of each process or replica: single 1, ddp 1.",
        "Peak memory: growth of a fresh process's resident memory from before the task is built, of the fullest "
        "process; dp holds all its replicas in one process.",
    ]
    assert footnotes(comparison(contender("single", 20.0)))[-1] == (
        "Peak memory: most bytes that tensors held on the fullest device, in fresh processes."
    )


def test_peaks_that_were_not_measured_need_no_footnote():
    found = comparison(replace(contender("single", 20.0), memory=None), device="cpu")
    assert footnotes(found)[-1] == "Threads of each process or replica: single 1."


def test_rates_have_about_three_figures():
    assert [number(value) for value in (0.01234, 5.678, 99.9, 1234.5, 99_949.9, 123_456.0)] == [
        "0.0123",
        "5.68",
        "99.9",
        "1,234",
        "99.9k",
        "123k",
    ]
