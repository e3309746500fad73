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
function probe() {
  const plots = [...document.querySelectorAll(".plot")], texts = [...document.querySelectorAll(".plot text")];
  if (!plots.every(e => e.querySelector(".main-svg"))) return setTimeout(probe, 50);
  const keys = [...document.querySelectorAll(".legend button")].slice(0, 3);
  if (keys[1].ariaPressed === "true") {
    keys[1].click();
    return setTimeout(probe, 500);  // it draws again
  }
  const wide = [...document.querySelectorAll("main *")].filter(e => !e.closest(".scroll, details, svg") &&
    e.getBoundingClientRect().right > innerWidth + 1);
  const style = getComputedStyle(document.body);
  document.querySelectorAll("details").forEach(e => e.open = true);
  const first = plots[0].data.map(trace => trace.visible !== false);
  document.title = JSON.stringify({
    width: innerWidth, page: document.documentElement.scrollWidth, wide: wide.map(e => e.tagName),
    ground: style.backgroundColor, text: style.color,
    soft: [...document.querySelectorAll(".soft, .note, summary, footer, th, td")].map(e => getComputedStyle(e).color),
    card: getComputedStyle(document.querySelector("figure")).backgroundColor,
    svgs: plots.map(e => e.querySelector(".main-svg").getBoundingClientRect()).map(e => [e.width, e.height]),
    fills: [...new Set(texts.map(e => getComputedStyle(e).fill))],
    letters: texts.map(e => parseFloat(getComputedStyle(e).fontSize)),
    cut: texts.filter(e => {
      const [text, plot] = [e, e.closest(".plot")].map(each => each.getBoundingClientRect());
      return text.right > plot.right + 1 || text.left < plot.left - 1;
    }).map(e => e.textContent),
    scrolls: [...document.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth).length,
    keys: keys.map(e => e.textContent), pressed: keys.map(e => e.ariaPressed), first,
    stops: [...document.querySelectorAll("a, summary, .scroll")].filter(e => e.tabIndex === 0).length,
  });
}
addEventListener("load", probe);
</script>
"""


def look(path, tmp_path, *, width, dark):
    """Open the page in a frame of that width (windows have a least one), and return what a script in it sees."""
    frame = tmp_path / f"frame-{width}.html"
    frame.write_text(
        f'<body style="margin:0"><iframe src="{path.name}" style="border:0;width:{width}px;height:3000px"></iframe>'
        "<script>const wait = () => frames[0].document.title.startsWith('{') ?"
        " document.body.append(frames[0].document.title) : setTimeout(wait, 50);"
        ' addEventListener("load", wait)</script>'
    )
    done = subprocess.run(
        [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            "--hide-scrollbars",
            f"--user-data-dir={tmp_path}/profile",
            *("--allow-file-access-from-files", "--virtual-time-budget=20000", "--window-size=1400,1000"),
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *("--dump-dom", frame.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=90,
    )
    found = re.search(r"\{\"width.*\}", done.stdout)
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
    assert all(150 < wide < width and high > 60 for wide, high in seen["svgs"]) and len(seen["svgs"]) == 5
    assert seen["fills"] == [seen["text"]]
    assert min(seen["letters"]) >= 9  # pixels, of the text in plots
    assert seen["cut"] == []
    assert width < 1000 or seen["scrolls"] == 0
    assert seen["stops"] == 7  # the link to the figures, three that unfold, and their tables, which scroll
    # A name in a legend hides the part.
    assert seen["keys"] == ["data wait", "forward", "backward"]
    assert seen["pressed"] == ["true", "false", "true"]
    assert seen["first"][:3] == [True, False, True]
