"""Tests weights opened for inference: of a model's folder, of a run's store and of its output folder."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from served import Labelled

from fuyou_cli.core.errors import DeviceMemoryError, PlanError, UsageError
from fuyou_cli.core.units import MiB
from fuyou_cli.data.batches import lay_out
from fuyou_cli.engine.forward_only import GenerationMemory, StreamedLosses, Visited
from fuyou_cli.inference.evaluating import room_of
from fuyou_cli.inference.models import Budget, find, open_for_inference, open_source
from fuyou_cli.inference.prompting import Generator, left_for_weights
from fuyou_cli.recipe.schema import TrainSection
from fuyou_cli.spec.plan import Numerics
from fuyou_cli.training.run_log import JsonlLog
from fuyou_cli.training.state.at_rest import find_store

from .conftest import NewProject, Project, WholeOf, write_llama
from .running import STEPS, exported, store_of, train

IDS = torch.arange(3, 43).view(2, 20)
ROWS = Labelled(IDS.tolist(), [20, 20])
NUMERICS = Numerics(
    compute_dtype="float32", accumulate_dtype="float32", batch_size=2, micro_batch_size=1, max_seq_len=20, head_chunk_tokens=0,
    torch_threads=1, seed=0,
)  # fmt: skip


PLENTY = Budget(ram=1 << 34, process=0)


def streamed(source: Path, dtype: str = "auto", *, memory: int = 1 << 20) -> list[float]:
    found = find(source, dtype=dtype)  # type: ignore[arg-type]
    with (
        open_for_inference(found, memory=memory) as model,
        StreamedLosses(model.weights, NUMERICS) as losses,
    ):
        rows: list[float] = losses.losses(lay_out(ROWS, range(2), pad_id=0, numerics=NUMERICS), last=True).sum(-1).tolist()
        model.check()
    return rows


def in_memory(folder: Path) -> list[float]:
    import transformers

    return losses_of(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@torch.no_grad()
def losses_of(model: Any) -> list[float]:
    return [float(model.eval()(input_ids=row[None], labels=row[None]).loss) * (IDS.shape[1] - 1) for row in IDS]


def test_a_model_and_the_store_of_its_run(materials: Path, whole: WholeOf, tmp_path: Path) -> None:
    assert streamed(materials / "model") == pytest.approx(in_memory(materials / "model"), rel=1e-6)
    run = whole({"precision.compute": "float32"})
    exported(run.store, tmp_path / "out" / "model")
    trained = in_memory(tmp_path / "out" / "model")
    assert trained != pytest.approx(in_memory(materials / "model"), rel=1e-5)  # of a text that is not its own
    for source in (run.store, run.store.parent, tmp_path / "out", tmp_path / "out" / "model"):
        assert streamed(source) == pytest.approx(trained, rel=1e-6), source
    masters = whole()  # computed in bfloat16
    exported(masters.store, tmp_path / "masters")
    assert streamed(masters.store, "float32") == pytest.approx(in_memory(tmp_path / "masters"), rel=1e-6)


def test_what_takes_turns_is_read_by_the_stage(materials: Path, tmp_path: Path) -> None:
    """Two reads of the drive for a block whose tensors lie in two files, not one for each tensor; none beside them."""
    folder = write_llama(materials, str(tmp_path / "blocks"), hidden_size=64, intermediate_size=256)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 12})
    )
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="1MB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    found = find(folder)
    with (
        open_for_inference(found, memory=1 << 20) as opened,
        StreamedLosses(opened.weights, NUMERICS) as losses,
    ):
        batch, seen = lay_out(ROWS, range(2), pad_id=0, numerics=NUMERICS), []
        for _ in range(3):
            reads, size = _reads(), opened.read_bytes()
            rows = losses.losses(batch, last=True).sum(-1).tolist()
            seen.append((_reads() - reads, opened.read_bytes() - size))
        assert rows == pytest.approx(in_memory(folder), rel=1e-6)
        taking_turns = 12 - len(opened.weights.staying & set(range(1, 13)))
        looked_up = len(IDS.unique())
        assert taking_turns > 6
        assert seen[2][0] <= 2 * taking_turns + looked_up + 20
        assert seen[2][1] <= opened.weights.streamed_bytes + looked_up * 4 * 64


def _reads() -> int:
    """Returns how often this process has read."""
    return int(re.search(r"syscr: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]


def test_a_block_of_which_two_do_not_fit_passes_in_ranges_of_its_experts(materials: Path, tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, moe_intermediate_size=256, num_experts=16, num_experts_per_tok=2, max_position_embeddings=64,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(4)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    found, sizes = find(tmp_path), {"max_len": 20, "rows": 2, "longest": 20}
    least, plenty = Visited.of(found.anatomy, torch.float32).least, room_of(found, TrainSection(), PLENTY, **sizes)
    assert plenty.found.anatomy.stages == found.anatomy.stages
    room = room_of(found, TrainSection(), replace(PLENTY, ram=PLENTY.ram - plenty.weights + least // 2), **sizes)
    with pytest.raises(PlanError), open_for_inference(found, memory=room.weights):
        pass
    assert any(stage.expert_range for stage in room.found.anatomy.stages)
    with (
        open_for_inference(room.found, memory=room.weights) as model,
        StreamedLosses(model.weights, replace(room.numerics, micro_batch_size=1)) as losses,
    ):
        rows = losses.losses(lay_out(ROWS, range(2), pad_id=0, numerics=NUMERICS), last=True).sum(-1).tolist()
        assert model.weights.memory <= room.weights < least
    assert rows == pytest.approx(in_memory(tmp_path), rel=1e-6)


def test_rows_and_weights_share_a_devices_memory(materials: Path) -> None:
    """Gives a device's own memory to rows first, but at most a part of it; says what is missing for one micro-batch."""
    found = find(materials / "model")
    sizes = {"max_len": 64, "rows": 4096, "longest": 64}
    without = room_of(found, TrainSection(), PLENTY, **sizes)
    assert without.device_weights == 0
    seen = [room_of(found, TrainSection(), replace(PLENTY, device=there << 20), **sizes) for there in (48, 64, 128, 1 << 14)]
    rows = [room.numerics.batch_size for room in seen]
    assert rows == sorted(set(rows)) and rows[-1] == without.numerics.batch_size
    assert all(room.numerics.batch_size % room.numerics.micro_batch_size == 0 for room in seen)
    assert all(0 < room.device_weights < there << 20 for room, there in zip(seen, (48, 64, 128, 1 << 14), strict=True))
    with pytest.raises(PlanError, match="of GPU memory more than is free"):
        room_of(found, TrainSection(), replace(PLENTY, device=1 << 20), **sizes)


def test_a_cache_and_the_largest_stage_fit_a_device_at_once() -> None:
    needed = GenerationMemory(cache=6 * MiB, work=4 * MiB)
    assert left_for_weights(None, needed, 5 * MiB) == 0
    assert left_for_weights(15 * MiB, needed, 5 * MiB) == 5 * MiB
    with pytest.raises(PlanError, match="the largest stage's weights"):
        left_for_weights(15 * MiB - 1, needed, 5 * MiB)


def test_a_device_that_is_full_is_an_error_of_generate() -> None:
    class Full:
        base_model, dtype = torch.nn.Identity(), torch.float32

        def generate(self, **given: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")

    opened = SimpleNamespace(weights=SimpleNamespace(device=torch.device("cpu")), check=lambda: None)
    generator = Generator(Full(), SimpleNamespace(pad_id=0, tokenizer=None), SimpleNamespace(pad_token_id=0), opened)  # type: ignore[arg-type]
    with pytest.raises(DeviceMemoryError, match=r"^out of device memory: CUDA out of memory$") as told:
        generator.run([[1, 2]], new=2)
    assert told.value.hint is not None and "--batch-size" in told.value.hint


def test_a_store_is_found_by_the_folder_of_its_run(whole: WholeOf) -> None:
    store = whole().store
    assert find_store(store.parent.parent).folder == store, "in output_dir/store, without a log"


def test_an_output_folder_whose_store_lies_elsewhere(new_project: NewProject, tmp_path: Path) -> None:
    """A run's log says where, from any folder; nothing is exported yet."""
    project = new_project(changes={"train.max_steps": 2, "export.at_end": False, "offload.dir": "drive"})
    project.done("finetune", project.recipe)
    (store,) = (project.folder / "drive").iterdir()
    saved = find(project.out).store
    assert saved is not None and saved.folder == store and not (project.out / "store").exists()
    assert streamed(project.out) == streamed(store)
    sets = f"dataset.eval=[{{path: {project.materials / 'rows.jsonl'}}}]"
    for words in (
        ("export", project.out, tmp_path / "model"),
        ("verify", project.out),
        ("generate", project.out, "--prompt", "The road", "--max-new-tokens", "2"),
        ("eval", project.out, project.recipe, sets),
    ):
        project.done(*words)
    assert (tmp_path / "model" / "config.json").is_file()


def test_an_export_that_is_older_than_the_saved_state_is_said_to_be(stopped: Project) -> None:
    """By whatever opens the run's output folder: it reads the export. Not of a store or a model that is named."""
    store, said = store_of(stopped), list[str]()
    exported(store, stopped.out / "model")
    assert open_source(str(stopped.out), say=said.append).folder == stopped.out / "model" and said == []
    train(stopped)
    for source in (store, stopped.out / "model"):
        open_source(str(source), say=said.append)
    assert said == []
    done = stopped.done("generate", stopped.out, "--prompt", "The road", "--max-new-tokens", "1")
    told = (
        f"reading {stopped.out / 'model'}, which was exported after step 2; the run has saved step {STEPS} since: name {store}"
    )
    assert told in " ".join(done.stderr.split())


def test_a_run_that_has_not_exported_is_told_from_a_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(UsageError, match="has not exported a model yet") as told:
        find(tmp_path)
    assert told.value.hint is not None and "in the recipe's offload.dir: name that folder; or run its recipe" in told.value.hint
    (store := tmp_path / "store" / "out-1").mkdir(parents=True)
    (store / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match="has not exported a model yet") as told:
        find(tmp_path)
    assert told.value.hint is not None and f"is in {store}: name that folder" in told.value.hint
    with JsonlLog(tmp_path / "log.jsonl") as log:
        log.write("plan", {"store": "/"})
    with pytest.raises(UsageError, match="has not exported a model yet"):
        find(tmp_path)
    (elsewhere := tmp_path / "drive" / "out-1").mkdir(parents=True)
    (elsewhere / "manifest.json").write_text("{}")
    with JsonlLog(tmp_path / "log.jsonl") as log:
        log.write("plan", {"store": str(elsewhere)})
    with pytest.raises(UsageError) as told:
        find(tmp_path)
    assert told.value.hint is not None and f"is in {elsewhere}: name that folder" in told.value.hint


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        find(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (store := tmp_path / "store" / "out-1").mkdir(parents=True)
    (store / "manifest.json").write_text("{}")
    for source in (tmp_path, tmp_path / "adapter"):
        with pytest.raises(UsageError, match="holds an adapter") as told:
            find(source)
        assert f"is in {store}: name that folder, or merge it" in str(told.value.hint)
        assert str(told.value.hint).endswith("without the adapter, name the base model")
