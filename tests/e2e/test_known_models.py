"""Tests that a model that was planned before is planned again from what is kept of it: without torch, and to the same plan."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

import pytest
from drawn import every
from engine.test_configs import CONFIGS
from planner.models import SPEC

from fuyou_cli.advice.planning import plan_recipe
from fuyou_cli.machine.described import described
from fuyou_cli.machine.profile import PROCESS_STEP
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.recipe.named import shipped_recipes
from fuyou_cli.spec.model import ModelFacts, ModelSpec, TensorSpec
from fuyou_cli.training import known_model, plan_step
from fuyou_cli.training.known_model import MOST, Descriptions, read_description, written
from fuyou_cli.training.numerics import fastest_size

MACHINE = "rtx4090,2xgen4,128GiB"
ONE = "train.micro_batch_size=1"
FULL, QLORA = "llama31-8b-full-24gb", "llama31-8b-qlora-6gb"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    content = json.loads((CONFIGS / "llama-3.2-1b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 3}))
    return tmp_path


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each time a model is built."""
    times, build = list[str](), known_model.outline_of

    def counted(*arguments: Any, **options: Any) -> Any:
        times.append("built")
        return build(*arguments, **options)

    monkeypatch.setattr(known_model, "outline_of", counted)
    return times


def planned(folder: Path, *keys: str, recipe: str = FULL, machine: str = MACHINE) -> tuple[object, ...]:
    """The plan, what it is made from, and what was said."""
    notes = list[str]()
    loaded = load_recipe(shipped_recipes()[recipe], (f"model.name_or_path={folder}", ONE, *keys))
    found = plan_recipe(loaded, described(machine), effort="usual", say=notes.append)
    return found.plan, found.model, found.refusal, found.known.facts, notes


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "kept/fuyou/models").iterdir())


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        (FULL, ["dataset.max_seq_len=140000", "train.batch_size=1"]),  # longer than what the model was trained on: a warning
        (FULL, ["freeze=[lm_head]", "optimizer.state_dtype=int8"]),  # tied: a note
        (FULL, ["train.head_chunk_vocab=0", "train.compile=true"]),
        ("llama31-8b-lora-8gb", []),
        (QLORA, []),
    ],
)
def test_the_same_plan_without_building_the_model(folder: Path, built: list[str], recipe: str, keys: list[str]) -> None:
    first = planned(folder, *keys, recipe=recipe)
    assert built == ["built"]
    again = planned(folder, *keys, recipe=recipe)
    assert again == first and built == ["built"]
    of_blocks = [{id(stage.operators) for stage in cast(ModelSpec, made[1]).stages[1:4]} for made in (first, again)]
    assert [len(some) for some in of_blocks] == [1, 1]  # equal blocks share them, so that a search takes no longer


def test_what_it_depends_on(folder: Path, built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    planned(folder)
    of_the_model = "model.attn_implementation=eager", "freeze=[model.norm]", "precision.compute=float32"
    changes = [[key] for key in (*of_the_model, "train.head_chunk_vocab=0")]
    for number, keys in enumerate(changes, start=2):
        planned(folder, *keys)
        assert len(built) == number, keys
    planned(folder, "optimizer.lr=1e-3", "train.epochs=7", "offload.lookahead=2")
    assert len(built) == 1 + len(changes)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    planned(folder)
    assert len(built) == 2 + len(changes)
    monkeypatch.setattr("fuyou_cli.training.known_model._DESCRIBING", ("engine",))  # as if the code were another
    planned(folder)
    assert len(built) == 3 + len(changes)


def test_sizes_of_micro_batches_are_compared_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = list[str]()

    def compared(*arguments: Any, **options: Any) -> int:
        times.append("compared")
        return fastest_size(*arguments, **options)

    monkeypatch.setattr(plan_step, "fastest_size", compared)
    keys = ["train.micro_batch_size=auto", "train.batch_size=4", "dataset.max_seq_len=512"]
    first = planned(folder, *keys)
    assert planned(folder, *keys) == first and len(times) == 1
    assert planned(folder, *keys, machine="rtx4090,2xgen4,96GiB") != first and len(times) == 2
    planned(folder, *keys, "offload.activations=recompute")
    assert len(times) == 3


def test_frozen_weights_lie_where_they_lay(folder: Path, built: list[str], materials: Path) -> None:
    """Finds them there as long as the model's files are the same."""
    shutil.copytree(materials / "model", folder, dirs_exist_ok=True)
    keys = ["freeze=[transformer.h.0]", "precision.compute=float32", "dataset.max_seq_len=24", f"offload.dir={folder}/store"]
    first = planned(folder, *keys, machine="gen4,64GiB")  # to a GPU, tensors of this file would lie badly
    assert isinstance(first[1], ModelSpec) and first[1].sources and not first[1].imported_because
    assert planned(folder, *keys, machine="gen4,64GiB") == first and built == ["built"]
    os.utime(folder / "model.safetensors", ns=(0, 7))
    (changed,) = cast(ModelSpec, planned(folder, *keys, machine="gen4,64GiB")[1]).sources
    assert changed.changed == 7 and len(built) == 2


@pytest.mark.parametrize("damage", every(3, [b"flip", b"", b"\xff", b"7" * 64 + b"\n{}"]))
def test_what_is_damaged_is_made_again(folder: Path, built: list[str], damage: bytes) -> None:
    first, files = planned(folder), kept(folder)
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600, 0o600]
    whole = [file.read_bytes() for file in files]
    for file, content in zip(files, whole, strict=True):
        at = len(content) - 9
        file.write_bytes(damage if damage != b"flip" else content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert planned(folder) == first and len(built) == 2
    assert [file.read_bytes() for file in kept(folder)] == whole


def test_only_some_are_kept(folder: Path) -> None:
    facts = ModelFacts(
        refusal=None, attention="sdpa", positions=None, learns_positions=False, embeddings=1, logits=1, head_rows=1,
        vocabulary_rows=0, has_frozen=False, frozen_with=(("a", "b"),),
    )  # fmt: skip
    of = Descriptions("key")
    of.keep(facts, "first")
    (models,) = {file.parent for file in kept(folder)}
    kept(folder)[0].unlink()
    (models / "strange").mkdir()  # the oldest, and no file of ours
    (models / "dangling").symlink_to(models / "nowhere")
    for number in range(MOST + 3):
        of.keep(facts, number)
        assert of.find(ModelFacts, 0) == facts  # used, so it stays
    assert len(kept(folder)) == MOST + 1 and (models / "strange").is_dir()
    assert [of.find(ModelFacts, number) for number in (1, 2, 3)] == [None] * 3 and of.find(ModelFacts, 4) == facts
    assert of.find(ModelFacts, "other") is None and Descriptions("other").find(ModelFacts, 4) is None
    Descriptions("").keep(facts)
    assert Descriptions("").find(ModelFacts) is None and len(kept(folder)) == MOST + 1


def test_experts_are_kept_as_runs(tmp_path: Path) -> None:
    """Of experts that are alike one tensor is written, with how many there are; nothing else is taken for one."""
    named = [(f"mlp.experts.{number}.{what}.weight", (4, 8)) for what in ("up", "down") for number in range(9)]
    odd = [("mlp.experts.11.up.weight", (4, 8)), ("mlp.experts.12.up.weight", (2, 8)), ("norm.weight", (8,))]
    tensors, offset = list[TensorSpec](), 0
    for name, shape in [*named, *odd]:
        tensors.append(TensorSpec(name=name, shape=shape, offset=offset, numel=prod(shape), decay=True, routed=True))
        offset += prod(shape)
    stage = replace(SPEC.stages[1], tensors=tuple(tensors))
    spec = replace(SPEC, stages=(SPEC.stages[0], stage, *SPEC.stages[2:]))
    file = tmp_path / "model.json"
    file.write_bytes(written(spec))
    assert read_description(ModelSpec, file) == spec
    content = json.loads(file.read_text().partition("\n")[2])
    assert [len(stage["tensors"]) for stage in content["stages"]][1] == 2 + len(odd)


def told(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The plan of a process of its own, and which large libraries it loaded."""
    program = (
        "import sys\nfrom fuyou_cli.cli.app import main\n"
        "try:\n    main()\nfinally:\n    print({'torch', 'transformers', 'numpy'} & set(sys.modules), file=sys.stderr)\n"
    )
    keys = [f"model.name_or_path={folder}", "output_dir=out", ONE, "offload.dir=store", "offload.measure=false"]
    command = [sys.executable, "-c", program, "plan", str(shipped_recipes()[QLORA]), "--json", *words, *keys]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    return json.loads(done.stdout), done.stderr.splitlines()[-1]


def test_a_known_model_is_planned_without_torch(folder: Path) -> None:
    facts = planned(folder, recipe=QLORA)[3]
    found, loaded = told(folder, "--hardware", MACHINE)
    assert found["fits"] and loaded == "set()"
    assert isinstance(facts, ModelFacts) and facts.loaded_bytes is None  # so a plan for this machine would load torch


@pytest.mark.slow
def test_the_process_counts_as_if_it_had_loaded_all(folder: Path) -> None:
    """Plans on this machine in a process that did not load torch as in one that did, but for one step of its size at most."""
    (first, all_of_it), (second, nothing) = told(folder), told(folder)
    assert "'torch'" in all_of_it and "'transformers'" in all_of_it and nothing == "set()"
    assert abs(second["hardware"]["process_bytes"] - first["hardware"]["process_bytes"]) <= PROCESS_STEP
    assert first["hardware"]["process_bytes"] > 10 * PROCESS_STEP
    assert second["plan"]["stages"] == first["plan"]["stages"]
