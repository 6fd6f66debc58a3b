"""Tests that a safetensors header is either understood exactly or refused with a UsageError that names file and tensor."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fuyou_cli.checkpoint.header import parse_file
from fuyou_cli.core.errors import UsageError

from .tiny_models import safetensors_bytes, write_file

GOOD = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        parse_file(path)
    assert str(path) in caught.value.message
    return caught.value.message


def test_reads_what_the_reference_library_writes(tmp_path: Path) -> None:
    tensors = {
        "weights": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        'odd "name" \\ é\n': torch.arange(5, dtype=torch.float32),
        "scalar": torch.tensor(7.0, dtype=torch.float16),
        "empty": torch.empty(0, 4),
        "whole": torch.arange(3),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt", "note": "ü"})
    header = parse_file(tmp_path / "x.safetensors")
    assert header.metadata == {"format": "pt", "note": "ü"}
    assert header.entries.keys() == tensors.keys()
    raw = (tmp_path / "x.safetensors").read_bytes()
    for name, tensor in tensors.items():
        entry = header.entries[name]
        assert (entry.shape, entry.numel) == (tuple(tensor.shape), tensor.numel())
        assert entry.dtype == str(tensor.dtype).removeprefix("torch.")
        assert raw[entry.begin : entry.end] == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def entry_text(**changes: object) -> bytes:
    return json.dumps({"a": {**GOOD["a"], **changes}}).encode()


@pytest.mark.parametrize(
    ("table", "data"),
    [
        ({"a": {"dtype": "F32", "shape": [2, 3]}}, 24),
        (entry_text(dtype="F5"), 24),
        (entry_text(dtype=["F32"]), 24),
        (entry_text(shape=[-2, -3]), 24),
        (entry_text(shape=[2.0, 3]), 24),
        (entry_text(shape=[2, True]), 24),
        (entry_text(shape=[2, "3"]), 24),
        (entry_text(shape=[2, [3]]), 24),
        (entry_text(shape=[1 << 40, 1 << 40]), 24),
        (entry_text(shape=[2, 4]), 24),
        (entry_text(data_offsets=[24, 0]), 24),
        (entry_text(data_offsets=[0, 24, 24]), 24),
        (entry_text(data_offsets=[0]), 24),
        (entry_text(data_offsets=[-24, 0]), 24),
        (entry_text(data_offsets=[9223372036854775800, 9223372036854775807]), 24),
        (entry_text(data_offsets=[10**30, 10**30 + 24]), 24),
        (entry_text(data_offsets=[4, 28]), 28),  # a hole
        ({**GOOD, "b": {"dtype": "F32", "shape": [2], "data_offsets": [20, 28]}}, 28),  # overlapping
        ({**GOOD, "b": GOOD["a"]}, 24),
        (GOOD, 23),
        (GOOD, 25),
        (b'{"__metadata__": {}, "__metadata__": {}}', 0),
        (b'{"__metadata__": {"k": 1}}', 0),
        (b'{"__metadata__": ["k"]}', 0),
        (b'{"a\\ud800": {}}', 0),
        (b'{"\\x41": {}}', 0),
        (b'{"\xff": {}}', 0),
        (b'{"a\nb": {}}', 0),
        (b"[]", 0),
        (b"", 0),
        (b"{} {}", 0),
        (b"{},", 0),
        (b'{"a" {}}', 0),
        (b'{"__metadata__": {"k": "v",}}', 0),
        (b"[" * 100_000, 0),
        (b'{"a":' * 100_000, 0),
        (b'{"a": {"shape": ' + b"[" * 100_000, 0),
    ],
)
def test_refuses_by_name(tmp_path: Path, table: dict[str, object] | bytes, data: int) -> None:
    assert "is not a valid safetensors file: " in refusal(tmp_path / "x.safetensors", safetensors_bytes(table, bytes(data)))


def test_refuses_what_no_model_has(tmp_path: Path) -> None:
    """Refuses dtypes without a whole byte for every element, and names that no manifest takes."""
    table = {"a": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}
    assert "tensor 'a' has dtype 'F4'" in refusal(tmp_path / "x.safetensors", safetensors_bytes(table, bytes(2)))
    assert "2000 characters" in refusal(tmp_path / "x.safetensors", safetensors_bytes({"n" * 2000: GOOD["a"]}, bytes(24)))


@pytest.mark.parametrize("length", [0xFFFF_FFFF_FFFF_FFFF, 1 << 63, 100_000_001])
def test_refuses_an_absurd_header_length_without_reading_it(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(1 << 30)  # sparse: long enough that only the limit can refuse it
    with pytest.raises(UsageError, match="header too large"):
        parse_file(path)


@pytest.mark.parametrize("size", range(8))
def test_refuses_files_shorter_than_the_length(tmp_path: Path, size: int) -> None:
    assert "header too small" in refusal(tmp_path / "x.safetensors", bytes(size))


def test_refuses_what_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refusals = {"pipe": "it is a pipe, not a plain file", "": "Is a directory", "absent": "cannot be read: No such file"}
    for name, says in refusals.items():
        with pytest.raises(UsageError, match=says):
            parse_file(tmp_path / name)
    with pytest.raises(UsageError, match="cannot be read"):
        parse_file(tmp_path / "nul\0nul")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "x.safetensors", [("a", "F32", [2, 3], 24), ("b", "BF16", [4], 8)])
    whole = path.read_bytes()
    assert parse_file(path).entries.keys() == {"a", "b"}
    for size in range(len(whole)):
        refusal(path, whole[:size])


SEED_FILE = safetensors_bytes(
    {
        "__metadata__": {"format": "pt"},
        "model.norm.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]},
        "lm_head.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]},
    },
    bytes(24),
)
PIECES = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"-", b"0", b"9" * 25, b"1e9", b"\\u0000", b"\xc3", b"null", b" "]
EDIT = st.tuples(st.integers(0, len(SEED_FILE)), st.integers(0, 12), st.sampled_from(PIECES) | st.binary(max_size=8))


@examples(600)
@given(edits=st.lists(EDIT, min_size=1, max_size=4), keep_length=st.booleans())
def test_mutated_files_give_entries_or_a_usage_error(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int, bytes]], keep_length: bool
) -> None:
    content = SEED_FILE
    for position, cut, inserted in edits:
        content = content[:position] + inserted + content[position + cut :]
    if not keep_length and len(content) > 32:  # mend the length, so that the mutations reach the parser
        content = struct.pack("<Q", len(content) - 32) + content[8:]
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    try:
        entries = parse_file(path).entries
    except UsageError as error:
        error.message.encode("ascii")  # printable anywhere, whatever the file holds
        assert path.name in error.message
    else:
        position = 8 + int.from_bytes(content[:8], "little")
        for entry in entries.values():
            assert entry.begin == position
            position = entry.end
        assert position == len(content)


@examples(200)
@given(text=st.binary(max_size=200), data=st.binary(max_size=16))
def test_arbitrary_headers_give_entries_or_a_usage_error(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "arbitrary.safetensors"
    path.write_bytes(safetensors_bytes(text, data))
    try:
        parse_file(path)
    except UsageError:
        return
    assert json.loads(text) is not None and data == b""
