"""The page: it needs nothing from elsewhere, is whole without pictures, and no text of a record becomes markup."""

import base64
import gzip
import json
import re
from html import escape, unescape
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from plotly.offline import get_plotlyjs

from lockstep.cli.studies import report
from lockstep.study import drawing
from lockstep.study.report import run_page
from lockstep.study.report.run_page import Report
from lockstep.study.report.view import compare_with_baseline, view_run
from tests.unit.study.report.report_planted import MACHINE, START, event_line, session, steps, timeline_line, write_run

HOSTILE = '<script>alert("1")</script>$\\frac{<img src=x onerror=alert(2)>'
VOID = ("meta", "br", "hr", "img", "link", "input")


class Outline(HTMLParser):
    """Checks that every element is closed, and keeps what a reader meets."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words, self.scripts = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open[-1:] == ["script"] else self.words).append(data)


def planted(folder, **changes):
    buckets = [(0, 2**20, 0.004, 0.005, 0.009)]
    lanes = [timeline_line(number, START + 0.011 * number, buckets=buckets) for number in (4, 5, 6)]
    events = [event_line("checkpoint", "saved", 10, 0.2), event_line("spike", "took 50 ms", 12)]
    lines = [*steps(), *lanes, *events, MACHINE]
    return write_run(folder, [lines, lines], [session(2, **changes)])


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return Report(view_run(planted(tmp_path_factory.mktemp("page") / "run"))).page


def test_the_page_needs_nothing_from_elsewhere(page):
    outline = Outline(page)
    names = ("src", "href", "xlink:href", "srcset", "data", "action")
    used = [value for _, found in outline.elements for name, value in found.items() if name in names]
    assert [value for value in used if not value.startswith("#")] == []
    assert re.findall(r"@import|https?://", page) == []
    plotly, draws = outline.scripts[-2:]
    assert gzip.decompress(base64.b64decode(plotly)).decode() == get_plotlyjs()
    assert "Plotly.newPlot" in draws and len(page) < 2_100_000


def test_the_page_suits_phones_dark_rooms_keyboards_and_those_who_do_not_see_it(page):
    outline = Outline(page)
    viewport = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
    assert ("meta", viewport) in outline.elements
    assert page.count("@media (prefers-color-scheme: dark)") == 1
    assert "The plots need JavaScript; the tables have the figures." in outline.words
    plots = [found for _, found in outline.elements if found.get("role") == "img"]
    assert len(plots) == 5  # parts, timeline, loss, throughput, learning rate
    assert all(len(found["aria-label"]) > 40 for found in plots)
    folds = sum(tag == "summary" for tag, _ in outline.elements)
    assert folds == sum(tag == "table" for tag, _ in outline.elements) == 3
    scrolls = [found for tag, found in outline.elements if "scroll" in (found.get("class") or "")]
    assert all(found["tabindex"] == "0" and found["aria-label"] for found in scrolls)
    ids = [found["id"] for _, found in outline.elements if "id" in found]
    assert len(ids) == len(set(ids))


def test_the_page_says_when_it_ran_and_on_which_commit_of_the_users(tmp_path):
    provenance = {
        "when": "2026-01-02T03:04:05+00:00",
        "commits": {"lockstep": "f" * 40, "task": "0123456789ab" * 3 + "+"},
    }
    folder = planted(tmp_path / "run", provenance=provenance)
    place = f"{folder} (ranks: 2, hosts: 1, starts: 1)"
    page = Report(view_run(folder)).page
    assert f'<p class="soft">2026-01-02 03:04:05 UTC, commit 0123456789ab + changes, {place}</p>' in page
    without = Report(view_run(planted(tmp_path / "run", provenance={}))).page
    assert f'<p class="soft">{place}</p>' in without


def test_the_page_tells_verdict_advice_events_and_how_to_repeat_it(page):
    words = " ".join(Outline(page).words)
    for text in (
        "digits trains 5,818 samples/s on 2 CPU processes, 11.0 ms a step.",
        "Training pauses for checkpoints during",
        "took 50 ms",
        "lockstep train digits.py --devices 2",
        "/somewhere",
    ):
        assert words.count(text) >= 1, text


def lost(number):
    return (
        f"rank 1 was killed by SIGKILL (signal 9) in step {number}; rank 1 is back after 0.6 s with the state of rank "
        f"0; step {number + 1} is done again; 12,345 bytes copied"
    )


def test_recoveries_stand_in_the_summary_and_the_table(tmp_path):
    cause = '\n  File "train.py", line 3, in step\n    x; y'
    events = [event_line("recovery", lost(number) + cause, number, 0.61) for number in range(10, 18)]
    found = Report(view_run(write_run(tmp_path / "run", [[*steps(), *events[:7]], [*steps(), *events]])))
    told = [text for text in found.sentences if text.startswith("Recovery")]
    assert told == [f"Recovery {number}: {lost(number + 9)}." for number in range(3, 9)]
    table = run_page.events_table(found.view)
    assert len(table.rows) == 8 and table.rows[0][1:] == ["10", "recovery", "0.61 s", lost(10) + cause]
    assert lost(10) in unescape(found.page)
    without = Report(view_run(write_run(tmp_path / "without", [steps()])))
    assert "Recover" not in "".join((*without.sentences, without.page))


def test_a_record_with_a_recovery_and_no_step_makes_a_page(tmp_path):
    lines = [event_line("recovery", HOSTILE, 0, None), {**event_line("recovery", "", 1), "time": 1e300}]
    found = Report(view_run(write_run(tmp_path / "run", [lines, []])))
    assert HOSTILE not in found.page
    rows = [row[1:] for row in run_page.events_table(found.view).rows]
    assert rows == [["0", "recovery", "", HOSTILE], ["1", "recovery", "", ""]]


def test_each_advice_stands_once(tmp_path):
    lines = [*steps(exposed_s=0.030), event_line("checkpoint", "saved", 10, 0.2)]
    view = view_run(write_run(tmp_path / "run", [lines, lines]))
    words = " ".join(Outline(Report(view).page).words)
    assert len(view.advice) == 3 and "What else to change" in words
    assert [words.count(advice.text) for advice in view.advice] == [1, 1, 1]


def test_no_text_of_a_record_becomes_markup(tmp_path):
    settings = {"strategy": HOSTILE, HOSTILE: HOSTILE}
    provenance = {"when": HOSTILE, "versions": {HOSTILE: HOSTILE}, "machine": {"cpu": HOSTILE}, "commits": {}}
    folder = planted(
        tmp_path / "run",
        task=HOSTILE,
        command=HOSTILE,
        working_directory=HOSTILE,
        settings=settings,
        provenance=provenance,
        backend=HOSTILE,
        global_batch_size=HOSTILE,
        workers=HOSTILE,
    )
    for rank in (0, 1):
        path = folder / f"rank-{rank}.jsonl"
        text = path.read_text().replace('"host": "here"', f'"host": {json.dumps(HOSTILE)}')
        path.write_text(text.replace('"device": "cpu"', f'"device": {json.dumps(HOSTILE)}') + "<b>no JSON</b>\n")
        with path.open("a") as file:
            evaluated = {**event_line("evaluation", "", 20), "metrics": {HOSTILE: 1.0}}
            for event in (event_line("error", HOSTILE, 20), evaluated):
                file.write(json.dumps(event) + "\n")
    outline = Outline(Report(view_run(folder)).page)
    tags = {tag for tag, _ in outline.elements}
    assert tags.isdisjoint({"img", "b", "iframe"})
    plots = [json.loads(text) for text in outline.scripts[:-2]]
    assert sum(tag == "script" for tag, _ in outline.elements) == len(outline.scripts) == len(plots) + 2
    events = [trace for plot in plots for trace in plot["data"] if trace["name"] == "error"]
    # Tags in them would be interpreted by plotly.
    assert {text for trace in events for text in trace["text"]} == {
        escape(f"error after step 20: {HOSTILE}", quote=False),
        "",
    }
    assert not any(name.startswith("on") for _, found in outline.elements for name in found)
    assert sum(HOSTILE in words for words in outline.words) > 5


@pytest.fixture
def no_drawings(monkeypatch):
    """Leave out the plots and what draws them, for tests of words and tables."""
    monkeypatch.setattr(run_page, "draw", lambda *_: [])
    monkeypatch.setattr(drawing, "_plotly", lambda: "")


@pytest.mark.usefixtures("no_drawings")
def test_settings_that_differ_from_the_baseline_are_marked(tmp_path):
    view = view_run(planted(tmp_path / "run"))
    other = view_run(planted(tmp_path / "other", settings={"strategy": "ddp", "accumulate": 4}))
    page = Report(view, [compare_with_baseline(view, other)]).page
    assert page.count('<tr class="differs"><th scope="row">accumulate</th>') == 1
    assert ">2 devices</th>" in page


@pytest.mark.usefixtures("no_drawings")
def test_a_notebook_shows_the_page_in_a_frame_and_print_the_sentences(tmp_path):
    folder = planted(tmp_path / "run")
    found = run_page.report(folder, against=folder)
    assert unescape(found._repr_html_()).startswith('<iframe srcdoc="<!doctype html>')
    assert " ".join(str(found).split()) == " ".join(" ".join(found.sentences).split())


@pytest.mark.parametrize(
    "ranks", [[steps(3)], [steps(exposed_s=None, loss="nan"), steps()], [[event_line("error", "x", 0)]]]
)
def test_records_with_little_in_them_make_a_page_too(tmp_path, ranks):
    folder = write_run(tmp_path / "run", ranks)
    (folder / "run.json").unlink()
    assert "What is missing in this record" in " ".join(Outline(Report(view_run(folder)).page).words)


def test_many_ranks_and_long_runs_stay_a_page(tmp_path):
    lines = steps(1000)
    folder = write_run(tmp_path / "run", [[*lines, MACHINE]] * 20)
    page = Report(view_run(folder)).page
    assert len(page) < 2_200_000
    assert page.count('<th scope="row">19</th>') == 1


def command(*arguments):
    result = CliRunner().invoke(report, [str(argument) for argument in arguments])
    return result.output if result.exception is None else f"{type(result.exception).__name__}: {result.exception}"


@pytest.mark.usefixtures("no_drawings")
def test_the_command_says_the_verdict_and_writes_page_and_trace(tmp_path):
    folder, trace = planted(tmp_path / "run"), tmp_path / "trace.json"
    out = command(folder, "--trace", trace).splitlines()
    assert out[0] == "digits trains 5,818 samples/s on 2 CPU processes, 11.0 ms a step."
    assert out[-2:] == [f"trace written to {trace}", f"page written to {folder}/report.html"]
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    entries = json.loads(trace.read_text())["traceEvents"]
    spans = [entry for entry in entries if entry["ph"] == "X"]
    first = min((entry for entry in spans if entry["pid"] == 1), key=lambda entry: entry["ts"])
    assert (first["name"], first["tid"]) == ("forward", 0)
    assert (first["ts"], first["dur"]) == pytest.approx((4 * 0.011e6, 0.003e6), abs=1)
    assert first["args"] == {"step": 5}
    assert {entry["name"] for entry in spans} == {"forward", "backward", "exchange", "other", "bucket 0"}
    assert sum(entry["ph"] == "i" for entry in entries) == 4
