"""Writes finished rows to the files that `rows` maps: tokens.bin, mask.bin, offsets.npy, summary.json."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .packing import LABEL, Row
from .rows import TOKENS
from .samples import Reading
from .tokenise import decode_pieces


def write_rows(rows: Iterable[Row], reading: Reading, out: Path) -> tuple[int, bool]:
    """Writes rows of a reading, their description last, and flushes them. Returns the labels that carry loss, and whether one
    of them is a stop token."""
    tokeniser = reading.tokeniser
    summary, learns_to_stop = _write(rows, out, tokeniser.stop_ids)
    summary |= {
        "pad_id": tokeniser.pad_id,
        "never_stops": not learns_to_stop and "marked" in reading.targets,
        "entry_rows": reading.entry_rows,
        "formats": sorted(reading.formats.items()),  # by the source's number: the rows do not depend on its path
        "preview": decode_pieces(tokeniser.tokenizer, reading.shown) if reading.shown else (),
        **asdict(reading.counts),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")  # names may not be UTF-8
    for file in out.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())
    return summary["label_tokens"], learns_to_stop


def _write(rows: Iterable[Row], out: Path, stop_ids: frozenset[int]) -> tuple[dict[str, Any], bool]:
    """Writes the rows and returns their description, and whether any label is a stop token. The digest covers every row's
    length, tokens and mask, in order."""
    offsets, digest, stops = array("q", [0]), hashlib.sha256(), np.asarray(sorted(stop_ids), np.int32)
    label_tokens = longest = highest_id = 0
    learns_to_stop = False
    with (out / TOKENS).open("wb") as tokens_file, (out / "mask.bin").open("wb") as mask_file:
        for tokens, mask in rows:
            digest.update(len(tokens).to_bytes(8, "little"))
            for file, data in ((tokens_file, tokens.tobytes()), (mask_file, mask.tobytes())):
                digest.update(data)
                file.write(data)
            offsets.append(offsets[-1] + len(tokens))
            learnt = tokens[1:][mask[1:] & LABEL != 0]
            label_tokens += len(learnt)
            longest = max(longest, len(tokens))
            highest_id = max(highest_id, int(tokens.max()))
            learns_to_stop = learns_to_stop or bool(np.isin(learnt, stops).any())
    np.save(out / "offsets.npy", np.frombuffer(offsets, np.int64))
    return {
        "rows": len(offsets) - 1,
        "tokens": offsets[-1],
        "label_tokens": label_tokens,
        "longest_row": longest,
        "highest_token_id": highest_id,
        "digest": digest.hexdigest(),
    }, learns_to_stop
