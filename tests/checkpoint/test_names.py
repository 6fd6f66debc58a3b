"""Tests names: what a family declares is followed, every other difference is reported, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fuyou_cli.checkpoint.files import SINGLE_NAME, open_checkpoint
from fuyou_cli.checkpoint.names import entries_for, match, tied_names
from fuyou_cli.checkpoint.reader import TensorEntry
from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.skeleton import build

from .tiny_models import assert_same_bits, loaded, make_model, matched_entries, on_meta, read_all

TIED = {"lm_head.weight": "model.embed.weight"}
NAMES = {"model.embed.weight": (9, 4), "model.norm.weight": (4,), "lm_head.weight": (9, 4)}


def entry(name: str, shape: tuple[int, ...] = (9, 4), dtype: str = "float32") -> TensorEntry:
    size = 4
    for dimension in shape:
        size *= dimension
    return TensorEntry(name=name, file=Path("x"), dtype=dtype, shape=shape, begin=100, end=100 + size)


def entries(**changes: TensorEntry | None) -> dict[str, TensorEntry]:
    table = {name: entry(name, shape) for name, shape in NAMES.items()}
    for name, value in changes.items():
        table.pop(name.replace("__", "."), None)
        if value is not None:
            table[value.name] = value
    return table


def refusal(table: dict[str, TensorEntry], tied: dict[str, str] | None = None) -> UsageError:
    with pytest.raises(UsageError) as caught:
        match(NAMES, table, base_model_prefix="model", tied=tied or {})
    return caught.value


def test_identical_names() -> None:
    matched, _ = match(NAMES, entries(), base_model_prefix="model", tied={})
    assert {name: one.name for name, one in matched.items()} == {name: name for name in NAMES}
    assert list(matched) == list(NAMES)


def test_prefix_absent_in_the_file() -> None:
    table = {name: entry(name, shape) for name, shape in {"embed.weight": (9, 4), "norm.weight": (4,)}.items()}
    matched, _ = match(NAMES, table, base_model_prefix="model", tied=TIED)
    assert {name: one.name for name, one in matched.items()} == {
        "model.embed.weight": "embed.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "embed.weight",
    }


def test_prefix_absent_in_the_model() -> None:
    names = {"embed.weight": (9, 4), "norm.weight": (4,)}
    table = {f"model.{name}": entry(f"model.{name}", shape) for name, shape in names.items()}
    matched, _ = match(names, table, base_model_prefix="model", tied={})
    assert [one.name for one in matched.values()] == ["model.embed.weight", "model.norm.weight"]


@pytest.mark.parametrize("absent", ["lm_head__weight", "model__embed__weight"])
def test_tied_weights_stored_once_under_either_name(absent: str) -> None:
    table = entries(**{absent: None})
    matched, _ = match(NAMES, table, base_model_prefix="model", tied=TIED)
    assert matched["lm_head.weight"] is matched["model.embed.weight"]
    owner_only = {name: shape for name, shape in NAMES.items() if name != "lm_head.weight"}
    assert match(owner_only, table, base_model_prefix="model", tied=TIED)[0]["model.embed.weight"].shape == (9, 4)
    assert match(NAMES, table, base_model_prefix="model", tied=TIED)[1] == []


def test_tied_weights_stored_twice_are_a_pair_to_compare() -> None:
    table = entries()
    matched, copies = match(NAMES, table, base_model_prefix="model", tied=TIED)
    assert matched["lm_head.weight"].name == "model.embed.weight"
    assert [(one.name, other.name) for one, other in copies] == [("model.embed.weight", "lm_head.weight")]


def test_untied_weights_have_to_be_there() -> None:
    assert "1 missing: 'lm_head.weight'" in refusal(entries(lm_head__weight=None)).message


def test_reports_everything_at_once() -> None:
    table = entries(
        lm_head__weight=None,
        model__norm__weight=entry("model.norm.weight", (5,)),
        extra=entry("model.extra.weight"),
        twice=entry("embed.weight"),
    )
    message = refusal(table).message
    assert "1 missing: 'lm_head.weight'" in message
    assert "1 not part of this model: 'model.extra.weight'" in message
    assert "'model.norm.weight': [5] in the file, [4] needed" in message
    assert "'model.embed.weight' and 'embed.weight' both stand for 'model.embed.weight'" in message


def test_refuses_weights_that_cannot_be_trained() -> None:
    error = refusal(
        entries(
            model__norm__weight=entry("model.norm.weight", (4,), "int8"),
            q=entry("model.layers.0.q_proj.qweight", (4,), "int32"),
        )
    )
    assert "'model.norm.weight' is int8" in error.message
    assert "quantised" in str(error.hint)


def test_ignores_only_known_constants() -> None:
    constants = ["model.layers.0.self_attn.rotary_emb.inv_freq", "h.0.attn.bias", "h.0.attn.masked_bias"]
    table = entries() | {name: entry(name) for name in constants}
    assert list(match(NAMES, table, base_model_prefix="model", tied={})[0]) == list(NAMES)
    assert "'h.0.attn.c_attn.bias'" in refusal(entries() | {"h.0.attn.c_attn.bias": entry("h.0.attn.c_attn.bias")}).message
    names = {**NAMES, "h.0.attn.bias": (9, 4)}  # the same name as a real parameter is needed, not ignored
    with pytest.raises(UsageError, match=r"1 missing: 'h\.0\.attn\.bias'"):
        match(names, entries(), base_model_prefix="model", tied={})
    assert match(names, table, base_model_prefix="model", tied={})[0]["h.0.attn.bias"].name == "h.0.attn.bias"


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama", {}),
        ("llama_tied", {"lm_head.weight": "model.embed_tokens.weight"}),
        ("gpt2", {"lm_head.weight": "transformer.wte.weight"}),
        ("gemma", {"lm_head.weight": "model.embed_tokens.weight"}),
        ("gpt_neox", {}),
    ],
)
def test_tied_names_of_families(tmp_path: Path, family: str, tied: dict[str, str]) -> None:
    make_model(family).config.save_pretrained(tmp_path)
    assert tied_names(on_meta(tmp_path)) == tied


def save_as(model: transformers.PreTrainedModel, directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    model.config.save_pretrained(directory)
    contiguous = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / SINGLE_NAME, metadata={"format": "pt"})


def test_gpt2_as_it_is_on_the_hub(tmp_path: Path) -> None:
    """No prefix, no head, and the causal masks of old versions."""
    model = make_model("gpt2")
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_as(model, tmp_path, tensors)
    matched = matched_entries(tmp_path)
    assert matched["transformer.wte.weight"].name == matched["lm_head.weight"].name == "wte.weight"
    assert_same_bits(read_all(matched), model.state_dict())


def test_gpt_neox_under_the_old_name_of_its_head(tmp_path: Path) -> None:
    model = make_model("gpt_neox")
    tensors = {name.replace("lm_head.", "embed_out."): tensor for name, tensor in model.state_dict().items()}
    assert "embed_out.weight" in tensors
    save_as(model, tmp_path, tensors)
    matched = matched_entries(tmp_path)
    assert matched["lm_head.weight"].name == "embed_out.weight"
    assert_same_bits(read_all(matched), loaded(tmp_path, torch.float32).state_dict())


def test_tied_copies_have_to_be_equal(tmp_path: Path) -> None:
    model = make_model("llama_tied")
    tensors = dict(model.state_dict())
    save_as(model, tmp_path, tensors)
    assert_same_bits(read_all(matched_entries(tmp_path)), model.state_dict())
    tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 1
    save_as(model, tmp_path, tensors)
    with pytest.raises(UsageError, match=r"'model.embed_tokens.weight' and 'lm_head.weight' are tied .* but differ"):
        matched_entries(tmp_path)


def test_experts_kept_in_another_form_are_refused_by_name(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    stored = load_file(tmp_path / SINGLE_NAME)
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in stored
    with pytest.raises(UsageError, match=r"model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight"):
        matched_entries(tmp_path)


def test_another_models_configuration_is_refused(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    make_model("qwen3").config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"missing: 'model\.layers\.0\.self_attn\.q_norm\.weight'"):
        entries_for(on_meta(tmp_path), open_checkpoint(tmp_path))


def test_buffers_get_the_values_of_the_file(tmp_path: Path) -> None:
    model = make_model("llama", dtype=torch.bfloat16)
    skeleton = build(model.config, dtype="float32", attention="sdpa")
    for one in (model, skeleton):
        one.model.layers[1].register_buffer("scale", torch.ones(1, dtype=one.dtype))
    model.model.layers[1].scale.fill_(1 / 3)
    model.save_pretrained(tmp_path)
    assert "model.layers.1.scale" in entries_for(skeleton, open_checkpoint(tmp_path))
    assert skeleton.model.layers[1].scale.item() == torch.tensor(1 / 3, dtype=torch.bfloat16).item()
