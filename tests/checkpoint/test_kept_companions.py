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

from fuyou_cli.checkpoint.files import companion_files
from fuyou_cli.core.errors import UsageError
from fuyou_cli.recipe.schema import TokenizerSection
from fuyou_cli.training.state.kept_companions import keep_companions, kept_companions, written_companions

OLD = {"config.json": '{"age": "old"}', "tokenizer.json": "old", "LICENSE": "old", "merges.txt": "old"} | {
    f"additional_chat_templates/{name}.jinja": "old" for name in ("rag", "tool_use")
}
NEW = {"config.json": '{"age": "new"}', "tokenizer.json": "new", "LICENSE": "new", "vocab.txt": "new"} | {
    "additional_chat_templates/tool_use.jinja": "new"
}


class Cut(BaseException):
    """Stands for a kill."""


def _source(folder: Path, files: dict[str, str]) -> Callable[[Path], None]:
    """Makes a model's folder; what keeps its companions in a store, for a recipe that changes nothing."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    return lambda store: keep_companions(store, TokenizerSection(), model_dir=folder, tokenizer_dir=folder)


def _content(store: Path) -> dict[str, str]:
    folder = store / "companions"
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


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
            assert all(
                name in exported for name in ({"additional_chat_templates/tool_use.jinja"} if before or finished else ())
            )
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
    folder = tmp_path / "companions"
    assert {str(path.relative_to(folder)) for path in written_companions(tmp_path)} == set(NEW)


def test_templates_that_are_gone_go_with_their_folder_unless_others_use_it(tmp_path: Path) -> None:
    for name, more in (("alone", []), ("shared", ["notes.md"])):
        store, folder = tmp_path / name, tmp_path / name / "companions" / "additional_chat_templates"
        store.mkdir()
        _source(tmp_path / f"{name}-old", OLD)(store)
        for other in more:
            (folder / other).write_text("mine")
        _source(tmp_path / f"{name}-new", {"config.json": "{}", "tokenizer.json": "new"})(store)
        assert folder.is_dir() is bool(more)
        assert _content(store).keys() == {"config.json", "tokenizer.json", *(f"{folder.name}/{other}" for other in more)}


def test_a_link_in_place_of_the_folder_of_templates_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rag.jinja").write_text("mine")
    (tmp_path / "companions").mkdir()
    (tmp_path / "companions" / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    assert written_companions(tmp_path) == []
    with pytest.raises(UsageError, match="is a symbolic link"):
        _source(tmp_path / "model", NEW)(tmp_path)
    _source(tmp_path / "plain", {"config.json": "{}", "tokenizer.json": "new"})(tmp_path)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["rag.jinja"]


def test_a_recipes_template_replaces_those_with_names(tmp_path: Path) -> None:
    """Its run was trained with no other, and transformers would choose `tool_use` where there are tools."""
    store = tmp_path / "store"
    store.mkdir()
    _source(tmp_path / "model", OLD)
    (tmp_path / "mine.jinja").write_text("mine")
    recipe = TokenizerSection(chat_template=str(tmp_path / "mine.jinja"))
    keep_companions(store, recipe, model_dir=tmp_path / "model", tokenizer_dir=tmp_path / "model")
    assert {name: text for name, text in _content(store).items() if "template" in name} == {"chat_template.jinja": "mine"}


@pytest.mark.parametrize("begin", [0, (1 << 20) - 20, (1 << 20) - 1, 3 << 20])
def test_a_token_is_found_anywhere_in_its_table(begin: int, tmp_path: Path) -> None:
    """Also across what is read at once."""
    added = '{"content": "<|ünder|>"}'
    model = tmp_path / "model"
    _source(model, {**NEW, "tokenizer.json": " " * begin + added + " " * 99})
    (model / "tokenizer_config.json").write_text("{}")
    recipe = TokenizerSection(pad_token="<|ünder|>")
    keep_companions(tmp_path / "store", recipe, model_dir=model, tokenizer_dir=model)
    kept = json.loads((tmp_path / "store/companions/tokenizer_config.json").read_text())
    assert kept == {"pad_token": "<|ünder|>"}
    (model / "tokenizer.json").write_text(" " * begin + added.replace("ü", "u"))
    keep_companions(tmp_path / "other", recipe, model_dir=model, tokenizer_dir=model)
    assert json.loads((tmp_path / "other/companions/tokenizer_config.json").read_text()) == {}
