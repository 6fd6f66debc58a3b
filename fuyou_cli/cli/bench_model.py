"""Runs `fuyou bench --model`: how fast this machine trains a model of given shapes, without its weights or data.

It writes checkpoints of two and of four of the model's blocks, with random weights (a GPU multiplies zeros faster), and trains
each for a few steps with `fuyou finetune`, all in the places where the plan of the whole model keeps most of its blocks. To the
step of such a sample it adds the blocks that are missing, at the time of those that are there. How far the estimates of the two
samples differ says how much to believe them.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from rich.console import Console
from rich.text import Text

from fuyou_cli.core.errors import FuyouError, PlanError, UsageError
from fuyou_cli.core.paths import folder, scratch_folder
from fuyou_cli.core.units import count, duration
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.recipe.named import find_recipe, shipped_shapes
from fuyou_cli.training.run_log import LOG, History, read_history

from .console import result_console, write_status
from .error_screen import DOES_NOT_FIT, like_ctrl_c
from .render.theme import column, heading, ordered, percent, ruled, say, show, some, speed, symbols, tera

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from fuyou_cli.recipe.schema import Recipe

SCHEMA_VERSION = 2
SAMPLES = (2, 4)  # blocks of the two runs
STEPS = 5  # of a run; the first ones, which differ from the rest, do not count
AGREE = 0.05  # largest difference between the samples' estimates of the whole step, as a share
_DEVIATION = 0.02  # standard deviation of such models' initial weights
_SHARD = 5 * 10**9  # bytes
_OF_BLOCK = re.compile(r"\w+ (\S+\.)?\w+\.\d+\b")  # labels of visits: "forward layers.3", "backward layers.3.mlp[0:8]"

NAMED = {  # shapes that are shipped
    "8b": "meta-llama/Llama-3.1-8B", "13b": "meta-llama/Llama-2-13b-hf", "70b": "meta-llama/Llama-3.1-70B",
    "175b": "facebook/opt-175b",
}  # fmt: skip
_AS_GOOD = {"mxfp4": "nf4", "fp8": "int8"}  # what random weights are quantised to instead: as many bits, and decoded as fast


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The whole model's step as the run of a sample gives it. Seconds."""

    blocks: int  # of the sample
    measured_seconds: float  # of its step
    block_seconds: float  # of it, per block: from the end of the visit before to the end of its own visit
    step_seconds: float  # of the whole model's step


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The figures of one batch size."""

    batch_size: int
    micro_batch_size: int
    tokens: int  # per step
    parameters: int
    frozen_parameters: int
    predicted_seconds: float
    step_flops: float  # as 6 per token and parameter that computes, 2 less for frozen ones
    device_flops: float  # the device's measured rate
    homes: dict[str, str]  # tensor -> the tier where it rests, of most blocks
    estimates: tuple[Estimate, ...]
    busy: dict[str, float]  # resource -> share of the larger sample's step

    @property
    def step_seconds(self) -> float:
        return self.estimates[-1].step_seconds

    @property
    def apart(self) -> float:
        """Returns how much the estimates differ, as a share of the one from more blocks."""
        return abs(self.estimates[0].step_seconds - self.step_seconds) / self.step_seconds

    def as_data(self) -> dict[str, object]:
        derived = {"step_seconds": self.step_seconds, "tokens_per_second": self.tokens / self.step_seconds}
        derived |= {"flops_6n": self.step_flops / self.step_seconds, "apart": self.apart, "agrees": self.apart <= AGREE}
        return {**asdict(self), **derived}


def parsed_batch_sizes(text: str | None) -> tuple[int, ...]:
    """Parses "8,16,32"."""
    try:
        sizes = tuple(int(size) for size in text.split(",")) if text else ()
    except ValueError:
        sizes = (0,)
    if any(size < 1 for size in sizes):
        raise UsageError(f"--batch: {text} is not a list of batch sizes", hint="write it as --batch 8,16,32")
    return sizes


@like_ctrl_c()  # so that its files are removed however it ends
def run_model_bench(
    model: str, overrides: Sequence[str], *, batch_sizes: Sequence[int], directory: Path | None, json_output: bool
) -> None:
    """Measures a named shape or a recipe's, and prints a table or one JSON object. Without `batch_sizes` it takes the recipe's,
    twice that and four times."""
    with ExitStack() as stack:
        if directory is not None:
            places: tuple[Path, ...] = (folder(directory, key="--dir"),)
        elif model.lower() in NAMED:
            places = (folder(os.environ.get("FUYOU_OFFLOAD_DIR") or ".", key="FUYOU_OFFLOAD_DIR"),)
        else:
            places = load_recipe(*find_recipe(model, list(overrides))).recipe.offload_directories(os.environ)
        store = [stack.enter_context(scratch_folder(place)) for place in places]
        bench = _Bench(model, overrides, stack.enter_context(scratch_folder(places[0])), store)
        usual = bench.recipe.train.batch_size
        points = [bench.point(size) for size in batch_sizes or (usual, 2 * usual, 4 * usual)]
    if json_output:
        record = {"schema_version": SCHEMA_VERSION, "model": model, "points": [point.as_data() for point in points]}
        result_console().file.write(json.dumps(record, indent=2) + "\n")
    else:
        show_model_bench(result_console(), model, points)


class _Bench:
    """The recipe and the shapes of a model, and the folders of the runs that measure it."""

    def __init__(self, model: str, overrides: Sequence[str], scratch: Path, store: Sequence[Path]) -> None:
        from transformers import AutoConfig

        from fuyou_cli.checkpoint.hub import Hub
        from fuyou_cli.engine.skeleton import load_config
        from fuyou_cli.training.stored_quantised import as_stored

        self._scratch, self._store = scratch, [str(place) for place in store]
        self._model: dict[str, Any] = {"revision": None}
        if model.lower() in NAMED:
            self._config: PreTrainedConfig = AutoConfig.for_model(**shipped_shapes(NAMED[model.lower()]) or {})
            usual = {"dataset": {"train": [{"path": "-"}], "max_seq_len": 2048}, "train": {"max_steps": 1, "batch_size": 16}}
            usual |= {"output_dir": "-", "model": {"name_or_path": "-"}}
            path = scratch / "recipe.yaml"
            path.write_text(yaml.safe_dump(usual), encoding="utf-8")
            self.recipe = load_recipe(path, list(overrides)).recipe
        else:
            self.recipe = load_recipe(*find_recipe(model, overrides)).recipe
            source = Hub(self.recipe, say=write_status, progress=lambda what, done, total: None).model(need_weights=False)
            self._config = load_config(source, trust_remote_code=self.recipe.model.trust_remote_code)
            rests = as_stored(self.recipe, source, say=write_status).model
            self._model |= {"quantize": _AS_GOOD.get(rests.quantize, rests.quantize), "double_quant": rests.double_quant}
        if self.recipe.freeze:
            why = "a model with frozen parts is not extrapolated from a few blocks"
            raise UsageError(f"freeze: {why}", hint="leave it out: freeze=[]")
        self._text = self._config.get_text_config()

    def point(self, batch_size: int) -> Point:
        """Plans the whole model, and measures both samples of it."""
        write_status(f"batch size {batch_size}")
        whole = json.loads(_fuyou("plan", self._recipe(self._text.num_hidden_layers, batch_size), "--json"))
        if reason := whole.get("refusal") or next(iter(whole["problems"]), ""):  # without a plan there is no word of a refusal
            raise PlanError(f"batch size {batch_size}: {reason}")
        plan, homes = whole["plan"], homes_of(whole["plan"]["stages"])
        micro_batch_size, blocks, samples = plan["numerics"]["micro_batch_size"], self._text.num_hidden_layers, {}
        for number in sorted({min(number, blocks) for number in SAMPLES}):
            write_status(f"training {number} of {blocks} blocks, {some(STEPS, 'step')}")
            recipe = self._recipe(number, batch_size, homes=homes, micro_batch_size=micro_batch_size)
            _fuyou("finetune", recipe, "--assume-rates")  # what can be known by now was measured for the plan
            samples[number] = read_history(self._scratch / f"{batch_size}-{number}" / LOG)
        larger = samples[max(samples)]
        return Point(
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            tokens=larger.steps[-1].batch_tokens,
            parameters=whole["model"]["parameters"],
            frozen_parameters=whole["model"]["frozen_parameters"],
            predicted_seconds=plan["predicted"]["step_seconds"],
            step_flops=plan["predicted"]["step_flops"],
            device_flops=whole["hardware"]["matmul_flops"],
            homes=homes,
            estimates=tuple(estimated(history, number, blocks) for number, history in samples.items()),
            busy={name: seconds / larger.report.step_seconds for name, seconds in larger.report.busy.items()},
        )

    def _recipe(
        self, blocks: int, batch_size: int, *, homes: dict[str, str] | None = None, micro_batch_size: int | None = None
    ) -> str:
        """Writes the recipe of a short run that leaves nothing behind elsewhere, its rows, and its model: with weights if it is
        told `homes`. Returns the recipe's path."""
        name, kind, length = f"{batch_size}-{blocks}", "shapes" if homes is None else "model", self.recipe.dataset.max_seq_len
        rows, model = self._scratch / f"{name}.jsonl", self._scratch / f"{kind}-{blocks}"
        ids = np.random.default_rng(0).integers(0, self._text.vocab_size, (batch_size, length))  # each step trains on these
        rows.write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in ids), encoding="utf-8")
        if not model.exists():
            write_model(self._config, model, self.recipe, blocks=blocks, weights=homes is not None)
        content = self.recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
        of_run: dict[str, Any] = {key: content[key] for key in ("seed", "adapter", "optimizer", "precision") if key in content}
        of_run |= {"output_dir": str(self._scratch / name), "logging": {"backends": ["jsonl"]}}
        of_run |= {"dataset": {"train": [{"path": str(rows), "format": "tokenized"}], "max_seq_len": length}}
        of_run |= {"lr_scheduler": {"name": "constant"}, "checkpoint": {"resume": "never"}, "export": {"at_end": False}}
        of_run["model"] = {**content["model"], **self._model, "name_or_path": str(model)}
        ends = {"epochs": None, "max_time": None, "early_stopping": None, "max_steps": STEPS}
        of_run["train"] = content.get("train", {}) | ends | {"batch_size": batch_size}
        if micro_batch_size is not None:
            of_run["train"]["micro_batch_size"] = micro_batch_size
        limits = {"dir": self._store, "ssd_write_limit": None}
        of_run["offload"] = content.get("offload", {}) | limits | (homes or {})
        path = self._scratch / f"{name}.yaml"
        path.write_text(yaml.safe_dump(of_run), encoding="utf-8")
        return str(path)


def _fuyou(*words: str) -> str:
    """Runs a command of fuyou in a process of its own and returns what it printed. Raises FuyouError with its message and exit
    code."""
    done = subprocess.run(
        [sys.executable, "-m", "fuyou_cli", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode and not (done.returncode == DOES_NOT_FIT and done.stdout):
        message = done.stderr.rpartition("error: ")[2].strip()
        error = FuyouError(message or f"`fuyou {words[0]}` ended with code {done.returncode}")
        error.exit_code = max(1, done.returncode)
        raise error
    return done.stdout


# ---- what a run reads ------------------------------------------------------------------------------------------------


def write_model(config: PreTrainedConfig, directory: Path, recipe: Recipe, *, blocks: int, weights: bool) -> None:
    """Writes a model of so many blocks of text, with a tokenizer, and random weights if they are wanted."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = blocks
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:blocks]
    if weights:
        _write_weights(config, directory, recipe)
    config.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({str(word): word for word in range(text.vocab_size)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(directory)


def _write_weights(config: PreTrainedConfig, directory: Path, recipe: Recipe) -> None:
    """Writes random weights in the names and shapes of the model's files. Buffers have their values."""
    import torch

    from fuyou_cli.checkpoint.names import tied_names
    from fuyou_cli.checkpoint.writer import PIECE, OutTensor, write_checkpoint
    from fuyou_cli.engine.anatomy import dissect
    from fuyou_cli.engine.skeleton import build

    trusts = recipe.model.trust_remote_code
    model = build(config, dtype="bfloat16", attention=recipe.model.attn_implementation, trust_remote_code=trusts)
    parts, tied, buffers = dissect(model).parts, tied_names(model), dict(model.named_buffers())
    tensors = [
        OutTensor(name=part, dtype=str(tensor.dtype).removeprefix("torch."), shape=shape)
        for name, tensor in model.state_dict().items()
        if name not in tied
        for part, shape in parts.get(name) or ((name, tuple(tensor.shape)),)
    ]
    drawn = np.random.default_rng(0).standard_normal(PIECE // 2, np.float32) * np.float32(_DEVIATION)
    piece = memoryview((drawn.view(np.uint32) >> 16).astype(np.uint16).tobytes())  # cut off to bfloat16

    def read(tensor: OutTensor, first: int, number: int) -> memoryview:
        if (buffer := buffers.get(tensor.name)) is None:
            return piece[: 2 * number]
        return memoryview(buffer.reshape(-1)[first : first + number].clone().view(torch.uint8).numpy())

    write_checkpoint(directory, tensors, read, max_shard_size=_SHARD, metadata={})


# ---- what it found ---------------------------------------------------------------------------------------------------


def homes_of(stages: Sequence[dict[str, str]]) -> dict[str, str]:
    """Returns the tier where a plan keeps most stages' weights, states, gradients and boundaries: nearly all are blocks."""
    keys = {"weights": "weights", "optimizer_states": "states", "gradients": "gradients", "boundaries": "boundary"}
    return {key: Counter(stage[own] for stage in stages).most_common(1)[0][0] for key, own in keys.items()}


def estimated(history: History, sample: int, blocks: int) -> Estimate:
    """Estimates the whole step: adds each block that the sample lacks, at the time of a block that it has."""
    step, each = history.report.step_seconds, block_seconds(history, sample)
    return Estimate(blocks=sample, measured_seconds=step, block_seconds=each, step_seconds=step + (blocks - sample) * each)


def block_seconds(history: History, blocks: int) -> float:
    """Returns the seconds of a step per block, with the waits before its visits: its share of the last step, of which alone the
    log has a timeline, times the usual step."""
    computed = sorted((item for item in history.report.timeline if item.resource == "compute"), key=lambda item: item.end)
    begins = [0.0, *(item.end for item in computed)]
    durations = (item.end - begin for item, begin in zip(computed, begins, strict=False) if _OF_BLOCK.match(item.label))
    return sum(durations) / history.steps[-1].seconds * history.report.step_seconds / blocks


def show_model_bench(console: Console, model: str, points: Sequence[Point]) -> None:
    """Prints the results."""
    first, shapes = points[0], symbols(console)
    frozen = f", {count(first.frozen_parameters)} frozen" if first.frozen_parameters else ""
    size = f"{count(first.parameters)} parameters{frozen}, random weights and tokens"
    say(console, Text.assemble((f"fuyou bench --model {model}", "bold"), f"  {size}"))
    heading(console, "Training", f"the device measures {tera(first.device_flops)} TFLOPS")
    content = ruled(shapes)
    for title in ("batch", "tokens", "step", "predicted", "tokens/s", "TFLOPS 6N", "device", "apart"):
        column(content, title, right=True)
    for point in points:
        flops = point.step_flops / point.step_seconds
        content.add_row(
            str(point.batch_size),
            f"{point.tokens:,}",
            duration(point.step_seconds),
            duration(point.predicted_seconds),
            Text(speed(point.tokens / point.step_seconds), style="bold"),
            tera(flops),
            percent(flops, point.device_flops),
            f"{point.apart:.1%}",
        )
    show(console, content, indent=2)
    heading(console, "Notes")
    say(
        console, "- device: 6N as a share of the device's measured rate; apart: how far the samples' estimates differ", indent=2
    )
    for point in points:
        homes = ", ".join(f"{name.replace('_', ' ')} on {home}" for name, home in point.homes.items())
        busy = ", ".join(f"{name} {percent(point.busy[name], 1)}" for name in ordered(list(point.busy)))
        samples = "; ".join(
            f"{some(estimate.blocks, 'block')} take {duration(estimate.measured_seconds)}, "
            f"of it {duration(estimate.block_seconds)} each, so the whole {duration(estimate.step_seconds)}"
            for estimate in point.estimates
        )
        verdict = f"{'agree' if point.apart <= AGREE else 'DO NOT AGREE'}: {point.apart:.1%} apart (at most {AGREE:.0%})"
        say(console, f"- batch {point.batch_size}: micro-batches of {point.micro_batch_size}; most blocks: {homes}", indent=2)
        say(console, f"- batch {point.batch_size}: {samples}; they {verdict}", indent=2)
        say(console, f"- batch {point.batch_size}: busy in the larger sample: {busy}", indent=2)
