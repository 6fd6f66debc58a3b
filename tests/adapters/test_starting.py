"""Tests what a saved adapter must be for a run to start from it: every other one is refused with what to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuyou_cli.adapters.injection import inject
from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.skeleton import build
from fuyou_cli.recipe.schema import AdapterSection
from fuyou_cli.training.adapting import keys_of, read_start, tensors_of, with_keys
from tests.engine.families import FAMILIES

from .test_peft import by_peft, plain

KEYS = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Makes the folder of an adapter as peft saves it."""
    by_peft(plain("llama"), AdapterSection(**KEYS)).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def _asked(folder: Path, **changes: Any) -> AdapterSection:
    return AdapterSection(**{**KEYS, "from": str(folder), **changes})


def _tensors(section: AdapterSection, family: str = "llama") -> Any:
    model = build(FAMILIES[family], dtype="float32", attention="sdpa")
    inject(model, section)
    return tensors_of(read_start(section), model)


def _rewrite(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_every_trained_parameter_is_found_by_its_own_name(saved: Path) -> None:
    found, held = _tensors(_asked(saved, lora_dropout=0.1)), load_file(saved / "adapter_model.safetensors")
    assert len(found) == len(held) and all(name.endswith(".default.weight") for name in found)
    assert {entry.name: entry.shape for entry in found.values()} == {key: tuple(v.shape) for key, v in held.items()}
    saved.rename(saved.with_name("adapter"))  # where an output_dir has it
    assert _tensors(_asked(saved.parent)).keys() == found.keys()


@pytest.mark.parametrize(("changes", "says", "write"), [
    ({"r": 8}, "adapter.r is 4 there, 8 here", "adapter.r=4"),
    ({"lora_alpha": 4}, "adapter.lora_alpha is 16 there, 4 here", "adapter.lora_alpha=16,"),
    ({"use_dora": True}, "adapter.use_dora is false there, true here", "adapter.use_dora=false"),
    ({"use_rslora": True, "r": 2}, "r is 4 there, 2 here; adapter.use_rslora is false", "adapter.r=4 adapter.use_rslora=false"),
    ({"modules_to_save": ["lm_head"]}, 'modules_to_save is [] there, ["lm_head"] here', "'adapter.modules_to_save=[]'"),
    ({"rank_pattern": {"q_proj": 2}}, 'rank_pattern is {} there, {"q_proj": 2} here', "adapter.rank_pattern=null"),
    ({"target_modules": "all-linear"}, "which the recipe trains", '\'adapter.target_modules=["q_proj", "v_proj"]\''),
    ({"target_modules": ["q_proj"]}, "which the recipe does not train", '\'adapter.target_modules=["q_proj", "v_proj"]\''),
])  # fmt: skip
def test_another_kind_is_refused_with_what_to_write(changes: dict[str, Any], says: str, write: str, saved: Path) -> None:
    with pytest.raises(UsageError) as refused:
        _tensors(_asked(saved, **changes))
    assert says in refused.value.message and write in str(refused.value.hint)
    assert "adapter.from: " in refused.value.message and refused.value.exit_code == 2


@pytest.mark.parametrize(("changes", "says"), [
    ({"bias": "all"}, "bias is 'all', which fuyou does not train"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"init_lora_weights": "pissa_niter_4"}, "it belongs to weights that it has changed itself"),
    ({"r": "4"}, "r: expected a whole number"),
    ({"lora_alpha": 16.5}, "adapter.lora_alpha is 16.5 there, 16 here"),
    ({"lora_alpha": float("inf")}, "adapter_config.json"),
    ({"modules_to_save": "lm_head"}, "modules_to_save: expected a list"),
    ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern.q_proj: expected a whole number"),
    ({"r": 10**400}, "a number has 401 digits"),
], ids=lambda one: str(one)[:40])  # fmt: skip
def test_what_strangers_may_have_written(changes: dict[str, Any], says: str, saved: Path) -> None:
    _rewrite(saved, **changes)
    with pytest.raises(UsageError) as refused:
        read_start(_asked(saved))
    assert says in refused.value.message and refused.value.hint and len(refused.value.message) < 600


def test_files_that_are_not_there_or_not_an_adapter(saved: Path, tmp_path: Path) -> None:
    weights = saved / "adapter_model.safetensors"
    with pytest.raises(UsageError, match=r"adapter\.from: there is no adapter_config\.json in .*/none"):
        read_start(_asked(tmp_path / "none"))
    held = weights.read_bytes()
    weights.write_bytes(held[:100])
    with pytest.raises(UsageError, match="not a valid safetensors file"):
        _tensors(_asked(saved))
    weights.rename(saved / "adapter_model.bin")
    with pytest.raises(UsageError, match=r"has only adapter_model\.bin, which can run code") as refused:
        read_start(_asked(saved))
    assert "safetensors" in str(refused.value.hint)
    (tmp_path / "outside.safetensors").write_bytes(held)
    weights.symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(UsageError, match="lies outside the directory"):
        read_start(_asked(saved))
    (saved / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"adapter_config\.json"):
        read_start(_asked(saved))


def test_an_adapter_of_another_model_is_refused_by_its_shapes(saved: Path) -> None:
    file = saved / "adapter_model.safetensors"
    held = load_file(file)
    name = next(name for name in held if name.endswith("lora_A.weight"))
    save_file({**held, name: torch.zeros(4, 8)}, file)
    with pytest.raises(UsageError, match=r"is \(4, 8\), but \(4, \d+\) for the recipe's model") as refused:
        _tensors(_asked(saved))
    assert "model.name_or_path" in str(refused.value.hint)


def test_what_a_recipe_leaves_out_is_as_the_adapter_has_it(saved: Path) -> None:
    """And what it says is compared with that one."""
    alone = AdapterSection(**{"from": str(saved)})
    filled = with_keys(alone, keys_of(alone))
    assert (filled.r, filled.lora_alpha, filled.target_modules) == (4, 16, ("q_proj", "v_proj"))
    assert _tensors(filled).keys() == _tensors(_asked(saved)).keys()
    other = AdapterSection(**{"from": str(saved), "r": 8})
    with pytest.raises(UsageError, match=r"another kind than the recipe's adapter: adapter\.r is 4 there, 8 here$"):
        read_start(with_keys(other, keys_of(other)))
    _rewrite(saved, lora_alpha=12.5, lora_dropout=0.25)
    with pytest.raises(UsageError, match=r"adapter\.from: .*lora_alpha: ") as refused:
        with_keys(alone, keys_of(alone))
    assert "write adapter.lora_alpha" in str(refused.value.hint)
    stated = AdapterSection(**{"from": str(saved), "lora_alpha": 12})
    assert with_keys(stated, keys_of(stated)).lora_dropout == 0.25
