"""Runs of a mixture whose blocks do not fit: their experts are stages of their own, by the planner's choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from fuyou_cli.core.errors import Interrupted
from fuyou_cli.core.units import MiB
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.exporting import export_store
from fuyou_cli.training.prepared import Ready

from .conftest import NewProject, Project
from .running import interrupt, planned, prepared_run, sums, train
from .test_mixture_runs import SIZES

STEPS = 4
SAVED = 24 * MiB  # of a block's experts, 50 MiB in float32
LORA: dict[str, Any] = {"adapter": {"r": 4, "target_modules": "all-linear"}}


WIDE: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_moe": (transformers.Qwen3MoeConfig, {"num_experts": 32, "moe_intermediate_size": 2048, "head_dim": 16}),
    "gpt_oss": (  # one tensor for all experts
        transformers.GptOssConfig,
        {"num_local_experts": 32, "intermediate_size": 2048, "head_dim": 16, "pad_token_id": 0},
    ),
}


def _written(materials: Path, family: str) -> Path:
    folder = materials / f"wide-{family}"
    if folder.exists():
        return folder
    words = len(transformers.AutoTokenizer.from_pretrained(materials / "model"))
    torch.manual_seed(4)
    kind, wide = WIDE[family]
    config = kind(vocab_size=words, **{**SIZES, **wide})
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((materials / "model" / file).read_bytes())
    return folder


@pytest.fixture
def projects(new_project: NewProject, materials: Path) -> Any:
    """Gives projects(name, keys, fits=..., family=...), whose budget is too small for a whole block unless it `fits`."""

    def make(name: str, changes: dict[str, Any] | None = None, *, fits: bool = False, family: str = "qwen3_moe") -> Project:
        usual = {
            "model.name_or_path": str(_written(materials, family)), "precision": {"compute": "float32"},
            "train.max_steps": STEPS, "train.micro_batch_size": 2, "export.at_end": False,
        }  # fmt: skip
        keys = usual | (changes or {})
        if fits:
            return new_project(name, keys)
        small = new_project(f"{name}-small", keys | {"offload.max_memory.cpu": "64MiB"})
        least = planned(load_recipe(small.recipe).recipe).plan.predicted.cpu_peak
        return new_project(name, keys | {"offload.max_memory.cpu": f"{(least - SAVED) // MiB}MiB"})

    return make


def _is_cut(ready: Ready) -> bool:
    planned = ready.planned
    assert planned.model.has_ranges == (planned.plan.numerics.range_experts > 0)
    return planned.model.has_ranges


@pytest.mark.parametrize("family", WIDE)
def test_trains_stops_and_exports(family: str, projects: Any, tmp_path: Path) -> None:
    """Losses and exported weights of whole blocks, and after a stop the same bits."""
    whole, cut = (prepared_run(projects(str(fits), fits=fits, family=family)) for fits in (True, False))
    assert not _is_cut(whole) and _is_cut(cut)
    wanted, of_whole = train(whole)
    losses, store = train(cut)
    assert losses == pytest.approx(wanted, rel=1e-6)
    exports = [export_store(one, tmp_path / one.name, dtype="float32", max_shard_size=1 << 30) for one in (of_whole, store)]
    before, after = ({k: v for file in files for k, v in load_file(file).items()} for files in exports)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.allclose(after[name], value, rtol=0, atol=1e-5), name

    again = projects("again", {"checkpoint.commit_every_steps": 1}, family=family)
    with pytest.raises(Interrupted):
        train(again, interrupt(3, "backward"))
    resumed, same = train(again)
    assert resumed == losses[-len(resumed) :]
    assert [digest for *_, digest in sums(same)] == [digest for *_, digest in sums(store)]


def test_adapters_on_experts_in_place(projects: Any) -> None:
    """Frozen experts are read from the model's own files, range by range."""
    cut = prepared_run(projects("lora", LORA))
    assert _is_cut(cut) and not cut.planned.model.imported_because
    losses, _ = train(cut)
    wanted, _ = train(prepared_run(projects("lora-whole", LORA, fits=True)))
    assert losses == pytest.approx(wanted, rel=1e-6)


def test_quantised_experts(projects: Any) -> None:
    keys = LORA | {"model.quantize": "nf4"}
    cut = prepared_run(projects("nf4", keys))
    assert _is_cut(cut)
    losses, _ = train(cut)
    wanted, _ = train(prepared_run(projects("nf4-whole", keys, fits=True)))
    assert losses == pytest.approx(wanted, rel=1e-6)
