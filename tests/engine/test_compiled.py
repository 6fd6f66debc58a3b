"""Tests compiled blocks: one compilation for all of them wherever their bytes rest, and what a compiler cannot do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import every
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.compiled import CompiledBlocks, KeptGraphs, as_compiled, graph_bytes, load_compiler
from fuyou_cli.engine.forward_only import ForwardOnly
from fuyou_cli.planner.boundary_layout import every_operator
from fuyou_cli.planner.memory import device_memory
from fuyou_cli.recipe.schema import AdapterSection

from .comparing import Outcome, assert_near, assert_same, unequal
from .families import FAMILIES, gpt2, llama
from .rig import EVERYWHERE, SPARE, Rectangle, Rig, Shape, Subject, outcome

STEPS = 2
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "llama, 5 blocks": lambda: Subject(llama(num_hidden_layers=5), Shape(micro=1)),
    "llama, bf16, cut": lambda: Subject(llama(num_hidden_layers=3), Shape(dtype="bfloat16", vocabulary=40)),
    "gpt2, dropout": lambda: Subject(gpt2(dropout=0.1), Shape()),
    "gemma2, local and global": lambda: Subject(FAMILIES["gemma2"], Shape()),  # which differ in the mask alone
}
WAYS: dict[str, dict[str, Any]] = {
    "ssd": dict(),
    "RAM, unclipped": dict(home="cpu", clip=None, lookahead=3),
    "on the device": dict(device="emulated", home="cpu"),
    "through the host": dict(device="emulated", batch_on_device=False),
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """Nothing that an earlier test compiled is found again."""
    load_compiler()
    torch._dynamo.reset()


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_a_process_trains_as_often_as_it_likes() -> None:
    """Each run loads the compiler and compiles anew, as `fuyou bench --model` does for every batch size."""
    for number in range(torch._dynamo.config.recompile_limit + 2):
        load_compiler()
        blocks = CompiledBlocks(backend="aot_eager")
        assert blocks.of(Doubled())(torch.full((2,), float(number), requires_grad=True)).tolist() == [2 * number] * 2
        assert blocks.graphs == 1


@pytest.mark.parametrize("name", every(2, SUBJECTS))
def test_blocks_alike_are_compiled_once(name: str, tmp_path: Path) -> None:
    """Traces and differentiates by the compiler, with operators run one by one: the same arithmetic as without it."""
    subject = SUBJECTS[name]()
    plain = outcome(subject, tmp_path / "plain", STEPS)
    found: list[Outcome] = []
    ways = dict([*WAYS.items()][[*SUBJECTS].index(name) % 2 :: 2])  # in turn: every way with two subjects
    for way, options in ways.items():
        torch._dynamo.reset()
        blocks = CompiledBlocks(backend="aot_eager")
        found.append(outcome(subject, tmp_path / way, STEPS, compiled=blocks, **options))
        assert blocks.graphs == 1, way
    clipped = [outcome for outcome, options in zip(found, ways.values(), strict=True) if "clip" not in options]
    for losses, weights in clipped[1:]:
        assert losses == clipped[0][0] and unequal(weights, clipped[0][1]) == []
    loose = 1e-2 if subject.shape.dtype == "bfloat16" else 1e-5
    assert_near(clipped[0], plain, losses=loose, weights=loose)


def test_blocks_that_differ_are_compiled_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles each where they differ in what their code looks at, though their weights are alike."""
    forward = LlamaDecoderLayer.forward

    def differs(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, hidden_states, *args, **kwargs) * (1 + self.self_attn.layer_idx / 4)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", differs)
    subject, blocks = Subject(llama(num_hidden_layers=3), Shape()), CompiledBlocks(backend="aot_eager")
    plain = outcome(subject, tmp_path / "plain", STEPS, home="cpu")
    found = outcome(subject, tmp_path / "compiled", STEPS, home="cpu", compiled=blocks)
    assert blocks.graphs == 3
    assert_near(found, plain, losses=1e-5, weights=1e-5)


@pytest.mark.slow  # its kernels take gcc twenty-five seconds of a core; the quick tests run the compiler's operators one by one
def test_by_the_real_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stays within 1e-5 of the losses and weights without it."""
    monkeypatch.setenv("SETUPTOOLS_USE_DISTUTILS", "stdlib")  # setuptools refuses another, which a test may have imported
    subject, blocks = Subject(llama(num_hidden_layers=2), Shape(batch=2, micro=1)), CompiledBlocks()
    plain = outcome(subject, tmp_path / "plain", STEPS, home="cpu")
    found = outcome(subject, tmp_path / "compiled", STEPS, home="cpu", compiled=blocks)
    assert blocks.graphs == 1
    assert_near(found, plain, losses=1e-5, weights=1e-5)


def test_a_block_that_cannot_be_compiled_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaDecoderLayer.forward
    subject = Subject(llama(), Shape())

    def looks(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", looks)
    with Rig(subject, tmp_path, home="cpu", compiled=CompiledBlocks(backend="aot_eager")) as rig:
        with pytest.raises(UsageError, match=r"^train\.compile: LlamaDecoderLayer cannot be compiled: "):
            rig.run(1)
        rig.executor.abandon()


def test_memory_is_planned_for_all_gradients_of_a_block(tmp_path: Path) -> None:
    """They come at once; one operator stands for all, which never leaves a device, and none is left out."""
    subject = Subject(llama(), Shape())
    with Rig(subject, tmp_path, home="cpu", kept="all", compiled=CompiledBlocks(backend="aot_eager")) as rig:
        for before, after in zip(subject.spec.stages, rig.spec.stages, strict=True):
            assert ([o.stays for o in after.operators], after.unneeded) == ([True], ()) or after.kind != "block"
            assert after.backward_peak - before.backward_peak == (4 * after.params if after.kind == "block" else 0)
        assert not any(stage.kept for stage in rig.plan.stages)


# ---- graphs that are kept ------------------------------------------------------------------------------------------


UNEVEN = Shape(batch=5, micro=2)
GRAPHS: dict[str, Callable[[], Subject]] = {
    "llama": lambda: Subject(llama(num_hidden_layers=4), Shape(micro=1)),
    "bf16, cut": lambda: Subject(llama(num_hidden_layers=3), Shape(dtype="bfloat16", vocabulary=40)),
    "gpt2, dropout": lambda: Subject(gpt2(dropout=0.1), Shape(micro=1)),
    "gemma2": lambda: Subject(FAMILIES["gemma2"], Shape()),
    "lora": lambda: Subject(llama(), Shape(), adapter=AdapterSection(r=4)),
    "frozen below": lambda: Subject(llama(num_hidden_layers=3), Shape(), freeze=["model.embed_tokens", "model.layers.0.*"]),
    "uneven": lambda: Subject(llama(), UNEVEN),
}
HOMES: dict[str, dict[str, Any]] = {
    "RAM": dict(home="cpu"), "unclipped": dict(home="cpu", clip=None, lookahead=3), "ssd": dict(home="ssd"),
    "through the host": dict(home="cpu", batch_on_device=False), "boundaries there": dict(home="cpu", boundaries="gpu"),
    "states there": dict(home=None, device_states=(1, 2)), "norm first": dict(home="cpu", norm_first=True),
    "two sweeps": dict(home="cpu", sweeps=2),
}  # fmt: skip


class Runs:
    """Compiles with operators run one by one. `forwards`: runs of forwards; `peak`: most bytes that were held at a time of all
    that they made."""

    def __init__(self) -> None:
        self.forwards = self.live = self.peak = 0

    def blocks(self) -> CompiledBlocks:
        torch._dynamo.reset()
        compiler = aot_autograd(
            fw_compiler=self._counted, bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            partition_fn=min_cut_rematerialization_partition,
        )  # fmt: skip
        return CompiledBlocks(backend=compiler)

    def _counted(self, graph: Any, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.forwards += 1
            made = graph.forward(*args)
            known = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor)}
            for storage in (value.untyped_storage() for value in made if isinstance(value, torch.Tensor)):
                if storage._cdata not in known:
                    known.add(storage._cdata)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._given_back, storage.nbytes())
            self.peak = max(self.peak, self.live)
            return made

        return make_boxed_func(run)

    def _given_back(self, size: int) -> None:
        self.live -= size


def graphs_of(subject: Subject) -> tuple[tuple[int, ...], ...]:
    return every_operator(as_compiled(subject.spec), there=True)


@pytest.mark.parametrize(
    ("name", "way"),
    every(8, [
        *(("llama", way) for way in HOMES), ("bf16, cut", "RAM"), ("bf16, cut", "through the host"),
        ("gpt2, dropout", "norm first"), ("gpt2, dropout", "RAM"), ("gemma2", "boundaries there"), ("lora", "RAM"),
        ("lora", "two sweeps"), ("frozen below", "RAM"), ("uneven", "ssd"), ("uneven", "norm first"),
    ]),
)  # fmt: skip
def test_no_bit_differs(name: str, way: str, tmp_path: Path) -> None:
    """Weights lie in memory that other blocks use in between, so that a graph that held them would compute with other ones."""
    subject, found, graphs = GRAPHS[name](), [], []
    if way == "two sweeps" and not subject.spec.may_sweep:
        pytest.skip("its sums are not by row")
    kept = graphs_of(subject)
    assert any(kept) and not any(every_operator(as_compiled(subject.spec)))
    for kept_there in (None, kept):
        runs = Runs()
        blocks = runs.blocks()
        found.append(
            outcome(subject, tmp_path / str(bool(kept_there)), STEPS, compiled=blocks, device="emulated", kept_there=kept_there,
                    **HOMES[way])
        )  # fmt: skip
        graphs.append((blocks.graphs, runs.forwards))
    assert_same(*found)
    assert graphs[1][0] == graphs[0][0] == (2 if name in ("uneven", "frozen below") else 1)
    blocks_once = STEPS * sum(map(len, kept)) * subject.numerics.micro_batches
    assert graphs[0][1] - graphs[1][1] == blocks_once


@pytest.mark.parametrize("way", ["RAM", "norm first"])
@pytest.mark.slow
def test_kept_graphs_by_the_real_compiler(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward writes into what graphs saved."""
    monkeypatch.setenv("SETUPTOOLS_USE_DISTUTILS", "stdlib")  # as for `test_by_the_real_compiler`
    subject, found = GRAPHS["llama"](), []
    for kept_there in (None, graphs_of(subject)):
        torch._dynamo.reset()
        options = dict(device="emulated", kept_there=kept_there, compiled=CompiledBlocks(), **HOMES[way])
        found.append(outcome(subject, tmp_path / str(bool(kept_there)), STEPS, **options))
    assert_same(*found)


@pytest.mark.parametrize("name", every(2, ["bf16, cut", "uneven"]))
def test_memory_is_no_more_than_the_plan_charges(name: str, tmp_path: Path) -> None:
    """Holds what graphs saved, and neither weights nor inputs: those would be another batch beside the one that is lent."""
    subject, runs = GRAPHS[name](), Runs()
    way: dict[str, Any] = {"home": "cpu", "device": "emulated", "kept_there": graphs_of(subject)}
    with Rig(subject, tmp_path, compiled=runs.blocks(), **way) as rig:
        charged = device_memory(rig.spec, rig.request, rig.plan.stages).outputs
        limit = rig.plan.predicted.gpu_peak + SPARE
        if EVERYWHERE != "cuda":  # what compute allocates is not counted by the emulated device
            limit -= charged
        rig.run(STEPS)
        assert rig.device.peak_memory() <= limit
    assert 0.35 * charged < runs.peak <= charged  # what operators save one by one; a graph computes some of it again
    assert runs.live == 0


def test_neither_input_nor_weights_are_held() -> None:
    """Gives both to others between forward and backward."""
    torch.manual_seed(0)
    weight, x, gradient = torch.randn(8, 8), torch.randn(4, 8), torch.randn(4, 8)
    expected = [x.clone().requires_grad_(True), nn.Parameter(weight.clone())]
    _ran(*expected).backward(gradient)
    graphs = KeptGraphs(512, twice=False, too_large=_unheard)  # the result of tanh
    flat = torch.cat([torch.zeros(64), weight.flatten()])
    parameter, before = nn.Parameter(flat[64:].view(8, 8)), x.clone()
    y = graphs.forward(lambda part: _ran(part, parameter), before, 0, [parameter])
    flat.fill_(torch.nan)
    gone = weakref.ref(before.untyped_storage())
    del before, y
    assert gone() is None
    again, again_weight = x.clone().requires_grad_(True), nn.Parameter(weight.clone())
    graphs.recompute(_refused, again, 0, None, [again_weight]).backward(gradient)
    for one, other in zip((again, again_weight), expected, strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def _ran(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


def _unheard(size: int, left: int) -> None:
    raise AssertionError(f"{size} bytes where {left} are left")


def _refused(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the forward runs again")


class _Gated(nn.Module):
    """Is the gated product of a Llama block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((16, 64), (16, 64), (64, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


def test_what_is_cheap_to_compute_again_is_not_saved() -> None:
    """Two results of products are held. The gated one, which backward's product reads, is computed again."""
    block = _Gated()
    run = Runs().blocks().of(block)
    assert graph_bytes(run, torch.randn(8, 16), list(block.parameters())) == 2 * 8 * 64 * 4


def test_what_is_computed_again_drops_the_same() -> None:
    """No random choice is made anew: the gradient of a weight that multiplies what dropout gives tells which it was."""
    block = nn.Sequential(nn.Linear(16, 64, bias=False), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 16, bias=False))
    x, gradient = torch.randn(32, 16, requires_grad=True), torch.randn(32, 16)
    y = Runs().blocks().of(block)(x)
    y.backward(gradient)
    weight = block[-1].weight
    torch.testing.assert_close((gradient * y).sum(), (weight.grad * weight).sum())


def test_a_graph_larger_than_planned_is_not_kept() -> None:
    told: list[tuple[int, int]] = []
    graphs = KeptGraphs(511, twice=False, too_large=lambda *sizes: told.append(sizes))
    weight, x = nn.Parameter(torch.ones(8, 8)), torch.ones(4, 8, requires_grad=True)
    graphs.forward(lambda part: _ran(part, weight), x, 0, [weight])
    assert told == [(512, 511)]
    with pytest.raises(AssertionError, match="runs again"):
        graphs.recompute(_refused, x, 0, None, [weight])


def test_what_graphs_share_is_counted_once() -> None:
    """Else a size measured of more rows is too small for fewer: what is the same for all rows does not shrink with them."""
    weight, shared, told = nn.Parameter(torch.ones(8, 8)), torch.ones(8), list[tuple[int, int]]()
    graphs, none = (KeptGraphs(size, twice=False, too_large=lambda *sizes: told.append(sizes)) for size in (3 * 512, 0))
    for _ in range(2):  # sweeps
        for number in range(2):
            graphs.forward(lambda part: _ran(part, weight) * shared, torch.ones(4, 8), number, [weight])
        for number in range(2):
            graphs.recompute(_refused, torch.ones(4, 8, requires_grad=True), number, None, [weight])
    none.forward(lambda part: _ran(part, weight) * shared, torch.ones(4, 8), 0, [weight])
    assert told == [(1024, 0)]


def test_a_step_given_up_gives_its_graphs_back(tmp_path: Path) -> None:
    subject, runs = GRAPHS["llama"](), Runs()
    way: dict[str, Any] = {"home": "cpu", "device": "emulated", "kept_there": graphs_of(subject)}
    expected = outcome(subject, tmp_path / "whole", STEPS, compiled=runs.blocks(), **way)
    with Rig(subject, tmp_path / "given up", compiled=runs.blocks(), **way) as rig:

        def look() -> None:
            assert runs.live > 0

        rig.give_up(1, lambda visit: visit.phase == "head", after=True, look=look)
        assert runs.live == 0
        assert_same((rig.run(STEPS), rig.weights()), expected)


def test_an_evaluation_keeps_none(tmp_path: Path) -> None:
    subject, runs = GRAPHS["llama"](), Runs()
    way: dict[str, Any] = {"home": "cpu", "device": "emulated", "kept_there": graphs_of(subject)}
    with Rig(subject, tmp_path, compiled=runs.blocks(), **way) as rig:
        ids, labels = next(subject.batches(1))
        rig.step(ids, labels, 1, last=True)
        before, evaluation = runs.peak, ForwardOnly(rig.executor)
        runs.peak = 0
        with evaluation.open():
            evaluation.losses(Rectangle(ids, labels), last=True)
        assert runs.peak < before / 2 and runs.live == 0
