import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lockstep.study.compare.comparison import judge, render_page
from lockstep.telemetry.provenance import Provenance
from tests.unit.study.compare.compare_planted import MIB, comparison, contender

PROVENANCE = Provenance(
    "2026-01-01T00:00:00+00:00", {"torch": "2.13.0"}, {"cpu": "A & B"}, {"lockstep": "0123456789ab" * 3}
)


def planted():
    return comparison(
        contender("single", 20.0, peak_bytes=(300 * MIB,)),
        contender("torch-ddp", 11.5, exposed_ms=1.0, noise=(1.0, 1.25, 0.8, 1.0, 1.0)),
        contender("ddp", 11.0, exposed_ms=0.8, peak_bytes=(200 * MIB, 100 * MIB)),
        left_out=[{"strategy": "torch-dp", "reason": "no <CUDA> here"}],
        task="<b>task</b>.py",
    )


@pytest.fixture(scope="module")
def text():
    found = planted()
    return render_page(replace(found, verdict=judge(found)), PROVENANCE)


def test_a_notebook_shows_the_tables_and_the_verdict():
    found = replace(planted(), verdict=judge(planted()))
    assert "&lt;b&gt;task&lt;/b&gt;.py" in found._repr_html_()
    assert found.verdict.sentences[0].split()[0] in str(found)


class Outline(HTMLParser):
    """Checks that every element is closed, and keeps what a reader meets."""

    VOID = ("meta", "br", "hr", "img", "link")

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.labels = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if dict(attributes).get("role") == "img":
            self.labels.append(dict(attributes)["aria-label"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_from_elsewhere(text):
    assert text[:15] == "<!doctype html>"
    used = [
        value
        for _, attributes in Outline(text).elements
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href") or (value and "url(" in value)
    ]
    assert used != []
    assert [value for value in used if not value.startswith(("#", "url(#")) and "url(#" not in value] == []
    assert re.findall(r"@import|https?://", text) == []


def test_the_page_holds_the_verdict_the_tables_and_what_was_left_out(text):
    expected = [
        "<li>Use ddp: 1.82x single&#x27;s speed (1.82x to 1.82x). torch-ddp ties with it.</li>",
        '<th scope="row">ddp</th><td>5,818</td><td>1.82x</td><td>1.82 - 1.82</td><td>200</td>',
        '<th scope="row">ddp</th><td>11.00</td><td>0.00</td><td>2.55</td><td>5.10</td><td>0.80</td>',
        "torch-dp was left out: no &lt;CUDA&gt; here",
        "cpu A &amp; B",
        "lockstep commit 0123456789ab",
    ]
    # Counted, as a failing "in" would print the whole page.
    assert {part: text.count(part) for part in expected} == dict.fromkeys(expected, 1)


def test_what_users_name_is_escaped(text):
    assert text.count("<b>") == 0
    assert text.count("<h1>&lt;b&gt;task&lt;/b&gt;.py") == 1


def test_every_plot_says_in_words_what_it_shows(text):
    assert Outline(text).labels == [
        "Stacked bars of milliseconds per step: "
        "single 20.00 (data wait 0.00, forward 5.00, backward 10.00, optimizer 5.00, waiting for a core 0.00, "
        "other 0.00); "
        "torch-ddp 11.50 "
        "(data wait 0.00, forward 2.62, backward 5.25, exchange 1.00, optimizer 2.62, waiting for a core 0.00, "
        "other 0.00); "
        "ddp 11.00 (data wait 0.00, forward 2.55, backward 5.10, exchange 0.80, optimizer 2.55, waiting for a core "
        "0.00, other 0.00).",
    ]


def test_the_plot_stacks_the_parts_and_no_id_stands_twice(text):
    data = json.loads(re.search('<script type="application/json">(.*?)</script>', text)[1])["data"]
    assert [trace["name"] for trace in data] == [
        *("data wait", "forward", "backward", "exchange", "optimizer", "waiting for a core", "other")
    ]
    exchange = data[3]
    assert (exchange["y"], exchange["x"]) == (["torch-ddp", "ddp"], [1.0, 0.8])
    assert exchange["marker"]["color"] == "#009E73" and exchange["marker"]["pattern"]["shape"] == "/"
    names = [attributes["id"] for _, attributes in Outline(text).elements if "id" in attributes]
    assert len(names) == len(set(names))
