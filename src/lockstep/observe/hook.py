"""Hooks that never harm the program they watch: errors of ours end the watching, and copies of a hook do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """Calls ``listener`` and returns nothing; passes an error of it to ``fail``.

    Within a function that is compiled it does nothing. Copies and pickles of it do nothing either: a copy of a model
    that is watched, such as one for averaged weights, is not watched.

    Args:
        listener: What to call.
        fail: What to call with an error.
    """

    __torch_unserializable__ = True
    """Tells torch not to warn that tensors are pickled without it."""

    def __init__(
        self, listener: Callable[..., object] | None = None, fail: Callable[[Exception], None] | None = None
    ) -> None:
        self._listener, self._fail = listener, fail

    def __call__(self, *args: Any) -> None:
        """Call the listener."""
        if torch.compiler.is_compiling() or self._listener is None:
            return
        try:
            self._listener(*args)
        except Exception as error:
            assert self._fail is not None
            self._fail(error)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()
