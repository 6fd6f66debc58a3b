"""Tests data sets that `datasets` names or reads: streams of the hub, whose files are fetched when they are read and removed
afterwards (a small server is the hub), and subsets and slices of a folder like a repository there, without a network."""

from __future__ import annotations

import errno
import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.data.cache import RowsRequest, prepare, request_for
from fuyou_cli.data.reading import read_rows
from fuyou_cli.data.rows import Rows
from fuyou_cli.data.sources import (
    MissingDataError,
    find_sources,
    is_on_hub,
    is_remote,
    load_set,
    local_copy,
    look,
    say_nothing,
    size_of,
)
from fuyou_cli.data.tokenise import Tokeniser
from fuyou_cli.data.worker import NEXT, Parts, build
from tests.hub_server import COMMIT, Hub

from .conftest import OPTION_DEFAULTS, SOURCE_DEFAULTS, section
from .test_stream import stream

FILES, ROWS, STEPS = 3, 40, 24  # of 5 rows: exactly an epoch


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    config = "configs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en/part-*.jsonl\n"
    made.repositories["o/set"] = {"README.md": f"---\n{config}---\n".encode(), "en/notes.bin": b"no rows"} | {
        f"en/part-{file}.jsonl": "".join(json.dumps({"text": f"apple {file} {row} "}) + "\n" for row in range(ROWS)).encode()
        for file in range(FILES)
    }
    for key, name in (("XDG_CACHE_HOME", "kept"), ("HF_HOME", "hf")):
        monkeypatch.setenv(key, str(tmp_path / name))
    monkeypatch.setenv("HF_ENDPOINT", made.address)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def fetched(server: Hub) -> list[str]:
    return [name for name in server.sent if name.startswith("en/")]


def test_a_file_is_fetched_when_it_is_read(
    server: Hub, tokenizer_dir: Path, tokenise: Callable[..., Rows], tmp_path: Path
) -> None:
    """The rows are those of the same files on this disk. The network that fails ends nothing but this process. A stream that
    ends within a file leaves nothing but rows."""
    dataset, cache = section("o/set", entry={"name": "en", "revision": COMMIT}, streaming=True), tmp_path / "cache"
    told: list[str] = []
    made = stream(dataset, tokenizer_dir, cache, say=told.append)
    assert told == ["asking the hub for the files of o/set"]
    wait([made._entries[0]._ahead])
    assert len([*cache.rglob("*.jsonl")]) == 1 and len(fetched(server)) == 2
    assert str(look(dataset)[0].choice).endswith("3 files of the hub, each fetched when it is read")
    del made
    gc.collect()
    assert [*cache.iterdir()] == [file.parent for file in cache.glob("*/0-000000")] and not [*cache.rglob("*.jsonl")]
    server.refusals["o/set"] = (403, "GatedRepo")
    failing = stream(dataset, tokenizer_dir, cache)
    with pytest.raises(FuyouError, match=r"^o/set: en/part-\d\.jsonl: ") as refused:
        failing.is_ready(STEPS - 1, lambda: False)
    assert not isinstance(refused.value, UsageError)
    del server.refusals["o/set"]
    going_on = stream(dataset, tokenizer_dir, cache)
    rows = [going_on.tokens(index).tolist() for step in range(STEPS) for index in going_on.batch(step)]
    assert {*fetched(server)} == {f"en/part-{file}.jsonl" for file in range(FILES)} and len(fetched(server)) <= FILES + 1
    here = []
    for name in {*fetched(server)}:
        here.append(tmp_path / Path(name).name)
        here[-1].write_bytes(server.repositories["o/set"][name])
    local = tokenise(*here)
    assert sorted(rows) == sorted(local.tokens(index).tolist() for index in range(len(local)))
    assert going_on.is_ready(STEPS, lambda: False) and not [*cache.rglob("*.jsonl")]  # it has looked behind the last file


def parts_of(files: dict[str, bytes], tokenizer: Any, tokenizer_dir: Path, folder: Path) -> Parts:
    """Makes parts of files of the hub that are in the folder already."""
    for name, content in files.items():
        (place := folder / "o" / "set@main" / name).parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    source = {"files": [f"hf:/datasets/o/set@main/{name}" for name in files], **SOURCE_DEFAULTS}
    request = {"sources": [source], "mixed": False, "seconds": 60, "part_tokens": 10**6, **OPTION_DEFAULTS}
    request["remote"] = {"folder": str(folder), "offline": True}
    return Parts(request, Tokeniser(tokenizer, directory=tokenizer_dir))


def test_an_empty_file_does_not_end_a_stream(tokenizer: Any, tokenizer_dir: Path, tmp_path: Path) -> None:
    row = b'{"text": "apple"}\n'
    parts = parts_of({"a.jsonl": row, "b.jsonl": b"", "c.jsonl": row, "d.csv": b""}, tokenizer, tokenizer_dir, tmp_path)
    (out := tmp_path / "out").mkdir()
    assert parts.make({"entry": 0, "sources": [0], "begin": None, "formats": {}, "out": str(out)})["rows"] == 2
    assert json.loads((out / NEXT).read_text())["begin"] is None


def test_a_name_that_leads_out_of_its_folder_is_not_of_the_hub(tmp_path: Path) -> None:
    """What is fetched is removed afterwards, so nothing else may be where a name leads."""
    (kept := tmp_path / "kept.jsonl").write_text("{}")
    (tmp_path / "o" / "set@main").mkdir(parents=True)
    name = Path("hf:/datasets/o/set@main/../../kept.jsonl")
    with local_copy(name, {"folder": str(tmp_path), "offline": True}) as file:
        assert file == name
    assert not is_remote(name) and kept.exists()


def test_a_full_disk_is_told_from_other_failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(*_: Any, **__: Any) -> None:
        try:
            raise OSError(code, os.strerror(code))
        except OSError as error:
            raise ValueError("while downloading") from error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", failing)
    asked = {"path": "o/set", "commit": "main", "file": "a.jsonl", "out": str(tmp_path)}
    for code, kind in ((errno.EDQUOT, "disk"), (errno.EIO, "usage")):  # noqa: B007
        assert load_set(asked) == {"error": "while downloading", "kind": kind}


@pytest.mark.slow
def test_what_cannot_be_streamed_is_refused(server: Hub, tokenizer_dir: Path, tmp_path: Path) -> None:
    for entry, said in (
        ({"name": "en", "revision": "other"}, r"o/set: (Revision .*other|.*'other'.* doesn't exist)"),
        ({"name": "en", "split": "train[:10]"}, r"o/set: dataset\.streaming reads no slice of a split"),
        ({"name": "en", "split": "test"}, r'o/set: Unknown split "test"\. Should be one of \[\'train\'\]'),
    ):
        with pytest.raises(UsageError, match=said):
            stream(section("o/set", entry=entry, streaming=True), tokenizer_dir, tmp_path / "cache")
    readme = b'---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  sep: ";"\n---\n'
    for name, files, said in (
        ("o/packed", {"train.jsonl.zip": b"PK"}, r"dataset\.streaming cannot read train\.jsonl\.zip"),
        ("o/parted", {"README.md": readme, "a.csv": b"text;n\na;1\n"}, "its README sets sep, which"),
    ):
        server.repositories[name] = files
        with pytest.raises(UsageError, match=f"{name}: {said}"):
            stream(section(name, streaming=True), tokenizer_dir, tmp_path / "cache")
    assert not fetched(server)


# ---- subsets and slices ----------------------------------------------------------------------------------------------


Taken = Callable[..., list[str]]


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes two subsets with splits, told apart by the folder's README as on the hub."""
    for key, name in (("XDG_CACHE_HOME", "cache"), ("HF_HOME", "hf")):
        monkeypatch.setenv(key, str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder, configs = tmp_path / "set", ""
    for subset in ("en", "de"):
        (folder / subset).mkdir(parents=True)
        configs += f"- config_name: {subset}\n  data_files:\n"
        for split, rows in (("train", 10), ("test", 3)):
            texts = [f"{subset} {split} {number}" for number in range(rows)]
            (folder / subset / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            configs += f"  - split: {split}\n    path: {subset}/{split}.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return folder


def taken(folder: Path, **entry: str) -> list[str]:
    [source] = find_sources(section(folder, entry=entry), fetching=say_nothing)
    return [row["text"] for file in source.files for _, row in read_rows(file)]


def test_a_subset_its_splits_and_their_parts(data_set: Path) -> None:
    assert taken(data_set, name="de", split="train[:20%]+test[1:]") == ["de train 0", "de train 1", "de test 1", "de test 2"]
    with pytest.raises(UsageError, match=r"set: BuilderConfig 'fr' not found. Available: \['en', 'de'\]") as refused:
        taken(data_set, name="fr")
    assert "\n" not in refused.value.message and refused.value.exit_code == 2
    with pytest.raises(UsageError, match=r"Config name is missing\. Please pick one"):
        taken(data_set, split="train[:2]")


def test_it_is_fetched_once_and_only_for_a_run(
    data_set: Path, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = section(data_set, entry={"name": "en", "split": "train[2:5]"})
    assert look(dataset)[0].choice == f"{data_set}, subset en, split train[2:5]: fetched when a run begins"
    with pytest.raises(MissingDataError, match="is not fetched yet"):
        size_of(dataset)
    asked, cache = RowsRequest(dataset=dataset, tokenizer_dir=tokenizer_dir), tmp_path / "rows"
    rows = prepare(asked, cache)
    assert len(rows) == 3 and size_of(dataset) > 0
    monkeypatch.setattr("fuyou_cli.data.sources._call_datasets", lambda *_, **__: pytest.fail("asked again"))
    assert prepare(asked, cache).summary.digest == rows.summary.digest
    assert ": 1 file in " in str(look(dataset)[0].choice)
    (data_set / "en" / "train.jsonl").write_text('{"text": "changed"}\n')  # a folder is looked at again
    with pytest.raises(MissingDataError):
        size_of(dataset)


def test_a_line_of_text_is_a_row_streamed_or_not(data_set: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    readme, config = data_set / "README.md", "- config_name: plain\n  data_files: train.txt\n---\n"
    readme.write_text(readme.read_text().removesuffix("---\n") + config)
    (data_set / "train.txt").write_bytes("\ufeffone apple\r\ntwo\n\n four \rfive\u2028\nlast".encode())
    with pytest.raises(UsageError, match=r"it reads train\.txt as Json, which dataset\.streaming does not"):
        find_sources(section(data_set, entry={"name": "plain"}, streaming=True), fetching=say_nothing)
    readme.write_text(f"---\nconfigs:\n{config}")
    made: list[list[list[int]]] = []
    for number, (packing, streaming) in enumerate(product((False, "concat"), (False, True))):
        dataset = section(data_set, entry={"name": "plain"}, packing=packing, streaming=streaming)
        (out := tmp_path / f"rows-{number}").mkdir()
        request, _ = request_for(RowsRequest(dataset=dataset, tokenizer_dir=tokenizer_dir), fetching=say_nothing)
        build({**request, "out": str(out), "seconds": 60})
        rows = Rows(out)
        made.append([rows.tokens(row).tolist() for row in range(len(rows))])
    assert made[0] == made[1] and made[2] == made[3] and len(made[0]) == 6


def test_a_name_of_the_hub_that_cannot_be_reached(data_set: Path) -> None:
    with pytest.raises(UsageError, match=r"^dataset.train: owner/set-that-is-not: Couldn't reach"):
        taken(Path("owner/set-that-is-not"))


def test_what_is_a_name_of_the_hub(data_set: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data_set.parent)
    names = ["owner/set", "owner/set-1.0", "set/de", "data/rows.jsonl", "rows.json.gz", "./owner/set", "owner", "a/b/c", "a/*"]
    assert [name for name in names if is_on_hub(name)] == ["owner/set", "owner/set-1.0"]


def test_a_cache_that_cannot_be_written(data_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"file/fuyou/sets/\w+ cannot be written: Not a directory"):
        taken(data_set, name="de")


@pytest.mark.parametrize("entry", [{"name": "de"}, {"split": "train[:10%]"}, {"revision": "main"}])
def test_files_have_neither_subsets_nor_slices_nor_revisions(data_set: Path, entry: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="works only for data sets of the hub"):
        taken(data_set / "en" / "train.jsonl", **entry)
