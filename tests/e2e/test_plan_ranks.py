"""`fuyou plan` of several ranks: on the cards of one box, on several boxes, and what it says of them where one is planned."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from fuyou_cli.cli.plan_command import parse_link
from fuyou_cli.core.errors import UsageError

from .conftest import Command, CommandIn, NewProject, write_llama
from .test_plan_command import HERE

MACHINE = "rtx4090,gen4,64GiB"
BLOCKS = 6
# Beside one block 8 micro-batches of 64 tokens; states are on drives that are slow.
SHAPE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": BLOCKS}
CHANGES = {**HERE, "train.batch_size": 8, "train.micro_batch_size": 1, "train.max_steps": 1000}


@pytest.fixture(scope="module")
def blocks(materials: Path) -> Path:
    return write_llama(materials, "ranks", **SHAPE)


@pytest.fixture
def fuyou(new_project: NewProject, command: CommandIn, blocks: Path) -> Callable[..., Command]:
    return lambda **changes: command(new_project(changes={**CHANGES, "model.name_or_path": str(blocks), **changes}))


def test_boxes_share_the_model(fuyou: Callable[..., Command]) -> None:
    run = fuyou()
    shown = run.json("--hardware", MACHINE, "--boxes", "2", "--link", "25GbE")
    ring = shown["ring"]
    assert (shown["fits"], ring["boxes"], ring["ranks_per_box"], ring["link_name"]) == (True, 2, 1, "25GbE")
    assert ring["link"] == pytest.approx(25e9 / 8 * 0.94)
    stages = [rank["stages"] for rank in ring["ranks"]]
    assert sorted(stages[0] + stages[1]) == list(range(BLOCKS + 3)) and all(stages)
    whole = run.json("--hardware", MACHINE)
    assert sum(rank["parameters"] for rank in ring["ranks"]) == whole["model"]["parameters"] and "ring" not in whole
    assert shown["model"] == whole["model"] and shown["slowest"]["model"]["parameters"] < whole["model"]["parameters"]
    flops = whole["tflops_6n"] / whole["tokens_per_second"]
    assert shown["tflops_6n"] == pytest.approx(shown["tokens_per_second"] * flops)
    assert shown["commits"]["lost"] == pytest.approx((shown["commits"]["every_steps"] + 1) * ring["step_seconds"])
    assert ring["alone_tokens_per_second"] == whole["tokens_per_second"]
    assert ring["speed_up"] == pytest.approx(shown["tokens_per_second"] / whole["tokens_per_second"])
    assert shown["run_seconds"] == pytest.approx(1000 * ring["step_seconds"])
    crossings = sum(one != other for one, other in pairwise(_owners(stages)))
    assert sum(rank["sent"] for rank in ring["ranks"]) == 2 * crossings * shown["computed_per_step"] * 64 * 2  # bfloat16


def _owners(stages: list[list[int]]) -> list[int]:
    return [next(rank for rank, found in enumerate(stages) if stage in found) for stage in range(BLOCKS + 3)]


def test_cards_of_one_box_share_its_memory(fuyou: Callable[..., Command]) -> None:
    run = fuyou()
    one, two = (run.json("--hardware", f"{cards}rtx4090,gen4,64GiB") for cards in ("", "2x"))
    assert two["ring"]["ranks_per_box"] == 2 and two["ring"]["link"] is None
    part = two["slowest"]
    assert part["plan"]["cpu_budget"] == one["plan"]["cpu_budget"] // 2
    assert part["hardware"]["cores"] == 8 and part["hardware"]["store_read"] == one["hardware"]["store_read"] / 2


def test_a_recipe_names_the_ranks_of_this_machine(fuyou: Callable[..., Command]) -> None:
    shown = fuyou(**{"train.nproc": 2, "offload.device": "cpu"}).json("--dry-run")
    assert shown["ring"]["ranks_per_box"] == 2 and [rank["box"] for rank in shown["ring"]["ranks"]] == [0, 0]


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen(fuyou: Callable[..., Command], monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    run = fuyou()  # sets a width as well
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = run("plan", "recipe.yaml", "--hardware", MACHINE, "--boxes", "3")
    said = " ".join(out.split())
    assert code == 0 and max(map(len, out.splitlines())) <= width
    for words in ("fits: 3 ranks on 3 boxes over 10GbE", "one such box with one rank", "1.18 GB/s each way", "Plan of rank"):
        assert words in said
    assert "embedding, " in said and "block" in said
    assert said.count("a crash loses") == 1 and "tokens per step" in said and "to each of" not in said
    left_out = "what is alike for all is left out, and "
    assert (left_out in said) == (width < 96)


def test_two_boxes_are_named_where_drives_bind(fuyou: Callable[..., Command]) -> None:
    run = fuyou(**{"offload.optimizer_states": "ssd", "offload.weights": "ssd"})
    rates = dict.fromkeys(("store_read", "store_write", "store_read_mixed", "store_write_mixed", "sustained_write"), "100kB/s")
    Path("slow.yaml").write_text(f"parts: {MACHINE}\n" + "".join(f"{key}: {value}\n" for key, value in rates.items()))
    boxes = run.json("--hardware", "slow.yaml")["boxes"]
    assert boxes["speed_up"] == pytest.approx(2, abs=0.4) and "--boxes 2 --link 10GbE" in boxes["command"]
    words = boxes["command"].split()[2:]
    again = run.json(*words[1:])["ring"]
    assert again["speed_up"] == pytest.approx(boxes["speed_up"], rel=0.1)
    _, out, _ = run("plan", "recipe.yaml", "--hardware", "slow.yaml")
    assert "two such boxes over 10GbE: " in " ".join(out.split())


def test_micro_batches_are_chosen_by_the_step_of_all(fuyou: Callable[..., Command]) -> None:
    """A rank's own step, in which drives bind and nobody waits for others, cannot tell."""
    run = fuyou(**{"offload.optimizer_states": "ssd", "offload.weights": "ssd"})
    rates = dict.fromkeys(("store_read", "store_write", "store_read_mixed", "store_write_mixed", "sustained_write"), "100kB/s")
    Path("slow.yaml").write_text(f"parts: {MACHINE}\n" + "".join(f"{key}: {value}\n" for key, value in rates.items()))
    tokens = {
        rows: run.json(f"train.micro_batch_size={rows}", "--hardware", "slow.yaml", "--boxes", "2")["tokens_per_second"]
        for rows in ("auto", 1, 2, 4, 8)
    }
    assert tokens.pop("auto") >= 0.999 * max(tokens.values()), tokens


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--link", "10GbE"), "--link 10GbE connects boxes, and there is one"),
        (("--boxes", "0"), "--boxes 0: a plan is of 1 to 64 boxes"),
        (("--boxes", "2", "--link", "fast"), "'fast' is no rate of a network"),
        (("--boxes", "7"), f"7 ranks cannot share a model of {BLOCKS} blocks"),
    ],
)
def test_what_cannot_be_planned(fuyou: Callable[..., Command], words: tuple[str, ...], said: str) -> None:
    code, _, err = fuyou()("plan", "recipe.yaml", "--hardware", MACHINE, *words)
    assert code == 2 and said in " ".join(err.split())


@pytest.mark.parametrize(
    ("device", "parallel", "note"),
    [
        ("cuda", "auto", ""),
        ("cuda", "replicas", "several ranks cannot train with train.parallel=replicas on a GPU yet"),
        ("cpu", "auto", "With train.lanes: 2 a run has replicas"),
    ],
)
def test_lanes_make_replicas_on_a_cpu(fuyou: Callable[..., Command], device: str, parallel: str, note: str) -> None:
    run = fuyou(**{"adapter": {"r": 4}, "train.lanes": 2, "train.parallel": parallel, "offload.device": device})
    machine = ("--dry-run",) if device == "cpu" else ("--hardware", MACHINE)
    code, out, _ = run("plan", "recipe.yaml", "--boxes", "2", *machine)
    said = " ".join(out.split())
    assert code == 0 and note in said and ("replicas" in said) == bool(note)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("10GbE", 1.175e9), ("2.5gbe", 0.29375e9), ("25Gbit/s", 2.9375e9), ("1.2GB/s", 1.2e9), ("100 Mbit/s", 11.75e6)],
)
def test_links(text: str, rate: float) -> None:
    assert parse_link(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "fast", "0", "10", "1e30", "0GbE", "-1GB/s", "10GB", "1B/s", "1000000GbE", "2TB/s"])
def test_links_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="is no rate of a network"):
        parse_link(text)
