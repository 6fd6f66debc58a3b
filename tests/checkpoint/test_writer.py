"""Tests writing: what `from_pretrained` loads, in one step or not at all, and never over somebody else's files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from drawn import crossed
from safetensors import safe_open

from fuyou_cli.checkpoint import writer
from fuyou_cli.checkpoint.files import INDEX_NAME, SINGLE_NAME, companion_files, is_companion, open_checkpoint
from fuyou_cli.checkpoint.writer import OutTensor, write_checkpoint
from fuyou_cli.core.errors import FuyouError, OutOfSpaceError, UsageError

from .tiny_models import CONFIGS, assert_same_bits, loaded, make_model, matched_entries, out_tensors, read_all, reading

TENSORS = {
    "b.weight": torch.arange(9, dtype=torch.bfloat16).reshape(3, 3),
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "scalar": torch.tensor(5.0),
    "empty": torch.empty(0, 4),
}


def write(directory: Path, tensors: dict[str, torch.Tensor] | None = None, **options: object) -> list[Path]:
    tensors = TENSORS if tensors is None else tensors
    chosen = {"max_shard_size": 1 << 30, "metadata": {}, "companions": {"config.json": b"{}"}, **options}
    return write_checkpoint(directory, out_tensors(tensors), reading(tensors), **chosen)  # type: ignore[arg-type]


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@crossed(2, family=sorted(CONFIGS), shard_size=[1 << 30, 3000])
def test_round_trip_of_a_family(tmp_path: Path, family: str, shard_size: int) -> None:
    """Saves with save_pretrained, reads and writes with ours, and loads with from_pretrained: every bit, for one file and for
    many."""
    model = make_model(family, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "in", max_shard_size="4KB" if shard_size == 3000 else "1GB")
    matched = matched_entries(tmp_path / "in")
    assert_same_bits(read_all(matched), model.state_dict())
    stored = {entry.name: entry for entry in matched.values()}
    tensors = read_all(stored)
    written = write(
        tmp_path / "out", tensors, max_shard_size=shard_size, companions=companion_files(tmp_path / "in", dtype="bfloat16")
    )
    assert (len(written) > 5) == (shard_size == 3000)
    assert_same_bits(loaded(tmp_path / "out", torch.bfloat16).state_dict(), model.state_dict())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["model_type"] == model.config.model_type


def test_shards_hold_no_more_than_asked(tmp_path: Path) -> None:
    tensors = {f"layer.{number}": torch.full((number + 1, 16), float(number)) for number in range(12)}
    files = write(tmp_path / "out", tensors, max_shard_size=800)
    assert [file.name for file in files][:2] == ["model-00001-of-00008.safetensors", "model-00002-of-00008.safetensors"]
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert index["metadata"] == {"total_size": 78 * 64, "total_parameters": 78 * 16}
    for file in files:
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            assert all(torch.equal(opened.get_tensor(name), tensors[name]) for name in names)
            assert {index["weight_map"][name] for name in names} == {file.name}
        assert sum(tensors[name].nbytes for name in names) <= 800
    assert_same_bits({name: read_all(open_checkpoint(tmp_path / "out").entries)[name] for name in tensors}, tensors)


def test_mixed_dtypes_stay_aligned_and_metadata_is_kept(tmp_path: Path) -> None:
    (file,) = write(tmp_path / "out", metadata={"step": "7", "format": "tf"})
    entries = open_checkpoint(tmp_path / "out").entries
    assert all(entry.begin % (4 if entry.dtype == "float32" else 2) == 0 for entry in entries.values())
    assert_same_bits({name: read_all(entries)[name] for name in TENSORS}, TENSORS)
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["step"] == "7"
        assert opened.metadata()["format"] == "pt"


def test_reads_in_pieces_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PIECE", 64)
    monkeypatch.setattr(writer, "SYNC_EVERY", 200)
    tensors = {"w": torch.arange(100, dtype=torch.float32), "v": torch.arange(33, dtype=torch.float32)}
    asked: list[tuple[str, int, int]] = []
    heard: list[tuple[int, int]] = []

    def read(tensor: OutTensor, first: int, count: int) -> memoryview:
        asked.append((tensor.name, first, count))
        return reading(tensors)(tensor, first, count)

    (file,) = write_checkpoint(
        tmp_path / "out",
        out_tensors(tensors),
        read,
        max_shard_size=1 << 20,
        metadata={},
        progress=lambda done, total: heard.append((done, total)),
    )
    assert asked == [("w", first, min(16, 100 - first)) for first in range(0, 100, 16)] + [
        ("v", first, min(16, 33 - first)) for first in range(0, 33, 16)
    ]
    assert heard[-1] == (file.stat().st_size, file.stat().st_size)
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    assert_same_bits(read_all(open_checkpoint(tmp_path / "out").entries), tensors)


def test_replaces_only_what_it_wrote(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    write(out, max_shard_size=30, companions={"config.json": b"{}", "tokenizer.json": b"old"})
    assert (out / INDEX_NAME).exists()
    write(out, {"other": torch.ones(3)})
    assert sorted(snapshot(out)) == ["config.json", SINGLE_NAME]
    assert list(open_checkpoint(out).entries) == ["other"]
    before = snapshot(out)
    for name in ("notes.txt", "train.py", "LICENSE", "tokenizer.json", "model-extra.safetensors"):
        (out / name).write_bytes(b"mine")
        with pytest.raises(UsageError, match=f"did not write: '{name}'"):
            write(out)
        (out / name).unlink()
    (out / "vocab.json").symlink_to("config.json")
    with pytest.raises(UsageError, match=r"vocab\.json"):
        write(out)
    (out / "vocab.json").unlink()
    assert snapshot(out) == before
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]


def test_refuses_a_directory_of_other_origin(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "theirs")
    before = snapshot(tmp_path / "theirs")
    with pytest.raises(UsageError, match="did not write"):
        write(tmp_path / "theirs")
    assert snapshot(tmp_path / "theirs") == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        write(tmp_path / "file")
    (tmp_path / "only-config").mkdir()
    (tmp_path / "only-config" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"did not write: 'config\.json'"):
        write(tmp_path / "only-config")


def test_fills_an_empty_directory_and_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert SINGLE_NAME in snapshot(tmp_path / "empty")


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), OSError(5, "I/O error"), KeyboardInterrupt()])
def test_a_failure_leaves_what_was_there(tmp_path: Path, existing: bool, failure: BaseException) -> None:
    out = tmp_path / "out"
    if existing:
        write(out)
    before = snapshot(tmp_path)

    def read(tensor: OutTensor, first: int, count: int) -> memoryview:
        if tensor.name == "scalar":
            raise failure
        return reading(TENSORS)(tensor, first, count)

    wanted = {28: OutOfSpaceError, 5: FuyouError}.get(getattr(failure, "errno", 0), KeyboardInterrupt)
    with pytest.raises(wanted):
        write_checkpoint(out, out_tensors(TENSORS), read, max_shard_size=1 << 20, metadata={})
    assert snapshot(tmp_path) == before
    assert out.exists() == existing


def test_a_short_piece_is_named(tmp_path: Path) -> None:
    with pytest.raises(FuyouError, match=r"a\.weight: elements 0 to 6 take 24 bytes, 23 were given"):
        write_checkpoint(
            tmp_path / "out",
            out_tensors({"a.weight": TENSORS["a.weight"]}),
            lambda tensor, first, count: reading(TENSORS)(tensor, first, count)[:-1],
            max_shard_size=1 << 20,
            metadata={},
        )
    assert list(tmp_path.iterdir()) == []


def test_reads_back_what_it_wrote_before_it_shows_it(tmp_path: Path) -> None:
    def read(tensor: OutTensor, first: int, count: int) -> memoryview:
        os.truncate(tmp_path / ".out.partial" / SINGLE_NAME, 10_000)  # something else writes to the file
        return reading(TENSORS)(tensor, first, count)

    with pytest.raises(UsageError, match="not fully covered"):
        write_checkpoint(tmp_path / "out", out_tensors(TENSORS), read, max_shard_size=1 << 20, metadata={})
    assert list(tmp_path.iterdir()) == []


def test_checks_the_space_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = namedtuple("status", ["f_bavail", "f_frsize"])
    monkeypatch.setattr(os, "statvfs", lambda path: status(10, 4096))
    with pytest.raises(OutOfSpaceError, match=r"takes 4\.\d+ MB, but only 41 kB are free"):
        write(tmp_path / "out", {"w": torch.zeros(1 << 20)})
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_the_kernel_asks_to_try_again_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, data: memoryview) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(FuyouError, match="Resource temporarily unavailable") as caught:
        write(tmp_path / "out")
    assert "try again" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_cleared_but_not_what_another_writes(tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "model-00001-of-00002.safetensors").write_bytes(b"half")
    (partial / "config.json").write_bytes(b"{}")
    (partial / "additional_chat_templates").mkdir()
    (partial / "additional_chat_templates" / "rag.jinja").write_bytes(b"half")
    descriptor = os.open(partial, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # even so weak a lock shows that it is in use
    with pytest.raises(UsageError, match="another process"):
        write(tmp_path / "out")
    assert len(snapshot(partial)) == 3
    os.close(descriptor)
    (partial / "thesis.txt").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"thesis\.txt"):
        write(tmp_path / "out")
    assert len(snapshot(partial)) == 4
    (partial / "thesis.txt").unlink()
    write(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_replaces_without_exchange_of_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LibcWithoutExchange:
        """Stands for a C library from before renameat2."""

    monkeypatch.setattr(writer.ctypes, "CDLL", lambda *arguments, **options: LibcWithoutExchange())
    write(tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / ".out.replaced")  # as one leaves it that is killed before it removes it
    write(tmp_path / "out", {"other": torch.ones(3)})
    assert list(open_checkpoint(tmp_path / "out").entries) == ["other"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_copies_what_belongs_to_a_model(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    config = {
        "model_type": "llama",
        "torch_dtype": "float32",
        "text_config": {"dtype": "float16", "hidden_size": 3},
        "quantization_config": {"dtype": "int8"},
    }
    (source / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "merges.txt", "LICENSE.md", "generation_config.json", "run.py", "optimizer.pt"):
        (source / name).write_text(name)
    write(tmp_path / "out", companions=companion_files(source, dtype="bfloat16"))
    written = snapshot(tmp_path / "out")
    assert sorted(written) == [
        "LICENSE.md", "config.json", "generation_config.json", "merges.txt", SINGLE_NAME, "tokenizer.json",
    ]  # fmt: skip
    assert written["merges.txt"] == b"merges.txt"
    assert json.loads(written["config.json"]) == {
        "model_type": "llama",
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "hidden_size": 3},
    }
    (source / "vocab.txt").symlink_to("/etc/hostname")
    with pytest.raises(UsageError, match=r"'vocab\.txt' lies outside"):
        companion_files(source, dtype="bfloat16")


TEMPLATES = {f"additional_chat_templates/{name}.jinja": name.encode() for name in ("rag", "tool_use")}


def test_templates_with_names_keep_their_folder(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    (source / "additional_chat_templates" / "inner").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    for name in (*TEMPLATES, "additional_chat_templates/notes.txt", "additional_chat_templates/inner/deep.jinja"):
        (source / name).write_text(Path(name).stem)
    write(out, companions=companion_files(source, dtype="bfloat16"))
    assert {name: text for name, text in snapshot(out).items() if "templates" in name} == TEMPLATES
    for name in ("additional_chat_templates/mine.jinja", "additional_chat_templates/thesis.txt"):
        (out / name).write_bytes(b"mine")
        with pytest.raises(UsageError, match=f"did not write: '{name}'"):
            write(out)
        (out / name).unlink()
    write(out)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", SINGLE_NAME]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tool_use.jinja").write_bytes(b"mine")
    (out / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="did not write: 'additional_chat_templates'"):
        write(out)
    assert snapshot(tmp_path / "elsewhere") == {"tool_use.jinja": b"mine"}
    for link in (source / "additional_chat_templates" / "x.jinja", tmp_path / "linked" / "additional_chat_templates"):
        link.parent.mkdir(exist_ok=True)
        (link.parent / "config.json").write_text("{}")
        link.symlink_to(tmp_path / "elsewhere" / ("tool_use.jinja" if link.suffix else ""))
        with pytest.raises(UsageError, match="lies outside"):
            companion_files(source if link.suffix else link.parent, dtype="bfloat16")


def test_every_file_of_a_tokenizer_of_transformers_is_copied() -> None:
    """As its tokenizers name them, but those that need a library that is not there."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    missing, known = set(), 0
    for name in filter(None, TOKENIZER_MAPPING_NAMES.values()):
        with suppress(ImportError):
            found = getattr(tokenizer_class_from_name(name), "vocab_files_names", {})
            known += bool(found)
            missing |= {file for file in found.values() if not is_companion(file)}
    assert missing == set() and known > 40


@pytest.mark.parametrize("size", [0, -1])
def test_refuses_an_impossible_shard_size(tmp_path: Path, size: int) -> None:
    with pytest.raises(UsageError, match="max_shard_size"):
        write(tmp_path / "out", max_shard_size=size)


MEMORY_PROGRAM = """
import resource, sys
from contextlib import suppress
from pathlib import Path
from fuyou_cli.checkpoint.writer import OutTensor, write_checkpoint

zeros = bytes(16 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tensors = [OutTensor(name="w", dtype="float32", shape=(6, 4 << 20))]
write_checkpoint(Path(sys.argv[1]), tensors, lambda tensor, first, count: memoryview(zeros)[: 4 * count],
                 max_shard_size=1 << 30, metadata={})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_writing_costs_no_memory_of_its_own_and_no_torch(tmp_path: Path) -> None:
    arguments = [sys.executable, "-X", "importtime", "-c", MEMORY_PROGRAM, str(tmp_path / "out")]
    run = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert int(run.stdout) <= 8
    assert (tmp_path / "out" / SINGLE_NAME).stat().st_size > 96 << 20
    assert " torch" not in run.stderr
