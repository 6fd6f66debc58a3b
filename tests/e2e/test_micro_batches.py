"""Tests how many rows are computed at once where the recipe says auto: the fastest that fits, chosen once, kept with the
run."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.units import GiB, MiB
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
    head_chunk,
    head_piece,
    sizes_of,
)

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


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({2: 10.0, 4: 9.9, 8: 9.9, 1: 10.1}, 2),  # hardly faster: the usual one
        ({2: 10.0, 4: 9.0, 8: 9.5, 1: 11.0}, 4),
        ({2: 10.0, 4: 9.0, 8: 8.0, 16: 7.0, 1: 11.0}, 16),  # upwards while it helps
        ({2: 10.0, 4: 9.0, 8: None, 1: 11.0}, 4),
        ({2: None, 1: 12.0}, 1),  # too large but one; what is larger still is not looked at
        (dict.fromkeys((1, 2, 4, 8, 16)), 2),  # nothing fits: the one that needs least, and who plans it says how much
    ],
)
def test_the_fastest_that_fits(seconds: dict[int, float | None], best: int) -> None:
    assert (
        fastest_size(16, 512, usual=USUAL_TOKENS, planned=seconds.__getitem__, searched=seconds.__getitem__, needed=NEEDED)
        == best
    )


def test_downwards_past_one_that_is_no_faster() -> None:
    """Has the times of a 70B model, 256 rows a step, on a 4090 with two drives: of four rows, gradients wait for updates."""
    seconds = {8: 980.8, 4: 1005.8, 2: 898.7, 1: 1011.2}
    assert (
        fastest_size(256, 1024, usual=MOST_TOKENS, planned=seconds.__getitem__, searched=seconds.__getitem__, needed=NEEDED)
        == 2
    )


def test_mixtures_may_have_more_tokens_at_once() -> None:
    seconds = {2: 10.0, 4: 9.0, 8: 8.0, 1: 12.0}
    asked = {"usual": MOST_TOKENS, "planned": seconds.__getitem__, "searched": seconds.__getitem__, "needed": NEEDED}
    assert fastest_size(8, 4096, **asked) == 2  # type: ignore[arg-type]
    assert fastest_size(8, 4096, most=MOST_OF_MIXTURES, **asked) == 8  # type: ignore[arg-type]


def test_downwards_until_one_fits() -> None:
    """Goes downwards from the usual four rows at a length of 256, to one where the budget holds no more."""
    seconds = {4: None, 2: None, 1: 3.0}
    assert (
        fastest_size(16, 256, usual=USUAL_TOKENS, planned=seconds.__getitem__, searched=seconds.__getitem__, needed=NEEDED) == 1
    )


@pytest.mark.parametrize(
    ("planned", "searched", "best"),
    [
        ({2: 10.0, 4: 9.0, 8: 9.5, 1: 11.0}, {4: 9.0, 8: 8.0}, 8),  # the search finds more for the second
        ({2: 10.0, 4: 9.0, 8: 9.5, 1: 11.0}, {4: 9.0, 8: None}, 4),
        ({2: 10.0, 4: 9.9, 1: 11.0}, {2: 9.0, 4: 8.9}, 2),  # the usual one unless another is clearly faster
        ({2: 10.0, 4: 7.0, 8: 7.0, 1: 20.0}, {4: 6.9, 8: 7.0}, 4),
        ({2: 10.1, 4: 10.0, 1: 10.05}, {2: 10.0, 4: 9.9}, 2),  # of three that are alike the usual one
    ],
)
def test_of_the_best_two_the_search_decides(
    planned: dict[int, float | None], searched: dict[int, float | None], best: int
) -> None:
    assert (
        fastest_size(16, 512, usual=USUAL_TOKENS, planned=planned.__getitem__, searched=searched.__getitem__, needed=NEEDED)
        == best
    )


def test_what_is_far_off_is_not_searched() -> None:
    planned = {2: 10.0, 4: 20.0, 1: 30.0}
    assert fastest_size(16, 512, usual=USUAL_TOKENS, planned=planned.__getitem__, searched={}.__getitem__, needed=NEEDED) == 2


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


def _numerics(project: Project, *changes: str) -> Numerics:
    return planned(load_recipe(project.recipe, [*changes]).recipe).plan.numerics
