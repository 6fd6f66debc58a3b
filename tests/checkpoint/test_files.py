"""Tests opening a directory: what belongs together is found, anything else is refused by name before data is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuyou_cli.checkpoint.files import INDEX_NAME, SINGLE_NAME, open_checkpoint
from fuyou_cli.core.errors import UsageError

from .tiny_models import write_file

A, B = ("a.weight", "F32", [2], 8), ("b.weight", "BF16", [3], 6)


def sharded(directory: Path, weight_map: dict[str, object] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    write_file(directory / "one.safetensors", [A])
    write_file(directory / "two.safetensors", [B])
    weight_map = {"a.weight": "one.safetensors", "b.weight": "two.safetensors"} if weight_map is None else weight_map
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 14.0}, "weight_map": weight_map}))
    return directory


def refusal(directory: Path) -> UsageError:
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
    "shard",
    ["../outside.safetensors", "/etc/passwd", "sub/../../outside.safetensors", "..\\outside", "a\0b", "", "link"],
)
def test_refuses_shards_outside(tmp_path: Path, shard: str) -> None:
    write_file(tmp_path / "outside.safetensors", [A])
    directory = sharded(tmp_path / "model", {"a.weight": shard, "b.weight": "two.safetensors"})
    (directory / "link").symlink_to(tmp_path / "outside.safetensors")
    assert "lies outside the directory" in refusal(directory).message


@pytest.mark.parametrize("name", [SINGLE_NAME, INDEX_NAME])
def test_refuses_links_outside(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    outside = write_file(tmp_path / "outside", [A])
    (tmp_path / "model" / name).symlink_to(outside)
    assert name in refusal(tmp_path / "model").message
    outside.unlink()
    assert "does not exist" in refusal(tmp_path / "model").message
    outside.symlink_to(tmp_path / "model" / name)
    assert "cannot be followed" in refusal(tmp_path / "model").message


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
    assert "lies outside" in refusal(snapshot).message


def test_a_linked_directory_is_the_directory(tmp_path: Path) -> None:
    sharded(tmp_path / "model")
    (tmp_path / "alias").symlink_to("model")
    assert len(open_checkpoint(tmp_path / "alias").entries) == 2


def test_names_every_missing_shard(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "one.safetensors").unlink()
    (tmp_path / "two.safetensors").unlink()
    message = refusal(tmp_path).message
    assert "2 of 2 shards are missing" in message
    assert "one.safetensors" in message and "two.safetensors" in message


def test_refuses_one_file_as_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path, {"a.weight": "one.safetensors", "b.weight": "./one.safetensors"})
    assert "are the same file" in refusal(tmp_path).message


def test_refuses_tensors_that_are_not_where_the_index_says(tmp_path: Path) -> None:
    sharded(tmp_path, {"a.weight": "two.safetensors", "b.weight": "one.safetensors", "c.weight": "one.safetensors"})
    message = refusal(tmp_path).message
    assert "'a.weight' is in one.safetensors, but the index says 'two.safetensors'" in message
    assert "'b.weight' is in two.safetensors, but the index says 'one.safetensors'" in message
    assert "'c.weight' is not in one.safetensors" in message


def test_refuses_a_tensor_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_file(tmp_path / "two.safetensors", [B, A])
    assert "'a.weight' is in one.safetensors and in two.safetensors" in refusal(tmp_path).message


def test_keeps_a_tensor_that_the_index_forgot(tmp_path: Path) -> None:
    """It has a place and is complete; whether the model wants it is for the matching of names to say."""
    sharded(tmp_path, {"a.weight": "one.safetensors", "b.weight": "two.safetensors"})
    write_file(tmp_path / "two.safetensors", [B, ("c.weight", "F32", [1], 4)])
    assert list(open_checkpoint(tmp_path).entries) == ["a.weight", "b.weight", "c.weight"]


def test_names_the_truncated_shard(tmp_path: Path) -> None:
    file = sharded(tmp_path) / "two.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    message = refusal(tmp_path).message
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
    error = refusal(tmp_path)
    assert says in error.message and INDEX_NAME in error.message


def test_a_shard_of_a_name_that_no_file_has(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    assert "1 of 1 shards are missing: 'xxx" in refusal(tmp_path).message


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
    error = refusal(tmp_path)
    assert says in error.message and hint in str(error.hint)


def test_refuses_a_missing_directory(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "absent").message
