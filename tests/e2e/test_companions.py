"""Tests that an export carries the tokenizer that was trained with, also when everything the run started from is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from drawn import every
from transformers import AutoTokenizer

from fuyou_cli.training.state import kept_companions as companions

from .conftest import NewProject

TEMPLATE = "{% for m in messages %}<|end|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
CHAT = [{"role": "user", "content": "How far?"}, {"role": "assistant", "content": "Seven miles."}]
TEXT = "The road!! from the harbour<|filler|> to the mill!<|end|>"


def _started_from(materials: Path, folder: Path, *, pad: str) -> dict[str, object]:
    """Makes a model whose tokenizer is another's, in a folder of its own and without config.json; returns the recipe's
    changes."""
    shutil.copytree(materials / "model", folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = "{{ 'not this one' }}"
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "model" / "tokenizer.json").unlink()  # nothing of it may be needed
    (folder / "model" / "LICENSE").write_text("terms")
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(8)))
    return {
        "model.name_or_path": str(folder / "model"),
        "tokenizer": {
            "name_or_path": str(folder / "tokenizer"), "chat_template": str(folder / "template.jinja"), "pad_token": pad,
        },
        "dataset.train": [{"path": str(folder / "chat.jsonl")}],
        "dataset.max_seq_len": 64,
        "dataset.loss_on": "all",
        "train.max_steps": 3,
    }  # fmt: skip


def test_what_is_kept_already_is_not_written_again(tmp_path: Path) -> None:
    """Needs no room for it on a full disk when a run goes on. Whatever is not as it was is made so."""
    folder, files = tmp_path / "companions", {"config.json": b"{}", "tokenizer.json": tmp_path / "t", "LICENSE": b"terms"}
    (tmp_path / "t").write_bytes(b"t" * 200_000)
    companions._replace(folder, files)
    kept = {name: (folder / name).stat().st_ino for name in files}
    (folder / "tokenizer.json").write_bytes(b"t" * 199_999 + b"u")
    (folder / "LICENSE").chmod(0o644)
    companions._replace(folder, files)
    changed = {name for name in files if (folder / name).stat().st_ino != kept[name]}
    assert changed == {"tokenizer.json", "LICENSE"}
    assert (folder / "tokenizer.json").read_bytes() == b"t" * 200_000 and (folder / "LICENSE").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in folder.iterdir()} == {*files}


@pytest.mark.parametrize("pad", every(2, ["!", "<|end|>"]), ids=["a token of ordinary text", "a special token"])
def test_the_export_has_the_tokenizer_of_the_run(pad: str, new_project: NewProject, materials: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    project = new_project(changes=_started_from(materials, start, pad=pad))
    project.done("finetune", project.recipe)
    expected = AutoTokenizer.from_pretrained(start / "tokenizer")
    ids, chat = expected(TEXT)["input_ids"], expected.apply_chat_template(CHAT, chat_template=TEMPLATE)["input_ids"]
    shutil.rmtree(start)
    stores = [manifest.parent for manifest in (project.out / "store").glob("*/manifest.json")]
    project.done("export", stores[0], project.folder / "again")
    for folder in (project.out / "model", project.folder / "again"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer(TEXT)["input_ids"] == ids
        assert tokenizer.apply_chat_template(CHAT)["input_ids"] == chat
        # naming an ordinary token would change the ids of texts that hold it
        assert tokenizer.pad_token == ("<|end|>" if pad == "<|end|>" else "<|pad|>")
        assert (folder / "LICENSE").read_text() == "terms"
    config = json.loads((project.folder / "again" / "config.json").read_text())
    assert config["model_type"] == "gpt2"


def test_a_store_without_kept_files_is_exported_from_the_models_folder(new_project: NewProject) -> None:
    project = new_project(changes={"train.max_steps": 3, "export.at_end": False})
    project.done("finetune", project.recipe)
    kept = next((project.out / "store").glob("*/companions"))
    assert {file.name for file in kept.iterdir()} >= {"config.json", "tokenizer.json", "tokenizer_config.json"}
    shutil.rmtree(kept)
    project.done("export", project.recipe, project.folder / "model")
    assert AutoTokenizer.from_pretrained(project.folder / "model").eos_token == "<|end|>"


NAMED = {"default": TEMPLATE, "tool_use": "TOOLS {{ tools }}" + TEMPLATE}


@pytest.mark.parametrize("kind", ["files", "one list", "adapter"])
def test_chat_templates_with_names_are_in_every_export(
    kind: str, new_project: NewProject, materials: Path, llama: Path, tmp_path: Path
) -> None:
    """one list: as transformers wrote them before, in tokenizer_config.json."""
    start = shutil.copytree(llama if kind == "adapter" else materials / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.chat_template = NAMED
    tokenizer.save_pretrained(start, save_jinja_files=kind != "one list")
    assert (start / "additional_chat_templates").is_dir() is (kind != "one list")
    changes = {"model.name_or_path": str(start), "train.max_steps": 1, "lr_scheduler.warmup_steps": 0}
    if kind == "adapter":
        pytest.importorskip("peft", reason="peft comes with the extra lora")
    project = new_project(changes=changes | ({"adapter": {"r": 2}} if kind == "adapter" else {}))
    project.done("finetune", project.recipe)
    (store,) = (manifest.parent for manifest in (project.out / "store").glob("*/manifest.json"))
    if kind == "adapter":
        project.done("export", store, project.folder / "merged", "--merged")
    for name in ("additional_chat_templates", "chat_template.jinja", "tokenizer_config.json"):  # the store has its own
        path = start / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    project.done("export", store, project.folder / "again")
    folders = [project.out / ("adapter" if kind == "adapter" else "model"), project.folder / "again"]
    for folder in (*folders, *([project.folder / "merged"] if kind == "adapter" else [])):
        assert AutoTokenizer.from_pretrained(folder).chat_template == NAMED, folder
    cleaned = project.fuyou("clean", project.out / "store", "--yes")
    assert cleaned.returncode == 0 and [*store.iterdir()] == [], cleaned.stderr
