#!/usr/bin/env python3
"""Shows that this checkout computes what another one computed: losses, exports, evaluations and stores, bit for bit.

    python scripts/compare_bits.py --checkout DIR --work DIR [--only WORD ...]
    DIR: another checkout of fuyou whose C extension is built; 20 minutes on two cores, 10 the second time

Each case is a tiny model and a recipe. The other checkout trains it, and this one does. Then the other one is killed in
mid-run, and this one continues its store. Compared are the losses of every step, the losses of evaluations, and the SHA-256 of
every exported file. What the other checkout did is kept in --work: a second call runs this one alone. A change that should not
alter numbers passes; one that alters them on purpose (the order of a sum) names the cases in its message.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

ROOT = Path(__file__).resolve().parents[1]
STEPS, KILLED_AFTER, WORDS = 8, 4, 97
LONGEST_RUN = 600.0  # seconds after which one is taken to hang
SSD = {f"offload.{kind}": "ssd" for kind in ("weights", "optimizer_states", "gradients", "boundaries")}
RAM = dict.fromkeys(SSD, "cpu")
LORA = {"adapter.r": 4, "adapter.lora_alpha": 8, "optimizer.lr": 1e-2}
# name -> model, keys of its recipe. Every way in which a step's numbers come about is here once, and every family with a part
# of its own; where things rest varies through them.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full, on the ssd": ("llama", SSD),
    "full, in ram": ("llama", RAM),
    "full, unclipped": ("llama", {**SSD, "train.clip_grad_norm": None}),
    "full, updates deferred": ("llama", {**SSD, "train.clip_grad_norm": None, "offload.defer_updates": 1.0}),
    "full, float32": ("gpt2", SSD),
    "full, float32 compute": ("llama", {**RAM, "precision.compute": "float32"}),
    "int8 states": ("llama", {**SSD, "optimizer.state_dtype": "int8"}),
    "bfloat16 states": ("llama", {**RAM, "optimizer.state_dtype": "bfloat16"}),
    "lion": ("llama", {**SSD, "optimizer.name": "lion"}),
    "two sweeps": ("llama", {**RAM, "train.sweep_tokens": 64}),
    "packed": ("llama", {**RAM, "dataset.packing": "concat", "dataset.max_seq_len": 64}),
    "packed, isolated": ("llama", {**SSD, "dataset.packing": "isolated", "dataset.max_seq_len": 64}),
    "a vocabulary in pieces": ("llama", {**SSD, "train.head_chunk_vocab": 32}),
    "evaluated": ("llama", {**SSD, "eval.every_steps": 3, "dataset.eval_fraction": 0.2}),
    "windows": ("gemma3", SSD),
    "positions by length": ("longrope", RAM),
    "frozen parts": ("llama", {**SSD, "freeze": ["model.layers.0.*"]}),
    "lora": ("llama", LORA),
    "lora, on the ssd": ("qwen3", {**LORA, **SSD}),
    "dora": ("llama", {**LORA, "adapter.use_dora": True}),
    "qlora, nf4": ("llama", {**LORA, "model.quantize": "nf4"}),
    "qlora, int8": ("qwen3", {**LORA, "model.quantize": "int8"}),
    "mixture": ("qwen3_moe", SSD),
    "mixture, balanced": ("mixtral", {**RAM, "train.router_aux_loss": 0.01}),
    "mixture, shared expert": ("deepseek_v3", SSD),
    "mixture with sinks": ("gpt_oss", RAM),
    "mixture, lora": ("qwen3_moe", LORA),
    "mixture, lora of experts": ("qwen3_moe", {**LORA, "adapter.experts": True}),
    "mixture, nf4": ("mixtral", {**LORA, "model.quantize": "nf4"}),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--checkout", type=Path, required=True, help="the other checkout")
    options.add_argument("--work", type=Path, required=True, help="models, runs, and what the other checkout did")
    options.add_argument("--only", nargs="*", default=[], help="cases whose names have one of these words")
    asked = options.parse_args()
    cases = {name: case for name, case in CASES.items() if not asked.only or any(word in name for word in asked.only)}
    work = asked.work.resolve()
    make_materials(work, {model for model, _ in cases.values()})
    if not cases:
        options.error("no case has one of these words in its name")
    differ = [name for name in cases if not compare(name, asked.checkout.resolve(), work)]
    print(f"{len(cases) - len(differ)} of {len(cases)} cases equal" + "".join(f"\n  differs: {name}" for name in differ))
    sys.exit(1 if differ else 0)


def compare(name: str, other: Path, work: Path) -> bool:
    """Runs a case in both checkouts and continues a killed run of the other one. Prints what differs."""
    kept = work / "other" / name.replace(" ", "_")
    aside, folder = kept / "aside", kept / "killed"
    if not (kept / "done").exists():
        shutil.rmtree(kept, ignore_errors=True)
        train(other, write_recipe(name, kept / "straight", work))
        kill_in_mid_run(other, write_recipe(name, folder, work))
        shutil.copytree(folder, aside)
        (kept / "done").touch()
    expected = results(kept / "straight")

    shutil.rmtree(work / "this", ignore_errors=True)
    train(ROOT, write_recipe(name, work / "this" / "straight", work))
    straight = results(work / "this" / "straight")
    # The store of the other checkout stays as it was: a copy of it is continued, in the place that its manifest names.
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(aside, folder)
    train(ROOT, folder / "recipe.yaml")
    continued = results(folder)

    wrong = [
        f"{what}: {part}" for what, got in (("trained", straight), ("continued", continued)) for part in unequal(expected, got)
    ]
    print(f"{'DIFFERS' if wrong else 'equal  '}  {name}" + "".join(f"\n           {line}" for line in wrong), flush=True)
    return not wrong


def unequal(expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}: {expected.get(key)} and {got.get(key)}"
        for key in sorted({*expected, *got})
        if expected.get(key) != got.get(key)
    ]


def results(folder: Path) -> dict[str, Any]:
    """Returns the losses of steps and evaluations, and the digests of exported weights."""
    found: dict[str, Any] = {}
    for line in (folder / "out" / "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key, value in record.items():
            if "loss" in key or key == "grad_norm":
                found[f"step {record.get('step')} {key}"] = value
    for path in sorted((folder / "out").rglob("*.safetensors")):
        found[str(path.relative_to(folder / "out"))] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def train(checkout: Path, recipe: Path) -> None:
    child = start(checkout, recipe)
    try:
        code = child.wait(LONGEST_RUN)
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    if code:
        give_up(checkout, recipe, f"exit code {code}")


def kill_in_mid_run(checkout: Path, recipe: Path) -> None:
    """Kills a run as soon as it has logged a few steps."""
    child = start(checkout, recipe)
    log, deadline = recipe.parent / "out" / "log.jsonl", time.monotonic() + LONGEST_RUN
    while child.poll() is None:
        if time.monotonic() > deadline or (log.exists() and log.read_text().count('"loss"') >= KILLED_AFTER):
            child.kill()
        time.sleep(0.005)
    if child.returncode != -signal.SIGKILL:
        give_up(checkout, recipe, f"exit code {child.returncode}, before it could be killed")
    if not log.exists() or log.read_text().count('"loss"') >= STEPS:
        give_up(checkout, recipe, "not killed in mid-run")


def give_up(checkout: Path, recipe: Path, why: str) -> NoReturn:
    sys.exit(f"{recipe}: {why}, of {checkout}\n{(recipe.parent / 'screen.txt').read_text()[-3000:]}")


def start(checkout: Path, recipe: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(recipe.parent / "cache"),
    }
    command = [sys.executable, "-m", "fuyou_cli", "finetune", str(recipe)]
    with (recipe.parent / "screen.txt").open("w") as screen:
        return subprocess.Popen(command, cwd=recipe.parent, env=environment, stdout=screen, stderr=screen)


def write_recipe(name: str, folder: Path, work: Path) -> Path:
    model, keys = CASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "model": {"name_or_path": str(work / "models" / model)},
        "dataset": {"train": [{"path": str(work / "rows.jsonl")}], "max_seq_len": 32, "overlong": "split"},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": STEPS, "batch_size": 4, "micro_batch_size": 2, "threads": 1},
        "offload": {"device": "cpu", "max_memory": {"cpu": "4GiB"}, "dir": str(folder / "store"), "measure": False},
        "checkpoint": {"commit_every_steps": 1},
    }
    for key, value in keys.items():
        *sections, last = key.split(".")
        part: Any = content
        for section in sections:
            part = part.setdefault(section, {})
        part[last] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def make_materials(work: Path, models: set[str]) -> None:
    """Makes rows, and checkpoints with a tokenizer that has a token for each word."""
    rows = work / "rows.jsonl"
    if not rows.exists():
        work.mkdir(parents=True, exist_ok=True)
        lines = [
            " ".join(f"w{(row * 7 + place * place) % (WORDS - 2) + 2}" for place in range(5 + row % 23)) for row in range(64)
        ]
        rows.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    for model in sorted(models):
        if not (work / "models" / model / "config.json").exists():
            make_model(work / "models" / model, model)


def make_model(folder: Path, name: str) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    sizes: dict[str, Any] = {
        "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_experts": 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [1.5, 2.0, 4.0, 8.0] * 2}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    config = {
        "llama": lambda: transformers.LlamaConfig(**sizes),
        "longrope": lambda: transformers.LlamaConfig(**sizes, rope_parameters=rope),
        "qwen3": lambda: transformers.Qwen3Config(**sizes, head_dim=16),
        "gemma3": lambda: transformers.Gemma3TextConfig(**sizes, head_dim=16, sliding_window=8),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=WORDS, n_embd=64, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**sizes, **experts, head_dim=16),
        "mixtral": lambda: transformers.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **sizes, num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=8
        ),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(
            **{**sizes, "num_key_value_heads": 4}, **latent, n_routed_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=64, n_group=1, topk_group=1, first_k_dense_replace=1,
        ),
    }[name]()  # fmt: skip
    torch.manual_seed(11)
    dtype = torch.float32 if name == "gpt2" else torch.bfloat16
    transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    words = ["<pad>", "<end>", *(f"w{number}" for number in range(2, WORDS))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w2"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)


if __name__ == "__main__":
    main()
