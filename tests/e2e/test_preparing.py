"""Tests what is checked before what: nothing dear is done for a run that a cheap look refuses. The model is on a hub of our
own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint.test_hub import Hub

from fuyou_cli.core.errors import PlanError, UsageError
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.plan_step import plan_downloaded
from fuyou_cli.training.prepare import Planned, fetch

from .conftest import NewProject, Project
from .running import planned, prepared_run, silent

WEIGHTS = "model.safetensors"


@pytest.fixture
def server(materials: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The tiny model as o/model, its tokenizer alone as o/tokenizer; the cache is empty."""
    hub = Hub()
    threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    files = {file.name: file.read_bytes() for file in (materials / "model").iterdir()}
    hub.repositories["o/model"] = files
    hub.repositories["o/tokenizer"] = {name: text for name, text in files.items() if name.startswith("tokenizer")}
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
    template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield hub
    hub.shutdown()
    hub.server_close()


def _planned(project: Project, said: list[str] | None = None) -> Planned:
    return planned(load_recipe(project.recipe).recipe, say=([] if said is None else said).append)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"dataset.train": [{"path": "no/such/data.jsonl"}]}, UsageError, "no data files at no/such/data.jsonl"),
        ({"dataset.train": [{"path": "ROWS", "format": "alpaca"}]}, UsageError, "rows.jsonl:1: format alpaca needs"),
        ({"dataset.loss_on": "assistant"}, UsageError, "loss_on: assistant does not fit"),
        ({"dataset.max_seq_len": 65}, UsageError, "65 is more than the 64 positions of o/model"),
        ({"tokenizer.name_or_path": "o/none"}, UsageError, "o/none"),
        ({"offload.max_memory.cpu": "64MiB"}, PlanError, "64"),
    ],
    ids=["no data", "wrong format", "wrong loss", "too long", "no tokenizer", "does not fit"],
)
def test_a_run_that_cannot_be_is_refused_before_its_weights_are_fetched(
    change: dict[str, Any], error: type[Exception], words: str, new_project: NewProject, server: Hub
) -> None:
    project = new_project(changes={"model.name_or_path": "o/model", **change})
    project.recipe.write_text(project.recipe.read_text().replace("ROWS", str(project.materials / "rows.jsonl")))
    with pytest.raises(error, match=words):
        prepared_run(project)
    assert "config.json" in server.sent
    assert WEIGHTS not in server.sent


def test_a_download_is_announced_and_followed(new_project: NewProject, server: Hub) -> None:
    changes = {"model.name_or_path": "o/model", "tokenizer.name_or_path": "o/tokenizer"}
    said: list[str] = []
    heard: list[tuple[str, int, int]] = []
    found = prepared_run(new_project(changes=changes), say=said.append, progress=lambda *report: heard.append(report))
    size = len(server.repositories["o/model"][WEIGHTS])
    assert ("downloading o/model", size, size) in heard
    assert {what for what, _, _ in heard} == {"downloading o/model", "downloading o/tokenizer"}
    assert f"downloading o/model: 1 files, {size:,} bytes" in said
    assert any(text.startswith("downloading o/tokenizer: 2 files") for text in said)
    assert len(found.rows) == 64 and found.entries
    assert found.planned.tokenizer_dir != found.planned.model_dir


def test_a_model_just_downloaded_is_read_where_it_lies(new_project: NewProject, server: Hub) -> None:
    changes = {"model.name_or_path": "o/model", "freeze": ["transformer.h.0.*"], "precision.compute": "float32"}
    recipe = load_recipe(new_project(changes=changes).recipe).recipe
    fetched = fetch(planned(recipe, to_run=True), say=silent)
    assert "not downloaded yet" in fetched.planned.model.imported_because
    again = plan_downloaded(fetched, fetched.planned.hardware, None, say=silent)
    assert again.planned.model.sources and not again.planned.model.imported_because
    assert plan_downloaded(again, fetched.planned.hardware, None, say=silent) is again


def test_a_plan_needs_neither_weights_nor_data(new_project: NewProject, server: Hub) -> None:
    changes = {"model.name_or_path": "o/model", "dataset.train": [{"path": "no/such/data.jsonl"}]}
    said: list[str] = []
    assert _planned(new_project(changes=changes), said).plan.predicted.cpu_peak > 0
    assert WEIGHTS not in server.sent
    assert said[-1].startswith("note: dataset.train: no data files at no/such/data.jsonl. A run would be refused")


def test_notes_on_the_data_are_said(new_project: NewProject, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"prompt": "How far?", "completion": "Seven miles."}] * 4
    for name in ("a_train", "extra", "test_x"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[str] = []
    prepared_run(new_project(changes={"dataset.train": [{"path": str(folder)}]}), say=said.append)
    assert f"data: {folder}: 1 file taken (a_train.jsonl), 2 skipped, not of split train (extra.jsonl, test_x.jsonl)" in said
    assert any(text.startswith("note: in 4 of 4 samples no white space separates prompt and completion") for text in said)


def test_a_slice_is_fetched_by_a_run_of_so_many_steps(new_project: NewProject, tmp_path: Path) -> None:
    """Its size is not known before, which a run of epochs does not ask for."""
    (tmp_path / "set").mkdir()
    rows = "".join(json.dumps({"prompt": f"{number}? ", "completion": "7"}) + "\n" for number in range(8))
    (tmp_path / "set" / "train.jsonl").write_text(rows)
    entry = {"path": str(tmp_path / "set"), "split": "train[:50%]"}
    ready = prepared_run(new_project(changes={"dataset.train": [entry], "train.max_steps": 4}))
    assert ready.rows.summary.samples == 4


def test_rows_seen_more_often_than_asked_and_special_tokens_are_noted(new_project: NewProject, tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text('{"text": "an end <|end|>"}\n{"text": "none"}\n')
    said: list[str] = []
    changes = {"dataset.train": [{"path": str(file)}], "train.max_steps": None, "train.epochs": 1}
    changes["lr_scheduler.warmup_steps"] = 0
    assert prepared_run(new_project(changes=changes), say=said.append).planned.total_steps == 1
    assert any(text.startswith("note: 2 rows, batches of 4: each row is seen about 2 times per step") for text in said)
    assert any(text.startswith("note: 1 sample contains special tokens as text, e.g. few.jsonl:1 '<|end|>'") for text in said)


def test_a_tokenizer_of_another_model_is_refused(new_project: NewProject, materials: Path, tmp_path: Path) -> None:
    """Refuses a token, or what fills short rows, beyond the embeddings: an index error in the first step, or worse on a GPU."""
    from transformers import AutoTokenizer

    size = json.loads((materials / "model" / "config.json").read_text())["vocab_size"]
    tokenizer = AutoTokenizer.from_pretrained(materials / "model")
    tokenizer.add_special_tokens({"pad_token": "<|filler|>"})
    tokenizer.save_pretrained(tmp_path / "tokenizers" / "padded")
    tokenizer.add_tokens(["road"])
    tokenizer.save_pretrained(tmp_path / "tokenizers" / "larger")
    for name, what, number in (("padded", "padding", size), ("larger", "token", size + 1)):
        folder = tmp_path / "tokenizers" / name
        project = new_project(name, {"tokenizer.name_or_path": str(folder)})
        words = f"tokenizer of {folder} gives the {what} id {number}, but {materials / 'model'} has only .* below {size}"
        with pytest.raises(UsageError, match=words):
            prepared_run(project)
        assert not project.out.joinpath("store").exists()


def test_positions_that_are_computed_only_warn(new_project: NewProject, materials: Path, tmp_path: Path) -> None:
    import transformers

    model = tmp_path / "rotary"
    size = json.loads((materials / "model" / "config.json").read_text())["vocab_size"]
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    for file in (materials / "model").glob("tokenizer*"):
        (model / file.name).write_bytes(file.read_bytes())
    said: list[str] = []
    _planned(new_project(changes={"model.name_or_path": str(model)}), said)
    assert f"warning: dataset.max_seq_len: 24 is more than the 16 positions of {model}" in said[-1]
    said.clear()
    shorter = {"model.name_or_path": str(model), "dataset.max_seq_len": 16}
    _planned(new_project("shorter", shorter), said)
    assert said == []


def test_a_warm_up_longer_than_the_epochs_are_is_refused(new_project: NewProject) -> None:
    """Refuses it: shortened in silence, a run made longer later would go on at another rate."""
    schedule = {"lr_scheduler.name": "constant", "lr_scheduler.warmup_steps": 17}
    with pytest.raises(UsageError, match=r"lr_scheduler\.warmup_steps: a warm-up of 17 steps .* 16"):
        prepared_run(new_project("short", {"train.max_steps": None, "train.epochs": 1, **schedule}))
    longer = prepared_run(new_project("long", {"train.max_steps": None, "train.epochs": 2, **schedule}))
    assert longer.planned.total_steps == 32


def test_the_order_of_the_rows_is_in_the_plan(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = prepared_run(new_project("plain"))
    monkeypatch.setattr("fuyou_cli.data.batches.Sampler.PEAK_BYTES", 24 + 1_000_000)
    larger = prepared_run(new_project("larger"))
    assert larger.planned.plan.predicted.cpu_peak - plain.planned.plan.predicted.cpu_peak == 64 * 1_000_000


def test_a_backend_that_was_not_built_is_refused_at_once(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuyou_cli.swap.kernels.build_info", lambda: "gcc; no io_uring; portable")
    with pytest.raises(UsageError, match=r"offload\.io\.backend is io_uring"):
        _planned(new_project("wants", {"offload.io": {"backend": "io_uring"}}))
    assert _planned(new_project("leaves")).plan.io.backend == "auto"


def test_swapped_activations_are_planned_for_every_block(new_project: NewProject) -> None:
    plans = {way: _planned(new_project(way, {"offload.activations": way})) for way in ("recompute", "swap")}
    assert all(stage.kept == () for stage in plans["recompute"].plan.stages)
    for stage, placed in zip(plans["swap"].model.stages, plans["swap"].plan.stages, strict=True):
        assert placed.kept == tuple(operator.index for operator in stage.operators)
        assert (placed.kept != ()) == (stage.kind == "block")
    assert plans["swap"].plan.predicted.compute_flops < plans["recompute"].plan.predicted.compute_flops
