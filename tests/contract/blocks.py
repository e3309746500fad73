"""The code blocks of README and docs, and how they are marked.

A comment on the line before a block, which no reader sees, says what the block is:

    <!-- fragment -->        not a program: it is compiled only
    <!-- 2 ranks -->         runs in 2 ranks, and not in one process
    <!-- 1 and 2 ranks -->   runs both ways
    <!-- 1 rank -->          runs in one process, as Python without a mark does
    <!-- prints -->          the output of the block before it, to the letter, of every way in which that runs

Of a ``diff``, both sides are compiled; with a mark, the new one runs.
"""

import re
import textwrap
from dataclasses import dataclass

from tests.contract.tree import REPO

PAGES = (REPO / "README.md", *sorted((REPO / "docs").rglob("*.md")))
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_RANKS = {None: (1,), "fragment": (), "1 rank": (1,), "2 ranks": (2,), "1 and 2 ranks": (1, 2)}


@dataclass(frozen=True)
class Block:
    """A program, or a part of one, with enough empty lines before it that its lines have the page's numbers."""

    place: str
    code: str
    num_ranks: tuple[int, ...]
    prints: str | None = None


def blocks() -> list[Block]:
    """Return the blocks of all pages, in order."""
    return [block for page in PAGES for block in blocks_of(page.read_text(), str(page.relative_to(REPO)))]


def blocks_of(text: str, page: str) -> list[Block]:
    """Return the blocks of one page."""
    found: list[Block] = []
    for match in _BLOCK.finditer(text):
        language, mark, code = match["language"], match["mark"], match["text"]
        first_line = text.count("\n", 0, match.start("text")) + 1
        empty, place = "\n" * (first_line - 1), f"{page}:{first_line}"
        if mark == "prints":
            last = found.pop()
            assert last.num_ranks and last.prints is None, f"{place}: of which block is this the output?"
            found.append(Block(last.place, last.code, last.num_ranks, code))
        elif language == "python":
            found.append(Block(place, empty + code, _RANKS[mark]))
        elif language == "diff":
            found.append(Block(place, _side(code, "-"), ()))
            found.append(Block(place, empty + _side(code, "+"), _RANKS[mark] if mark else ()))
    return found


def _side(diff: str, sign: str) -> str:
    """Return one side of a diff; the other side's lines are left empty, so that numbers stay."""
    lines = diff.splitlines(keepends=True)
    return textwrap.dedent("".join(line[1:] if line[0] in (sign, " ") else "\n" for line in lines))
