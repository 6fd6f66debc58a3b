"""Tests weights opened for inference: of a model's folder, of a run's store and of its output folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.streamed_losses import StreamedLosses
from fuyou_cli.training.inference import find, open_for_inference
from fuyou_cli.training.jsonl import JsonlLog

from .conftest import Whole
from .running import exported

IDS = torch.arange(3, 43).view(2, 20)


def streamed(source: Path, dtype: str = "auto") -> list[float]:
    found = find(source, dtype=dtype)  # type: ignore[arg-type]
    with (
        open_for_inference(found, memory=1 << 20) as model,
        StreamedLosses(model.weights, micro_batch_size=1, head_chunk_tokens=0) as losses,
    ):
        rows: list[float] = losses.losses(IDS, IDS, last=True).tolist()
        model.check()
    return rows


def in_memory(folder: Path) -> list[float]:
    import transformers

    return losses_of(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@torch.no_grad()
def losses_of(model: Any) -> list[float]:
    return [float(model.eval()(input_ids=row[None], labels=row[None]).loss) * (IDS.shape[1] - 1) for row in IDS]


def test_a_model_and_the_store_of_its_run(materials: Path, whole: Callable[..., Whole], tmp_path: Path) -> None:
    assert streamed(materials / "model") == pytest.approx(in_memory(materials / "model"), rel=1e-6)
    run = whole({"precision.compute": "float32"})
    exported(run.store, tmp_path / "out" / "model")
    trained = in_memory(tmp_path / "out" / "model")
    assert trained != pytest.approx(in_memory(materials / "model"), rel=1e-3)
    for source in (run.store, run.store.parent, tmp_path / "out", tmp_path / "out" / "model"):
        assert streamed(source) == pytest.approx(trained, rel=1e-6), source
    masters = whole()  # computed in bfloat16
    exported(masters.store, tmp_path / "masters")
    assert streamed(masters.store, "float32") == pytest.approx(in_memory(tmp_path / "masters"), rel=1e-6)


def test_a_run_that_has_not_exported_is_told_from_a_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(UsageError, match="has not exported a model yet") as told:
        find(tmp_path)
    assert told.value.hint is not None and "in the recipe's offload.dir: name that folder; or run its recipe" in told.value.hint
    (store := tmp_path / "store" / "out-1").mkdir(parents=True)
    (store / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match="has not exported a model yet") as told:
        find(tmp_path)
    assert told.value.hint is not None and f"is in {store}: name that folder" in told.value.hint
    (elsewhere := tmp_path / "drive" / "out-1").mkdir(parents=True)
    (elsewhere / "manifest.json").write_text("{}")
    with JsonlLog(tmp_path / "log.jsonl") as log:
        log.write("plan", {"store": str(elsewhere)})
    with pytest.raises(UsageError) as told:
        find(tmp_path)
    assert told.value.hint is not None and f"is in {elsewhere}: name that folder" in told.value.hint


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        find(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (store := tmp_path / "store" / "out-1").mkdir(parents=True)
    (store / "manifest.json").write_text("{}")
    for source in (tmp_path, tmp_path / "adapter"):
        with pytest.raises(UsageError, match="holds an adapter") as told:
            find(source)
        assert f"is in {store}: name that folder, or merge it" in str(told.value.hint)
