"""Every causal decoder family of transformers that the table of models says trains: a step of each, as in plain PyTorch."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn import every, quick_and_slow
from torch._subclasses.fake_tensor import FakeTensor

from fuyou_cli.engine.anatomy import dissect
from fuyou_cli.engine.calls import stage_calls
from fuyou_cli.engine.skeleton import build

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import models_table

from .comparing import relative
from .measuring import Seen
from .plain_torch import plain_run
from .rig import Rig, Shape, Subject

ROWS = [line.split(" | ") for line in models_table.TABLE.read_text().splitlines() if line.startswith("| `")]
SAME = f"transformers {transformers.__version__}," in models_table.TABLE.read_text()
VERDICTS = {row[0].strip("| `"): row[2] for row in ROWS}
LINES = {row[0].strip("| `"): " | ".join(row) for row in ROWS}
TRAINED = [name for name, verdict in VERDICTS.items() if verdict == "yes"]


def test_the_table_has_every_family() -> None:
    """Looks at the newest transformers that is allowed; an older one has fewer."""
    assert set(models_table.names()) <= set(VERDICTS)


def test_help_tries_no_family(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(models_table, "names", list)  # no family: a table that is printed is quick
    with pytest.raises(SystemExit) as caught:
        models_table.main(["--print", "--help"])
    assert caught.value.code == 0 and capsys.readouterr().out.startswith("usage: ")


def test_a_process_that_the_kernel_ends_is_not_waited_for() -> None:
    def end_it() -> None:
        while not (found := multiprocessing.active_children()):
            time.sleep(0.001)
        found[0].kill()

    ending = threading.Thread(target=end_it)
    ending.start()
    with pytest.raises(BrokenProcessPool) as caught:
        models_table.all_tried(["falcon"])  # slow
    ending.join()
    assert caught.value.__notes__ == ["it tried falcon"]


@pytest.mark.parametrize(
    ("name", "kind"), [("lfm2", "conv"), ("qwen3_5_text", "linear_attention"), ("gemma3_text", "sliding_attention")]
)
def test_a_way_is_another_model(name: str, kind: str) -> None:
    """A configuration takes any key, and ignores those that it does not know."""
    config = models_table.made(name, models_table.variants(name)["every kind of layer"])
    assert {kind, "full_attention"} == set(config.layer_types)


@pytest.mark.parametrize("name", quick_and_slow(VERDICTS, lambda number: number == 83))
def test_as_the_table_says(name: str) -> None:
    """Builds a family in every way, from files. All of them, in ten minutes: `pytest -m slow -k table_says`. Of those that were
    wrong most often, which are slow, e2e/test_families_from_files trains one each time."""
    if not SAME:
        pytest.skip("the table is of another transformers")
    assert models_table.tried(name).row == LINES[name]


@pytest.mark.parametrize("name", every(90, TRAINED))
def test_two_steps_as_plain_pytorch(name: str, tmp_path: Path) -> None:
    if name not in models_table.names():
        pytest.skip("this transformers does not have it")
    torch.manual_seed(0)
    config = models_table.small(name)
    config.vocab_size = models_table.VOCABULARY  # which a configuration of several parts does not have
    subject = Subject(config, Shape())
    with Rig(subject, tmp_path) as rig:
        losses = rig.run(2)
    assert relative(losses, plain_run(subject, 2)[0]) <= 1e-6


def _products(func: Any, args: Any) -> str | None:
    """Returns what is multiplied, by which operator."""
    multiplies = any(part in str(func) for part in ("mm", "attention", "conv"))
    return f"{func} {[tuple(each.shape) for each in args if isinstance(each, torch.Tensor)]}" if multiplies else None


@pytest.mark.parametrize("name", every(60, TRAINED))
def test_forward_multiplies_as_its_recompute(name: str) -> None:
    """Or bits would depend on what is kept: torch chooses products by what wants a gradient."""
    if name not in models_table.names():
        pytest.skip("this transformers does not have it")
    anatomy = dissect(build(models_table.small(name), dtype="float32", attention="sdpa"))
    stages = {stage.name: stage for stage in anatomy.stages if stage.kind == "block"}
    calls = stage_calls(anatomy.model, anatomy.modules(), shape=(2, 16))
    for call, x in ((call, x) for call, x in calls if call.name in stages):
        assert isinstance(x, FakeTensor)
        with x.fake_mode:
            flat, found = torch.empty(stages[call.name].params), list[list[str]]()
            for gradients in (False, True):
                with torch.set_grad_enabled(gradients), stages[call.name].installed(flat), Seen(_products) as products:
                    call.run(x.detach().requires_grad_(gradients))
                found.append(products.found)
        assert found[0] == found[1] != [], call.name
