"""Tests streams of data sets of the hub: a file is fetched when it is read and removed afterwards. A small server is the
hub."""

from __future__ import annotations

import errno
import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.data.rows import Rows
from fuyou_cli.data.sources import is_remote, load_set, local_copy, look
from fuyou_cli.data.tokenise import Tokeniser
from fuyou_cli.data.worker import NEXT, Parts
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
