#!/usr/bin/env python3
"""Shows what plans promise on an RTX 4090: seconds of a step, tokens per second, TB written in 1,000 steps.

    python scripts/plan_table.py [--beside FILE] [--checkout DIR] [--results DIR]
    needs no GPU and no drives; a few minutes
    to try the script itself: --quick, one plan; --readme also writes the clipped ones into the README's table; --others,
    --mixtures or --boxes instead

The plans are of 8B, 14B, 32B and 70B with 64 and 128 GiB of RAM, one and two gen4 drives, with and without clipping, 8 rows of
4,096 tokens a step, 1,000 steps, and defaults for the rest. Shapes are in tests/engine/configs; 32B is 14B with the differences
listed here. `--checkout` plans with the sources of another checkout whose C extension is built. `--beside` prints the figures
of an earlier result below each line. `--others` plans what other trainers have published of an RTX 4090: 512 rows of 1,024
tokens a step. Their figures were measured, ours are predicted. `--mixtures` plans mixtures of experts on cards of 12 to 24 GB,
32,768 tokens a step: at the rates of dense blocks, as the first sketch of them did, and as plans do, which charge what few rows
of each of many experts cost a GPU. `--boxes` plans one, two and four boxes of an RTX 4090, 64 GiB and one gen4
drive each that train one model together over 10GbE, in full and with LoRA. fuyou is exact: weights, what float32 masters add to
them, and float32 moments take 12 bytes per parameter, and gradients 4 more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

# Whose sources are imported below.
sys.path.insert(0, sys.argv[sys.argv.index("--checkout") + 1] if "--checkout" in sys.argv else str(Path(__file__).parents[1]))

from proof.on_paper import known_config, recipe_of
from proof.verdicts import FAIL, ROOT, Row, commit, conclude, holds, missing, plain_parser, reported, say, show_command

try:
    from fuyou_cli.advice.planning import plan_recipe
except ImportError:  # a checkout of before it
    from fuyou_cli.advice.planned import planned_elsewhere as plan_recipe  # type: ignore[import-not-found, no-redef]
from fuyou_cli.cli.console import write_status
from fuyou_cli.core.errors import FuyouError
from fuyou_cli.machine.described import described as machine_of
from fuyou_cli.planner.place import too_small
from fuyou_cli.recipe.load import LoadedRecipe
from fuyou_cli.spec.plan import Plan

QWEN_32B = {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_hidden_layers": 64}
QWEN_32B |= {"num_key_value_heads": 8, "max_window_layers": 64}
QWEN_235B = {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94}
QWEN_235B |= {"num_attention_heads": 64}
GLM = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}  # Air, as transformers has it
GLM_355B = {"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 92}
GLM_355B |= {"n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "8B": ("llama-3.1-8b", {}),
    "14B": ("qwen3-14b", {}),
    "32B": ("qwen3-14b", QWEN_32B),
    "70B": ("llama-3.1-70b", {}),
    "7B": ("qwen2.5-7b", {}),
    "30B-A3B": ("qwen3-30b-a3b", {}),
    "gpt-oss-20b": ("gpt-oss-20b", {}),
    "gpt-oss-120b": ("gpt-oss-120b", {}),
    "Mixtral 8x7B": ("mixtral-8x7b", {}),
    "DeepSeek-V3": ("deepseek-v3", {}),
    "235B-A22B": ("qwen3-30b-a3b", QWEN_235B),
    "gpt-oss-120b, mxfp4": ("gpt-oss-120b", {"quantization_config": {"quant_method": "mxfp4"}}),
    "OLMoE 7B": ("", {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "intermediate_size": 1024}),
    "Qwen3-Next 80B": ("", {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}),  # as transformers has it
    "Qwen3.5 35B": ("", {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}),
    "GLM-4.5-Air": ("", GLM),
    "GLM-4.5": ("", GLM | GLM_355B),
}
IN_TABLE = ("8B", "14B", "30B-A3B", "32B", "70B")
RAM, DRIVES = ("64GiB", "128GiB"), ("gen4", "2xgen4")
STEPS, ROWS, LENGTH = 1000, 8, 4096
# Tokens/s as published; bytes of weights, masters and moments per parameter. LLM.Q has all in bfloat16, rounded at random. ZeRO
# has masters and moments in float32 beside weights in bfloat16.
PUBLISHED = {
    "7B": {"LLM.Q, 6 bytes": 2777, "LLaMA-Factory, ZeRO-3 offload, 14 bytes": 2523},
    "14B": {"LLM.Q, 6 bytes": 1348, "LLaMA-Factory, ZeRO-3 offload, 14 bytes": 1135},
}
THEIR_ROWS, THEIR_LENGTH = 512, 1024
TABLES = {name: (f"<!-- {name} table -->", f"<!-- end of {name} table -->") for name in ("plan", "boxes")}
BOXES, METHODS, LINK = (1, 2, 4), ("full", "LoRA"), "10GbE"
NEAR_SKETCH = 0.85
MOST_OF_COMPUTE = 1.15  # 8B with 128 GiB, clipped as by default


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    model: str
    ram: str
    drives: str
    clipped: bool
    rows: int = ROWS
    length: int = LENGTH
    gpu: str = "rtx4090"
    method: str = "full"
    overrides: tuple[str, ...] = ()
    sketched: int = 0  # tokens/s of the first sketch of mixtures
    boxes: int = 0  # that train it together; 0: not planned so

    @property
    def words(self) -> str:
        if self.boxes:
            return f"{self.model}, {self.method}, {self.boxes} x {self.gpu}, {self.drives}, {self.ram}"
        if self.sketched:
            part = "".join(f" with {override.rpartition('=')[2]}" for override in self.overrides)
            return f"{self.model}, {self.method}, {self.gpu}{part}, {self.ram}, {self.drives}"
        return f"{self.model}, {self.ram}, {self.drives}, {'clipped' if self.clipped else 'no clipping'}"

    @property
    def has_bar(self) -> bool:
        return self.model == "8B" and self.ram == "128GiB" and self.clipped


def cases() -> Iterator[Case]:
    for model, ram, drives, clipped in product(IN_TABLE, RAM, DRIVES, (True, False)):
        yield Case(model=model, ram=ram, drives=drives, clipped=clipped)


def others() -> Iterator[Case]:
    for model, ram in product(PUBLISHED, ("64GiB", "128GiB", "256GiB")):
        yield Case(model=model, ram=ram, drives="2xgen4", clipped=True, rows=THEIR_ROWS, length=THEIR_LENGTH)


def on_boxes() -> Iterator[Case]:
    for model, method, boxes in product(("8B", "32B", "70B"), METHODS, BOXES):
        yield Case(model=model, ram="64GiB", drives="gen4", clipped=True, method=method, boxes=boxes)


def mixtures() -> Iterator[Case]:
    """Yields what the sketch planned, in its order."""

    def of(model: str, method: str, tokens: int, ram: str = "64GiB", drives: str = "gen4", **more: Any) -> Case:
        return Case(model=model, method=method, sketched=tokens, ram=ram, drives=drives, clipped=True, **more)

    small: dict[str, Any] = {"ram": "32GiB", "overrides": ("offload.max_memory.gpu=11.4GiB",)}
    yield of("30B-A3B", "LoRA", 5385)
    yield of("30B-A3B", "nf4 LoRA", 5172)
    yield of("30B-A3B", "LoRA", 2916, **small)
    yield of("30B-A3B", "nf4 LoRA", 3143, **small)
    yield of("30B-A3B", "full", 117)
    yield of("30B-A3B", "full", 226, drives="2xgen4")
    yield of("gpt-oss-20b", "LoRA", 3797, gpu="rtx4080")
    yield of("gpt-oss-20b", "LoRA", 3959, ram="32GiB", gpu="rtx4080", rows=16, length=2048)
    yield of("gpt-oss-120b", "LoRA", 621)
    yield of("gpt-oss-120b", "LoRA", 1180, drives="2xgen4")
    yield of("gpt-oss-120b, mxfp4", "LoRA", 2236, drives="2xgen4")
    yield of("OLMoE 7B", "full", 1797)
    yield of("gpt-oss-20b", "full", 331, drives="2xgen4")
    yield of("Mixtral 8x7B", "LoRA", 1994)
    yield of("GLM-4.5-Air", "LoRA", 703)
    yield of("Qwen3-Next 80B", "LoRA", 1198)
    yield of("Qwen3.5 35B", "LoRA", 4940)
    yield of("235B-A22B", "LoRA", 276)
    yield of("GLM-4.5", "LoRA", 173)
    yield of("GLM-4.5", "nf4 LoRA", 471)


def figures_of(case: Case, *, dense: bool = False) -> dict[str, Any] | str:
    """Returns the figures of its plan, or why there is none. `dense`: as if experts' products took a GPU no longer than those
    of a dense block."""
    name, differences = MODELS[case.model]
    overrides = [*case.overrides, *([] if case.clipped else ["train.clip_grad_norm=null"])]
    hardware = machine_of(f"{case.gpu},{case.drives},{case.ram}")
    if dense:
        hardware = replace(hardware, tile_rows=1, product_launch=0.0)
    train = {"max_steps": STEPS, "batch_size": case.rows}
    more: dict[str, Any] = {} if case.method == "full" else {"adapter": {"r": 16, "lora_alpha": 32}}
    overrides += ["model.quantize=nf4"] if case.method.startswith("nf4") else []
    config = (known_config(name) if name else {}) | differences
    with recipe_of(config, length=case.length, train=train, overrides=overrides, **more) as loaded:
        try:
            if case.boxes > 1:
                return _figures_of_ring(loaded, case)
            planned = plan_recipe(loaded, hardware, say=write_status)
        except FuyouError as error:
            return error.message
    if not planned.fits_ram:
        return too_small(planned.model, hardware, planned.request).message
    if not planned.request.has_room_for(planned.plan, hardware):
        return "the device or the drives have no room for it"
    return figures(planned.plan, case.rows * case.length)


def _figures_of_ring(loaded: LoadedRecipe, case: Case) -> dict[str, Any] | str:
    """Returns the figures of several boxes: a step of all, and what the fullest of them writes."""
    from fuyou_cli.advice.rings import plan_ring
    from fuyou_cli.cli.plan_command import parse_link
    from fuyou_cli.machine.described import described_box
    from fuyou_cli.spec.hardware import Network

    network = Network(boxes=case.boxes, link=parse_link(LINK), link_name=LINK)
    ring = plan_ring(loaded, described_box(f"{case.gpu},{case.drives},{case.ram}"), network, say=write_status, beside=False)
    if ring.problems:
        return ring.problems[0]
    slowest = figures(ring.ranks[ring.slowest].plan, case.rows * case.length)
    step = {"step_seconds": ring.step_seconds, "tokens_per_second": ring.tokens_per_second}
    return {**slowest, **step, "written_per_step": ring.written_on_a_box(), "idle": ring.idle, "remarks": ring.remarks()}


def figures(plan: Plan, tokens: int) -> dict[str, Any]:
    predicted, every = plan.predicted, plan.commit_every
    return {
        "step_seconds": predicted.step_seconds,
        "tokens_per_second": tokens / predicted.step_seconds,
        "written_per_step": predicted.written_per_step,
        "compute_seconds": predicted.seconds["compute"],
        "stalls": predicted.stalls,
        "commit_every": every,
        "commit_seconds": getattr(predicted, "commit_seconds", 0.0),  # an earlier checkout's plans have none
        "sustained": plan.sustained,
        "micro_batch": plan.numerics.micro_batch_size,
        "bottleneck": predicted.bottleneck,
    }


def in_words(values: Mapping[str, Any]) -> str:
    terabytes = values["written_per_step"] * STEPS / 1e12
    commits = values["commit_every"]
    often = "each step" if commits == 1 else f"every {commits} steps"
    return (
        f"{values['step_seconds']:7.2f} s  {values['tokens_per_second']:6,.0f} tokens/s  {terabytes:6.1f} TB  committed {often}"
    )


def row_of(case: Case, values: dict[str, Any] | str, before: Mapping[str, Any] | None) -> Row:
    if isinstance(values, str):
        return missing(case.words, "a plan", values)
    ratio = values["step_seconds"] / values["compute_seconds"]
    note = f"{ratio:.2f} of its compute"
    if case.rows == THEIR_ROWS:
        note += "".join(f"; {who}: {speed:,} tokens/s" for who, speed in PUBLISHED[case.model].items())
    if before:
        note += f"; before: {' '.join(in_words(before).split())}"
    if not case.has_bar:
        return reported(case.words, in_words(values), note=note, values=values)
    bar = f"<= {MOST_OF_COMPUTE} of its compute"
    return holds(case.words, bar, in_words(values), ratio <= MOST_OF_COMPUTE, note=note, values=values)


def row_of_mixture(case: Case) -> Row:
    """Plans it twice. What is asked is asked at the rates of dense blocks: at least the sketch's speed, less 15 %."""
    dense, values = figures_of(case, dense=True), figures_of(case)
    if isinstance(dense, str) or isinstance(values, str):
        return missing(case.words, "a plan", dense if isinstance(dense, str) else str(values))
    speed, least = dense["tokens_per_second"], NEAR_SKETCH * case.sketched
    found = f"{speed:6,.0f} tokens/s; with what small groups cost {in_words(values)}"
    note = f"micro-batch {values['micro_batch']}, bottleneck {values['bottleneck']}; sketched: {case.sketched:,} tokens/s"
    asked = f">= {least:,.0f} tokens/s at dense rates"
    return holds(case.words, asked, found, speed >= least, note=note, values={"dense": dense, "grouped": values})


def kept(path: Path | None) -> dict[str, Mapping[str, Any]]:
    """Returns the figures of an earlier result, by line."""
    if path is None:
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {row["what"]: row["values"] for row in rows if row["values"]}


def for_readme(rows: Sequence[Row]) -> str:
    """Returns a line per machine and a column per model, in Markdown."""
    found = {row.what: row.values for row in rows}
    lines = ["| GPU | RAM | drives | " + " | ".join(IN_TABLE) + " |", "| --- " * (3 + len(IN_TABLE)) + "|"]
    for ram, drives in product(RAM, DRIVES):
        cells = [_cell(found.get(Case(model=m, ram=ram, drives=drives, clipped=True).words)) for m in IN_TABLE]
        amount = ram.replace("GiB", " GiB")
        lines.append(f"| RTX 4090 | {amount} | {'2' if drives.startswith('2') else '1'} x gen4 | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def boxes_for_readme(rows: Sequence[Row]) -> str:
    """Returns a line per number of boxes and a column per model and method, in Markdown."""
    found, columns = {row.what: row.values for row in rows}, list(product(("8B", "32B", "70B"), METHODS))
    titles = [model if method == "full" else f"{model} {method}" for model, method in columns]
    lines = ["| boxes | " + " | ".join(titles) + " |", "| --- " * (1 + len(titles)) + "|"]
    for boxes in BOXES:
        of = (Case(model=m, ram="64GiB", drives="gen4", clipped=True, method=how, boxes=boxes) for m, how in columns)
        lines.append(f"| {boxes} | " + " | ".join(_cell(found.get(case.words)) for case in of) + " |")
    return "\n".join(lines)


def _cell(values: Mapping[str, Any] | None) -> str:
    if not values:
        return "does not fit"
    written = values["written_per_step"] * STEPS / 1e12
    return f"{values['tokens_per_second']:,.0f} tokens/s, {written:,.{int(written < 10)}f} TB"


def write_readme(name: str, table: str) -> None:
    path, (begin, end) = ROOT / "README.md", TABLES[name]
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    options = plain_parser(__doc__)
    options.add_argument("--quick", action="store_true", help="one plan: tries the script")
    options.add_argument("--others", action="store_true", help="what others have published, instead")
    options.add_argument("--mixtures", action="store_true", help="mixtures of experts, instead")
    options.add_argument("--boxes", action="store_true", help="several boxes, instead")
    options.add_argument("--readme", action="store_true", help="write the table of the README")
    options.add_argument("--beside", type=Path, help="an earlier result of this script")
    options.add_argument("--checkout", type=Path, default=ROOT, help="whose sources plan (default: this one)")
    options.add_argument("--name", default="plan_table", help="of the result")
    asked = options.parse_args(words)
    planned_by = Path(str(sys.modules["fuyou_cli.planner.place"].__file__))
    if not planned_by.is_relative_to(asked.checkout.resolve()):  # an editable install comes before sys.path
        raise SystemExit(f"--checkout: this Python plans with {planned_by}; use that checkout's own interpreter")
    show_command("scripts/plan_table.py", words)
    before, rows = kept(asked.beside), []
    every = others() if asked.others else mixtures() if asked.mixtures else on_boxes() if asked.boxes else cases()
    for case in list(every)[: 1 if asked.quick else None]:
        rows.append(row_of_mixture(case) if asked.mixtures else row_of(case, figures_of(case), before.get(case.words)))
        say(f"{case.words}: {rows[-1].measured}{' FAIL' if rows[-1].verdict == FAIL else ''}")
    if asked.readme:
        write_readme("boxes" if asked.boxes else "plan", boxes_for_readme(rows) if asked.boxes else for_readme(rows))
    tokens = THEIR_ROWS * THEIR_LENGTH if asked.others else ROWS * LENGTH
    settings = {"tokens_per_step": tokens, "steps": STEPS, "sources": commit(asked.checkout)}
    return conclude(asked.name, rows, results=asked.results, settings=settings)


if __name__ == "__main__":
    sys.exit(main())
