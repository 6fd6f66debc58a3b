"""Owns the library's objects: each is closed once, and used only while it is open."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from .failures import refusal_error


class Handle:
    """Owns one object of the library, named `what` in errors. A `with` block closes it."""

    def __init__(self, native: Any, close: Callable[[Any], int], what: str, *, hint: str | None = None) -> None:
        self._native, self._close, self._what, self._hint = native, close, what, hint

    @property
    def handle(self) -> Any:
        """Returns the library's object. Raises ValueError once it is closed."""
        if self._native is None:
            raise ValueError(f"the {self._what} is closed")
        return self._native

    def close(self) -> None:
        """Closes it. A second call does nothing. Raises SwapError where the library refuses."""
        if self._native is None:
            return
        native, self._native = self._native, None  # first: other threads find it closed
        code = self._close(native)
        if code:
            self._native = native
            raise refusal_error(f"the {self._what} cannot be closed", code, self._hint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
