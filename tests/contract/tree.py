"""Where the contract tests find what they check."""

from pathlib import Path

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "src" / "lockstep"


def sources() -> list[Path]:
    """All Python files of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())
