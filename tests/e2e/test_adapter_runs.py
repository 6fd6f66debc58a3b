"""Tests recipes with `adapter`: from the command to the losses of peft in memory, and to the same bits after a stop."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn import every
from safetensors.torch import load_file

from fuyou_cli.cli.finetune import run_finetune
from fuyou_cli.cli.stores import run_export
from fuyou_cli.core.errors import UsageError
from fuyou_cli.data.batches import collate
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.exporting import AdapterWeights, stored_weights
from fuyou_cli.training.length import learning_rate, loaded
from fuyou_cli.training.prepare import Ready
from fuyou_cli.training.state.at_rest import saved_store

from .conftest import CommandIn, NewProject, Project, WholeOf
from .running import interrupt, loaded_run, manifest_of, prepared_run, stop, store_of, sums, train
from .test_inference import losses_of, streamed

peft = pytest.importorskip("peft", reason="peft comes with the extra lora")

STEPS = 4


@pytest.fixture
def lora(new_project: NewProject, llama: Path) -> NewProject:
    """Gives lora(name, {dotted key: value}), a project that trains an adapter of the Llama in float32."""

    def make(name: str = "project", changes: dict[str, Any] | None = None) -> Project:
        usual = {
            "model.name_or_path": str(llama), "adapter": {"r": 4}, "precision": {"compute": "float32"},
            "train.max_steps": STEPS, "export.at_end": False,
        }  # fmt: skip
        return new_project(name, usual | (changes or {}))

    return make


def by_peft(ready: Ready, *, began: bool = True) -> list[float]:
    """The losses of the same steps in memory. began: with all keys; else with a new adapter, wherever it starts."""
    recipe = ready.planned.recipe
    assert recipe.adapter is not None
    keys = recipe.adapter.model_dump(exclude={"type"} if began else {"type", "start"}) | {
        "modules_to_save": list(recipe.adapter.modules_to_save) or None
    }
    torch.manual_seed(recipe.seed)
    model = peft.get_peft_model(base_of(ready), peft.LoraConfig(task_type="CAUSAL_LM", **keys)).train()
    return list(steps_in_memory(ready, model))


def base_of(ready: Ready) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(ready.planned.model_dir, dtype=torch.float32)


def steps_in_memory(
    ready: Ready, model: Any, *, first: int = 0, rate: Callable[[int], float] | None = None,
    before: tuple[int, Mapping[str, Any]] = (0, {}),
) -> Iterator[float]:  # fmt: skip
    """The losses of the steps after the first ones. AdamW has seen none. rate: of each step; None: the recipe's; before: of so
    many steps, the recipe's keys as they were then."""
    recipe, numerics = ready.planned.recipe, ready.planned.plan.numerics
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [[p for p in trained if (p.dim() > 1) is decayed] for decayed in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": recipe.optimizer.weight_decay}, {"params": groups[1], "weight_decay": 0.0}],
        betas=recipe.optimizer.betas, eps=recipe.optimizer.eps,
    )  # fmt: skip
    rate = rate or learning_rate(recipe, ready.planned.total_steps).at
    for step in range(first, ready.planned.total_steps):
        batch = collate(ready.rows, ready.sampler.batch(step), pad_id=ready.rows.summary.pad_id, max_len=numerics.max_seq_len)
        ids, labels = batch.tensors()
        counted, whole = int((labels[:, 1:] != -100).sum()), 0.0
        for some in range(0, len(ids), numerics.micro_batch_size):
            here = slice(some, some + numerics.micro_batch_size)
            logits = model(input_ids=ids[here]).logits[:, :-1].float()
            loss = (
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[here, 1:].flatten(), reduction="sum") / counted
            )
            loss.backward()
            whole += loss.item()
        yield whole
        torch.nn.utils.clip_grad_norm_(trained, recipe.train.clip_grad_norm)
        steps, keys = before
        for group, decayed in zip(optimizer.param_groups, (True, False), strict=True):
            at = recipe.settings() if step >= steps else keys
            decay = at["optimizer.weight_decay"] if decayed else 0.0
            group.update(lr=rate(step + 1), eps=at["optimizer.eps"], weight_decay=decay)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("adapter", "tier"),
    every(2, [({"r": 4, "use_dora": True, "lora_alpha": 16, "modules_to_save": ["lm_head"]}, "ssd"), ({"r": 4}, "cpu")]),
    ids=["dora", "plain"],
)
def test_losses_are_those_of_peft_in_memory(adapter: dict[str, Any], tier: str, lora: NewProject) -> None:
    """Puts the adapter with its gradients and states on `tier`; the model's weights are on the ssd."""
    project = lora(changes={"adapter": adapter, "offload.optimizer_states": tier, "offload.gradients": tier})
    wanted = by_peft(ready := prepared_run(project))
    losses, _ = train(ready)
    assert losses == pytest.approx(wanted, rel=1e-6)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("dtype", "tier"), every(2, [("float32", "ssd"), ("bfloat16", "cpu")]))
def test_a_stopped_run_continues_with_the_same_bits(dtype: str, tier: str, lora: NewProject) -> None:
    """Stops with dropout and DoRA in backward, where the step has begun to sum gradients. tier: where the adapter rests with
    its gradients and states."""
    changes = {
        "adapter": {"r": 4, "lora_dropout": 0.1, "use_dora": True}, "precision.compute": dtype,
        "offload.optimizer_states": tier, "offload.gradients": tier, "train.sweep_tokens": 96,
    }  # fmt: skip
    whole, stopped = lora("whole", changes), lora("stopped", changes)
    wanted, store = train(whole)
    stop(stopped, interrupt(3, "backward"))
    losses, again = train(stopped)
    assert losses == wanted
    assert sums(again) == sums(store) and manifest_of(stopped).step == STEPS


def test_a_saved_run_keeps_its_adapter(lora: NewProject) -> None:
    project = lora(changes={"train.max_steps": 2})
    train(project)
    other = lora("other", {"train.max_steps": 2, "adapter": {"r": 8}, "output_dir": str(project.out)})
    with pytest.raises(UsageError, match=r"the adapter \(adapter\) changed"):
        prepared_run(other)


@pytest.mark.usefixtures("untuned")
def test_the_command_exports_what_peft_loads_and_goes_on_with(lora: NewProject, tmp_path: Path, command: CommandIn) -> None:
    """The loss of the next step is that of the run itself, had it gone on."""
    constant = {"lr_scheduler": {"name": "constant", "warmup_steps": 0}}
    longer = lora("longer", constant | {"train.max_steps": STEPS + 1})
    ready = prepared_run(longer)
    wanted, _ = train(longer)
    project = lora(changes=constant | {"export": {"at_end": True, "dtype": "float32"}})
    code, out, err = command(project)("finetune", "recipe.yaml")
    assert code == 0, err
    folder = project.out / "adapter"
    assert f"exported to {folder} in float32" in out
    assert f"model = PeftModel.from_pretrained(base, {str(folder)!r})" in err
    loaded = peft.PeftModel.from_pretrained(base_of(ready), folder, is_trainable=True)
    assert next(steps_in_memory(ready, loaded, first=STEPS)) == pytest.approx(wanted[STEPS], rel=1e-6)

    model = peft.PeftModel.from_pretrained(base_of(ready), folder).merge_and_unload()
    assert streamed(store_of(project)) == pytest.approx(losses_of(model), rel=1e-6)
    merged = model.state_dict()
    run_export(store_of(project), tmp_path / "merged", [], dtype="bfloat16", merged=True)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value.float(), merged[name], rtol=2**-8, atol=1e-7)


@pytest.mark.parametrize(
    "adapter", every(2, [{"r": 4}, {"r": 4, "use_dora": True, "lora_alpha": 16, "modules_to_save": ["lm_head"]}]),
    ids=["plain", "dora"],
)  # fmt: skip
@pytest.mark.usefixtures("untuned")
def test_a_run_starts_from_the_adapter_of_another(adapter: dict[str, Any], lora: NewProject) -> None:
    """Its losses are those of peft that goes on with it, and it resumes when that adapter is gone."""
    dtypes = {"adapter": adapter, "export": {"at_end": True, "dtype": "float32"}}
    first = lora("first", {**dtypes, "train.max_steps": 3, "optimizer.lr": 0.02})
    run_finetune(load_recipe(first.recipe))
    second = lora("second", {"adapter": {"from": str(first.out)}, "seed": 7})  # what it leaves out is as it was
    ready = prepared_run(second)
    began = peft.PeftModel.from_pretrained(base_of(ready), first.out / "adapter", is_trainable=True).train()
    wanted = list(steps_in_memory(ready, began))
    assert wanted[0] != pytest.approx(by_peft(ready, began=False)[0], rel=1e-4), "it makes a difference"
    stop(second, interrupt(4, "forward"))
    shutil.rmtree(first.out)
    losses, store = train(second)
    assert losses == pytest.approx(wanted, rel=1e-6)
    names = {tensor.stored_as for stage in manifest_of(second).stages for tensor in stage.tensors}
    assert "lm_head.weight" in names, "the names of the model's checkpoint, for a merged export"
    assert len(streamed(store)) == 2
    other = lora("other", {"adapter": {**adapter, "from": "elsewhere"}, "seed": 7, "output_dir": str(second.out)})
    with pytest.raises(UsageError, match=r"adapter\.from was .*, is elsewhere"):
        prepared_run(other)


def test_a_run_starts_from_what_peft_saves_in_bfloat16(lora: NewProject, llama: Path, tmp_path: Path) -> None:
    """A float32 adapter keeps its bits in the masters of a bfloat16 run."""
    torch.manual_seed(5)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(llama), config).save_pretrained(tmp_path / "saved")
    adapter = {"r": 4, "target_modules": ["q_proj", "down_proj"], "from": str(tmp_path / "saved")}
    project = lora(changes={"adapter": adapter, "precision": {"compute": "bfloat16"}})
    stop(project, interrupt(1, "forward"))
    with stored_weights(saved_store(store_of(project)), dtype="float32", say=None, trained_only=True) as weights:
        kept = AdapterWeights(weights)
        held = {one.name: (bytearray(kept.read(one, 0, one.numel)), one.shape) for one in kept.tensors()}
    ours = {name: torch.frombuffer(values, dtype=torch.float32).view(shape) for name, (values, shape) in held.items()}
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert saved.keys() == ours.keys() and all(torch.equal(saved[name], ours[name]) for name in saved)


def test_a_missing_start_is_only_a_note_of_a_plan(lora: NewProject, command: CommandIn) -> None:
    project = lora(changes={"adapter": {"r": 4, "from": "nowhere"}})
    code, out, err = command(project)("plan", "recipe.yaml")
    missing = "adapter.from: there is no adapter_config.json in nowhere"
    assert code == 0 and f"{missing}. A run would be refused" in " ".join(f"{out} {err}".split())
    with pytest.raises(UsageError, match=missing):
        prepared_run(project)


@pytest.mark.usefixtures("untuned")
def test_an_output_folder_with_an_adapter_whose_store_lies_elsewhere(
    lora: NewProject, tmp_path: Path, command: CommandIn
) -> None:
    """Its model is that of the store, merged; so is what is exported."""
    project = lora(changes={"train.max_steps": 2, "export.at_end": True, "offload.dir": "drive"})
    fuyou = command(project)
    assert fuyou("finetune", "recipe.yaml")[0] == 0
    ready = prepared_run(project)
    loaded = peft.PeftModel.from_pretrained(base_of(ready), project.out / "adapter")
    wanted = losses_of(loaded.merge_and_unload())
    for source in (project.out, project.out / "adapter"):
        assert streamed(source) == pytest.approx(wanted, rel=1e-3), source  # exported in bfloat16
    assert streamed(project.out) == streamed(store_of(project))
    code, _, err = fuyou("export", str(project.out), str(tmp_path / "merged"), "--merged")
    assert code == 0, err
    assert streamed(tmp_path / "merged") == pytest.approx(streamed(project.out), rel=1e-6)


def test_a_model_is_not_merged(whole: WholeOf, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds a model and no adapter"):
        run_export(whole().store, tmp_path / "out", [], dtype=None, merged=True)
    assert not (tmp_path / "out").exists()


def test_the_plan_counts_what_loading_writes(lora: NewProject) -> None:
    """Counts frozen weights too, and no more than the adapter for the export."""
    ready = prepared_run(lora())
    with loaded_run(ready) as run:
        assert run.daemon.counters().written_bytes == loaded(run.plan)
    assert ready.planned.plan.predicted.export_bytes == 4 * ready.planned.model.trained_parameters


def test_without_peft_one_error_names_the_extra(lora: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuyou_cli.training.adapting.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="the package peft is not installed") as caught:
        prepared_run(lora())
    assert "fuyou[lora]" in str(caught.value.hint)


def test_states_on_a_device(lora: NewProject) -> None:
    """Loads a stage that rests there in parts; losses are those of states in RAM."""
    losses = []
    for name, tier in (("there", "gpu"), ("ram", "cpu")):
        changes = {
            "adapter": {"r": 4, "use_dora": True}, "offload.device": "emulated", "offload.optimizer_states": tier,
            "offload.weights": "auto", "offload.gradients": "auto", "train.max_steps": 3,
        }  # fmt: skip
        losses.append(train(lora(name, changes))[0])
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("held", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("use_dora", every(2, [False, True]))
def test_a_merged_export_in_float32_has_the_values_of_the_models_files(
    held: torch.dtype, use_dora: bool, lora: NewProject, llama: Path, tmp_path: Path
) -> None:
    """As peft merges into the model in float32, though the run computed in bfloat16."""
    model, of = tmp_path / "held", transformers.AutoModelForCausalLM.from_pretrained
    of(llama, dtype=held).save_pretrained(model)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / file, model)
    changes = {"adapter": {"r": 4, "use_dora": use_dora}, "precision": {"compute": "bfloat16"}, "train.max_steps": 2}
    project = lora("project", {**changes, "model.name_or_path": str(model), "optimizer.lr": 0.05})
    run_finetune(load_recipe(project.recipe))
    run_export(store_of(project), tmp_path / "adapter", [], dtype="float32")
    for dtype in ("float32", "bfloat16"):
        run_export(store_of(project), tmp_path / dtype, [], dtype=dtype, merged=True)  # type: ignore[arg-type]
    base = of(model, dtype=torch.float32)
    began = {key: value.clone() for key, value in base.state_dict().items()}
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    ours, narrow = (of(tmp_path / dtype, dtype="auto").state_dict() for dtype in ("float32", "bfloat16"))
    same = {key for key in began if torch.equal(theirs[key], began[key])}
    assert same and same != began.keys()
    for key, value in ours.items():
        assert value.dtype is torch.float32
        if key in same:  # the narrower one is as it was computed with
            assert torch.equal(value, began[key]) and torch.equal(narrow[key], began[key].bfloat16())
        torch.testing.assert_close(value, theirs[key], rtol=1e-6, atol=1e-7)
