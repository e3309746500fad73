"""Environments that have some of what is installed here, and nothing of this checkout."""

import importlib.metadata
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement


def distributions(*requirements: str) -> Iterator[importlib.metadata.Distribution]:
    """Yield the installed distributions of these requirements, and of all that they require."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found = importlib.metadata.distribution(requirement.name)
            yield found
            yield from distributions(*found.requires or [])


def environment_with(folder: Path, *requirements: str) -> Path:
    """Make an environment with links to these distributions and to what they require; return its programs."""
    venv.create(folder)
    [site] = folder.glob("lib/python*/site-packages")
    here = Path(sysconfig.get_path("purelib"))
    for found in distributions(*requirements):
        for top in {Path(str(file)).parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (site / top).is_symlink():
                (site / top).symlink_to(here / top)
    return folder / "bin"
