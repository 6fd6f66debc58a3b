"""The closed form by hand: the bytes of an update by its dtypes, and what crosses to a device with memory of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from fuyou_cli.core.units import MiB
from fuyou_cli.planner.bound import lower_bound
from fuyou_cli.planner.costs import Costs, update_bytes
from fuyou_cli.planner.device import square_lanes
from fuyou_cli.planner.place import Candidate, least_memory, made_of, plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.spec.model import Dtype, ModelSpec, StateLayout
from fuyou_cli.spec.plan import Numerics, Plan, Predicted, Tier

from .models import HARDWARE, NUMERICS, cut, model

BLOCK, LEAF, NORM = 1 << 20, 1 << 19, 2048
BLOCKS = 6
PARAMETERS = 2 * LEAF + BLOCKS * BLOCK + NORM
BOUNDARY = 4 * 64 * 1024 * 2  # rows, tokens, width, bfloat16
RATED = replace(HARDWARE, device="cuda", h2d=2e9, d2h=1e9)


def _numerics(compute: Dtype = "bfloat16", accumulate: Dtype = "bfloat16") -> Numerics:
    return replace(NUMERICS, compute_dtype=compute, accumulate_dtype=accumulate, torch_threads=1)


def _predicted(
    spec: ModelSpec,
    *,
    clip: float | None = 1.0,
    accumulate: Dtype = "bfloat16",
    weights: Tier = "ssd",
    boundaries: Tier = "ssd",
    device: str = "cuda",
) -> Predicted:
    request = PlanRequest(
        numerics=_numerics(spec.compute_dtype, accumulate), model_name="test", device=device, clip_grad_norm=clip,
        cpu_budget=1 << 40, weights=weights, boundaries=boundaries, lookahead=1,
        kept=((),) * len(spec.stages),
    )  # fmt: skip
    return plan(spec, RATED, request).predicted


SPEC = model(LEAF, *[BLOCK] * BLOCKS, NORM, LEAF)
# Forward: the embedding's output, both of each block's and the norm's, and the input back to where it is kept. Head: in and its
# gradient back. Backward: input and the output's gradient in, the input's gradient back; the embedding's gradient in.
BOUNDARIES_IN = (BLOCKS + 1) + 1 + 2 * (BLOCKS + 1) + 1
BOUNDARIES_BACK = 1 + 2 * (BLOCKS + 1) + 1 + (BLOCKS + 1)


@pytest.mark.parametrize(
    ("compute", "accumulate", "size"),
    [("bfloat16", "bfloat16", 14 + 12), ("bfloat16", "float32", 16 + 12), ("float32", "float32", 16 + 12)],
)
def test_an_update_reads_and_writes_what_its_dtypes_take(compute: Dtype, accumulate: Dtype, size: int) -> None:
    """Reads weights, remainder, momentum, variance and gradient; writes all but the gradient."""
    assert update_bytes(StateLayout(weights=compute), accumulate, 1) == size
    spec = model(LEAF, *[BLOCK] * BLOCKS, NORM, LEAF, dtype=compute)
    assert _predicted(spec, accumulate=accumulate).seconds["update"] == pytest.approx(PARAMETERS * size / RATED.adamw_bytes)


@pytest.mark.parametrize(("accumulate", "item"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("boundaries", ["cpu", "ssd"])
def test_sums_and_boundaries_come_back_from_the_device(accumulate: Dtype, item: int, boundaries: Tier) -> None:
    """Brings them back in the dtype that gradients are summed in; a boundary crosses wherever it rests."""
    seconds = _predicted(SPEC, accumulate=accumulate, boundaries=boundaries).seconds
    assert seconds["d2h"] == (item * PARAMETERS + BOUNDARIES_BACK * BOUNDARY) / RATED.d2h


@pytest.mark.parametrize(("clip", "embedding"), [(1.0, 1), (None, 2)])
def test_weights_go_up_for_every_visit_but_the_turn(clip: float | None, embedding: int) -> None:
    """The norm's are still there in backward. Without clipping the embedding is visited with its weights again."""
    seconds = _predicted(SPEC, clip=clip).seconds
    weights = 2 * (embedding * LEAF + 2 * BLOCKS * BLOCK + NORM + LEAF)
    assert seconds["h2d"] == (weights + BOUNDARIES_IN * BOUNDARY) / RATED.h2d


def test_weights_at_home_on_the_device_go_up_once() -> None:
    seconds = _predicted(SPEC, weights="gpu").seconds
    assert seconds["h2d"] == (2 * PARAMETERS + BOUNDARIES_IN * BOUNDARY) / RATED.h2d


@pytest.mark.parametrize(("blocks_at_home", "device"), [(0, "cuda"), (2, "cuda"), (4, "cuda"), (4, "emulated")])
def test_weights_stay_on_the_device_as_far_as_it_has_room(blocks_at_home: int, device: str) -> None:
    """Each block that does goes up once instead of twice; what rests on the ssd does not stay."""
    request = PlanRequest(
        numerics=_numerics(), model_name="test", device=device, clip_grad_norm=1.0, cpu_budget=1 << 40, lookahead=1,
        kept=((),) * len(SPEC.stages), batch_on_device=False,
    )  # fmt: skip
    streamed = plan(SPEC, RATED, request)
    assert {stage.weights for stage in streamed.stages} == {"cpu"}, "nobody knows how much memory the device has"
    room = replace(request, gpu_budget=streamed.predicted.gpu_peak + blocks_at_home * 2 * BLOCK)
    chosen = plan(SPEC, RATED, room)
    at_home = [stage.stage for stage in chosen.stages if stage.weights == "gpu"]
    assert len(at_home) == blocks_at_home and all(SPEC.stages[stage].kind == "block" for stage in at_home)
    assert chosen.predicted.gpu_peak <= room.gpu_budget
    saved = (streamed.predicted.seconds["h2d"] - chosen.predicted.seconds["h2d"]) * RATED.h2d
    assert saved == pytest.approx(2 * BLOCK * blocks_at_home)
    lines = {line.what: line.size for line in chosen.memory if line.tier == "gpu"}
    assert lines["weights"] == 2 * BLOCK * (blocks_at_home + 2)  # two turns beside
    longest = max(tensor.numel for stage in SPEC.stages for tensor in stage.tensors)
    assert lines["gradients"] == 2 * 2 * BLOCK + 8 * square_lanes(longest)
    assert sum(lines.values()) == chosen.predicted.gpu_peak
    assert chosen.arena_size == streamed.arena_size, "the host's copy is where updates write"
    on_ssd = plan(SPEC, RATED, replace(room, cpu_budget=least_memory(SPEC, RATED, room)))
    assert "gpu" not in {stage.weights for stage in on_ssd.stages if stage.weights_ram is None}


@pytest.mark.parametrize(("pieces", "kept"), [(0, None), (4, None), (0, "all")])
def test_the_batch_stays_on_a_device_that_has_room(pieces: int, kept: Literal["all"] | None) -> None:
    """Lets of boundaries only what backward needs cross; the host has none of the batch."""
    whole = model(LEAF, *[BLOCK] * BLOCKS, NORM, LEAF)
    spec = cut(whole, *[LEAF // pieces] * pieces) if pieces else whole
    request = PlanRequest(
        numerics=_numerics(), model_name="test", device="cuda", clip_grad_norm=1.0, cpu_budget=1 << 40, lookahead=1,
        kept=kept, weights="cpu",
    )  # fmt: skip
    least = plan(spec, RATED, replace(request, batch_on_device=True)).predicted.gpu_peak
    chosen = plan(spec, RATED, replace(request, gpu_budget=least))
    assert chosen.batch_on_device and chosen.predicted.gpu_peak == least
    lines = {line.what: line.size for line in chosen.memory if line.tier == "gpu"}
    sums = 4 * 64 * 1024 * 4 * (pieces > 0)  # of the cut head, in float32
    assert lines["crossing"] == 4 * BOUNDARY + sums and sum(lines.values()) == least
    assert "crossing" not in {line.what for line in chosen.memory if line.tier == "cpu"}
    through_host = plan(spec, RATED, replace(request, gpu_budget=least - 1))
    assert not through_host.batch_on_device
    assert through_host.arena_size > chosen.arena_size
    spared = {
        way: (through_host.predicted.seconds[way] - chosen.predicted.seconds[way]) * getattr(RATED, way) / BOUNDARY
        for way in ("h2d", "d2h")
    }
    stashed = BLOCKS + 1  # of stages that keep their input
    most = {"h2d": BOUNDARIES_IN - stashed, "d2h": BOUNDARIES_BACK - stashed}
    assert spared == pytest.approx(most) if not pieces else all(spared[way] > most[way] for way in most)
    assert plan(spec, RATED, request).batch_on_device is False, "nobody knows how much memory the device has"


def test_gradients_of_tied_pieces_cross_twice() -> None:
    """Down after the head's part, up and down again with the embedding's; a piece of a cut head takes its input twice. What
    pieces compute together goes on: the embedding's output, and its gradient once more each; sums of float32."""
    pieces = 2
    spec = cut(model(LEAF, *[BLOCK] * BLOCKS, NORM, LEAF, tied=True), *[LEAF // pieces] * pieces)
    seconds = _predicted(spec).seconds
    parameters = LEAF + BLOCKS * BLOCK + NORM
    back = 2 * (parameters + LEAF) + (BOUNDARIES_BACK + (1 + 2) * (pieces - 1)) * BOUNDARY
    assert seconds["d2h"] == back / RATED.d2h
    # up: both pieces in forward and for the logits; the last is there still for its gradient, the first is as well
    weights = 2 * (2 * LEAF + 2 * BLOCKS * BLOCK + NORM)
    into = weights + 2 * NORM + 2 * LEAF + (BOUNDARIES_IN + 2 * pieces - 1 + (2 + 2) * (pieces - 1)) * BOUNDARY
    assert seconds["h2d"] == into / RATED.h2d


def test_on_the_cpu_nothing_crosses() -> None:
    assert {"h2d", "d2h", "compute", "update"}.isdisjoint(_predicted(SPEC, device="cpu").seconds)


# ---- what no step can pass -------------------------------------------------------------------------------------------


SLOW = replace(RATED, matmul_flops=RATED.matmul_flops / 100, device_memory_rate=1e15)


def _in_ram(clip: float | None, there: tuple[int, ...] = ()) -> tuple[Costs, Plan]:
    """Returns a plan whose updates take longer than its compute, with these stages on the device."""
    request = PlanRequest(
        numerics=_numerics(), model_name="test", device="cuda", clip_grad_norm=clip, cpu_budget=1 << 40, weights="cpu",
        states="cpu", boundaries="cpu", lookahead=1, kept=((),) * len(SPEC.stages), device_states=there,
    )  # fmt: skip
    made = plan(SPEC, SLOW, request)
    return Costs.of(SPEC, SLOW, made), made


def test_clipped_updates_end_before_the_head_begins() -> None:
    """What computes from the head on comes on top of them."""
    costs, clipped = _in_ram(1.0)
    update = PARAMETERS * (14 + 12) / RATED.adamw_bytes
    schedule = plan_schedule(SPEC, clipped)
    later = sum(costs.compute_seconds(visit) for visit in schedule.visits if visit.phase != "forward")
    assert lower_bound(costs, schedule, clipped) == pytest.approx(update + later)
    assert max(clipped.predicted.seconds.values()) < update + later


def test_weights_that_a_deferred_update_finds_in_their_slot_are_not_counted() -> None:
    """Backward was the last to use them, and its slot has no other stage."""
    spec = model(1 << 20, 4 << 20, 1 << 20, 1 << 20)
    drives = dict(store_read=2e8, store_write=2e8, store_read_mixed=1.5e8, store_write_mixed=1.5e8)
    hardware = replace(RATED, h2d=1e9, matmul_flops=5e11, **drives)
    request = PlanRequest(
        numerics=replace(_numerics(), max_seq_len=64), model_name="test", device="cuda", clip_grad_norm=None, cpu_budget=0,
        scratch_size=MiB,
    )  # fmt: skip
    request = replace(request, cpu_budget=least_memory(spec, hardware, request) + 8 * MiB)
    made = made_of(spec, hardware, request, Candidate(lookahead=2, gradient_slots=2, defer=True))
    assert made is not None and made.stages[1].deferred
    assert [stage.weights for stage in made.stages] == ["cpu", "ssd", "cpu", "cpu"]
    schedule = plan_schedule(spec, made)
    steady = simulate(spec, hardware, made, schedule, steps=30)
    assert steady.read < made.predicted.read_per_step
    assert lower_bound(Costs.of(spec, hardware, made), schedule, made) <= steady.step_seconds
