"""Recipes with `model.quantize`: from a checkpoint to the losses of peft over decoded weights in memory.

Costs about 8 s of one core."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import every

from fuyou_cli.cli.stores import run_export
from fuyou_cli.core.errors import UsageError
from fuyou_cli.planner.schedule import plan_schedule, weights_left
from fuyou_cli.training.length import loaded
from fuyou_cli.training.prepare import Ready
from fuyou_cli.training.report import StepReport
from fuyou_cli.training.state import manifest as manifests
from tests.swap import quantised_reference as reference

from . import test_adapter_runs as adapter_runs
from .conftest import NewProject, Project, write_llama
from .running import interrupt, loaded_run, manifest_of, prepared_run, stop, store_of, sums, train

peft = pytest.importorskip("peft", reason="peft comes with the extra lora")

FORMATS = {"nf4": {}, "nf4_double": {"model.double_quant": True}, "int8": {}}


@pytest.fixture(scope="session")
def odd_llama(materials: Path) -> Path:
    """Makes a model whose matrices end within a block of 64."""
    return write_llama(materials, "odd-llama", hidden_size=40, intermediate_size=52)


@pytest.fixture
def qlora(new_project: NewProject, odd_llama: Path) -> NewProject:
    """Gives qlora(format, name, {dotted key: value}), a project that trains an adapter over quantised weights."""

    def make(kind: str, name: str = "project", changes: dict[str, Any] | None = None) -> Project:
        usual = {
            "model.name_or_path": str(odd_llama), "model.quantize": kind.removesuffix("_double"), **FORMATS[kind],
            "adapter": {"r": 4}, "precision": {"compute": "float32"}, "train.max_steps": adapter_runs.STEPS,
            "export.at_end": False, "offload.optimizer_states": "cpu", "offload.gradients": "cpu",
        }  # fmt: skip
        return new_project(name, usual | (changes or {}))

    return make


def decoded(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """Returns what the format has of a weight, by the reference."""
    values = weight.detach().float().numpy()
    if kind == "int8":
        codes, maxima = reference.int8(values.astype(np.float16).astype(np.float32))
        found = reference.int8_values(codes, maxima)
    else:
        packed, maxima = reference.nf4(values.reshape(-1))
        if kind == "nf4_double":
            from fuyou_cli.swap.kernels import dynamic_levels

            mean, levels = torch.from_numpy(maxima).mean().numpy(), dynamic_levels()
            codes, outer = reference.dynamic(maxima - mean, levels)
            maxima = levels[codes] * np.repeat(outer, 256)[: codes.size] + mean
        found = reference.nf4_values(packed, maxima, values.size)
    return torch.from_numpy(found).view(weight.shape)


def with_decoded(kind: str, model: Any, *, blocks: slice = slice(None)) -> Any:
    for block in model.model.layers[blocks]:
        for module in block.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = decoded(kind, module.weight)
    return model


def by_peft(kind: str, ready: Ready) -> list[float]:
    """The losses of the same steps in memory, over decoded weights."""
    recipe = ready.planned.recipe
    assert recipe.adapter is not None
    keys = recipe.adapter.model_dump(exclude={"type"}) | {"modules_to_save": None}
    torch.manual_seed(recipe.seed)
    model = peft.get_peft_model(with_decoded(kind, adapter_runs.base_of(ready)), peft.LoraConfig(task_type="CAUSAL_LM", **keys))
    return list(adapter_runs.steps_in_memory(ready, model.train()))


def by_bitsandbytes(kind: str, ready: Ready) -> tuple[list[float], dict[str, list[np.ndarray]]]:
    """The losses of peft over the library's own layers, and the parts of their weights as the library packs them."""
    bnb = pytest.importorskip("bitsandbytes", reason="what fuyou reads and writes is compared with the library where it is")
    recipe = ready.planned.recipe
    assert recipe.adapter is not None
    model, parts = adapter_runs.base_of(ready), dict[str, list[np.ndarray]]()
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            parent, _, last = name.rpartition(".")
            size = {"bias": False, "input_features": module.in_features, "output_features": module.out_features}
            if kind == "int8":
                new = bnb.nn.Linear8bitLt(**size, has_fp16_weights=False)
                new.weight = bnb.nn.Int8Params(module.weight.data, requires_grad=False, has_fp16_weights=False).to("cpu")
                found = [new.weight.SCB, new.weight.CB]
            else:
                double = kind == "nf4_double"
                new = bnb.nn.LinearNF4(**size, compress_statistics=double)
                new.weight = bnb.nn.Params4bit(
                    module.weight.data, requires_grad=False, compress_statistics=double, quant_type="nf4"
                ).to("cpu")
                state = new.weight.quant_state
                outer = [state.offset.reshape(1), state.state2.absmax] if double else []
                found = [*outer, state.absmax, new.weight.data]
            setattr(model.get_submodule(parent), last, new)
            parts[f"{name}.weight"] = [part.detach().contiguous().reshape(-1).view(torch.uint8).numpy() for part in found]
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind != "int8", kind == "int8"
    torch.manual_seed(recipe.seed)
    keys = recipe.adapter.model_dump(exclude={"type"}) | {"modules_to_save": None}
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **keys)).train()
    return list(adapter_runs.steps_in_memory(ready, model)), parts


@pytest.mark.parametrize(
    ("kind", "device", "dora"), every(3, [("nf4_double", "emulated", True), ("nf4", "cpu", True), ("int8", "cpu", False)])
)
def test_losses_are_those_of_peft_over_decoded_weights(kind: str, device: str, dora: bool, qlora: NewProject) -> None:
    project = qlora(kind, changes={"offload.device": device, "adapter": {"r": 4, "use_dora": dora}})
    wanted = by_peft(kind, ready := prepared_run(project))
    losses, _ = train(ready)
    assert losses == pytest.approx(wanted, rel=1e-6)
    assert losses[-1] < losses[0]


def test_frozen_blocks_rest_quantised_below_trained_ones(qlora: NewProject) -> None:
    frozen = ("model.embed_tokens", "model.layers.0")
    project = qlora("nf4", changes={"adapter": None, "freeze": list(frozen)})
    ready = prepared_run(project)
    model = with_decoded("nf4", adapter_runs.base_of(ready).train(), blocks=slice(0, 1))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    wanted = list(adapter_runs.steps_in_memory(ready, model))
    losses, store = train(ready)
    assert losses == pytest.approx(wanted, rel=1e-6) and losses[-1] < losses[0]
    saved = manifests.read(store)
    assert saved is not None and [stage.name for stage in saved.stages if stage.quantised] == ["layers.0"]


def test_a_stopped_run_continues_with_the_same_bits(qlora: NewProject) -> None:
    """Stops in bfloat16 on a device, and with the adapter on the ssd, so that slots hold trained weights too."""
    kind = "nf4_double"
    changes = {
        "precision.compute": "bfloat16", "offload.device": "emulated", "offload.optimizer_states": "ssd",
        "offload.gradients": "ssd",
    }  # fmt: skip
    whole, stopped = qlora(kind, "whole", changes), qlora(kind, "stopped", changes)
    wanted, store = train(whole)
    stop(stopped, interrupt(3, "backward"))
    losses, again = train(stopped)
    assert losses == wanted
    assert sums(again) == sums(store) and manifest_of(stopped).step == adapter_runs.STEPS


def test_a_store_is_not_opened_as_another_format(qlora: NewProject) -> None:
    project = qlora("nf4", changes={"train.max_steps": 2})
    train(project)
    for number, other in enumerate([{"model.double_quant": True}, {"model.quantize": "int8"}, {"model.quantize": "none"}]):
        changed = qlora("nf4", f"other-{number}", {"train.max_steps": 2, "output_dir": str(project.out), **other})
        with pytest.raises(UsageError, match=r"model\.(quantize was nf4|double_quant was false), is "):
            prepared_run(changed)


@pytest.mark.parametrize(("kind", "most"), every(2, [("nf4", 1.2), ("int8", 2.3)]))
def test_a_step_reads_what_rests_and_writes_nothing(kind: str, most: float, qlora: NewProject) -> None:
    """Reads a weight forward and backward. most: bytes of it in a step, with the scales and padding of these tiny blocks."""
    changes = {"checkpoint.commit_every_steps": 100, "train.clip_grad_norm": None}
    changes["dataset.packing"] = "concat"  # whole rows: others move what they have, a plan what a typical step has
    moved = list[tuple[int, int]]()
    with loaded_run(qlora(kind, changes=changes)) as run:
        assert run.daemon.counters().written_bytes == loaded(run.plan)

        def look(report: StepReport) -> None:
            counted = run.daemon.counters()
            moved.append((counted.read_bytes, counted.written_bytes))

        run.train(look)
        model, plan, in_all = run.model, run.plan, run.daemon.counters().read_bytes
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(moved[1:-1])]
    boundaries = plan.predicted.read_by["boundaries"]
    others = sum(stage.frozen_weight_bytes - stage.packed_bytes for stage in model.stages)
    for read, written in steps:
        assert written == plan.predicted.written_by["boundaries"]
        of_blocks = read - boundaries - 2 * others
        assert of_blocks <= most * model.quantised_parameters
    # In all: a look at a step's end may fall before or after what is fetched for the next one, but nothing follows the last.
    of_first = weights_left(model, plan, plan_schedule(model, plan).visits)
    assert in_all == len(moved) * plan.predicted.read_per_step + of_first


def test_the_command_merges_into_decoded_weights(qlora: NewProject, tmp_path: Path) -> None:
    """The adapter loads in peft over what the run computed with; merged, each weight is rounded once."""
    import transformers

    kind = "nf4_double"
    exported = {"at_end": True, "dtype": "float32"}
    project = qlora(kind, changes={"export": exported, "train.max_steps": 3, "adapter": {"r": 4, "use_dora": True}})
    ready = prepared_run(project)
    project.done("finetune", project.recipe)
    base = with_decoded(kind, adapter_runs.base_of(ready))
    merged = peft.PeftModel.from_pretrained(base, project.out / "adapter").merge_and_unload().state_dict()
    run_export(store_of(project), tmp_path / "merged", [], dtype="bfloat16", merged=True)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value.float(), merged[name], rtol=2**-8, atol=1e-7)


def test_nothing_to_quantise_is_one_error(new_project: NewProject) -> None:
    project = new_project(changes={"model.quantize": "nf4", "adapter": {"r": 4}})
    with pytest.raises(UsageError, match=r"model\.quantize: the blocks of GPT2LMHeadModel have no frozen matrix") as caught:
        prepared_run(project)
    assert "a Conv1D is never quantised" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("kind", "dora"), every(2, [*((kind, False) for kind in FORMATS), ("nf4", True), ("nf4_double", True)])
)  # peft's DoRA over the library's int8 layers fails on a CPU
def test_bytes_and_losses_are_those_of_bitsandbytes(kind: str, dora: bool, qlora: NewProject) -> None:
    project = qlora(kind, changes={"adapter": {"r": 4, "use_dora": dora}, "train.max_steps": 20})
    wanted, parts = by_bitsandbytes(kind, ready := prepared_run(project))
    losses, store = train(ready)
    assert losses == pytest.approx(wanted, rel=1e-3)
    saved, content = manifests.read(store), (store / "store.bin").read_bytes()
    assert saved is not None and saved.quantisation == kind
    for stage in saved.stages:
        if not stage.quantised:
            continue
        assert stage.frozen is not None
        bank = stage.frozen.offset + 4 * (stage.params - stage.trained - stage.quantised)
        for name, at in stage.packed(saved.quantisation)[0].items():
            for (begin, size), part in zip(
                [part for part in (at.mean, at.outer, at.maxima, at.codes) if part[1]],
                parts[name.replace(".base_layer", "")],
                strict=True,
            ):
                assert content[bank + begin : bank + begin + size] == part.tobytes(), name
