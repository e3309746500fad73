"""A view in a notebook: one output of the cell, which is replaced again and again."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.text import Text

_FORM = '<pre style="line-height:1.2; font-family:monospace; margin:0">{code}</pre>'


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which shows HTML."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class NotebookRegion:
    """Shows lines in a place of their own in the output of the present cell."""

    def __init__(self) -> None:
        self._handle: Any = None

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows to use."""
        return 100, 40

    def show(self, lines: Sequence[Text]) -> None:
        """Show ``lines`` instead of those before; if there are none, those stay."""
        if not lines:
            return
        display = import_module("IPython.display")
        page = display.HTML(_html(lines))
        if self._handle is None:
            self._handle = display.display(page, display_id=True)
        else:
            self._handle.update(page)

    def refresh(self) -> None:
        """Do nothing: nobody draws over it."""

    def disturbed(self, text: str) -> None:
        """Do nothing: what is written elsewhere does not reach it."""

    def close(self) -> None:
        """Leave there what was shown last."""


def _html(lines: Sequence[Text]) -> str:
    console = Console(file=io.StringIO(), record=True, width=200, force_jupyter=False, color_system="truecolor")
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)
    return console.export_html(code_format=_FORM, inline_styles=True)
