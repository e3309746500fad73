"""The settings of `fit` as a table, from the class that the keywords and the flags come from."""

from lockstep.train.settings import FitSettings, settings_of

MARKER = "<!-- settings: from the source -->"
_WORDS = {"choice": None, "bool": "`True`, `False`", "int": "whole number", "float": "number", "numbers": "numbers"}


def as_table() -> str:
    """Return a row for each setting: its name, what it may be, its default, what it is."""
    lines = ["| keyword | may be | default | what it is |", "|---|---|---|---|"]
    for setting in settings_of(FitSettings):
        kind = _WORDS.get(setting.kind, setting.kind)
        values = ", ".join([*([kind] if kind else []), *(f'`"{choice}"`' for choice in setting.choices)])
        lines.append(f"| `{setting.name}` | {values} | `{setting.default!r}` | {setting.flag.help} |")
    return "\n".join(lines)
