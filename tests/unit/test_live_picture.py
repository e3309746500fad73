"""What a live view shows in the room that there is, on a terminal and in a notebook."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from lockstep.telemetry.aggregator import with_waits
from lockstep.telemetry.live.notebook import NotebookRegion, is_notebook
from lockstep.telemetry.live_view import bar, chosen, picture
from lockstep.telemetry.metrics import EventFigures, Snapshot
from tests.unit.test_live_figures import ranks


def snapshot(*own_s, **changes):
    return Snapshot(
        **{
            "time": 0.0,
            "step": 250,
            "num_steps": 1000,
            "epoch": 1.5,
            "loss": 0.25,
            "learning_rate": 1e-3,
            "grad_norm": 2.5,
            "samples_per_s": 12345.6,
            "left_s": 75.0,
            "ranks": with_waits(ranks(*own_s)),
            "world_size": len(own_s),
            **changes,
        }
    )


EVENT = EventFigures(event="spike", step=12, time=0.0, seconds=None, text="took 33 ms")


def texts(*arguments, **room):
    return [line.plain for line in picture(*arguments, **{"width": 100, "height": 40, **room})]


def test_all_there_is_to_see():
    shown = texts(snapshot(0.010, 0.019, num_skipped_steps=2), [EVENT])
    assert shown[0].startswith("step 250/1,000 ━━━━") and shown[0].endswith("  25%  1:15 min left")
    assert shown[1] == "loss 0.2500  12,346 samples/s  lr 0.001  grad norm 2.5  epoch 1.5  skipped 2"
    assert shown[2].startswith(" 20.0 ms a step DDDDDDDD")
    assert shown[3] == "  D data wait 10%  F forward 26%  B backward 26%  X exchange 5%  W waiting for ranks 22%  "
    assert shown[4] == "  O optimizer 10%  "
    assert shown[-3].startswith("rank 0   DD") and "works 10.0 ms  waits 10.0 ms" in shown[-3]
    assert shown[-2].endswith("works 19.0 ms  waits 1.00 ms  slowest") or shown[-2].endswith("slowest")
    assert shown[-1].endswith("step 12 spike: took 33 ms")


def test_before_the_first_step():
    shown = texts(Snapshot(time=0.0, step=0, num_steps=10), [])
    assert shown[0].startswith("step 0/10 ─") and shown[0].endswith("   0%")
    assert shown[1:] == ["the first steps take longest"]


@pytest.mark.parametrize("width", [20, 40, 59, 80, 100, 300])
@pytest.mark.parametrize("height", [3, 8, 12, 50])
def test_nothing_is_wider_or_higher_than_the_terminal(width, height):
    lines = picture(snapshot(*(0.010 + rank / 1e4 for rank in range(12))), [EVENT] * 3, width=width, height=height)
    assert all(line.cell_len < width for line in lines)
    assert 1 <= len(lines) <= height - 2


def test_many_ranks_are_shown_by_their_extremes():
    own_s = [0.010] * 40
    own_s[7], own_s[30] = 0.020, 0.005
    shown = texts(snapshot(*own_s), [])
    named = [line.split()[1] for line in shown if line.startswith("rank ")]
    assert "7" in named and "30" in named and len(named) == 6
    assert shown[-1] == "  and 34 ranks whose own work takes no longer and no shorter"
    assert len(chosen(ranks(*own_s[:16]), 16)) == 16


def test_the_bar_is_readable_without_colours():
    text = bar(with_waits(ranks(0.010, 0.019)), 40)
    assert text.plain == "DDDD" + "F" * 10 + "B" * 11 + "X" * 2 + "W" * 9 + "OOOO"
    assert len({span.style for span in text.spans}) == 6


def test_a_notebook_shows_it_in_one_place(monkeypatch):
    pages = []

    class Handle:
        def update(self, page):
            pages.append(("update", page))

    def show(page, display_id):
        assert display_id is True
        pages.append(("new", page))
        return Handle()

    display = ModuleType("IPython.display")
    display.HTML, display.display = lambda text: text, show
    ipython = ModuleType("IPython")
    ipython.display = display
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    assert is_notebook()
    region = NotebookRegion()
    lines = picture(snapshot(0.010, 0.019), [], width=region.size[0], height=region.size[1])
    region.show(lines)
    region.show(lines)
    region.show([])
    region.close()
    assert [kind for kind, _ in pages] == ["new", "update"], "the last state stays"
    assert "loss 0.2500" in pages[0][1] and 'background-color: #56b4e9">FFF' in pages[0][1]
    ipython.get_ipython = lambda: SimpleNamespace()
    assert not is_notebook()
