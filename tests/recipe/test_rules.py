"""Tests keys that exclude each other, and keys whose feature does not exist yet."""

from __future__ import annotations

import pytest

from fuyou_cli.recipe import rules
from fuyou_cli.recipe.load import load_recipe
from tests import emulated

from .conftest import VALID


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("train: {epochs: 2, max_steps: 3}\n", "train.max_steps"),
        ("train: {epochs: null}\n", "train.epochs"),
        ("lr_scheduler: {warmup_ratio: 0.1, warmup_steps: 3}\n", "lr_scheduler.warmup_steps"),
        ("train: {max_steps: 3}\nlr_scheduler: {warmup_steps: 4}\n", "lr_scheduler.warmup_steps"),
        ("lr_scheduler: {name: constant, min_lr_ratio: 0.5}\n", "lr_scheduler.min_lr_ratio"),
        ("train: {batch_size: 64, micro_batch_size: 7}\n", "train.micro_batch_size"),
        ("train: {batch_size: 2, micro_batch_size: 4}\n", "train.micro_batch_size"),
        ("train: {lanes: 2}\n", "train.lanes"),
        ("train: {parallel: replicas}\n", "train.parallel"),
        ("train: {lanes: 4, batch_size: 24, micro_batch_size: 4}\nadapter: {r: 4}\n", "train.lanes"),
        ("train: {lanes: 2, sweep_tokens: 8192}\nadapter: {r: 4}\n", "train.sweep_tokens"),
        ("train: {lanes: 2, router_aux_loss: 0.1}\nadapter: {r: 4}\n", "train.router_aux_loss"),
        ("offload: {device: cpu, weights: gpu}\n", "offload.weights"),
        ("offload: {device: cpu, activations: keep}\n", "offload.activations"),
        ("offload: {device: cpu, max_memory: {gpu: 1GiB}}\n", "offload.max_memory.gpu"),
        ("offload: {strategy: none, optimizer_states: ssd}\n", "offload.optimizer_states"),
        ("offload: {strategy: manual, weights: cpu}\n", "offload.strategy"),
        ("offload: {dir: [/a, /a]}\n", "offload.dir"),
        ("train: {clip_grad_norm: 2}\noffload: {defer_updates: 0}\n", "offload.defer_updates"),
        ("train: {clip_grad_norm: null}\noffload: {norm_first: always}\n", "offload.norm_first"),
        ("adapter: {r: 4}\noffload: {norm_first: always}\n", "offload.norm_first"),
        ("train: {clip_grad_norm: null, skip_nonfinite: 2}\n", "train.skip_nonfinite"),
        ("train: {compile: true}\noffload: {activations: swap}\n", "offload.activations"),
        ("offload: {device: cuda, boundaries: gpu, activations: swap}\n", "offload.boundaries"),
        ("adapter: {r: 4}\nfreeze: [lm_head]\n", "freeze"),
        ("adapter: {experts: true, use_dora: true}\n", "adapter.use_dora"),
        ("adapter: {experts: true, lora_dropout: 0.1}\n", "adapter.lora_dropout"),
        ("optimizer: {name: lion, eps: 1e-6}\n", "optimizer.eps"),
        ("logging: {backends: [jsonl, jsonl]}\n", "logging.backends"),
        ("eval: {every_steps: 2}\n", "eval.every_steps"),
        ("train: {early_stopping: {patience: 2}}\n", "train.early_stopping"),
    ],
)
def test_impossible_pairs(refused, text, key):
    found = refused(text)
    assert {path: diagnostic.code for path, diagnostic in found.items()} == {key: "conflict"}


LORA, FLASH = "adapter={r: 4}", "model.attn_implementation=flash_attention_2"


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["model.quantize=nf4"], "model.quantize", "only frozen weights"),
        (["model.double_quant=true"], "model.double_quant", "of the maxima of nf4"),
        ([LORA, "model.quantize=int8", "model.double_quant=true"], "model.double_quant", "of the maxima of nf4"),
        ([LORA, "model.quantize=nf4", "offload.optimizer_states=gpu"], "offload.optimizer_states", "is not quantised"),
        (["dataset.streaming=true"], "dataset.streaming", "does not know how many rows"),
        (["dataset.streaming=true", "train.max_steps=3", "dataset.eval_fraction=0.1"], "dataset.eval_fraction", "holds back"),
        (["model.name_or_path=./not-yet", "model.revision=nope"], "model.revision", "has no revisions"),
        (["model.name_or_path=/", "model.revision=nope"], "model.revision", "has no revisions"),
        (
            ["eval={every_steps: 2, samples: {prompts: [a], max_new_tokens: 64}}", "dataset.max_seq_len=64"],
            "eval.samples.max_new_tokens",
            "leaves a prompt no token",
        ),
        ([FLASH, "offload.device=cpu"], "model.attn_implementation", "does not run on"),
        ([FLASH, "offload.device=cuda", "precision.compute=float32"], "model.attn_implementation", "cannot compute in"),
    ],
)
def test_impossible_overrides(refused, overrides, key, says):
    ((name, found),) = refused("", *overrides).items()
    assert (name, found.code) == (key, "conflict") and says in found.message


def test_all_entries_have_weights_or_none(load, refused):
    found = refused("", "dataset.train=[{path: a.jsonl, weight: 2}, {path: b.jsonl}]")
    assert found["dataset.train"].message == "`dataset.train[1]` has no weight, but another entry has one"
    both = load("", "dataset.train=[{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 0.5}]")
    alone = load("", "dataset.train=[{path: a.jsonl, weight: 2}]")
    assert (both.dataset.weights, alone.dataset.weights) == ((2, 0.5), ())


def test_what_excludes_nothing(load, tmp_path):
    assert load("", "model.name_or_path=some/model", "model.revision=main").model.revision == "main"
    assert load("", f"model.name_or_path={tmp_path}", "model.revision=null").model.revision is None
    assert load("", FLASH, "offload.device=cuda").model.attn_implementation == "flash_attention_2"


def test_a_divisor_is_suggested(refused):
    assert refused("train: {batch_size: 60, micro_batch_size: 8}\n")["train.micro_batch_size"].help == "use 6, or auto"


def test_no_help_is_refused_itself(refused):
    helps = []
    for asked in ("keep", "swap"):
        text = f"offload: {{device: cpu, activations: {asked}}}\ntrain: {{compile: true}}\n"
        helps.append(refused(text)["offload.activations"].help)
    assert helps == ["use auto", "use auto or recompute, or leave train.compile false"]


def test_an_empty_list_of_data_sets(refused):
    assert refused("", "dataset.train=[]")["dataset.train"].message == "`dataset.train`: must not be empty"


@pytest.mark.parametrize("override", [
    "precision.master=bfloat16", "precision.allow_tf32=true", "export.push_to_hub=me/model", "export.private=false",
])  # fmt: skip
def test_keys_that_did_nothing_are_refused_unless_they_ask_for_nothing(refused, override):
    key = override.partition("=")[0]
    ((name, found),) = refused("", override).items()
    assert (name, found.code) == (key, "removed") and f"`{override.replace('=', ': ')}` is gone" in found.message
    assert "delete the key" in found.help


def test_float16_is_no_choice(refused):
    ((name, found),) = refused("", "precision.compute=float16").items()
    assert (name, found.code) == ("precision.compute", "not-a-choice")
    assert "expected bfloat16 or float32, got 'float16'" in found.message


def test_neutral_values_are_fine(load):
    neutral = [
        "adapter=null", "dataset.eval=[]", "dataset.eval_fraction=0",
        "offload.activations=keep", "offload.defer_updates=1", "train.max_time=null",
        "precision.compute=float32", "dataset.packing=concat", "dataset.train[0].weight=1",
        "precision.allow_tf32=false", "offload.weights=gpu", "offload.gradients=ssd", "export.private=true",
        "dataset.train[0].split=validation",
    ]  # fmt: skip
    assert load("", *neutral).precision.compute == "float32"


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("mode", "redo", "12.3 with `optimizer.state_dtype: int8`"),
        ("mode", "snapshot", "`fuyou export`"),
        ("mode", "other", "delete the key"),
        ("snapshot_every_steps", "5", "`checkpoint.commit_every_steps` sets the interval"),
        ("keep_last", "3", "`eval.keep_best` keep copies"),
    ],
)
def test_a_key_that_is_gone_is_one_error_with_the_way_out(refused, key, value, remedy):
    for text, override in ((f"checkpoint: {{{key}: {value}}}\n", []), ("", [f"checkpoint.{key}={value}"])):
        ((name, found),) = refused(text, *override).items()
        assert (name, found.code) == (f"checkpoint.{key}", "removed")
        assert found.message.startswith(f"`checkpoint.{key}: {value}` is gone: ") and remedy in found.help
        assert found.place.line == (6 if text else 0)


@pytest.mark.parametrize("said", ["mode: in_place", "mode: auto", "snapshot_every_steps: null", "keep_last: 2"])
def test_a_key_that_is_gone_may_say_what_is_so_anyway(write, said):
    (note,) = load_recipe(write(f"{VALID}checkpoint:\n  {said}\n")).notes
    assert note.endswith(f"recipe.yaml:8: note: `checkpoint.{said}` has no effect any more: delete the key")


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("model.kernels", "liger", "train.compile: true"),
        ("optimizer.name", "sgd", "lion"),
        ("optimizer.momentum", "0.5", "betas"),
        ("offload.wear", "balanced", "spare"),
        ("offload.defer_updates", "0.5", "auto"),
    ],
)
def test_other_keys_and_values_that_are_gone(load, refused, key, value, remedy):
    ((name, found),) = refused("", f"{key}={value}").items()
    assert (name, found.code) == (key, "removed") and remedy in found.help
    assert load("", "model.kernels=torch", "optimizer.momentum=0.9").optimizer.name == "adamw"


def test_the_device_of_tests_is_gone_for_users(refused, monkeypatch):
    monkeypatch.setattr(rules, "REMOVED", (emulated.GONE,))
    ((name, found),) = refused("", "offload.device=emulated").items()
    assert (name, found.code, found.help) == ("offload.device", "removed", "write `auto`, `cpu` or `cuda`")
