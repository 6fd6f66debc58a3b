"""Tests data sets with subsets and slices, through `datasets` and without a network: a folder is one like a repository of the
hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from fuyou_cli.core.errors import UsageError
from fuyou_cli.data.cache import Asked, prepare, request_for
from fuyou_cli.data.reading import read_rows
from fuyou_cli.data.rows import Rows
from fuyou_cli.data.sources import MissingDataError, find_sources, is_on_hub, look, say_nothing, size_of
from fuyou_cli.data.worker import build

from .conftest import section

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
    assert taken(data_set, name="de") == [f"de train {number}" for number in range(10)]
    assert taken(data_set, name="en", split="train[:20%]+test[1:]") == ["en train 0", "en train 1", "en test 1", "en test 2"]
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
    asked, cache = Asked(dataset=dataset, tokenizer_dir=tokenizer_dir), tmp_path / "rows"
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
        request, _ = request_for(Asked(dataset=dataset, tokenizer_dir=tokenizer_dir), fetching=say_nothing)
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
