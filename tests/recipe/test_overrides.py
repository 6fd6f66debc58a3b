"""Tests key=value: parsing, merging, and errors that show the override."""

from __future__ import annotations

import pytest

from fuyou_cli.recipe.diagnostics import COMMAND_LINE


def test_values_are_yaml(load):
    recipe = load(
        "", "optimizer.lr=3e-6", "offload.dir=[/a, /b]", "offload.max_memory={cpu: 1GiB}",
        "dataset.train[0].columns={prompt: question}", "output_dir=a=b", "offload.io.backend=threads",
    )  # fmt: skip
    assert recipe.optimizer.lr == 3e-6
    assert recipe.offload.dir == ("/a", "/b")
    assert recipe.offload.max_memory.cpu.size == 1 << 30
    assert recipe.dataset.train[0].columns == {"prompt": "question"}
    assert recipe.output_dir == "a=b"
    assert recipe.offload.io.backend == "threads"


def test_sections_merge_and_later_wins(load):
    recipe = load("optimizer: {lr: 1e-3, eps: 1e-6}\n", "optimizer={lr: 1e-4}", "seed=1", "seed=2")
    assert (recipe.optimizer.lr, recipe.optimizer.eps, recipe.seed) == (1e-4, 1e-6, 2)


def test_an_override_heals_what_the_file_has_wrong(load):
    assert load("seed: x\n", "seed=5").seed == 5


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("seed", "override"),
        ("=3", "override"),
        ("a..b=3", "override"),
        ("--seed=3", "override"),
        ("seed: 3", "override"),
        ("seed=[1", "syntax"),
        ("seed=!!python/x 1", "syntax"),
        ("seed=&a [*a]", "syntax"),
        ("seed=0x_", "override"),
        ("seed=${", "override"),
        ("seed=${nothing}", "reference"),
        ("seed={a: 1, a: 2}", "duplicate-key"),
        ("seed=", "override"),
        ("seed= # of the day", "override"),
        ("optimizer={lr: , eps: 1e-8}", "override"),
        ("offload.dir=[/a, {x: }]", "override"),
        ('output_dir=""', "out-of-range"),
        ("seed=''", "wrong-type"),
        ("output_dir.x=3", "override"),
        ("dataset.train[3].path=x", "override"),
        ("dataset.train[first].path=x", "override"),
        ("seed=x", "wrong-type"),
        ("seed.x=1", "wrong-type"),
        ("train.epoch=1", "unknown-key"),
        ("offload={dri: /a}", "unknown-key"),
    ],
)
def test_a_wrong_override_is_shown_itself(refused, override, code):
    found = refused("", override)
    assert [diagnostic.code for diagnostic in found.values()] == [code]
    place = next(iter(found.values())).place
    assert (place.file, place.source) == (COMMAND_LINE, override)


def test_all_wrong_overrides_are_reported_with_the_files_errors(refused):
    found = refused("sed: 1\n", "train.epoch=1", "x", "train.batch_size=big")
    assert {diagnostic.code for diagnostic in found.values()} == {"unknown-key", "override", "wrong-type"}
    assert len(found) == 4


@pytest.mark.parametrize(
    ("override", "help_"),
    [
        ("optimizer.lr=", "write `optimizer.lr=null` to clear the key"),
        ("optimizer={lr: }", "write `lr: null` to clear the key"),
    ],
)
def test_an_empty_value_is_no_way_to_say_null(refused, load, override, help_):
    """Refuses it: `optimizer.lr=$LR` with LR not set must not train at the default instead of the recipe's 0.5."""
    (found,) = refused("optimizer: {lr: 0.5}\n", override).values()
    assert "is empty" in found.message
    assert found.help.startswith(help_)
    assert load("optimizer: {lr: 0.5}\n", "optimizer.lr=null").optimizer.lr == load().optimizer.lr
    assert load("", "dataset.train[0].columns={prompt: ''}").dataset.train[0].columns == {"prompt": ""}
