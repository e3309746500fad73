"""Functions that take settings as keywords, without listing them again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from lockstep.train.settings import FitSettings
from lockstep.train.task import Task

P = ParamSpec("P")
R = TypeVar("R")


def takes_settings(
    make: Callable[P, FitSettings],
) -> Callable[[Callable[[Task, FitSettings], R]], Callable[Concatenate[Task, P], R]]:
    """Have a function of task and settings take the settings as keywords, with the types and defaults of ``make``."""

    def decorate(function: Callable[[Task, FitSettings], R]) -> Callable[Concatenate[Task, P], R]:
        @functools.wraps(function)
        def called(task: Task, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return function(task, make(*args, **kwargs))

        task, _ = inspect.signature(function).parameters.values()
        keywords = inspect.signature(make).parameters.values()
        signature = inspect.signature(function).replace(parameters=[task, *keywords])
        called.__signature__ = signature  # type: ignore[attr-defined]
        return called

    return decorate
