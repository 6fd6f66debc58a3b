"""Exports of a store with an adapter beside peft's own: its files, and the merged model. The stores hold random weights.

Costs about 6 s of one core."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from proof.parsers import manifest

from fuyou_cli.adapters.adapter_names import base_name, config_text, file_name, is_added
from fuyou_cli.checkpoint.files import ADAPTER_CONFIG_NAME, ADAPTER_NAME
from fuyou_cli.core.errors import FuyouError, SwapError, UsageError
from fuyou_cli.core.units import align_up
from fuyou_cli.engine.skeleton import TORCH_DTYPE
from fuyou_cli.recipe.schema import AdapterSection
from fuyou_cli.swap.kernels import checksum, split
from fuyou_cli.training import exporting
from fuyou_cli.training.exporting import export_store
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.at_rest import saved_store
from fuyou_cli.training.state.manifest import StoredExtent, StoredStage, StoredTensor
from tests.damage import counted_reads
from tests.engine.families import FAMILIES

SECTIONS = {
    "plain": AdapterSection(r=4, modules_to_save=("lm_head",)),
    "tied": AdapterSection(r=3, target_modules=("c_attn", "h.0.mlp.c_proj")),
    "rslora": AdapterSection(r=4, use_rslora=True, lora_alpha=16, rank_pattern={r"h\.\d+\.attn\.\w+": 2}),
    "dora": AdapterSection(r=4, use_dora=True, alpha_pattern={r"[a-z.]*\.1\..*": 3}),
}
RELATIVE = {"float32": 1e-6, "bfloat16": 2**-8}  # of a merged weight to peft's in float32: one rounding


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Holds a store, what it began with, and peft's model with masters, in float32."""

    store: Path
    base: nn.Module
    model: PeftModel
    adapter: dict[str, torch.Tensor]  # masters, by their names in peft's files


def trained(folder: Path, family: str, section: str, dtype: str) -> Trained:
    """Makes a model with peft: `modules_to_save` as a run keeps it, B and magnitudes away from where they begin."""
    torch.manual_seed(3)
    config = FAMILIES[family]
    base = AutoModelForCausalLM.from_config(config, dtype=TORCH_DTYPE[dtype])
    torch.manual_seed(5)
    keys = SECTIONS[section].model_dump(exclude={"type"})
    keys["modules_to_save"] = list(keys["modules_to_save"]) or None
    model = peft.get_peft_model(base.float(), peft.LoraConfig(**keys))
    tensors, masters = {}, {}
    for name, parameter in model.base_model.model.named_parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.rand_like(parameter))
            masters[name.replace(".modules_to_save.default", "")] = parameter.data
        elif ".original_module" not in name:
            tensors[name] = parameter.data.to(TORCH_DTYPE[dtype])
    write_store(folder / "store", masters, tensors, dtype=dtype)
    beside = folder / "store" / manifests.COMPANIONS
    config.save_pretrained(beside)
    (beside / "tokenizer.json").write_text("{}")
    (beside / ADAPTER_CONFIG_NAME).write_bytes(config_text(model.peft_config["default"], base_model="owner/name"))
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_config(config, dtype=TORCH_DTYPE[dtype]).float()
    named = {file_name(name): value.clone() for name, value in masters.items()}
    return Trained(store=folder / "store", base=base, model=model, adapter=named)


def write_store(folder: Path, masters: dict[str, torch.Tensor], frozen: dict[str, torch.Tensor], *, dtype: str) -> None:
    """Writes a committed store of one stage, as a run leaves it that rests on one drive."""
    weights, remainder, first = packed(masters, dtype)
    bank, _, behind = packed(frozen, dtype, first=len(weights))
    parts = {"weights": weights, "frozen": bank, "remainder": remainder if dtype == "bfloat16" else None}
    folder.mkdir()
    content, extents = bytearray(), dict.fromkeys(("weights", "frozen", "remainder", "momentum", "variance"))
    for name, part in parts.items():
        if part is not None:
            data = part.view(torch.uint8).numpy().data
            extents[name] = StoredExtent(offset=len(content), size=len(data), sum=checksum(data, position=0))
            content += data
    (folder / "store.bin").write_bytes(content)
    stage = StoredStage(
        name="all", params=len(weights) + len(bank), trained=len(weights), generation=3, turn=0, zero_moments=True,
        zero_remainder=dtype == "float32", tensors=(*first, *behind), **extents,
    )  # fmt: skip
    whole = manifest()
    numerics = replace(whole.numerics, compute_dtype=dtype)
    manifests.write(folder, replace(
        whole, files=(str(folder / "store.bin"),), parts=(str(folder / "part.json"),), store_size=len(content),
        compute_dtype=dtype, numerics=numerics, stages=(stage,), untouched=None,
    ))  # fmt: skip


def packed(
    tensors: dict[str, torch.Tensor], dtype: str, *, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor, list[StoredTensor]]:
    """Packs a bank as weights and remainders, one after the other; `first`: where the bank begins in its stage."""
    offsets, end = {}, 0
    for name, tensor in tensors.items():
        offsets[name], end = end, align_up(end + tensor.numel(), 64)
    flat = torch.zeros(align_up(end, 2048))
    stored = []
    for name, tensor in tensors.items():
        flat[offsets[name] : offsets[name] + tensor.numel()] = tensor.reshape(-1)
        called = file_name(name) if is_added(name) else base_name(name).removeprefix("transformer.")
        stored.append(StoredTensor(
            name=name, stored_as=called, shape=tuple(tensor.shape), offset=first + offsets[name], first=0,
            count=tensor.numel(), decay=True,
        ))  # fmt: skip
    if dtype == "float32":
        return flat, flat, stored
    weights, remainder = torch.empty(len(flat), dtype=torch.int16), torch.empty(len(flat), dtype=torch.int16)
    split(flat.numpy().data, weights.numpy().data, remainder.numpy().data)
    return weights, remainder, stored


CASES = [
    ("llama", "plain", "bfloat16", "bfloat16"),
    ("gpt2", "tied", "float32", "bfloat16"),
    ("gpt2", "rslora", "bfloat16", "float32"),
    ("llama", "dora", "bfloat16", "bfloat16"),
    ("gpt2", "dora", "float32", "float32"),
]


@pytest.mark.parametrize(("family", "section", "computed", "dtype"), CASES)
def test_peft_loads_the_adapter_and_its_merge_is_ours(
    family: str, section: str, computed: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merges in pieces that begin and end within rows."""
    monkeypatch.setattr(exporting, "_AT_ONCE", 1000)
    run = trained(tmp_path, family, section, computed)
    (path,) = export_store(saved_store(run.store), tmp_path / "adapter", dtype=dtype, max_shard_size=1 << 30)
    assert sorted(file.name for file in path.parent.iterdir()) == [ADAPTER_CONFIG_NAME, ADAPTER_NAME, "tokenizer.json"]
    written = load_file(path)
    assert written.keys() == run.adapter.keys()
    for name, value in written.items():
        torch.testing.assert_close(value.float(), run.adapter[name], rtol=RELATIVE[dtype], atol=0, msg=name)
    loaded = PeftModel.from_pretrained(run.base, path.parent, is_trainable=True)
    trainable = {name for name, parameter in loaded.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, parameter in run.model.named_parameters() if parameter.requires_grad}

    export_store(saved_store(run.store), tmp_path / "merged", dtype=dtype, max_shard_size=1 << 15, merged=True)
    ours, told = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto", output_loading_info=True)
    assert not any(told.values()) and {value.dtype for value in ours.parameters()} == {TORCH_DTYPE[dtype]}
    theirs = (run.model if computed != dtype else loaded).merge_and_unload().state_dict()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value.float(), theirs[name], rtol=RELATIVE[dtype], atol=1e-7, msg=name)


@pytest.mark.parametrize("section", ["plain", "dora"])
def test_a_bit_flipped_on_its_way_is_not_exported(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging reads adapters out of order, and with DoRA matrices twice. A block may have bytes that are not asked for."""
    run = trained(tmp_path, "llama", section, "float32")
    reads = counted_reads(monkeypatch)

    def exported(name: str) -> bytes:
        (path,) = export_store(saved_store(run.store), tmp_path / name, dtype="float32", max_shard_size=1 << 30, merged=True)
        return path.read_bytes()

    whole, refused = exported("whole"), 0
    count = reads.seen
    for at in range(1, count + 1, 7):
        reads.seen, reads.at = 0, at
        try:
            assert exported("out") == whole, at
        except SwapError as error:
            assert "changed between two reads" in error.message or "are not what was written" in error.message
            refused += 1
    assert refused > count // 7 // 2


def test_an_adapter_without_its_configuration_is_not_exported_as_a_model(tmp_path: Path) -> None:
    run = trained(tmp_path, "llama", "plain", "float32")
    configuration = run.store / manifests.COMPANIONS / ADAPTER_CONFIG_NAME
    whole = configuration.read_text()
    for wrong, says in (
        ('{"lora_alpha": "much"}', "lora_alpha: expected a number"),
        (whole.replace('"alpha_pattern": {}', '"alpha_pattern": {"(?i)q": 2}'), "global flags"),
    ):
        configuration.write_text(wrong)
        with pytest.raises(UsageError, match=rf"adapter_config\.json: {says}"):
            export_store(saved_store(run.store), tmp_path / "out", dtype="float32", max_shard_size=1 << 30, merged=True)
    configuration.unlink()
    with pytest.raises(FuyouError, match=ADAPTER_CONFIG_NAME):
        export_store(saved_store(run.store), tmp_path / "out", dtype="float32", max_shard_size=1 << 30)
    assert not (tmp_path / "out").exists()
