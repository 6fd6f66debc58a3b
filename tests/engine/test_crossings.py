"""What crosses between the host and a device with memory of its own: beside compute, through pinned memory, and not a bit of
the result changes however late a copy is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import crossed, every
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fuyou_cli.core.errors import NumericsError, UsageError
from fuyou_cli.engine.context import HostMemory
from fuyou_cli.engine.devices.base import Event
from fuyou_cli.planner.boundary_layout import kept_bytes
from fuyou_cli.planner.memory import compute_memory
from fuyou_cli.planner.schedule import Visit
from fuyou_cli.spec.plan import Span
from fuyou_cli.swap.native import ffi

from .comparing import assert_same, unequal
from .families import FAMILIES, gpt2, llama, opt
from .late import EarlyDevice, LaggingDevice, LateDevice, ReluctantDevice, late
from .measuring import peak_of_a_step, without_holes
from .rig import Rig, Shape, Subject, outcome

STEPS = 2
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "llama, three micro-batches": lambda: Subject(llama(), Shape(batch=5, micro=2)),
    "llama, one micro-batch": lambda: Subject(llama(), Shape(batch=2, micro=2)),
    "llama, bf16, tied, chunks of the head": lambda: Subject(
        llama(tie_word_embeddings=True), Shape(dtype="bfloat16", accumulate="bfloat16", batch=6, chunk=5)
    ),
    "gpt2, dropout": lambda: Subject(gpt2(dropout=0.1), Shape(batch=6, micro=1)),
    "gpt2, dropout, cut": lambda: Subject(gpt2(dropout=0.1), Shape(batch=6, chunk=5, vocabulary=40)),
    "llama, cut": lambda: Subject(llama(), Shape(batch=5, vocabulary=40)),
    "gemma2": lambda: Subject(FAMILIES["gemma2"], Shape()),
    "opt, projected": lambda: Subject(opt(projected_to=16), Shape()),
}
WAYS: dict[str, dict[str, Any]] = {
    "ssd": dict(),
    "RAM, unclipped": dict(home="cpu", clip=None),
    "all kept": dict(kept="all"),
    "all kept, in RAM, unclipped": dict(home="cpu", kept="all", clip=None),
    # Boundaries and resting gradients in the same memory, in turns.
    "RAM": dict(home="cpu"),
    "all kept, in RAM": dict(home="cpu", kept="all"),
}
IN_TURN = (["ssd", "all kept, in RAM, unclipped", "RAM"], ["RAM, unclipped", "all kept", "all kept, in RAM"])
# (model, way, whether with the first device the batch stays there). A model has three ways, and every device with a batch that
# stays and with one that does not; a way has these too, each with two models.
CASES = [(name, way, (n // 2 + w) % 2 == 0) for n, name in enumerate(SUBJECTS) for w, way in enumerate(IN_TURN[n % 2])]


@pytest.mark.parametrize(("name", "way", "stays"), every(12, CASES))
def test_late_and_early_copies_change_no_bit(name: str, way: str, stays: bool, tmp_path: Path) -> None:
    """Lets the batch stay on the device, or hands it on by way of the host: in turn."""
    subject = SUBJECTS[name]()
    losses, weights = outcome(subject, tmp_path / "cpu", STEPS, **WAYS[way])
    for device in (LateDevice, ReluctantDevice, EarlyDevice, LaggingDevice):
        asked = WAYS[way] | late(device) | {"batch_on_device": stays}
        found = outcome(subject, tmp_path / device.__name__, STEPS, **asked)
        assert found[0] == losses, (device, stays)
        assert unequal(found[1], weights) == [], (device, stays)
        stays = not stays


def test_a_boundary_stays_until_it_is_up(tmp_path: Path) -> None:
    """The next one is read into the same slot, and where the batch stays on the device nothing else waits for the upload."""
    subject, lagging = Subject(llama(num_hidden_layers=8), Shape()), late(LaggingDevice)
    with Rig(subject, tmp_path, home="cpu", boundaries="ssd", clip=None, **lagging) as rig:
        rig.run(1)
        rig.executor.device.synchronize()


def test_a_source_that_does_not_stay_is_seen(tmp_path: Path) -> None:
    """Lets a host write into what goes up, when it is only compute that has waited for the copy."""
    with Rig(Subject(llama(), Shape()), tmp_path, home="cpu", clip=None, **late(LaggingDevice)) as rig:
        host = rig.memory.tensor(Span(offset=0, size=64), torch.uint8)
        event = rig.executor.device.upload(host, torch.zeros(64, dtype=torch.uint8))
        event.wait()
        host.add_(1)
        with pytest.raises(AssertionError, match="changed meanwhile"):
            rig.executor.device.synchronize()


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("direction", ["upload", "download"])
def test_a_wait_that_is_missing_is_seen(direction: str, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute that does not wait for a micro-batch, and a host that does not wait for its result, or where the batch stays on
    the device for what is kept of it: the emulation is worth something."""
    device = LateDevice()
    copy = getattr(device, direction)

    def unawaited(source: torch.Tensor, target: torch.Tensor, **how: Any) -> Event:
        event = copy(source, target, **how)
        return Event() if source.dim() == 3 else event

    monkeypatch.setattr(device, direction, unawaited)
    found = r"^step 1: 32 gradients of model.norm.weight" if stays else r"^step 1: the loss \(head\) is nan$"
    with Rig(Subject(llama(), Shape()), tmp_path, opened=device, device="emulated", batch_on_device=stays) as rig:
        with pytest.raises(NumericsError, match=found):
            rig.run(1)
        rig.executor.abandon()


@pytest.mark.parametrize("awaited", [True, False])
def test_a_span_that_is_lent_too_early_is_seen(awaited: bool, tmp_path: Path) -> None:
    """Lends a span before what is kept of a stage's input is away: another stage's output takes its place."""
    subject = Subject(llama(num_hidden_layers=4), Shape(batch=6))
    losses, _ = outcome(subject, tmp_path / "cpu", STEPS, home="cpu")
    with Rig(subject, tmp_path / "late", home="cpu", **late(ReluctantDevice)) as rig:
        assert isinstance(rig.device, ReluctantDevice)
        rig.device._late_down.in_vain = 200
        batches = rig.executor.visits.crossings.batches
        lend = batches.lend

        def lent(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if not awaited:
                batches._read.clear()
            return lend(shape, dtype)

        batches.lend = lent  # type: ignore[method-assign]
        assert (rig.run(STEPS) == losses) == awaited


class _Told(LateDevice):
    """Tells which micro-batches it is asked to copy and which are waited for, in order, and where in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.hosts: list[int] = []  # addresses: what holds a tensor keeps its place

    def upload(self, host: torch.Tensor, device: torch.Tensor, **how: Any) -> Event:
        if host.dim() == 3:
            self.log.append("up")
            self.hosts.append(host.data_ptr())
        return super().upload(host, device, **how)

    def download(self, device: torch.Tensor, host: torch.Tensor, **how: Any) -> Event:
        event = super().download(device, host, **how)
        if host.dim() != 3:
            return event
        self.log.append("down")
        self.hosts.append(host.data_ptr())
        return _Heard(event, self.log)


class _Heard(Event):
    def __init__(self, event: Event, log: list[str]) -> None:
        self._event, self._log = event, log

    def synchronize(self) -> None:
        self._log.append("arrived")
        self._event.synchronize()

    def done(self) -> bool:
        return self._event.done()


@pytest.mark.parametrize("stays", [True, False])
def test_neighbours_cross_while_a_micro_batch_computes(stays: bool, tmp_path: Path) -> None:
    """The next one's upload is asked for before a micro-batch computes, and in forward its own input sent to where it is kept;
    nobody waits for its result before the next one computes. All of it from and to pinned memory. Where the batch stays on
    the device, nothing but what is kept crosses, and the host waits for none of it."""
    subject = Subject(llama(), Shape(batch=3, micro=1))
    device = _Told()
    attention = subject.anatomy.model.get_submodule("model.layers.1.self_attn")
    hook = attention.register_forward_pre_hook(lambda *_: device.log.append("computes"))
    visits: dict[tuple[str, int], list[str]] = {}

    def after(visit: Visit) -> None:
        visits[visit.phase, visit.stage] = device.log[:]
        device.log.clear()

    with Rig(subject, tmp_path, opened=device, device="emulated", batch_on_device=stays) as rig:
        rig.executor.after_visit = after
        rig.run(1)
        block = next(stage.index for stage in subject.spec.stages if stage.name.endswith("layers.1"))
        begin = int(ffi.cast("uintptr_t", rig.memory.arena._base))
        assert device.hosts and all(begin <= host < begin + rig.memory.arena.size for host in device.hosts)
    hook.remove()
    if stays:
        assert visits["forward", block] == ["down", "computes"] * 3
        assert visits["backward", block] == ["up", "up", "computes", "up", "computes", "computes"]
        assert set(visits["head", subject.spec.stages[-1].index]) == set()
        return
    assert visits["forward", block] == [
        "up", "up", "down", "computes", "down", "up", "down", "computes", "down", "arrived", "arrived",
        "down", "computes", "down", "arrived", "arrived", "arrived", "arrived",
    ]  # fmt: skip
    assert visits["backward", block] == [
        "up", "up", "up", "up", "computes", "down", "up", "up", "computes", "down", "arrived",
        "computes", "down", "arrived", "arrived",
    ]  # fmt: skip


class _HostWork(TorchDispatchMode):
    """Bytes that this thread itself puts in the arena, or computes from what is there; what an emulated device copies is copied
    on threads of its own. Left out is what looks at shapes alone, and NaN in the targets of copies."""

    _ASIDE = (torch.ops.aten.fill_, torch.ops.aten.empty_like, torch.ops.aten.new_zeros)

    def __init__(self, memory: HostMemory) -> None:
        super().__init__()
        self._memory, self.bytes = memory, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            not func.is_view
            and func.overloadpacket not in self._ASIDE
            and isinstance(out, torch.Tensor)
            and any(map(self._in_arena, tree_leaves((args, kwargs))))
        ):
            self.bytes += out.numel() * out.element_size()
        return out

    def _in_arena(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and self._memory.holds(value)


PLACES: dict[str, dict[str, Any]] = {"RAM": dict(home="cpu"), "kept": dict(home="cpu", kept="all"), "ssd": dict()}
NUMERICS = [(0, "float32"), (40, "float32"), (40, "bfloat16")]


@pytest.mark.parametrize(
    ("way", "vocabulary", "dtype", "stays"),
    every(3, [(way, *pair, (w + n) % 2 == 0) for w, way in enumerate(PLACES) for n, pair in enumerate(NUMERICS)]),
)
def test_the_launching_thread_copies_ids_and_nothing_else(
    way: str, vocabulary: int, dtype: Any, stays: bool, tmp_path: Path
) -> None:
    """Inputs go up from where they are, results and what is kept for backward come down to where they are wanted. On the device
    pieces of a vocabulary pick the embedding's rows, and sum the gradient of the last hidden state. Where the batch stays
    there, ids go as they are."""
    subject = Subject(llama(), Shape(batch=6, vocabulary=vocabulary, dtype=dtype))
    ids = 8 * subject.shape.batch * subject.shape.tokens
    with Rig(subject, tmp_path, device="emulated", batch_on_device=stays, **PLACES[way]) as rig, _HostWork(rig.memory) as work:
        visits: list[tuple[str, str, int]] = []

        def after(visit: Visit) -> None:
            visits.append((subject.spec.stages[visit.stage].kind, visit.phase, work.bytes))
            work.bytes = 0

        rig.executor.after_visit = after
        rig.run(STEPS)
    assert {kind for kind, _, _ in visits} == {"embedding", "block", "norm", "head"}
    for kind, phase, done in visits:  # a cut head's targets stay on the device, and do not come from the arena
        staged = kind == "embedding" or (kind == "head" and not vocabulary)
        assert done == (ids if staged and not stays else 0), (kind, phase)


def test_next_weights_go_up_behind_the_first_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are large, and what is before it in their direction when it is asked for goes first."""
    subject = Subject(llama(num_hidden_layers=3), Shape())
    device = LateDevice()
    upload, asked = device.upload, list[int]()

    def told(host: torch.Tensor, target: torch.Tensor, **how: Any) -> Event:
        asked.append(host.dim())
        return upload(host, target, **how)

    monkeypatch.setattr(device, "upload", told)
    with Rig(subject, tmp_path, opened=device, device="emulated", home="cpu", clip=None, batch_on_device=False) as rig:
        middle: list[list[int]] = []
        rig.executor.after_visit = lambda visit: middle.append(asked[:]) or asked.clear()  # type: ignore[func-returns-value]
        rig.run(1)
        forward = [
            found for visit, found in zip(rig.executor.visits.schedule.visits, middle, strict=True) if visit.phase == "forward"
        ]
    assert forward[2].index(3) < forward[2].index(1)  # a block's rows before the weights of the one behind it


def test_what_is_too_wide_for_a_slot_crosses_as_well(tmp_path: Path) -> None:
    subject = Subject(llama(), Shape(batch=6))
    losses, weights = outcome(subject, tmp_path / "cpu", STEPS)
    with Rig(subject, tmp_path / "narrow", batch_on_device=False, **late()) as rig:
        crossings = rig.executor.visits.crossings
        for slot in crossings.slots:
            slot.memory = slot.memory[:64]
        crossings.batches._spans = tuple(Span(offset=span.offset, size=64) for span in crossings.batches._spans)
        assert rig.run(STEPS) == losses
        assert unequal(rig.weights(), weights) == []


@crossed(2, stays=[True, False], phase=["forward", "head", "backward"])
def test_a_step_given_up_with_copies_under_way(phase: str, stays: bool, tmp_path: Path) -> None:
    subject = Subject(llama(), Shape(batch=6))
    expected = outcome(subject, tmp_path / "cpu", STEPS, kept="all")
    with Rig(subject, tmp_path / "late", kept="all", batch_on_device=stays, **late()) as rig:

        def look() -> None:
            assert rig.device.under_way or (stays and phase == "head")  # type: ignore[attr-defined]  # where nothing crosses

        rig.step(*next(subject.batches(1)), 1)
        for _ in range(3):
            rig.give_up(2, lambda visit: visit.phase == phase and visit.stage != 0, look=look)
            assert not rig.device.under_way  # type: ignore[attr-defined]
        assert_same((rig.run(STEPS, begin=2), rig.weights()), expected)


LARGE: dict[str, int] = {"batch": 24, "micro": 1, "tokens": 64}  # a boundary of the whole batch is much more than a stage's own
LLAMA = LlamaConfig(
    vocab_size=192, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=256,
)  # fmt: skip
GPT2 = GPT2Config(vocab_size=192, n_embd=64, n_inner=64, n_layer=3, n_head=4, n_positions=256)


@pytest.mark.parametrize(
    ("config", "clip", "vocabulary", "freeze"),
    every(4, [
        (LLAMA, 0.5, 0, ()), (LLAMA, None, 80, ()), (GPT2, 0.5, 80, ()), (GPT2, None, 0, ()),
        (LLAMA, 0.5, 80, ("model.embed_tokens", "model.layers.[0-1]")),
    ]),
)  # fmt: skip
def test_a_step_of_a_processor_stays_within_what_is_charged(
    config: Any, clip: float | None, vocabulary: int, freeze: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_holes(monkeypatch)
    subject = Subject(config, Shape(vocabulary=vocabulary, **LARGE), freeze=freeze)
    with Rig(subject, tmp_path, home="cpu", clip=clip) as rig:
        charged = compute_memory(subject.spec, rig.request)
        peak = peak_of_a_step(rig)
    boundary = subject.spec.boundary_bytes_per_token * LARGE["batch"] * LARGE["tokens"]
    assert peak > 2 * boundary
    assert peak <= charged.whole_batch + charged.stage
    assert charged.whole_batch + charged.stage <= peak + 1.5 * boundary


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize(("kept", "vocabulary", "batch"), [(None, 0, 8), (None, 80, 2), ("all", 0, 2), ("all", 80, 8)])
def test_a_step_stays_within_what_is_charged(
    kept: Any, vocabulary: int, batch: int, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the device has of a micro-batch and its neighbours, with what the host has of the whole batch, storage by storage:
    an emulated device's memory is the host's. Copies are as late as they may be, and keep what they copy alive."""
    without_holes(monkeypatch)
    subject = Subject(LLAMA, Shape(batch=batch, micro=2, tokens=64, vocabulary=vocabulary))
    with Rig(subject, tmp_path, home="cpu", kept=kept, batch_on_device=stays, **late()) as rig:
        on_device = rig.plan.predicted.gpu_peak - rig.device.peak_memory()  # beside weights and sums
        charged = compute_memory(subject.spec, rig.request).whole_batch + on_device
        peak = peak_of_a_step(rig)
    # The host has most in the head, and the device in a block: of a cut head, that is not at once.
    # A model like this one makes nothing of the batch between stages, where one that scales the embedding does.
    unused = stays * subject.spec.choreography_bytes_per_token * subject.numerics.tokens
    # A set of kept outputs stays with the allocator of a device that runs behind the host, which this one does not.
    stages = zip(subject.spec.stages, rig.plan.stages, strict=True)
    unused += stays * max(kept_bytes(spec, plan.kept) for spec, plan in stages)
    assert (0.7 if vocabulary else 0.8) * (charged - unused) <= peak <= charged


# ---- a block that writes into its input ----------------------------------------------------------------------------


REFUSED = r"^layers.0 \(LlamaDecoderLayer\) writes into its own input \(aten.mul_\), which backward needs unchanged$"


def _subject(monkeypatch: pytest.MonkeyPatch, *, in_place: bool) -> Subject:
    """Makes a model of which autograd sees nothing of that: what it sees is refused before there is a plan."""
    forward = LlamaDecoderLayer.forward

    def writes(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if in_place:
            hidden_states.detach().mul_(1.5)
        else:
            hidden_states = hidden_states + (hidden_states / 2).detach()
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", writes)
    return Subject(llama(), Shape(batch=4, micro=2))


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("kept", [None, "all"])
def test_is_refused_by_name(stays: bool, kept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = _subject(monkeypatch, in_place=True)
    with Rig(subject, tmp_path, device="emulated", home="cpu", kept=kept, batch_on_device=stays) as rig:
        with pytest.raises(UsageError, match=REFUSED):
            rig.run(1)
        rig.executor.abandon()


def test_on_device_cpu_the_input_is_kept_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for in_place in (True, False):
        with monkeypatch.context() as patch:
            subject = _subject(patch, in_place=in_place)
            with Rig(subject, tmp_path / str(in_place), home="cpu", clip=None) as rig:
                found.append((rig.run(2), rig.weights()))
    assert_same(found[0], found[1])
