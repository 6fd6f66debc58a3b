"""Tests what `auto` and shares of memory stand for: micro-batches (the fastest that fits, chosen once, kept with the run),
pieces of logits, ranges of a large vocabulary, threads and budgets, on machines of several kinds."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.units import GiB, MiB
from fuyou_cli.engine.processor import has_fast_bfloat16, slow_bfloat16
from fuyou_cli.machine.described import described
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.spec.plan import Numerics
from fuyou_cli.training import numerics
from fuyou_cli.training.numerics import (
    MOST_OF_MIXTURES,
    MOST_TOKENS,
    USUAL_TOKENS,
    fastest_size,
    gpu_limit,
    gpu_most,
    head_chunk,
    head_piece,
    sizes_of,
)
from fuyou_cli.training.plan_step import plan_request
from fuyou_cli.training.prepare import Planned

from .conftest import NewProject, Project
from .running import planned, train

NEEDED = {1: 7, 2: 7, 4: 8, 8: 9, 16: 10}.__getitem__  # bytes, by rows


@given(st.integers(1, 96), st.integers(1, 16384), st.sampled_from([USUAL_TOKENS, MOST_TOKENS]))
def test_sizes_divide_the_batch(batch: int, length: int, tokens: int) -> None:
    smaller, usual, larger = sizes_of(batch, length, usual=tokens)
    assert all(batch % size == 0 for size in (usual, *larger, *smaller))
    assert usual == 1 or usual * length <= tokens
    assert larger == sorted(larger) and all(usual < size and size * length <= MOST_TOKENS for size in larger)
    assert smaller == sorted(smaller, reverse=True) and all(size < usual for size in smaller)
    assert 1 in (usual, *smaller), "whatever memory holds"


def test_sizes_of_a_vast_batch() -> None:
    """They are found without a look at every number below it."""
    begin = time.process_time()
    smaller, usual, larger = sizes_of(2**31 - 8, 16, usual=USUAL_TOKENS)
    assert (smaller[-1], usual, larger[-1]) == (1, 60, 508) and time.process_time() - begin < 5


FOUR_DRIVES = {8: 980.8, 4: 1005.8, 2: 898.7, 1: 1011.2}  # 70B on a 4090 with two drives: of 4 rows gradients wait for updates
FASTER = {2: 10.0, 4: 9.0, 8: 8.0, 1: 12.0}


@pytest.mark.parametrize(
    ("planned", "best"),
    [
        ({2: 10.0, 4: 9.9, 8: 9.9, 1: 10.1}, 2),  # hardly faster: the usual one
        ({2: 10.0, 4: 9.0, 8: 9.5, 1: 11.0}, 4),
        ({2: 10.0, 4: 9.0, 8: 8.0, 16: 7.0, 1: 11.0}, 16),  # upwards while it helps
        ({2: 10.0, 4: 9.0, 8: None, 1: 11.0}, 4),
        ({2: None, 1: 12.0}, 1),  # too large but one; what is larger still is not looked at
        (dict.fromkeys((1, 2, 4, 8, 16)), 2),  # nothing fits: the one that needs least, and who plans it says how much
    ],
)
def test_the_fastest_that_fits(planned: dict[int, float | None], best: int) -> None:
    assert _fastest(planned) == best


@pytest.mark.parametrize(
    ("planned", "shape", "best"),
    [
        (FOUR_DRIVES, (256, 1024, MOST_TOKENS, MOST_TOKENS), 2),  # downwards past one that is no faster
        ({4: None, 2: None, 1: 3.0}, (16, 256, USUAL_TOKENS, MOST_TOKENS), 1),  # and until one fits
        (FASTER, (8, 4096, MOST_TOKENS, MOST_TOKENS), 2),
        (FASTER, (8, 4096, MOST_TOKENS, MOST_OF_MIXTURES), 8),  # mixtures may have more tokens at once
    ],
)
def test_of_other_batches(planned: dict[int, float | None], shape: tuple[int, int, int, int], best: int) -> None:
    assert _fastest(planned, shape=shape) == best


@pytest.mark.parametrize(
    ("planned", "searched", "best"),
    [
        ({2: 10.0, 4: 9.0, 8: 9.5, 1: 11.0}, {4: 9.0, 8: 8.0}, 8),  # the search finds more for the second
        ({2: 10.0, 4: 9.0, 8: 9.5, 1: 11.0}, {4: 9.0, 8: None}, 4),
        ({2: 10.0, 4: 9.9, 1: 11.0}, {2: 9.0, 4: 8.95}, 2),  # the usual one unless another is clearly faster
        ({2: 10.0, 4: 7.0, 8: 7.0, 1: 20.0}, {4: 6.9, 8: 7.0}, 4),
        ({2: 10.1, 4: 10.0, 1: 10.05}, {2: 10.0, 4: 9.92}, 2),  # of three that are alike the usual one
        ({2: 10.1, 4: 10.0, 1: 10.05}, {2: 10.0, 4: 9.88}, 4),  # a search is closer to the truth than a usual plan
        ({2: 10.0, 4: 20.0, 1: 30.0}, {}, 2),  # what is far off is not searched
    ],
)
def test_of_the_best_two_the_search_decides(
    planned: dict[int, float | None], searched: dict[int, float | None], best: int
) -> None:
    assert _fastest(planned, searched) == best


def _fastest(
    planned: dict[int, float | None], searched: dict[int, float | None] | None = None, *,
    shape: tuple[int, int, int, int] = (16, 512, USUAL_TOKENS, MOST_TOKENS),
) -> int:  # fmt: skip
    """Chooses among sizes by their seconds. `shape`: rows of a batch; tokens of a row, of the usual micro-batch, at most."""
    batch, length, usual, most = shape
    seconds = (planned if searched is None else searched).__getitem__
    return fastest_size(batch, length, usual=usual, most=most, planned=planned.__getitem__, searched=seconds, needed=NEEDED)


def test_chosen_once_and_kept(new_project: NewProject) -> None:
    project = new_project(changes={"train.batch_size": 8, "train.micro_batch_size": "auto"})
    chosen = _numerics(project)
    assert chosen.batch_size == 8 and 8 % chosen.micro_batch_size == 0
    for size in (1, 2, 8):
        assert _numerics(project, f"train.micro_batch_size={size}").micro_batch_size == size


@pytest.mark.parametrize(
    ("device", "cores", "asked", "threads"),
    [
        ("cuda", 16, "auto", 4),  # the update has the cores
        ("cuda", 2, "auto", 2),
        ("cuda", 16, "12", 12),
        ("cpu", 16, "auto", 16),
        ("emulated", 16, "auto", 16),  # computes on the processor
    ],
)
def test_a_gpu_leaves_torch_few_threads(new_project: NewProject, device: str, cores: int, asked: str, threads: int) -> None:
    machine = replace(described("rtx4090,gen4,64GiB"), device=device, cores=cores)
    recipe = load_recipe(new_project().recipe, [f"train.threads={asked}", f"offload.device={device}"]).recipe
    assert planned(recipe, machine, here=False).plan.numerics.torch_threads == threads


def test_a_resumed_run_keeps_its_pieces_of_logits(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another card, or another version, would choose others, and so another dtype of gradients that need no sum."""
    changes = {"train.batch_size": 8, "train.micro_batch_size": 8, "precision.compute": "bfloat16"}
    project = new_project(changes={**changes, "train.max_steps": 2})
    train(project)
    chosen = _numerics(project)
    monkeypatch.setattr(numerics, "HEAD_PIECE_BYTES", 1)
    assert numerics.head_chunk(load_recipe(project.recipe).recipe.train, chosen.tokens, 1, piece=1) != chosen.head_chunk_tokens
    assert _numerics(project) == chosen


@pytest.mark.parametrize(
    ("device", "limit", "piece"),
    [
        ("cpu", "auto", 256 * MiB), ("emulated", "8GiB", 256 * MiB), ("cuda", "auto", GiB), ("cuda", "8GiB", GiB // 2),
        ("cuda", "3GiB", 256 * MiB),
    ],
)  # fmt: skip
def test_a_gpu_with_room_makes_more_logits_at_once(new_project: NewProject, device: str, limit: str, piece: int) -> None:
    """The card has 24 GB. Other programs that use it change nothing."""
    machine = replace(described("rtx4090,gen4,64GiB"), device=device)
    recipe = load_recipe(new_project().recipe, [f"offload.max_memory.gpu={limit}", f"offload.device={device}"]).recipe
    for free in (0, GiB):
        assert head_piece(recipe, replace(machine, device_free=free)) == piece
    auto = head_chunk(recipe.train, 1 << 20, 32768, piece=piece)
    assert auto == piece // (16 * 32768) and head_chunk(recipe.train, auto, 32768, piece=piece) == 0


@pytest.mark.parametrize(
    ("device", "asked", "planned_with"),
    [
        ("cuda", "20GiB", 19 * GiB), ("cuda", "1GiB", GiB - 128 * MiB), ("cuda", "100MiB", 0), ("emulated", "1GiB", GiB),
    ],
)  # fmt: skip
def test_libraries_have_their_part_of_a_gpu(new_project: NewProject, device: str, asked: str, planned_with: int) -> None:
    machine = replace(described("rtx4090,gen4,64GiB"), device=device)
    recipe = load_recipe(new_project().recipe, [f"offload.max_memory.gpu={asked}", f"offload.device={device}"]).recipe
    assert gpu_limit(recipe, machine) == planned_with


# ---- budgets, and what else `auto` stands for ------------------------------------------------------------------------------

NUMERICS = Numerics(
    compute_dtype="bfloat16", accumulate_dtype="float32", batch_size=4, micro_batch_size=2, max_seq_len=64, head_chunk_tokens=0,
    torch_threads=2, seed=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("device", "pinnable", "budget", "expected"),
    [
        ("cuda", 64 * GiB, "auto", int(0.9 * 62 * GiB)),
        ("cuda", 32 * GiB, "auto", 32 * GiB),  # WSL: nearly all of a run's memory is pinned
        ("cpu", 32 * GiB, "auto", int(0.9 * 62 * GiB)),
        ("cuda", 0, "auto", int(0.9 * 62 * GiB)),  # not known
        ("cuda", 32 * GiB, "90%", int(0.9 * 64 * GiB)),  # asked for: refused by name where the plan takes it
        ("cuda", 32 * GiB, "48GiB", 48 * GiB),
    ],
)
def test_the_budget(new_project: NewProject, device: str, pinnable: int, budget: str, expected: int) -> None:
    machine = replace(described("rtx4090,gen4,64GiB"), device=device, pinnable=pinnable)
    changes = [f"offload.max_memory.cpu={budget}", "offload.device=auto"]
    recipe = load_recipe(new_project().recipe, changes).recipe
    assert plan_request(recipe, NUMERICS, machine, device=device).cpu_budget == expected


@pytest.mark.parametrize(
    ("free", "budget", "expected"),
    [
        (0, "auto", int(0.95 * 24 * GiB)),  # described: all of it is
        (24 * GiB, "auto", int(0.95 * 24 * GiB)),
        (21 * GiB, "auto", int(0.95 * 21 * GiB)),  # others hold the rest
        (21 * GiB, "50%", int(0.95 * 12 * GiB)),  # a share is of the card
        (21 * GiB, "22GiB", int(0.95 * 21 * GiB)),  # more than there is
        (0, "22GiB", int(0.95 * 22 * GiB)),
    ],
)
def test_the_budget_of_a_card(new_project: NewProject, free: int, budget: str, expected: int) -> None:
    """Shows that what the process may have is a little more."""
    machine = replace(described("rtx4090,gen4,64GiB"), device_free=free)
    recipe = load_recipe(new_project().recipe, [f"offload.max_memory.gpu={budget}", "offload.device=auto"]).recipe
    assert gpu_limit(recipe, machine) == expected
    assert int(0.95 * (gpu_most(recipe, machine) or 0)) == expected
    assert plan_request(recipe, NUMERICS, machine, device="cuda").gpu_budget == expected


@pytest.mark.parametrize(
    ("dtype", "device", "slow"), [("bfloat16", "cpu", True), ("float32", "cpu", False), ("bfloat16", "cuda", False)]
)
def test_slow_products_are_said(dtype: str, device: str, slow: bool) -> None:
    assert bool(slow_bfloat16(dtype, device)) == (slow and not has_fast_bfloat16())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], None),
        (["offload.gradients=auto", "offload.norm_first=always"], True),
        (["model.trust_remote_code=true"], False),
    ],
)
def test_code_whose_backward_writes_into_outputs_has_one_backward(
    new_project: NewProject, changes: list[str], expected: bool | None
) -> None:
    recipe = load_recipe(new_project().recipe, ["train.clip_grad_norm=1", *changes]).recipe
    machine = replace(described("rtx4090,gen4,64GiB"), device="cpu")
    assert plan_request(recipe, NUMERICS, machine, device="cpu").norm_first is expected


def _numerics(project: Project, *changes: str) -> Numerics:
    return planned(load_recipe(project.recipe, [*changes]).recipe).plan.numerics


# ---- a large vocabulary --------------------------------------------------------------------------------------------------


@pytest.fixture
def project(new_project: NewProject) -> Project:
    """Makes a project of Llama-3.2-1B's shape, without weights."""
    import transformers

    project = new_project("large")
    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(project.folder / "llama")
    return project


def _planned(project: Project, **train: Any) -> Planned:
    keys = {f"train.{key}": value for key, value in train.items()}
    memory = keys.pop("train.memory", "1TB")
    project.write_recipe(
        {
            "model.name_or_path": str(project.folder / "llama"), "dataset.max_seq_len": 1024, "train.batch_size": 8,
            "train.micro_batch_size": 1, "offload.max_memory": {"cpu": memory}, **keys,
        }
    )  # fmt: skip
    return planned(load_recipe(project.recipe).recipe)


def _least(project: Project, **train: Any) -> int:
    """Returns the bytes of RAM that the plan of a tiny budget takes."""
    least = _planned(project, memory="100MiB", **train)
    assert not least.fits_ram
    return least.plan.predicted.cpu_peak


def test_auto_cuts_it_and_plans_with_less_than_half_the_memory(project: Project) -> None:
    prepared = _planned(project)
    assert prepared.plan.numerics.vocabulary_rows == 32_064
    assert prepared.plan.numerics.head_chunk_tokens == 512  # of 32,064 columns: 256 MiB of logits and gradients
    assert [stage.name for stage in prepared.model.stages if stage.vocabulary] == [
        f"{name}[{begin}:{begin + 32_064}]" for name in ("embed_tokens", "head") for begin in (0, 32_064, 64_128, 96_192)
    ]
    assert _planned(project, head_chunk_vocab=0).plan.numerics.head_chunk_tokens == 128
    assert _least(project) < 0.5 * _least(project, head_chunk_vocab=0)


def test_the_parameters_are_counted_once(project: Project) -> None:
    whole, cut = (_planned(project, head_chunk_vocab=rows).model for rows in (0, "auto"))
    assert whole.parameters == cut.parameters == 1_235_814_400
    head = 2.0 * 128_256 * 2048 * 1024  # of one micro-batch: logits of every token
    assert sum(stage.forward_flops for stage in cut.stages if stage.kind == "head") == head
