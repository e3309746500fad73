"""``lockstep examples``: copy the examples, so that the commands of the documentation can be tried."""

import re
import shutil
from pathlib import Path

import click

import lockstep
from lockstep.cli import command
from lockstep.errors import ConfigurationError


@command()
@click.argument("folder", default="examples")
def examples(folder: str) -> None:
    """Copy the examples into FOLDER (default: examples), and list them.

    Examples:
      lockstep examples
      lockstep train examples/digits.py --devices 2
    """
    package = Path(lockstep.__file__).parent
    # Within the package in a wheel, at the top of a checkout.
    source = next(parent / "examples" for parent in (package, package.parents[1]) if (parent / "examples").is_dir())
    try:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    except FileExistsError as error:
        raise ConfigurationError(f"{folder} already exists.\nName another folder: lockstep examples FOLDER") from error
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be made: {error.strerror}.\nName another folder.") from error
    for file in sorted(Path(folder).glob("*.py")):
        _, title, _ = re.split(r'"""|\n', file.read_text(encoding="utf-8"), maxsplit=2)
        click.echo(f"{file}  {title}")
    click.echo('What they need besides Lockstep: pip install "lockstep-torch[examples,integrations,ray]"')
