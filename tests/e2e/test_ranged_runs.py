"""Runs of a mixture whose blocks do not fit: their experts are stages of their own, by the planner's choice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn import every
from safetensors.torch import load_file

from fuyou_cli.core.units import GiB, MiB
from fuyou_cli.machine.described import described
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.exporting import export_store
from fuyou_cli.training.prepare import Ready
from fuyou_cli.training.state.at_rest import saved_store

from .conftest import NewProject, Project, write_model
from .running import interrupt, planned, prepared_run, stop, sums, train
from .test_inference import streamed
from .test_mixture_runs import SIZES

STEPS = 3
SAVED = 24 * MiB  # of a block's experts, 50 MiB in float32
LORA: dict[str, Any] = {"adapter": {"r": 4, "target_modules": "all-linear"}}


WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 32, "moe_intermediate_size": 2048, "head_dim": 16}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 32, "intermediate_size": 2048}),
    "gpt_oss": (  # one tensor for all experts
        "GptOssConfig",
        {"num_local_experts": 32, "intermediate_size": 2048, "head_dim": 16, "pad_token_id": 0},
    ),
}


@pytest.fixture
def projects(new_project: NewProject, materials: Path) -> Any:
    """Gives projects(name, keys, fits=..., family=...), whose budget is too small for a whole block unless it `fits`."""

    def make(name: str, changes: dict[str, Any] | None = None, *, fits: bool = False, family: str = "qwen3_moe") -> Project:
        kind, wide = WIDE[family]
        model = write_model(materials, materials / f"wide-{family}", kind, **{**SIZES, **wide})
        usual = {
            "model.name_or_path": str(model), "precision": {"compute": "float32"}, "train.max_steps": STEPS,
            "train.micro_batch_size": 2, "export.at_end": False,
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


@pytest.mark.parametrize("family", every(2, ["qwen3_moe", "gpt_oss"]))
def test_trains_stops_and_exports(family: str, projects: Any, tmp_path: Path) -> None:
    """Losses and exported weights of whole blocks, and after a stop the same bits."""
    whole, cut = (prepared_run(projects(str(fits), fits=fits, family=family)) for fits in (True, False))
    assert not _is_cut(whole) and _is_cut(cut)
    wanted, of_whole = train(whole)
    losses, store = train(cut)
    assert losses == pytest.approx(wanted, rel=1e-6)
    exports = [
        export_store(saved_store(one), tmp_path / one.name, dtype="float32", max_shard_size=1 << 30)
        for one in (of_whole, store)
    ]
    before, after = ({k: v for file in files for k, v in load_file(file).items()} for files in exports)
    assert before.keys() == after.keys()
    told = [streamed(one, memory=1 << 28) for one in (store, of_whole)]  # by `fuyou eval`
    assert told[0] == pytest.approx(told[1], rel=1e-6)
    for name, value in before.items():
        assert torch.allclose(after[name], value, rtol=0, atol=1e-5), name

    again = projects("again", {"checkpoint.commit_every_steps": 1}, family=family)
    stop(again, interrupt(3, "backward"))
    resumed, same = train(again)
    assert resumed == losses[-len(resumed) :]
    assert [digest for *_, digest in sums(same)] == [digest for *_, digest in sums(store)]


@pytest.mark.parametrize("quantize", ["none", pytest.param("nf4", marks=pytest.mark.slow)])
def test_adapters_on_experts_in_place(quantize: str, projects: Any) -> None:
    """Frozen experts are read from the model's own files, range by range, or quantised."""
    keys = LORA | {"model.quantize": quantize}
    cut = prepared_run(projects("lora", keys))
    assert _is_cut(cut) and (quantize != "none" or not cut.planned.model.imported_because)
    losses, _ = train(cut)
    wanted, _ = train(prepared_run(projects("lora-whole", keys, fits=True)))
    assert losses == pytest.approx(wanted, rel=1e-6)


def test_a_block_that_cannot_be_cut_says_why(projects: Any) -> None:
    said: list[str] = []
    project = projects("granite", {"offload.max_memory.cpu": "64MiB"}, fits=True, family="granitemoe")
    found = planned(load_recipe(project.recipe).recipe, say=said.append)
    assert not found.model.has_ranges
    assert any("layers.0 cannot be computed in ranges of its experts: it does more with what" in line for line in said)


DEEPSEEK_V3: dict[str, Any] = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
}  # fmt: skip


def test_layers_of_deepseek_v3_fit_a_card(new_project: NewProject, materials: Path) -> None:
    """LoRA in bfloat16 with rows of 4,096 tokens: in 24 GiB of a card, where two whole layers take 43."""
    folder = materials / "deepseek-v3"
    shutil.copytree(materials / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    words = len(transformers.AutoTokenizer.from_pretrained(folder))
    transformers.DeepseekV3Config(vocab_size=words, **DEEPSEEK_V3).save_pretrained(folder)
    keys = {
        "model.name_or_path": str(folder), "adapter": {"r": 16}, "dataset.max_seq_len": 4096, "train.batch_size": 8,
        "precision.compute": "bfloat16", "offload.device": "cuda", "offload.max_memory": {},
    }  # fmt: skip
    recipe = load_recipe(new_project("deepseek", keys).recipe).recipe
    found = planned(recipe, described("rtx4090,2xgen4,64GiB"), here=False)
    budget = found.request.gpu_budget
    assert budget is not None and 0 < found.plan.predicted.gpu_peak <= budget < 24 * GiB
    assert found.plan.numerics.range_experts == 64
