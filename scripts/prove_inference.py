#!/usr/bin/env python3
"""Evaluates a model larger than memory, and lets it write, inside a memory group: nothing is killed, each pass reads it once.

    sudo python scripts/prove_inference.py --work DIR --data gsm8k/train.jsonl
    the 1.1b shape in 1.5 GiB: about ten minutes on two cores; to try the script itself: --shape 50m --memory 768MiB

`fuyou eval` on 64 rows of at most 512 tokens, `fuyou generate` of 16 tokens for eight prompts at once. Each runs in a memory
group of exactly --memory, and is told so. What eval reads is counted by the daemon, for each parameter and pass.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.both_sides import FUYOU, end_of, limited, started
from proof.setting import Setting, parser, run_script, size
from proof.verdicts import Row, at_most, holds, missing

from fuyou_cli.core.units import MiB, gib

BYTES = 2.1  # of a parameter and pass, in bfloat16
ROWS, PROMPTS, TOKENS = 64, 8, 16


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--memory", type=size, default=1536 * MiB, help="of the group, and of fuyou's budget (1.5GiB)")
    return options.parse_args()


def recipe_of(setting: Setting) -> Path:
    rows, again = (
        json.loads(json.dumps({**setting.entry, "max_samples": ROWS})) for _ in range(2)
    )  # YAML names what is shared
    recipe = {
        "version": 1,
        "output_dir": str(setting.work / "inference"),
        "model": {"name_or_path": str(setting.model())},
        "dataset": {"train": [rows], "eval": [again], "max_seq_len": 512, "loss_on": "all"},
        "train": {"max_steps": 1, "batch_size": 1},
    }
    path = setting.work / "inference.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def in_group(setting: Setting, name: str, words: list[str], memory: int) -> dict[str, Any]:
    """Runs a command of fuyou in a group of this size."""
    output = setting.work / f"{name}.txt"
    with limited(setting.work, memory=memory, throttle=None) as (held, why):
        with output.open("wb") as file, started([*FUYOU, *words], held, file) as child:
            code = child.wait()
        kills = held.kills() if held is not None else 0
    told = output.read_text(encoding="utf-8", errors="replace")
    failed = f"exit code {code}:\n{end_of(output)}" if code else ""
    return {"exit": code, "killed": kills, "not_enforced_because": why, "told": told, "failed": failed}


def held_in(what: str, memory: int, result: dict[str, Any], done: str, ok: bool) -> Row:
    """Tells whether a command came to its end inside the group."""
    what, asked = f"{what} inside {gib(memory)}", "not killed, exit code 0"
    if why := result["not_enforced_because"]:
        return missing(what, asked, f"no limit could be set: {why}")
    measured = f"exit {result['exit']}, {result['killed']} killed"
    whole = ok and not result["failed"] and not result["killed"]
    return holds(what, asked, measured, whole, note=result["failed"] or done)


def evaluated(setting: Setting, memory: int) -> list[Row]:
    words = ["eval", str(setting.model()), str(recipe_of(setting)), f"offload.max_memory.cpu={memory // MiB}MiB", "--json"]
    result = setting.measure(f"eval in {memory}", lambda: in_group(setting, "eval", words, memory))
    found = {} if result["failed"] else json.loads(result["told"][result["told"].index("{") :])
    what = f"{setting.shape}: fuyou eval of {ROWS} rows"
    bytes_read = f"{setting.shape}: bytes that eval reads, of a parameter and pass"
    if not found:
        return [held_in(what, memory, result, "", False), missing(bytes_read, f"<= {BYTES:g}", "eval did not end")]
    [rows], passes, parameters = found["sets"], found["passes"], found["parameters"]
    peak = f"peak {gib(found['memory']['peak'])}, loss {rows['loss']:.4f}, {rows['rows']} rows, {passes} passes"
    each = found["read_bytes"] / parameters / passes
    return [
        held_in(what, memory, result, peak, rows["rows"] == ROWS),
        at_most(bytes_read, each, BYTES, values={"eval": found | {"model": setting.shape}}),
    ]


def written(setting: Setting, memory: int) -> Row:
    prompts = setting.work / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Question {n}: what is {n} + {n}?"}) + "\n" for n in range(PROMPTS)))
    words = ["generate", str(setting.model()), "--file", str(prompts), "--max-new-tokens", str(TOKENS)]
    words += ["--memory", f"{memory // MiB}MiB", "--batch-size", str(PROMPTS)]
    result = setting.measure(f"generate in {memory}", lambda: in_group(setting, "generate", words, memory))
    lines = [line for line in result["told"].splitlines() if line.startswith("{")]
    what = f"{setting.shape}: fuyou generate, {PROMPTS} prompts at once, {TOKENS} tokens each"
    return held_in(what, memory, result, f"{len(lines)} texts", len(lines) == PROMPTS)


def prove(setting: Setting, options: argparse.Namespace) -> int:
    rows = [*evaluated(setting, options.memory), written(setting, options.memory)]
    return setting.conclude(f"prove_inference-{setting.shape}", rows, {**setting.described(), "memory": options.memory})


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
