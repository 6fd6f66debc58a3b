"""Tests `fuyou bench RECIPE`: the recipe's own block and head, and what is done where they are too large."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from drawn import every
from rich.console import Console

from fuyou_cli.cli.bench import run_bench
from fuyou_cli.core.units import GiB
from fuyou_cli.engine import compiled
from fuyou_cli.engine.alone import BlockAlone
from fuyou_cli.engine.anatomy import Anatomy, dissect, frozen
from fuyou_cli.engine.compiled import CompiledBlocks
from fuyou_cli.engine.cutting import cut_vocabulary
from fuyou_cli.engine.describe import inspect
from fuyou_cli.engine.skeleton import build
from fuyou_cli.machine.measure import compute
from fuyou_cli.machine.measure import compute as measure_stages
from fuyou_cli.machine.measure import store_rates as measure_sustained
from fuyou_cli.machine.measure.compute import (
    affordable_tokens,
    block_stage,
    head_stage,
    measure_layers,
    measure_recipe,
    shape_of,
)
from fuyou_cli.machine.measure.timing import DTYPES, Findings, Rate, rate_of
from fuyou_cli.machine.profile import assumed_hardware, hardware_for
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.spec.model import Dtype, ModelSpec
from fuyou_cli.spec.plan import Numerics
from fuyou_cli.training.plan_step import OwnLayers, own_layers

NUMERICS = Numerics(
    compute_dtype="bfloat16", accumulate_dtype="float32", batch_size=4, micro_batch_size=2, max_seq_len=96,
    head_chunk_tokens=64, torch_threads=1, seed=0, vocabulary_rows=128,
)  # fmt: skip


def tied_gemma() -> Anatomy:
    config = transformers.Gemma2Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=32,
    )  # fmt: skip
    return cut_vocabulary(dissect(build(config, dtype="bfloat16", attention="sdpa")), NUMERICS.vocabulary_rows)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compute, "SECONDS", {"block": 0.5, "head": 0.5})
    monkeypatch.setattr(compute, "QUICK_RECIPE_PAIR", 0.5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def inspected(anatomy: Anatomy) -> ModelSpec:
    return inspect(
        anatomy, dtype=NUMERICS.compute_dtype, micro_batch_size=NUMERICS.micro_batch_size,
        max_seq_len=NUMERICS.max_seq_len, head_chunk_tokens=NUMERICS.head_chunk_tokens,
    )  # fmt: skip


def measured(anatomy: Anatomy, *, free: int = GiB) -> Findings:
    return measure_recipe(anatomy, [NUMERICS], torch.device("cpu"), quick=True, free=free, layers="own/96")


def test_a_recipes_stages_are_rated_as_the_planner_asks_for_them() -> None:
    torch.set_num_threads(2)
    anatomy = tied_gemma()
    spec, found = inspected(anatomy), measured(anatomy)
    assert torch.get_num_threads() == 2  # put back: the recipe's own are one
    block = next(stage for stage in spec.stages if stage.kind == "block")
    head = next(stage for stage in spec.stages if stage.kind == "head")
    tokens = NUMERICS.micro_batch_size * NUMERICS.max_seq_len
    owner, threads = spec.stages[spec.owner(head.index)], NUMERICS.torch_threads
    assert [rate.shape for rate in found.stage_rates] == [
        ("block", "bfloat16", 64, block.params, tokens, NUMERICS.max_seq_len, threads, block.trained),
        ("head", "bfloat16", 64, owner.params, 64, 1, threads, owner.trained),  # a piece, as a run
    ]
    assert [(rate.forward_flops, rate.layers) for rate in found.stage_rates] == [
        (block.forward_flops, "own/96"), (head.forward_flops * 64 / tokens, "own/96")
    ]  # fmt: skip
    assert all(rate.forward > 0 and rate.backward > 0 for rate in found.stage_rates) and found.notes == ()
    assert found.stage_rates[0].given > 0 and found.stage_rates[1].given == 0.0  # of a head nothing is kept
    assert all(rate.forward_launch == rate.backward_launch == 0.0 for rate in found.stage_rates)
    blocks, heads = ("forward", "backward", "backward, outputs kept"), ("forward", "backward")
    assert [rate.name for rate in found.rates] == [
        *(f"block 64 bfloat16, {way}" for way in blocks), *(f"head 64 bfloat16, {way}" for way in heads)
    ]  # fmt: skip
    assert all(rate.repeats >= 2 for rate in found.rates)


@pytest.mark.gpu
def test_a_small_block_takes_about_what_its_launches_take() -> None:
    anatomy = tied_gemma()
    flops = next(stage.forward_flops for stage in inspected(anatomy).stages if stage.kind == "block")
    rate = measure_recipe(anatomy, [NUMERICS], torch.device("cuda"), quick=True, free=GiB).stage_rates[0]
    assert 0.5 < rate.forward_launch / (flops / rate.forward) < 1.5
    assert 0.5 < rate.backward_launch / (3 * flops / rate.backward) < 1.5


@pytest.mark.slow
def test_a_compiled_block_is_rated_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles it for the whole micro-batch of the usual size alone."""
    made: list[CompiledBlocks] = []

    def blocks() -> CompiledBlocks:
        made.append(CompiledBlocks(backend="aot_eager"))
        return made[-1]

    monkeypatch.setattr(compiled, "CompiledBlocks", blocks)
    sizes = [replace(NUMERICS, micro_batch_size=rows) for rows in (2, 1)]
    found = measure_recipe(tied_gemma(), sizes, torch.device("cpu"), quick=True, free=GiB, compiled=True)
    assert [(rate.kind, rate.tokens) for rate in found.stage_rates] == [("compiled block", 192), ("head", 192)]  # one piece
    assert [blocks.graphs for blocks in made] == [1] and found.stage_rates[0].given == 0.0
    assert found.rates[0].name == "compiled block 64 bfloat16, forward"
    spec = inspect(tied_gemma(), dtype="bfloat16", micro_batch_size=2, max_seq_len=NUMERICS.max_seq_len, head_chunk_tokens=0)
    most = next(stage.graph_bytes for stage in spec.stages if stage.kind == "block")
    assert most / 3 < found.stage_rates[0].graph <= most and found.stage_rates[1].graph == 0


def size_beside_weights(anatomy: Anatomy, rows: int) -> int:
    """Returns bytes that computing takes at micro-batches of so many rows."""
    return block_stage(anatomy, replace(NUMERICS, micro_batch_size=rows), torch.device("cpu")).peak


@pytest.mark.parametrize("fitting", every(2, [[2, 1, 4], [2, 1]]), ids=["all fit", "the largest does not"])
@pytest.mark.slow
def test_micro_batches_of_several_sizes_take_turns(fitting: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All have the same weights."""
    monkeypatch.setattr(compute, "QUICK_RECIPE_PAIR", 60.0)
    anatomy = tied_gemma()
    sizes = [replace(NUMERICS, micro_batch_size=rows, head_chunk_tokens=0) for rows in (2, 1, 4)]
    weights = block_stage(anatomy, NUMERICS, torch.device("cpu")).weights
    free = round(1.01 * (weights + sum(size_beside_weights(anatomy, rows) for rows in fitting)) / compute.USABLE)
    found = measure_recipe(anatomy, sizes, torch.device("cpu"), quick=True, free=free, layers="own/96")
    assert [rate.tokens for rate in found.stage_rates if rate.kind == "block"] == [96 * rows for rows in fitting]
    assert [rate.tokens for rate in found.stage_rates if rate.kind == "head"][:2] == [192, 96] and found.notes == ()
    assert {f"block 64 bfloat16 x {rows} x 96, forward" for rows in fitting} <= {rate.name for rate in found.rates}


@pytest.mark.slow
def test_shapes_that_would_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is measured in any case."""
    monkeypatch.setattr(compute, "QUICK_RECIPE_PAIR", 0.05)
    sizes = [replace(NUMERICS, micro_batch_size=rows, max_seq_len=width) for rows, width in ((1, 24), (512, 96), (2, 24))]
    found = measure_recipe(tied_gemma(), sizes, torch.device("cpu"), quick=True, free=GiB, layers="own/96")
    shapes = [(rate.tokens, rate.width) for rate in found.stage_rates if rate.kind == "block"]
    assert shapes[0] == (24, 24) and (512 * 96, 96) not in shapes and found.notes == ()


def test_fewer_tokens_where_there_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "QUICK_RECIPE_PAIR", 0.0)
    monkeypatch.setattr(compute, "LEAST_TOKENS", 16)
    found = measured(tied_gemma())
    assert [rate.tokens for rate in found.stage_rates] == [16, 16]
    assert len(found.notes) == 2 and "measured on 16 tokens: 192 would" in found.notes[0] and "64 would" in found.notes[1]


def test_fewer_tokens_where_there_is_no_memory() -> None:
    """Takes whole rows as long as they fit, then parts of one."""
    anatomy = tied_gemma()
    block = next(stage for stage in inspected(anatomy).stages if stage.kind == "block")
    found = measured(anatomy, free=int((6 * block.params + 0.9 * block.backward_peak) / compute.USABLE))
    assert found.stage_rates[0].tokens == 96 and "measured on 96 tokens" in found.notes[0]


def test_a_heads_gradient_takes_memory_for_any_number_of_tokens() -> None:
    """One head that trains takes its weights, their gradient, and the sum of it; a frozen one takes its weights alone."""
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
    )  # fmt: skip
    anatomy = dissect(build(config, dtype="bfloat16", attention="sdpa"))
    numerics = replace(NUMERICS, vocabulary_rows=0)
    head = head_stage(anatomy, numerics, torch.device("cpu"))
    assert (2 + 2 + 4) * 4096 * 64 <= head.weights <= 1.01 * (2 + 2 + 4) * 4096 * 64
    logits = 64 * 4096 * 4  # bytes in float32
    assert logits < head.peak < 6 * logits
    found = measure_recipe(anatomy, [numerics], torch.device("cpu"), quick=True, free=int(head.weights / compute.USABLE))
    assert [rate.kind for rate in found.stage_rates] == ["block"] and "the recipe's head is not measured" in found.notes[0]
    still = head_stage(frozen(anatomy, ["lm_head", "model.norm"]), numerics, torch.device("cpu"))
    assert 2 * 4096 * 64 <= still.weights <= 1.01 * 2 * 4096 * 64


def test_copies_of_a_small_block_take_no_more_than_their_room() -> None:
    """A block's weights, sums and one gradient take memory for any number of tokens."""
    anatomy = tied_gemma()
    spec = next(stage for stage in inspected(anatomy).stages if stage.kind == "block")
    gradient = 2 * max(tensor.numel for tensor in spec.tensors)
    for room, copies in ((None, 16), (2 * 6 * spec.params, 3), (0, 1)):
        block = block_stage(anatomy, NUMERICS, torch.device("cpu"), room=room)
        made = block.make(16)
        assert isinstance(made, BlockAlone) and len(made._visits) == copies
        assert block.weights == 6 * spec.params + gradient
        assert block.peak == spec.backward_peak - gradient + sum(operator.bytes for operator in spec.operators)


def test_what_never_fits_is_said_and_not_refused() -> None:
    found = measured(tied_gemma(), free=1000)
    assert found.stage_rates == () and found.rates == ()
    assert len(found.notes) == 2 and all("is not measured: it needs" in note for note in found.notes)


@pytest.mark.parametrize(
    ("rate", "tokens"), [(1.0, 64), (4 * 127.0, 64), (4 * 128.0, 128), (4 * 511.0, 256), (1e9, 512)]
)  # fmt: skip
def test_tokens_for_a_time(rate: float, tokens: int) -> None:
    assert affordable_tokens(1.0, rate, 1.0) == tokens


def test_what_there_is_no_time_for_is_left_out_and_said(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures layers of the first width in any case: a plan needs something to go by."""
    monkeypatch.setattr(measure_stages, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(measure_stages, "WIDTHS", (256, 512))
    matmul: dict[Dtype, Rate] = {dtype: rate_of("x", "FLOP/s", [1.0]) for dtype in DTYPES}
    found = measure_layers(torch.device("cpu"), matmul, quick=True)
    assert [(rate.kind, rate.dtype, rate.hidden, rate.tokens) for rate in found.stage_rates] == [
        ("block", dtype, 256, 64) for dtype in DTYPES
    ]
    assert found.notes[0].startswith("4 of 6 layers and heads left out")


@pytest.mark.parametrize(("tokens", "shape"), [(64, (1, 64)), (1024, (1, 1024)), (8192, (8, 1024))])
def test_many_tokens_are_several_rows(tokens: int, shape: tuple[int, int]) -> None:
    assert shape_of(tokens) == shape


@pytest.mark.slow
def test_a_bench_of_a_recipe_is_kept_for_its_plans(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures sustained writing as well, where the recipe's store goes."""
    for name in ("FALLEN", "STEADY"):  # whatever this drive does, it is taken for one that slows down
        monkeypatch.setattr(measure_sustained, name, 1e9)
    transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(
        f"output_dir: {tmp_path}/out\nmodel: {{name_or_path: {tmp_path}/model}}\n"
        f"dataset: {{train: [{{path: none.jsonl}}], max_seq_len: 32}}\n"
        "train: {batch_size: 4, micro_batch_size: 2, threads: 1}\n"
        f"offload: {{dir: {tmp_path}/store, device: emulated}}\n"
    )
    loaded = load_recipe(tmp_path / "recipe.yaml", ["precision.compute=float32"])
    with (tmp_path / "shown").open("w") as shown:
        report = run_bench(
            None, quick=True, json_output=True, loaded=loaded, sustained=True, yes=True, out=Console(file=shown)
        )  # fmt: skip
    assert report is not None and list((tmp_path / "store").iterdir()) == []
    data = json.loads((tmp_path / "shown").read_text())
    assert data["written_bytes"] > 8 * 16 * 2**20
    kept = hardware_for(tmp_path / "store", device="cpu", say=print)
    own = [rate for rate in kept.stage_rates if rate.hidden == 64]
    shapes = {(rate.kind, rate.dtype, rate.tokens, rate.width) for rate in own}
    blocks = {
        ("block", "float32", 8, 8),
        ("block", "float32", 64, 32),
        ("block", "float32", 64, 8),
        ("block", "float32", 32, 32),
    }
    assert shapes == blocks | {("head", "float32", tokens, 1) for tokens in (8, 32, 64)}
    assert kept.sustained_write > 0 and kept.sustained_write_mixed > 0 and kept.sustained_read_mixed > 0
    assert kept.digest() == data["digest"] == replace(report.profile).digest()


def layers_of_gemma(folder: Path, *overrides: str) -> OwnLayers:
    """Finds what is timed for a recipe of a Gemma 2."""
    tied_gemma().model.config.save_pretrained(folder / "model")
    (folder / "recipe.yaml").write_text(
        f"version: 1\noutput_dir: {folder}/run\nmodel: {{name_or_path: {folder}/model}}\n"
        f"dataset: {{train: [{{path: none.jsonl}}], max_seq_len: 32}}\n"
        "train: {batch_size: 4, micro_batch_size: 2, threads: 1}\n"
        f"offload: {{dir: {folder}/store, device: cpu}}\n"
    )
    recipe = load_recipe(folder / "recipe.yaml", overrides).recipe
    return own_layers(recipe, assumed_hardware(folder, device="cpu"), say=print)


def test_rows_that_are_not_packed_are_timed_document_by_document(tmp_path: Path) -> None:
    """Each costs a call of attention in every pass, which a packed row does not."""
    apart, isolated, packed = (layers_of_gemma(tmp_path, f"dataset.packing={how}") for how in ("false", "isolated", "concat"))
    assert apart.layers == isolated.layers != packed.layers
    assert isolated.anatomy.isolated and not packed.anatomy.isolated
    alone = block_stage(apart.anatomy, apart.sizes[0], torch.device("cpu")).make(64)
    assert isinstance(alone, BlockAlone) and alone._call.documents == [[32], [32]]
    alone.forward()
    alone.backward()
    alone.backward_from_kept()


def test_an_adapters_block_is_measured_with_its_adapter(tmp_path: Path) -> None:
    """Measures the block that a plan asks for, and counts no gradients of frozen weights."""
    pytest.importorskip("peft", reason="peft comes with the extra lora")
    own = layers_of_gemma(tmp_path, "adapter.r=4")
    spec = inspect(own.anatomy, dtype="bfloat16", micro_batch_size=2, max_seq_len=32, head_chunk_tokens=0)
    sizes = [(one.micro_batch_size, one.max_seq_len) for one in own.sizes]
    assert sizes == [(2, 32), (1, 8), (8, 8), (4, 16)]
    block, whole = block_stage(own.anatomy, own.sizes[0], torch.device("cpu")), spec.stages[1]
    assert block.params == whole.params > whole.trained > 0
    alone = block.make(64)
    alone.forward()
    alone.backward()
    assert alone.backward_flops == 3 * whole.forward_flops - whole.unneeded_flops - whole.frozen_flops < 2.5 * alone.flops
