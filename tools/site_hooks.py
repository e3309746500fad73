"""What the site needs beyond MkDocs: links to files outside docs/, and tables that are read from the source.

On a git host, ``../src/lockstep/base/env.py`` leads to the file. The site has no such file, so one is added to it.
"""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO))

from tools import reference  # noqa: E402  # tools/ is found only now

_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Point links that leave docs/ to copies within the site; write the tables."""
    folder = (REPO / "docs" / page.file.src_uri).parent

    def point(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        if target.is_relative_to(REPO / "docs") or not target.is_relative_to(REPO) or not target.is_file():
            return match[1]  # a page; or MkDocs says that there is none
        uri = f"files/{target.relative_to(REPO).as_posix()}.txt"
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=target.read_text()))
        return f"{'../' * page.file.src_uri.count('/')}{uri}"

    return reference.fill(_LINK.sub(point, markdown))
