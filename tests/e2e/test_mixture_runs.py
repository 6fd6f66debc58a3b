"""Tests runs of mixtures of experts by files: the same keys and bits in and out, experts in place or in nf4, adapters
that peft loads, and the same bits after a stop."""

from __future__ import annotations

import io
import json
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn import every
from safetensors.torch import load_file, save_file

from fuyou_cli.cli.app import main
from fuyou_cli.cli.stores import run_export
from fuyou_cli.core.errors import UsageError
from fuyou_cli.training.exporting import export_store
from fuyou_cli.training.report import Spread
from fuyou_cli.training.state.at_rest import saved_store

from .conftest import NewProject, Project, WholeOf, write_model
from .running import interrupt, prepared_run, stop, store_of, sums, train
from .test_inference import in_memory, streamed
from .test_quantised_runs import decoded

STEPS = 4
SIZES = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 64, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 16, "pad_token_id": 0}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 4}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64, "num_key_value_heads": 4,
            "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
}  # fmt: skip


def write(materials: Path, family: str) -> Path:
    kind, sizes = MODELS[family]
    return write_model(materials, materials / family, kind, **{**SIZES, **sizes})


def finetuned(project: Project) -> Path:
    """Runs the command, and returns the folder of its store."""
    with pytest.raises(SystemExit) as ended:
        main(["finetune", str(project.recipe)])
    assert ended.value.code == 0
    return store_of(project)


def usual(materials: Path, family: str = "qwen3_moe") -> dict[str, Any]:
    return {
        "model.name_or_path": str(write(materials, family)), "precision": {"compute": "float32"}, "train.max_steps": STEPS,
        "export.at_end": False,
    }  # fmt: skip


@pytest.fixture
def mixture(new_project: NewProject, materials: Path) -> NewProject:
    """Gives mixture(name, keys), a project of the family that `name` begins with, in float32."""

    def make(name: str = "qwen3_moe", changes: dict[str, Any] | None = None) -> Project:
        return new_project(name, usual(materials, name.partition("-")[0]) | (changes or {}))

    return make


@pytest.mark.parametrize("family", every(3, MODELS))
def test_files_come_out_as_they_went_in(family: str, mixture: NewProject, tmp_path: Path) -> None:
    """At a rate that is zero in float32: the keys, shapes and bits that `save_pretrained` wrote."""
    project = mixture(family, {"optimizer.lr": 1e-60, "lr_scheduler.warmup_steps": 0, "train.max_steps": 1})
    _, store = train(project)
    files = export_store(saved_store(store), tmp_path / "out", dtype="float32", max_shard_size=1 << 30)
    found = {name: value for file in files for name, value in load_file(file).items()}
    wanted = load_file(write(project.materials, family) / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_layers_that_predict_further_tokens_are_carried(mixture: NewProject, tmp_path: Path) -> None:
    """transformers reads none of layer 61 of DeepSeek-V3, and loses it when it saves."""
    project = mixture("deepseek_v3")
    model = Path(shutil.copytree(write(project.materials, "deepseek_v3"), tmp_path / "model"))
    weights, layer = load_file(model / "model.safetensors"), torch.randn(3, 5).bfloat16()
    save_file(weights | {"model.layers.61.eh_proj.weight": layer}, model / "model.safetensors", metadata={"format": "pt"})
    project = mixture("deepseek_v3-more", {"model.name_or_path": str(model)})
    run_export(finetuned(project), tmp_path / "out", [], dtype="float32")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == weights.keys() | {"model.layers.61.eh_proj.weight"}
    assert torch.equal(found["model.layers.61.eh_proj.weight"], layer)


def test_transformers_misses_no_key_of_an_export(whole: WholeOf, materials: Path, tmp_path: Path) -> None:
    run = whole(usual(materials))
    assert run.losses[-1] < run.losses[0]
    run_export(run.store, tmp_path / "out", [], dtype="float32")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before = transformers.AutoModelForCausalLM.from_pretrained(write(materials, "qwen3_moe"))
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    assert all(moved)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_same_bits_after_a_stop(phase: str, mixture: NewProject, whole: WholeOf, materials: Path) -> None:
    undisturbed = whole(usual(materials))
    project = mixture("qwen3_moe-again", {"checkpoint.commit_every_steps": 1})
    stop(project, interrupt(3, phase))
    losses, store = train(project)
    assert losses == undisturbed.losses[-len(losses) :]
    assert [digest for *_, digest in sums(store)] == [digest for *_, digest in sums(undisturbed.store)]


FROZEN = {"freeze": ["model.layers.*.mlp.experts", "model.embed_tokens"]}


def test_frozen_experts_are_read_where_they_lie(mixture: NewProject, tmp_path: Path) -> None:
    """A copy in the store (of two drives) gives the same bits."""
    copied = mixture("qwen3_moe-two", FROZEN | {"offload.dir": [str(tmp_path / "a"), str(tmp_path / "b")]})
    assert not prepared_run(copied).planned.model.sources
    wanted, store = train(copied)
    project = mixture("qwen3_moe-there", FROZEN)
    ready = prepared_run(project)
    assert not ready.planned.model.imported_because
    losses, there = train(ready)
    assert losses == wanted
    trained = [{(n, d) for _, n, d in sums(one) if n not in ("frozen", "weights frozen")} for one in (there, store)]
    assert trained[0] and trained[0] <= trained[1]


def test_routers_can_be_frozen(mixture: NewProject) -> None:
    """By the pattern that the documentation gives."""
    project = mixture("qwen3_moe-routers", {"freeze": ["model.layers.*.mlp.gate"]})
    model = prepared_run(project).planned.model
    assert {t.name.split(".", 3)[-1] for s in model.stages for t in s.tensors if t.frozen} == {"mlp.gate.weight"}


def test_one_expert_can_be_frozen(mixture: NewProject) -> None:
    project = mixture("qwen3_moe-one", {"freeze": ["model.layers.0.mlp.experts.[1-2]"]})
    model = prepared_run(project).planned.model
    frozen = {t.name for s in model.stages for t in s.tensors if t.frozen}
    assert len(frozen) == 6 and all(".experts.1." in name or ".experts.2." in name for name in frozen)


# ---- adapters ------------------------------------------------------------------------------------------------------------

LORA: dict[str, Any] = {"adapter": {"r": 4, "target_modules": "all-linear"}}


@pytest.mark.parametrize("family", ["qwen3_moe", *every(4, ["gpt_oss", "deepseek_v3", "mixtral"])])
def test_peft_loads_an_adapter(family: str, mixture: NewProject, tmp_path: Path) -> None:
    """The same logits as fuyou's own, and as the merged model's."""
    peft = pytest.importorskip("peft", reason="peft comes with the extra lora")
    project = mixture(f"{family}-lora", LORA)
    store = finetuned(project)
    run_export(store, tmp_path / "adapter", [], dtype="float32")
    run_export(store, tmp_path / "merged", [], dtype="float32", merged=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(write(project.materials, family), dtype=torch.float32)
    ids = torch.arange(3, 23).view(1, -1)
    with torch.no_grad():
        before = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(input_ids=ids).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    assert (adapted - before).abs().max() > 1e-4
    assert torch.allclose(adapted, merged, atol=1e-5)


def test_an_expert_as_target_is_refused_by_name(mixture: NewProject) -> None:
    with pytest.raises(
        UsageError, match=r"peft takes these names for the experts of model\.layers\.0\.mlp\.experts"
    ) as refused:
        prepared_run(mixture("qwen3_moe-experts", {"adapter": {"target_modules": ["gate_proj", "up_proj", "down_proj"]}}))
    assert "adapter.experts=true" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("family", "kind", "number"),
    [
        ("qwen3_moe", "nf4", 2 * 4 * 3),
        *every(3, [("gpt_oss", "nf4", 2 * 2), ("granitemoe", "nf4", 2 * 2), ("gpt_oss", "int8", 2 * 2)]),
    ],
)
def test_experts_rest_quantised(family: str, kind: str, number: int, mixture: NewProject, tmp_path: Path) -> None:
    """Each matrix of an expert, or the matrices of all experts where a file has them in one tensor."""
    project = mixture(f"{family}-quantised", LORA | {"model.quantize": kind})
    ready = prepared_run(project)
    packed = [name for stage in ready.planned.model.stages for name in stage.packed()]
    experts = re.compile(r"\.experts\.")
    assert len(list(filter(experts.search, packed))) == number
    store = finetuned(project)
    run_export(store, tmp_path / "merged", [], dtype="float32", merged=True)
    base, found = _weights(write(project.materials, family)), _weights(tmp_path / "merged")
    for name in filter(experts.search, packed):
        assert torch.equal(found[name], decoded(kind, base[name].flatten(0, -2)).view(base[name].shape)), name
    assert streamed(store) == pytest.approx(in_memory(tmp_path / "merged"), rel=1e-5)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns every tensor by the name that it has in the files, and by that in the model."""
    held = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return held | transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def answer(source: Path) -> str:
    """What `fuyou generate` says."""
    said = io.StringIO()
    with pytest.raises(SystemExit) as ended, redirect_stdout(said):
        main(["generate", str(source), "--prompt", "The road", "--max-new-tokens", "12"])
    assert ended.value.code == 0 and said.getvalue().strip()
    return said.getvalue()


# ---- LoRA of experts -----------------------------------------------------------------------------------------------------

OF_EXPERTS: dict[str, Any] = {"adapter": {"r": 4, "lora_alpha": 12, "experts": True}, "optimizer.lr": 5e-3}


@pytest.mark.parametrize(
    ("family", "keys"),
    every(4, [("qwen3_moe", {}), ("mixtral", {"use_rslora": True}), ("deepseek_v3", {}), ("mixtral", {})]),
)
def test_peft_joins_what_experts_have(family: str, keys: dict[str, Any], mixture: NewProject, tmp_path: Path) -> None:
    """Keys are of each expert and matrix. Logits are those of the merged model, and of a run's store."""
    peft = pytest.importorskip("peft", reason="peft comes with the extra lora")
    project = mixture(f"{family}-x", {**OF_EXPERTS, "adapter": OF_EXPERTS["adapter"] | keys})
    store = finetuned(project)
    run_export(store, tmp_path / "adapter", [], dtype="float32")
    run_export(store, tmp_path / "merged", [], dtype="float32", merged=True)
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    own = "block_sparse_moe.experts.3.w1" if family == "mixtral" else "mlp.experts.3.gate_proj"  # what its files call it
    assert held[f"base_model.model.model.layers.1.{own}.lora_A.weight"].shape == (4, 64)
    assert sum(".experts." in name for name in held) == 4 * 6 * (1 if family == "deepseek_v3" else 2)
    assert all(float(value.abs().max()) > 0 for name, value in held.items() if ".experts." in name)
    base = transformers.AutoModelForCausalLM.from_pretrained(write(project.materials, family), dtype=torch.float32)
    ids = torch.arange(3, 23).view(1, -1)
    with torch.no_grad():
        before = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(input_ids=ids).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    assert (adapted - before).abs().max() > 1e-3
    assert torch.allclose(adapted, merged, atol=1e-5)
    assert streamed(store) == pytest.approx(in_memory(tmp_path / "merged"), rel=1e-5)
    assert answer(store) == answer(tmp_path / "merged")


def test_a_run_goes_on_from_an_adapter_of_experts(mixture: NewProject, tmp_path: Path) -> None:
    """What the recipe leaves out is as it was there; it begins where the other run ended, and resumes without it."""
    first = mixture("mixtral-first", {**OF_EXPERTS, "adapter": OF_EXPERTS["adapter"] | {"use_rslora": True}})
    store = finetuned(first)
    run_export(store, tmp_path / "adapter", [], dtype="float32")
    begun = {"adapter": {"from": str(tmp_path / "adapter")}, "optimizer.lr": 1e-60, "train.max_steps": 2}
    second = mixture("mixtral-second", begun)
    ready = prepared_run(second)
    recipe = ready.planned.recipe
    assert recipe.adapter is not None and recipe.adapter.experts and recipe.adapter.use_rslora
    assert set(recipe.adapter.target_modules) == {"q_proj", "k_proj", "v_proj", "o_proj"} and not recipe.adapter.alpha_pattern
    stop(ready, interrupt(1, "forward"))
    (tmp_path / "adapter").rename(tmp_path / "gone")
    store = finetuned(second)
    run_export(store, tmp_path / "again", [], dtype="float32")
    held, wanted = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("again", "gone"))
    assert held.keys() == wanted.keys() and all(torch.equal(held[name], wanted[name]) for name in wanted)


def test_another_adapter_of_experts_is_refused(mixture: NewProject, tmp_path: Path) -> None:
    from fuyou_cli.core.errors import UsageError

    store = finetuned(mixture("qwen3_moe-first", OF_EXPERTS))
    run_export(store, tmp_path / "adapter", [], dtype="float32")
    asked = {"from": str(tmp_path / "adapter"), "experts": False}
    with pytest.raises(UsageError, match=r"adapter\.experts is true there, false here"):
        prepared_run(mixture("qwen3_moe-second", {"adapter": asked}))


@pytest.mark.parametrize("quantize", [pytest.param("none", marks=pytest.mark.slow), "nf4"])
def test_frozen_experts_below_an_adapter_stay_where_they_are(quantize: str, mixture: NewProject) -> None:
    """In the model's own files, or in nf4; a run that was stopped has the same bits, and the plan counts what it reads."""
    changes = {**OF_EXPERTS, "model.quantize": quantize, "checkpoint.commit_every_steps": 1}
    whole, stopped = mixture(f"qwen3_moe-whole-{quantize}", changes), mixture(f"qwen3_moe-stopped-{quantize}", changes)
    ready = prepared_run(whole)
    model = ready.planned.model
    assert bool(model.sources) == (quantize == "none")
    packed = [name for stage in model.stages for name in stage.packed()]
    assert sum(".experts." in name for name in packed) == (2 * 4 * 3 if quantize == "nf4" else 0)
    trained = {tensor.name for stage in model.stages for tensor in stage.trained_tensors}
    assert sum(".experts." in name for name in trained) == 2 * 4 * 3 * 2
    wanted, store = train(ready)
    assert wanted[-1] < wanted[0]
    stop(stopped, interrupt(3, "backward"))
    losses, again = train(stopped)
    assert losses == wanted[-len(losses) :]
    assert sums(again) == sums(store)


# ---- what is not trained -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", *every(3, ["gpt_oss", "deepseek_v3"])])
def test_losses_of_files_and_of_a_run(family: str, mixture: NewProject, tmp_path: Path) -> None:
    """Weights partly on the drive, as transformers computes them."""
    project = mixture(f"{family}-lora", LORA)
    folder = write(project.materials, family)
    assert streamed(folder) == pytest.approx(in_memory(folder), rel=1e-6)
    store = finetuned(project)
    run_export(store, tmp_path / "merged", [], dtype="float32", merged=True)
    assert streamed(store) == pytest.approx(in_memory(tmp_path / "merged"), rel=1e-5)


def test_answers_as_transformers_does(materials: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, prompt = write(materials, "qwen3_moe"), "The road"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    wanted = tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :])
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(folder), "--prompt", prompt, "--max-new-tokens", "12"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == wanted.strip()


# ---- where tokens are sent -----------------------------------------------------------------------------------------------


def test_a_run_logs_where_its_tokens_are_sent(mixture: NewProject) -> None:
    """Of rows of unlike length, each token once for each of its two experts, and no padding. Evaluations count nothing."""
    keys = {"train.router_aux_loss": 0.1, "train.micro_batch_size": 1, "dataset.eval_fraction": 0.2, "eval.every_steps": 2}
    project = mixture("qwen3_moe-shares", keys)
    finetuned(project)
    records = [json.loads(line) for line in (project.out / "log.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    (last,) = (record for record in records if record["event"] == "experts")
    assert last["step"] == STEPS and list(last["sent"]) == ["layers.0", "layers.1"]
    assert [sum(counts) for counts in last["sent"].values()] == [2 * steps[-1]["batch_tokens"]] * 2
    spread = asdict(Spread.of(last["sent"]))
    assert steps[-1]["experts"] == spread and 0.5 < spread["entropy"] < 1 and spread["least"] < 1 < spread["most"]
    assert all(2 <= step["router_aux_loss"] < 4 for step in steps)  # 2 of 4 experts: 2 if all get as many
    assert not {"sent", "timeline"} & steps[0].keys()


def test_the_auxiliary_loss_is_of_the_rows_alone(mixture: NewProject) -> None:
    """That of transformers over the same rows, padded to one length."""
    project = mixture("qwen3_moe-rows", {"train.router_aux_loss": 0.1, "train.max_steps": 1, "lr_scheduler.warmup_steps": 0})
    ready = prepared_run(project)
    rows = [torch.tensor(ready.rows.tokens(index)).long() for index in ready.sampler.batch(0)]
    assert len({len(row) for row in rows}) > 1
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(write(project.materials, "qwen3_moe"), dtype=torch.float32)
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask, labels=ids, output_router_logits=True).aux_loss
    finetuned(project)
    (step,) = (one for one in map(json.loads, (project.out / "log.jsonl").open()) if one["event"] == "step")
    assert step["router_aux_loss"] == pytest.approx(float(wanted), rel=1e-6)


def test_a_coefficient_stays_that_of_the_run(mixture: NewProject) -> None:
    project = mixture("qwen3_moe-balanced", {"train.router_aux_loss": 0.5})
    written = project.recipe.read_text()
    train(project)
    project.recipe.write_text(written.replace("router_aux_loss: 0.5", "router_aux_loss: null"))
    told = r"its numerics changed since it was saved: train\.router_aux_loss was 0\.5, is null"
    with pytest.raises(UsageError, match=told) as refused:
        prepared_run(project)
    assert refused.value.hint is not None and "train.router_aux_loss=0.5" in refused.value.hint
    project.recipe.write_text(written)
    prepared_run(project)


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("deepseek_v3", {}, "transformers has no auxiliary loss for DeepseekV3ForCausalLM"),
        ("qwen3_moe", {"freeze": ["model.layers.*.mlp.gate"]}, "model.layers.0.mlp.gate is a router that does not learn"),
        ("qwen3_moe", LORA, "balances routers, but with `adapter` none of them learns"),
        ("qwen3_moe", {"train.sweep_tokens": 64}, "so a step takes one sweep"),
    ],
)
def test_an_auxiliary_loss_that_cannot_be_is_refused(
    family: str, changes: dict[str, Any], told: str, mixture: NewProject
) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        prepared_run(mixture(f"{family}-refused", {"train.router_aux_loss": 0.01, **changes}))
