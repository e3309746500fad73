"""The page in a real browser, if there is one: it fits a phone and a desktop, in light and in dark."""

import json
import re
import shutil
import subprocess

import pytest

from lockstep.study.report.run_page import Report
from lockstep.study.report.view import view_run
from tests.unit.study.report.test_run_page import planted

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")

PROBE = """
<script>
addEventListener("load", () => {
  const wide = [...document.querySelectorAll("main *")].filter(e => !e.closest(".scroll") && !e.closest("details") &&
    e.getBoundingClientRect().right > innerWidth + 1);
  const style = getComputedStyle(document.body);
  document.querySelectorAll("details").forEach(e => e.open = true);
  document.title = JSON.stringify({
    width: innerWidth, page: document.documentElement.scrollWidth, wide: wide.map(e => e.tagName),
    ground: style.backgroundColor, text: style.color,
    soft: [...document.querySelectorAll(".soft, .note, summary, footer, th, td")].map(e => getComputedStyle(e).color),
    card: getComputedStyle(document.querySelector("figure")).backgroundColor,
    svgs: [...document.querySelectorAll("svg")].map(
      e => [Math.round(e.getBoundingClientRect().width), Math.round(e.getBoundingClientRect().height)]),
    letters: [...document.querySelectorAll("svg text")].map(
      e => parseFloat(getComputedStyle(e).fontSize) * e.ownerSVGElement.getScreenCTM().a),
    cut: [...document.querySelectorAll("svg text")].filter(e => {
      const [text, svg] = [e, e.ownerSVGElement].map(each => each.getBoundingClientRect());
      return text.right > svg.right + 4 || text.left < svg.left - 4;
    }).map(e => e.textContent),
    stops: [...document.querySelectorAll("a, summary, [tabindex='0']")].filter(e => e.tabIndex === 0).length,
  });
});
</script>
"""


def look(path, tmp_path, *, width, dark):
    """Open the page in a frame of that width (windows have a least one), and return what a script in it sees."""
    frame = tmp_path / f"frame-{width}.html"
    frame.write_text(
        f'<body style="margin:0"><iframe src="{path.name}" style="border:0;width:{width}px;height:3000px"></iframe>'
        '<script>addEventListener("load", () => document.body.append(frames[0].document.title))</script>'
    )
    done = subprocess.run(
        [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            "--hide-scrollbars",
            f"--user-data-dir={tmp_path}/profile",
            *("--allow-file-access-from-files", "--virtual-time-budget=3000", "--window-size=1400,1000"),
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *("--dump-dom", frame.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=90,
    )
    found = re.search(r"\{.*\}", done.stdout)
    assert found is not None, done.stderr[-2000:]
    return json.loads(found[0])


def luminance(colour):
    """Return the relative luminance of a colour, by the Web Content Accessibility Guidelines."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_nothing_is_wider_than_the_screen_and_colours_follow_it(tmp_path, width, dark):
    path = tmp_path / "page.html"
    path.write_text(Report(view_run(planted(tmp_path / "run"))).page + PROBE)
    seen = look(path, tmp_path, width=width, dark=dark)
    assert (seen["width"], seen["page"], seen["wide"]) == (width, width, [])
    assert (luminance(seen["ground"]) < luminance(seen["text"])) == dark
    for ground in (seen["ground"], seen["card"]):
        assert min(contrast(ground, text) for text in {seen["text"], *seen["soft"]}) > 4.5  # level AA
        lines = ["rgb(0, 114, 178)", "rgb(213, 94, 0)", "rgb(0, 158, 115)"]  # what is not filled, or has no outline
        assert min(contrast(ground, colour) for colour in lines) > 3
    assert all(150 < wide < width and high > 60 for wide, high in seen["svgs"])
    assert min(seen["letters"]) >= 9  # pixels, of the text in drawings, the timeline's too
    assert seen["cut"] == []
    assert seen["stops"] == 7  # the link to the figures, three that unfold, and their tables, which scroll
