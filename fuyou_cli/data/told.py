"""What a library raises, in one line for people. Tokenizers and chat templates are code of others, and raise anything."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from fuyou_cli.core.errors import FuyouError

from .formats import RowError

_LONGEST = 300
_SPEAKS = ("Exception", "OSError", "ValueError", "TemplateError", "TemplateSyntaxError", "UndefinedError")
_PASSED_ON = (FuyouError, RowError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)


def reason(error: BaseException) -> str:
    """The first line of what it says, with its kind where that says more than the words."""
    kind = type(error).__name__
    words = (str(error).strip().splitlines() or [""])[0][:_LONGEST]
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return words if words and kind in _SPEAKS else f"{kind}: {words}" if words else kind


class Told:
    """`with Told(as_error):` raises `as_error(reason)` in place of whatever a library raises. Errors that are told already
    pass, and so does a lack of memory. A panic of the Rust below a tokenizer is no Exception, but told as well."""

    def __init__(self, as_error: Callable[[str], Exception]) -> None:
        self._as_error = as_error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not isinstance(error, _PASSED_ON):
            raise self._as_error(reason(error)) from error
