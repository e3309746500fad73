"""Carry an exception from a replica's thread to the caller: its type, where it happened and its traceback."""

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class ReplicaFailure:
    """An exception that a replica raised, as text and type.

    The traceback is kept as text: the object would hold the frames, and with them the activations of the failed step.
    """

    def __init__(self, error: BaseException, where: str) -> None:
        trace = "".join(traceback.format_exception(error))
        self._type = type(error)
        self._args = error.args
        self._attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
        self.message = f"Caught {self._type.__name__} {where}.\nOriginal {trace}"

    def error(self) -> BaseException:
        """Build the exception to raise: an instance of the original type whose text says where it comes from.

        The original constructor is not called, since it may want other arguments than one message; the attributes it
        had set are copied instead. A type that cannot be built this way arrives as a ``RuntimeError``.
        """
        try:
            copy = _bare_copy(self._type, self._args, self._attributes, self.message)
            if str(copy) == self.message:
                return copy
            # OSError and its like compose their text from fields of their own: say ours, keep the fields.
            spoken = type(self._type.__name__, (self._type,), {"__str__": lambda _: self.message})
            return _bare_copy(spoken, self._args, self._attributes, self.message)
        except Exception:
            return RuntimeError(self.message)


class _Verbatim(str):
    """A text that ``repr`` leaves as it is: ``KeyError`` shows the ``repr`` of its argument."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def attempt(function: Callable[[], Result], where: str) -> Result | ReplicaFailure:
    """Call ``function``; an exception, whichever it is, becomes the result. Its text begins "Caught X ``where``"."""
    try:
        return function()
    except BaseException as error:
        return ReplicaFailure(error, where)


def raise_first(outcomes: list[Any]) -> None:
    """Raise the failure of the replica with the lowest index, if one failed.

    Raises:
        BaseException: Of the type that the replica raised, with the replica, its device and its traceback in the text.
    """
    for outcome in outcomes:
        if isinstance(outcome, ReplicaFailure):
            raise outcome.error() from None


def _bare_copy(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any], message: str
) -> BaseException:
    copy = kind.__new__(kind, *args)
    vars(copy).update(attributes)
    copy.args = (_Verbatim(message) if issubclass(kind, KeyError) else message,)
    return copy
