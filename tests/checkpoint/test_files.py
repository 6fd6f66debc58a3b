"""Files of a checkpoint that a stranger wrote: what is found in them, and what is refused."""

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

from fuyou_cli.checkpoint.files import INDEX_NAME, SINGLE_NAME, open_checkpoint
from fuyou_cli.checkpoint.reader import parse_file
from fuyou_cli.core.errors import UsageError

from .tiny_models import safetensors_bytes, write_file

# ---- header ----------------------------------------------------------------------------------------------------------
# Tests that a safetensors header is either understood exactly or refused with a UsageError that names file and tensor.


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


# ---- files -----------------------------------------------------------------------------------------------------------
# Tests opening a directory: what belongs together is found, anything else is refused by name before data is used.


A, B = ("a.weight", "F32", [2], 8), ("b.weight", "BF16", [3], 6)


def sharded(directory: Path, weight_map: dict[str, object] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    write_file(directory / "one.safetensors", [A])
    write_file(directory / "two.safetensors", [B])
    weight_map = {"a.weight": "one.safetensors", "b.weight": "two.safetensors"} if weight_map is None else weight_map
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 14.0}, "weight_map": weight_map}))
    return directory


def refusal_of_files(directory: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        open_checkpoint(directory)
    return caught.value


def test_opens_one_file(tmp_path: Path) -> None:
    write_file(tmp_path / SINGLE_NAME, [A, B])
    checkpoint = open_checkpoint(tmp_path)
    assert (list(checkpoint.entries), checkpoint.nbytes) == (["a.weight", "b.weight"], 14)


def test_opens_shards(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(sharded(tmp_path))
    found = [(name, entry.file.name) for name, entry in checkpoint.entries.items()]
    assert found == [("a.weight", "one.safetensors"), ("b.weight", "two.safetensors")]


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/passwd", "sub/../../outside.safetensors", "..\\outside", "a\0b", "", "link"]
)
def test_refuses_shards_outside(tmp_path: Path, shard: str) -> None:
    write_file(tmp_path / "outside.safetensors", [A])
    directory = sharded(tmp_path / "model", {"a.weight": shard, "b.weight": "two.safetensors"})
    (directory / "link").symlink_to(tmp_path / "outside.safetensors")
    assert "lies outside the directory" in refusal_of_files(directory).message


@pytest.mark.parametrize("name", [SINGLE_NAME, INDEX_NAME])
def test_refuses_links_outside(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    outside = write_file(tmp_path / "outside", [A])
    (tmp_path / "model" / name).symlink_to(outside)
    assert name in refusal_of_files(tmp_path / "model").message
    outside.unlink()
    assert "does not exist" in refusal_of_files(tmp_path / "model").message
    outside.symlink_to(tmp_path / "model" / name)
    assert "cannot be followed" in refusal_of_files(tmp_path / "model").message


def test_opens_a_snapshot_of_the_hub_cache(tmp_path: Path) -> None:
    repository = tmp_path / "models--o--m"
    snapshot = repository / "snapshots" / "0123abcd"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    write_file(repository / "blobs" / "ff00", [A, B])
    (snapshot / SINGLE_NAME).symlink_to("../../blobs/ff00")
    assert list(open_checkpoint(snapshot).entries) == ["a.weight", "b.weight"]
    write_file(tmp_path / "elsewhere", [A])
    (snapshot / SINGLE_NAME).unlink()
    (snapshot / SINGLE_NAME).symlink_to("../../../elsewhere")
    assert "lies outside" in refusal_of_files(snapshot).message


def test_a_linked_directory_is_the_directory(tmp_path: Path) -> None:
    sharded(tmp_path / "model")
    (tmp_path / "alias").symlink_to("model")
    assert len(open_checkpoint(tmp_path / "alias").entries) == 2


def test_names_every_missing_shard(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "one.safetensors").unlink()
    (tmp_path / "two.safetensors").unlink()
    message = refusal_of_files(tmp_path).message
    assert "2 of 2 shards are missing" in message
    assert "one.safetensors" in message and "two.safetensors" in message


def test_refuses_one_file_as_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path, {"a.weight": "one.safetensors", "b.weight": "./one.safetensors"})
    assert "are the same file" in refusal_of_files(tmp_path).message


def test_refuses_tensors_that_are_not_where_the_index_says(tmp_path: Path) -> None:
    sharded(tmp_path, {"a.weight": "two.safetensors", "b.weight": "one.safetensors", "c.weight": "one.safetensors"})
    message = refusal_of_files(tmp_path).message
    assert "'a.weight' is in one.safetensors, but the index says 'two.safetensors'" in message
    assert "'b.weight' is in two.safetensors, but the index says 'one.safetensors'" in message
    assert "'c.weight' is not in one.safetensors" in message


def test_refuses_a_tensor_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_file(tmp_path / "two.safetensors", [B, A])
    assert "'a.weight' is in one.safetensors and in two.safetensors" in refusal_of_files(tmp_path).message


def test_keeps_a_tensor_that_the_index_forgot(tmp_path: Path) -> None:
    """It has a place and is complete; whether the model wants it is for the matching of names to say."""
    sharded(tmp_path, {"a.weight": "one.safetensors", "b.weight": "two.safetensors"})
    write_file(tmp_path / "two.safetensors", [B, ("c.weight", "F32", [1], 4)])
    assert list(open_checkpoint(tmp_path).entries) == ["a.weight", "b.weight", "c.weight"]


def test_names_the_truncated_shard(tmp_path: Path) -> None:
    file = sharded(tmp_path) / "two.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    message = refusal_of_files(tmp_path).message
    assert "two.safetensors: is not a valid" in message and "not fully covered" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[" * 200_000, "not valid JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 1}}', "'a' has no shard name"),
        ('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', "the key 'a' occurs twice"),
        ('{"weight_map": {"a": "\xff"}}', "not valid JSON"),
        ('{"weight_map": {"a": "\\ud800"}}', "lone surrogate"),
        ('{"weight_map": ' + "[" * 65 + "]" * 65 + "}", "nested too deeply"),
        ('{"weight_map": ' + "7" * 301 + "}", "a number has 301 digits"),
    ],
)
def test_refuses_broken_indexes(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / INDEX_NAME).write_bytes(text.encode("latin-1"))
    error = refusal_of_files(tmp_path)
    assert says in error.message and INDEX_NAME in error.message


def test_a_shard_of_a_name_that_no_file_has(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    assert "1 of 1 shards are missing: 'xxx" in refusal_of_files(tmp_path).message


@pytest.mark.parametrize(
    ("names", "says", "hint"),
    [
        (["pytorch_model.bin"], "pickled weights ('pytorch_model.bin')", "save_pretrained"),
        (["pytorch_model-00001-of-00002.bin"], "pickled weights", "save_pretrained"),
        (["adapter_model.safetensors"], "adapter", "merge_and_unload"),
        (["model.gguf"], "neither", "hub id"),
        ([], "neither", "hub id"),
    ],
)
def test_says_what_to_do_without_safetensors(tmp_path: Path, names: list[str], says: str, hint: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"\x80\x04.")
    error = refusal_of_files(tmp_path)
    assert says in error.message and hint in str(error.hint)


def test_refuses_a_missing_directory(tmp_path: Path) -> None:
    assert "no such directory" in refusal_of_files(tmp_path / "absent").message
