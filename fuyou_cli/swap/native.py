"""Imports the extension module's `ffi` and `lib`, or raises one clear error if it was not built."""

from __future__ import annotations

import importlib
from typing import Any, Final

from ..core.errors import FuyouError

try:
    _native: Any = importlib.import_module("fuyou_cli._native")
except ImportError as error:
    raise FuyouError(
        f"the native extension of fuyou cannot be loaded: {error}",
        hint="install the package with `pip install .`; in a checkout, `scripts/build-native` builds it in place",
    ) from error

ffi: Final[Any] = _native.ffi
lib: Final[Any] = _native.lib

NOWHERE: Final[int] = lib.FY_NOWHERE
DTYPES: Final[dict[str, int]] = {"float32": lib.FY_FLOAT32, "bfloat16": lib.FY_BFLOAT16}
