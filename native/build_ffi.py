"""Write the C source of the extension module: python build_ffi.py OUTPUT.c

The declarations are the text of fuyou.h between its two markers, so header and module cannot disagree; the C compiler
checks them against the header once more.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI

HEADER = Path(__file__).parent / "include" / "fuyou.h"
BEGIN, END = "/* cffi: begin */", "/* cffi: end */"


def declarations() -> str:
    """The part of the header that cffi reads."""
    _, begin, rest = HEADER.read_text().partition(BEGIN)
    text, end, _ = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{HEADER}: the markers {BEGIN} and {END} are missing")
    return text


def main() -> None:
    ffi = FFI()
    ffi.cdef(declarations())
    ffi.set_source("fuyou_cli._native", '#include "fuyou.h"', py_limited_api=True)
    ffi.emit_c_code(sys.argv[1])


if __name__ == "__main__":
    main()
