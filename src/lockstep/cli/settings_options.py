"""Command-line flags from a dataclass of settings, with a section of ``--help`` for each class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from lockstep.errors import ConfigurationError
from lockstep.train.declared import Setting, settings_of
from lockstep.train.settings import FitSettings
from lockstep.train.settings_file import over, read_settings

F = TypeVar("F", bound=Callable[..., Any])


def settings_options(cls: type) -> Callable[[F], F]:
    """Give a command a flag for each field of ``cls``; the command gets the values by the fields' names."""

    def decorate(function: F) -> F:
        for setting in reversed(settings_of(cls)):
            function = _option(setting)(function)
        return function

    return decorate


def settings_from(values: Mapping[str, Any], file: str | None) -> FitSettings:
    """Return the settings of the flags, and of a file where no flag was given.

    Args:
        values: Of all flags of the command that is being run, given or not, by the settings' names.
        file: With settings, if one was named.

    Raises:
        ConfigurationError: The file cannot be read, or names or values are wrong.
    """
    if file is None:
        return FitSettings(**values)
    context = click.get_current_context()
    given = {
        name: value
        for name, value in values.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    try:
        return FitSettings(**over(read_settings(file), given))
    except ConfigurationError as error:
        if str(error).startswith(f"{file}"):
            raise
        raise ConfigurationError(f"{error}\nWhat no flag says is from {file}.") from None


def _numbers(text: str | tuple[float, ...]) -> tuple[float, ...]:
    """Read numbers with commas between them."""
    try:
        words = text.split(",") if isinstance(text, str) else text
        return tuple(int(word) if str(word).strip().isdecimal() else float(word) for word in words)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers such as 2,1,1.") from None


def _number_or(words: tuple[str, ...], number: type[int] | type[float]) -> Callable[[Any], Any]:
    """Return what reads a number, or one of ``words``."""
    what = "a whole number" if number is int else "a number"

    def read(text: Any) -> Any:
        try:
            return text if text in words else number(text)
        except ValueError:
            raise click.BadParameter(f"{text!r} is neither {what} nor {' or '.join(words)}.") from None

    return read


def _option(setting: Setting) -> Callable[[F], F]:
    flag = "--" + setting.name.replace("_", "-")
    text = setting.flag.help
    if setting.kind == "bool":
        switch = f"{flag}/--no-{flag[2:]}" if setting.optional else flag
        return click.option(switch, setting.name, is_flag=True, default=setting.default, help=text)
    kinds: dict[str, Any] = {
        "int": _number_or(setting.choices, int) if setting.choices else click.INT,
        "float": _number_or(setting.choices, float) if setting.choices else click.FLOAT,
        "path": click.Path(),
        "choice": click.Choice(setting.choices),
        "numbers": _numbers,
        "words": click.STRING,
    }
    return click.option(
        flag,
        setting.name,
        type=kinds[setting.kind],
        default=setting.default,
        show_default=setting.default is not None,
        metavar=setting.flag.unit,
        help=text,
    )


class SettingsCommand(click.Command):
    """A command whose ``--help`` lists the flags by the class that declares them.

    Args:
        sections: Heading to dataclass; a flag is listed under the first class that has it.
    """

    def __init__(self, *args: Any, sections: Mapping[str, type], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section of flags for each class, and one for the rest."""
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        records = {option.name: option.get_help_record(ctx) for option in options}
        for heading, cls in self._sections.items():
            self._write(formatter, heading, [records.pop(setting.name, None) for setting in settings_of(cls)])
        self._write(formatter, "Other", list(records.values()))

    def _write(self, formatter: click.HelpFormatter, heading: str, records: list[tuple[str, str] | None]) -> None:
        rows = [record for record in records if record is not None]
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)
