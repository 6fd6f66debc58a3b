"""Every shipped recipe is planned from its model's configuration alone, on the machine that it is made for, and keeps what it
promises there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from drawn import quick_and_slow
from engine.test_configs import CONFIGS

from fuyou_cli.advice.planning import plan_recipe
from fuyou_cli.machine.described import described
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.recipe.named import shipped_recipes, shipped_shapes
from fuyou_cli.training.prepare import Planned

from .conftest import NewProject, ended

GB, GIB = 10**9, 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """Holds what a recipe says of itself, with some room. Sizes are GB, of a step at most."""

    model: str  # one of engine/configs
    machine: str
    tokens: int
    read: float
    written: float
    disk: float  # without the export
    overrides: tuple[str, ...] = ()
    gpu: float = 24.0  # GiB
    waits: float  # share of the step at most in which compute waits
    beside: float  # any other resource is busy for at most so many times the seconds of compute
    bottleneck: str = "compute"


SMALL_CARD = {"model": "llama-3.1-8b", "machine": "rtx4090,gen4,64GiB", "tokens": 32_768, "written": 0.2}
PROMISES = {
    "llama31-8b-qlora-6gb": Promise(
        **SMALL_CARD, overrides=("offload.max_memory.gpu=5.7GiB",), gpu=5.7, read=0, disk=7, waits=0.03, beside=0.3,
    ),
    "llama31-8b-lora-8gb": Promise(
        **SMALL_CARD, overrides=("offload.max_memory.gpu=7.6GiB",), gpu=7.6, read=32.2, disk=18, waits=0.03, beside=0.6,
    ),
    # The roofline of 70B in 16 bit on one drive is that of the card.
    "llama33-70b-lora-24gb": Promise(
        model="llama-3.1-70b", machine="rtx4090,1xgen4,64GiB", tokens=32_768, read=283, written=0.3, disk=147, waits=0.03,
        beside=0.5,
    ),
    "llama31-405b-qlora-24gb": Promise(
        model="llama-3.1-405b", machine="rtx4090,gen4,64GiB", tokens=16_384, read=455, written=28, disk=246, waits=0.06,
        beside=0.35,
    ),
    "qwen3-14b-lora-12gb": Promise(
        model="qwen3-14b", machine="rtx4090,1xgen4,64GiB", overrides=("offload.max_memory.gpu=11.4GiB",), gpu=11.4,
        tokens=32_768, read=61, written=0.1, disk=32, waits=0.15, beside=0.7,
    ),
    "llama31-8b-full-24gb": Promise(
        model="llama-3.1-8b", machine="rtx4090,2xgen4,128GiB", tokens=262_144, read=112 + 32, written=96 + 32, disk=200,
        waits=0.2, beside=0.5,
    ),
    "qwen3-14b-full-24gb": Promise(
        model="qwen3-14b", machine="rtx4090,2xgen4,128GiB", tokens=262_144, read=207 + 59, written=177 + 59, disk=420,
        waits=0.2, beside=0.6,
    ),
    # Mixtures of experts.
    "qwen3-30b-a3b-lora-24gb": Promise(
        model="qwen3-30b-a3b", machine="rtx4090,gen4,64GiB", tokens=32_768, read=24, written=0.2, disk=62, waits=0.25,
        beside=1.1, bottleneck="h2d",
    ),
    "qwen3-30b-a3b-lora-12gb": Promise(
        model="qwen3-30b-a3b", machine="rtx4090,gen4,32GiB", overrides=("offload.max_memory.gpu=11.4GiB",), gpu=11.4,
        tokens=32_768, read=90, written=0.2, disk=62, waits=0.6, beside=2.3, bottleneck="ssd read",
    ),
    "gpt-oss-20b-lora-16gb": Promise(
        model="gpt-oss-20b", machine="rtx4080,gen4,32GiB", gpu=16.0, tokens=32_768, read=12, written=0.2, disk=15, waits=0.1,
        beside=0.5,
    ),
    "gpt-oss-120b-lora-24gb": Promise(
        model="gpt-oss-120b", machine="rtx4090,gen4,64GiB", tokens=32_768, read=90, written=0.2, disk=67, waits=0.2,
        beside=0.95,
    ),
    "qwen3-30b-a3b-full-24gb": Promise(
        model="qwen3-30b-a3b", machine="rtx4090,2xgen4,64GiB", tokens=524_288, read=760, written=660, disk=1000, waits=0.8,
        beside=4.0, bottleneck="ssd write",
    ),
    # Beside the states, the boundaries of 256 rows go to the drives and come back.
    "llama31-70b-full-24gb": Promise(
        model="llama-3.1-70b", machine="rtx4090,4xgen4,256GiB", tokens=1_048_576, read=988 + 282 + 1400,
        written=847 + 282 + 1400, disk=3400, waits=0.05, beside=0.3,
    ),
}  # fmt: skip


NOT_IN_MXFP4 = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.mark.parametrize("name", PROMISES)
def test_shapes_are_those_of_the_model(name: str) -> None:
    model = load_recipe(shipped_recipes()[name]).recipe.model.name_or_path
    known = json.loads((CONFIGS / f"{PROMISES[name].model}.json").read_text())
    known["dtype"] = known.pop("torch_dtype")
    if known["model_type"] == "gpt_oss":  # a plan reads experts as they rest in the model's files
        known["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_IN_MXFP4}
    for key in ("_source", "bos_token_id", "eos_token_id"):
        known.pop(key, None)
    assert shipped_shapes(model) == {"hidden_act": "silu", **known}


def test_a_plan_without_a_network(new_project: NewProject, tmp_path: Path) -> None:
    """It says that its shapes are not the model's own. A config.json in the cache is what counts, and a run has no other."""
    project, model = new_project(), "Qwen/Qwen3-14B"
    words = ("qwen3-14b-lora-12gb", "dataset.max_seq_len=128", "train.batch_size=2", "train.micro_batch_size=1")
    plan = ("plan", *words, "--hardware", "rtx4090,1xgen4,64GiB", "--json")

    def fuyou(*words: str) -> Any:
        cache = f"from huggingface_hub import constants\nconstants.HF_HUB_CACHE = {str(tmp_path / 'hub/hub')!r}\n"
        return ended(project.begin(*words, first=cache))

    done = fuyou(*plan)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["frozen_parameters"] == 14_768_307_200
    assert f"planned with the shapes that fuyou knows of {model}" in done.stderr
    refused = fuyou("finetune", *words)
    assert refused.returncode == 2 and f"error: {model}: no such directory" in refused.stderr
    place = tmp_path / "hub/hub/models--Qwen--Qwen3-14B"
    (snapshot := place / "snapshots/0123abcd").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs/main").write_text("0123abcd")
    (snapshot / "config.json").write_text(json.dumps({**(shipped_shapes(model) or {}), "num_hidden_layers": 2}))
    (snapshot / "tokenizer.json").write_text("{}")
    done = fuyou(*plan)
    assert done.returncode == 0 and "shapes that fuyou knows" not in done.stderr
    assert json.loads(done.stdout)["model"]["frozen_parameters"] < 3 * 10**9


# A search looks for a faster plan, in ten seconds: slow. The usual one of the others keeps the promise, too.
SEARCHED = ("llama31-405b-qlora-24gb",)


def planned(name: str, folder: Path) -> Planned:
    """Plans micro-batches of one row: what `auto` finds for these is the same, after a search for each size."""
    promise = PROMISES[name]
    shapes = shipped_shapes(load_recipe(shipped_recipes()[name]).recipe.model.name_or_path)
    (folder / "config.json").write_text(json.dumps(shapes))
    keys = (f"model.name_or_path={folder}", "train.micro_batch_size=1", *promise.overrides)
    loaded = load_recipe(shipped_recipes()[name], keys)
    return plan_recipe(loaded, described(promise.machine), effort="search" if name in SEARCHED else "usual", say=print)


def test_all_are_planned_here() -> None:
    """Leaves out the quickstart, whose model is made on the spot: tests/quickstart plans and runs it."""
    assert {*PROMISES, "quickstart"} == set(shipped_recipes())


@pytest.mark.parametrize("name", quick_and_slow(PROMISES, lambda number: number % 2 and list(PROMISES)[number] not in SEARCHED))
def test_it_keeps_its_promise(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    promise, found = PROMISES[name], planned(name, tmp_path)
    plan, compute = found.plan.predicted, found.plan.predicted.seconds["compute"]
    assert found.refusal is None and found.fits_ram and found.request.has_room_for(found.plan, found.hardware)
    assert found.plan.numerics.tokens == promise.tokens and found.plan.clip_grad_norm == 1.0
    assert plan.gpu_peak <= promise.gpu * GIB and found.plan.store_size <= promise.disk * GB
    assert plan.read_per_step <= promise.read * GB and plan.written_per_step <= promise.written * GB
    assert plan.bottleneck == promise.bottleneck and compute >= (1 - promise.waits) * plan.step_seconds
    assert max(seconds for name, seconds in plan.seconds.items() if name != "compute") <= promise.beside * compute
    assert "A run would be refused" in capsys.readouterr().out  # of data that is not there
