"""Tells the kind of a data file by its name, and opens it, decompressed if needed."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fuyou_cli.core.errors import UsageError

from .sandbox import reason

KINDS = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".txt": "text", ".csv": "csv",
    ".parquet": "columns", ".arrow": "columns",
}  # fmt: skip
PACKED = (".gz", ".zst", ".bz2", ".xz")  # may follow the other suffixes, such as .jsonl.gz; column files are compressed inside
BESIDE = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # of `datasets`: files without rows
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)


def suffixes(file: Path) -> tuple[str, str]:
    """Returns the suffixes of a file's name, such as (".jsonl", ".gz"). The second is empty if the file is not compressed."""
    packing = file.suffix.lower()
    if packing not in PACKED:
        return packing, ""
    return Path(file.stem).suffix.lower(), packing


def kind_of_rows(file: Path) -> str | None:
    """Returns how the rows of a file are read: json, text, csv or columns. None for an unknown suffix."""
    suffix, packing = suffixes(file)
    kind = KINDS.get(suffix)
    return None if packing and kind == "columns" else kind


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Opens a file and returns its bytes, decompressed. Raises UsageError if they cannot be decompressed."""
    packing = suffixes(file)[1]
    try:
        with _stream(file, packing) as stream:
            yield stream
    except _DAMAGED as error:
        if not packing:
            raise
        raise UsageError(f"{file}: not valid {packing[1:]}: {reason(error)}", hint="is the file complete?") from error


def _stream(file: Path, packing: str) -> Any:
    if packing == ".zst":
        import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

        return pa.input_stream(str(file), compression="zstd")
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return openers[packing](file, "rb") if packing else file.open("rb")
