"""Goal: what an export needs besides weights is there whenever a store is, wherever writing it anew is cut off. Method:
the n-th change to the disk raises, for n = 1, 2, ... until nothing is left to fail."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.checkpoint.companions import companion_files
from fuyou_cli.recipe.schema import TokenizerSection
from fuyou_cli.training.state.kept_companions import keep_companions, kept_companions, written_companions

OLD = {"config.json": '{"age": "old"}', "tokenizer.json": "old", "LICENSE": "old", "merges.txt": "old"}
NEW = {"config.json": '{"age": "new"}', "tokenizer.json": "new", "LICENSE": "new", "vocab.txt": "new"}


class Cut(BaseException):
    """Stands for a kill."""


def _source(folder: Path, files: dict[str, str]) -> Callable[[Path], None]:
    """Makes a model's folder; what keeps its companions in a store, for a recipe that changes nothing."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    return lambda store: keep_companions(store, TokenizerSection(), model_dir=folder, tokenizer_dir=folder)


def _content(store: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in (store / "companions").iterdir()}


def _cut_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], int]:
    """Makes change `number` raise before it happens; how many were asked for."""
    changes = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal changes
            changes += 1
            if changes == number:
                raise Cut
            return real(*args, **kwargs)

        return call

    for owner, name in ((os, "open"), (os, "fsync"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return lambda: changes


@pytest.mark.parametrize("before", [True, False], ids=["resumed", "new"])
def test_cut_off_anywhere_the_kept_files_are_whole(tmp_path: Path, before: bool) -> None:
    old, new = _source(tmp_path / "old", OLD), _source(tmp_path / "new", NEW)
    for number in range(1, 200):
        store = tmp_path / f"store-{number}"
        store.mkdir()
        if before:
            old(store)
        with pytest.MonkeyPatch.context() as monkeypatch:
            asked = _cut_at(monkeypatch, number)
            with suppress(Cut):
                new(store)
            finished = asked() < number
        kept = kept_companions(store)
        if before or finished:
            assert kept is not None, f"change {number}: an export would fall back to the model's folder"
        if kept is not None:
            exported = companion_files(kept, dtype="float32")
            assert {"config.json", "tokenizer.json", "LICENSE"} <= set(exported)
            assert not any("unfinished" in name for name in exported)
            age = json.loads((kept / "config.json").read_text())["age"]
            for name in set(exported) - {"config.json"}:
                assert (kept / name).read_text() in ({"new"} if age == "new" and name in NEW else {"old", "new"})
        new(store)
        assert _content(store) == NEW, f"change {number}: the next run leaves its files and no others"
        if finished:
            assert number > 10
            return
    pytest.fail("it never came to an end")


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "companions").mkdir()
    for name in ("notes.md", ".notes.md.unfinished"):
        (tmp_path / "companions" / name).write_text("mine")
    _source(tmp_path / "model", NEW)(tmp_path)
    assert _content(tmp_path) == {**NEW, "notes.md": "mine", ".notes.md.unfinished": "mine"}
    assert {path.name for path in written_companions(tmp_path)} == set(NEW)
