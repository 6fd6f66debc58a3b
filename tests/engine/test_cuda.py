"""On a device with memory of its own: the same steps as on the CPU, and placement changes no bit there either.

Every test runs on the emulated device and, where there is one, on a GPU (`-m gpu`; with CUDA_LAUNCH_BLOCKING=1 as well: what
differs then waits for too little). torch computes deterministically here: with its usual kernels for attention and for sums by
index a GPU gives other last bits from one run to the next, wherever bytes rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fuyou_cli.recipe.schema import AdapterSection

from .comparing import Outcome, assert_same, unequal
from .families import gpt2, llama
from .rig import Rig, Shape, Subject

STEPS = 3
Usual = Callable[[Subject, str, Path], Outcome]
DEVICES = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3)
BF16: dict[str, Any] = dict(dtype="bfloat16", accumulate="float32")
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "gpt2, fp32": lambda: Subject(gpt2(), Shape()),
    "llama, fp32, uneven": lambda: Subject(llama(**SMALL), Shape(batch=5)),
    "llama, bf16": lambda: Subject(llama(**SMALL), Shape(**BF16)),
    "llama, bf16, summed in bf16": lambda: Subject(llama(**SMALL), Shape(dtype="bfloat16", accumulate="bfloat16")),
    "llama, fp32, cut": lambda: Subject(llama(**SMALL), Shape(vocabulary=40, chunk=5)),
    "llama, bf16, tied and cut": lambda: Subject(llama(**SMALL, tie_word_embeddings=True), Shape(vocabulary=40, **BF16)),
}


def _lora() -> Subject:
    pytest.importorskip("peft", reason="peft comes with the extra lora")
    return Subject(llama(**SMALL), Shape(**BF16), adapter=AdapterSection(r=4))


OTHERS: dict[str, Callable[[], Subject]] = {  # not compared with the CPU: dropout draws other numbers on another device
    "gpt2, bf16, dropout, cut": lambda: Subject(gpt2(dropout=0.1), Shape(batch=6, chunk=5, vocabulary=40, **BF16)),
    "gpt2, fp32, dropout": lambda: Subject(gpt2(dropout=0.1), Shape(batch=5)),
    "llama, bf16, LoRA": _lora,
}
PLACED = [
    "gpt2, fp32, dropout", "llama, fp32, uneven", "llama, bf16", "llama, bf16, tied and cut", "gpt2, bf16, dropout, cut",
    "llama, bf16, LoRA",
]  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "RAM": dict(home="cpu"), "RAM, all kept": dict(home="cpu", kept="all"), "ssd, all kept": dict(kept="all"),
    "on the device": dict(home=None, gpu_budget=1 << 33), "updated on the device": dict(home="gpu", boundaries="cpu"),
    "some updated on the device": dict(device_states=(0, 2)), "nothing ahead": dict(lookahead=1),
    "far ahead, striped": dict(lookahead=4, directories=3, update_threads=2),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def _outcome(subject: Subject, folder: Path, **way: Any) -> Outcome:
    with Rig(subject, folder, **way) as rig:
        return rig.run(STEPS), rig.weights()


@pytest.fixture(scope="module")
def subjects() -> Callable[[str], Subject]:
    """Makes each once."""
    return cache(lambda name: {**SUBJECTS, **OTHERS}[name]())


@pytest.fixture
def subject(request: pytest.FixtureRequest, subjects: Callable[[str], Subject]) -> Subject:
    return subjects(request.param)


@pytest.fixture(scope="module")
def usual() -> Usual:
    """Runs with everything on the ssd; computed once for a subject and device."""
    known: dict[tuple[Subject, str], Outcome] = {}

    def outcome(subject: Subject, device: Any, folder: Path) -> Outcome:
        key = subject, device
        if key not in known:
            known[key] = _outcome(subject, folder / "usual", device=device)
        return known[key]

    return outcome


CLIPS = [(name, None if number % 2 else 0.5) for number, name in enumerate(SUBJECTS)]


# The emulated device shows here that the tests themselves hold; what it gives in every way is shown by `test_equal_bits`.
@pytest.mark.parametrize(
    ("subject", "clip", "device"),
    [(*CLIPS[-1], "emulated"), *(pytest.param(*case, "cuda", marks=pytest.mark.gpu) for case in CLIPS)],
    indirect=["subject"],
)
def test_the_same_steps_as_on_the_cpu(subject: Subject, device: Any, clip: float | None, tmp_path: Path) -> None:
    ours, weights = _outcome(subject, tmp_path / "ours", device=device, clip=clip)
    theirs, expected = _outcome(subject, tmp_path / "cpu", clip=clip)
    if device == "emulated":  # the same kernels
        assert ours == theirs and unequal(weights, expected) == []
        return
    exact = subject.shape.dtype == "float32"
    assert ours == pytest.approx(theirs, rel=1e-4 if exact else 3e-2)  # other kernels, other order of sums


PLACES = [("llama, bf16, LoRA", "emulated", "RAM, all kept"), (PLACED[-2], "emulated", "some updated on the device")]
PLACES += [pytest.param(name, "cuda", way, marks=pytest.mark.gpu) for way in WAYS for name in PLACED]


@pytest.mark.parametrize(("subject", "device", "way"), PLACES, indirect=["subject"])
def test_bitwise_the_same_wherever_bytes_rest(subject: Subject, device: Any, way: str, tmp_path: Path, usual: Usual) -> None:
    expected = usual(subject, device, tmp_path)
    found = _outcome(subject, tmp_path / way, device=device, **WAYS[way])
    assert_same(found, expected)


@pytest.mark.parametrize("phase", ["forward", "head", "backward"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])  # as `test_equal_bits` has it of the other
@pytest.mark.parametrize("subject", ["llama, bf16", "gpt2, bf16, dropout, cut"], indirect=True)
def test_a_step_given_up_leaves_no_trace(subject: Subject, device: Any, phase: str, tmp_path: Path, usual: Usual) -> None:
    with Rig(subject, tmp_path / "again", device=device, kept="all") as rig:
        rig.step(*next(subject.batches(1)), 1)
        rig.give_up(2, lambda visit: visit.phase == phase)
        assert_same((rig.run(STEPS, begin=2), rig.weights()), usual(subject, device, tmp_path))
