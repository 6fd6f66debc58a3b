"""Tests types, defaults and sizes: what a value may be, and what it means once loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.units import format_time, parse_size, parse_time
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.recipe.named import find_recipe, shipped_recipes, summary
from fuyou_cli.recipe.schema import format_size


def test_three_keys_are_enough(load):
    recipe = load()
    assert (recipe.output_dir, recipe.model.name_or_path, recipe.dataset.train[0].path) == ("out", "tiny", "rows.jsonl")
    assert (recipe.train.epochs, recipe.train.max_steps, recipe.lr_scheduler.warmup_ratio) == (1, None, 0.03)
    assert recipe.optimizer.lr == 1e-5
    assert recipe.offload.max_memory.cpu.is_auto


def test_max_steps_and_warmup_steps_replace_the_default_they_exclude(load):
    recipe = load("train: {max_steps: 9}\nlr_scheduler: {warmup_steps: 2}\n")
    assert (recipe.train.epochs, recipe.train.max_steps) == (None, 9)
    assert (recipe.lr_scheduler.warmup_ratio, recipe.lr_scheduler.warmup_steps) == (None, 2)


def test_numbers_are_read_as_people_write_them(load):
    recipe = load("optimizer: {lr: 1e-5, eps: 1e-8, betas: [0, 0.99]}\n")
    assert (recipe.optimizer.lr, recipe.optimizer.eps, recipe.optimizer.betas) == (1e-5, 1e-8, (0.0, 0.99))


def test_memory_limits(load):
    limits = load("offload: {max_memory: {cpu: 2GiB, gpu: 90%, ssd: 1.5TB}}\n").offload.max_memory
    assert limits.cpu.resolve(total=0, auto=0) == 2 << 30
    assert limits.gpu.resolve(total=1000, auto=0) == 900
    assert limits.ssd.resolve(total=0, auto=0) == 1_500_000_000_000
    assert load().offload.max_memory.cpu.resolve(total=5, auto=3) == 3


@pytest.mark.parametrize("value", ["2 gigs", "0", "-1", "0%", "101%", "x%", "1e3GiB", "true", "[1]", "{a: 1}", "9999999PB"])
def test_limits_that_are_none(refused, value):
    assert "offload.max_memory.cpu" in refused(f"offload: {{max_memory: {{cpu: {value}}}}}\n")


@pytest.mark.parametrize("size", [1, 512, 1000, 1024, 4096, 5 * 10**9, 3 << 30, 1536, 10**15, (1 << 50) - 1])
def test_sizes_are_shown_as_what_reads_back(size):
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("8h", 28800), ("90m", 5400), ("1h30m", 5400), ("45s", 45), ("2d", 172800), (" 1d2h3m4s ", 93784)]
)
def test_times_are_read_and_shown_as_what_reads_back(load, text, seconds):
    assert load("", f"train.max_time='{text}'").train.max_time == seconds == parse_time(format_time(seconds))


@pytest.mark.parametrize("text", ["", "h", "1.5h", "8 hours", "30m1h", "-1h", "9" * 5000 + "h", "999999d"])
def test_times_that_are_none(refused, text):
    assert "train.max_time" in refused("", f"train.max_time='{text}'")


def test_limits_of_a_run_are_off_unless_written(load):
    recipe = load()
    assert (recipe.train.max_time, recipe.offload.ssd_write_limit, recipe.train.skip_nonfinite) == (None, None, 0)
    assert recipe.offload.verify_reads is True
    assert load("offload: {ssd_write_limit: 50TB}\n").offload.ssd_write_limit == 50 * 10**12


def test_one_folder_or_several(load):
    assert load("offload: {dir: /a}\n").offload.dir == ("/a",)
    assert load("offload: {dir: [/a, /b]}\n").offload_directories({}) == (Path("/a"), Path("/b"))
    assert load().offload_directories({"FUYOU_OFFLOAD_DIR": "/c"}) == (Path("/c"),)
    assert load().offload_directories({}) == (Path("out/store"),)


def test_null_brings_the_default_back(load):
    recipe = load("train:\n  batch_size: 8\noffload:\n", "train.batch_size=null", "train.clip_grad_norm=null")
    assert recipe.train.batch_size == 64
    assert recipe.train.clip_grad_norm is None


def test_references_inside_the_recipe(load):
    recipe = load("seed: 7\nexport: {max_shard_size: 1GB}\ntrain: {batch_size: '${seed}'}\n")
    assert recipe.train.batch_size == 7


def test_an_anchor_is_refused_with_what_to_write_instead(refused):
    found = refused("optimizer: &o {lr: 2e-5}\nlr_scheduler: *o\n")["syntax"]
    assert "must not have YAML anchors" in found.message and "${section.key}" in found.help


def test_a_loaded_recipe_does_not_change(load):
    with pytest.raises(ValueError, match="frozen"):
        load().seed = 3


def test_the_whole_configuration_loads_again(load, write):
    recipe = load(
        "train: {max_steps: 4, clip_grad_norm: null, micro_batch_size: 8, max_time: 1h30m}\n"
        "lr_scheduler: {name: constant, warmup_steps: 1}\n"
        "offload: {max_memory: {cpu: 90%}, dir: [/a, /b], io: {block_size: 1MiB}, ssd_write_limit: 1TB}\n"
    )
    shown = yaml.safe_dump(recipe.model_dump(mode="json"))
    assert load_recipe(write(shown)).recipe == recipe


def test_every_shipped_recipe_is_valid_and_says_how_to_run_it():
    shipped = shipped_recipes()
    assert set(shipped) == {
        "quickstart", "llama31-8b-full-24gb", "llama31-70b-full-24gb", "qwen3-14b-full-24gb", "llama31-8b-lora-8gb",
        "qwen3-14b-lora-12gb", "llama33-70b-lora-24gb", "llama31-8b-qlora-6gb", "llama31-405b-qlora-24gb",
        "qwen3-30b-a3b-full-24gb", "qwen3-30b-a3b-lora-24gb", "qwen3-30b-a3b-lora-12gb", "gpt-oss-20b-lora-16gb",
        "gpt-oss-120b-lora-24gb",
    }  # fmt: skip
    for name, path in shipped.items():
        text = path.read_text()
        recipe = load_recipe(path).recipe
        assert recipe.output_dir == f"outputs/{name}"
        assert summary(path)
        assert any(f"fuyou {verb}{name}" in text for verb in ("", "finetune ", "recipes cp "))


def test_a_recipe_that_is_not_there_is_called_a_file(tmp_path):
    with pytest.raises(UsageError, match=r"no file '.*recip.yaml', nor a shipped recipe of this name"):
        find_recipe(str(tmp_path / "recip.yaml"), [])


def test_overrides_in_shipped_headers_are_valid():
    for path in shipped_recipes().values():
        shown = [line.split("   ")[0] for line in path.read_text().splitlines() if line.startswith("#   ") and "=" in line]
        words = [word.strip("'") for line in path.read_text().splitlines() if line.startswith("#   ") for word in line.split()]
        overrides = [word for word in words if "=" in word]
        assert shown and overrides
        for override in overrides:
            load_recipe(path, [override])


@pytest.mark.parametrize(
    ("text", "path", "column"),
    [
        ('offload: {dir: "a\\0b"}\n', "offload.dir", 15),
        ('offload: {dir: [/a, "a\\0b"]}\n', "offload.dir", 15),
        ('dataset.cache_dir="a\\0b"', "dataset.cache_dir", 0),
        ('checkpoint: {resume: "a\\0b"}\n', "checkpoint.resume", 21),
        ('tokenizer: {chat_template: "a\\0b"}\n', "tokenizer.chat_template", 27),
    ],
)
def test_a_null_character_is_in_no_path(refused, text, path, column):
    found = refused("", text)[path] if "=" in text else refused(text)[path]
    assert "null character" in found.message
    assert "\0" not in found.message
    assert found.place.column == column
    assert "=" in text or found.place.line == 6


@pytest.mark.parametrize(
    ("written", "key", "says"),
    [
        ("{r: 0}", "r", "1"),
        ("{lora_dropout: 1.0}", "lora_dropout", "must be below 1.0"),
        ("{target_modules: 3}", "target_modules", "expected all-linear, a list of module names, or a regular expression"),
        ("{target_modules: []}", "target_modules", "must not be empty"),
        ("{target_modules: 'q_(proj'}", "target_modules", "'q_(proj' is not a regular expression"),
        ("{modules_to_save: ['[x']}", "modules_to_save", "'[x' is not a regular expression"),
        ("{target_modules: 'x{99999999999}'}", "target_modules", "is not a regular expression: the repetition number is too"),
        ("{rank_pattern: {'v[': 4}}", "rank_pattern", "'v[' is not a regular expression"),
        ("{alpha_pattern: {v: 0}}", "alpha_pattern.v", "1"),
        ("{type: loha}", "type", "lora"),
    ],
)
def test_what_an_adapter_cannot_be(refused, written, key, says):
    assert says in refused(f"adapter: {written}\n")[f"adapter.{key}"].message


def test_the_bounds_themselves_are_allowed(load):
    recipe = load(
        "offload: {io: {queue_depth: 256, block_size: 1GiB}}\ntrain: {threads: 1024}\n", "dataset.max_seq_len=16777216"
    )
    assert (recipe.offload.io.queue_depth, recipe.offload.io.block_size, recipe.train.threads) == (256, 1 << 30, 1024)


def test_the_native_library_has_the_same_bounds():
    header = (Path(__file__).parents[2] / "native" / "src" / "internal.h").read_text()
    assert "#define FY__DEPTH_MAX 256u" in header
    assert "#define FY__BLOCK_MAX (UINT64_C(1) << 30)" in header
