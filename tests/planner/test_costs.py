"""Tests seconds of compute: what kept outputs spare, and what goes through the host's memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fuyou_cli.machine.described import described
from fuyou_cli.planner.costs import Costs, Shaped, fitted
from fuyou_cli.planner.device import crossing, staged_bytes
from fuyou_cli.planner.place import plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import Visit, plan_schedule
from fuyou_cli.spec.hardware import HardwareProfile, StageRate
from fuyou_cli.spec.model import ExpertWork, ModelSpec, StageSpec
from fuyou_cli.spec.plan import Computed, TypicalStep

from .models import HARDWARE, NUMERICS, OPERATORS, cut, model, with_graphs
from .models import SPEC as SMALL

WHOLE, GIVEN = 4e3, 3.9e3  # FLOP/s of backward; with outputs given back what is no product weighs more
PARAMS, BLOCK = 1 << 12, 1
SPEC = model(PARAMS, PARAMS, PARAMS, 2048, PARAMS)
MICRO_BATCHES = 2
WHOLE_BATCH = 4 * 64 * 1024 * 2  # bytes of a boundary
EVERY = tuple(operator.index for operator in OPERATORS)
FLOPS = MICRO_BATCHES * 3 * SPEC.stages[BLOCK].forward_flops
PRODUCTS = MICRO_BATCHES * sum(operator.flops for operator in OPERATORS)


def machine(*, given: float, copy: float = 1e30, fresh: float = 1e30) -> HardwareProfile:
    rate = StageRate(
        kind="block", dtype="bfloat16", hidden=1024, params=PARAMS, tokens=128, forward=WHOLE, backward=WHOLE, given=given
    )  # fmt: skip
    return replace(HARDWARE, stage_rates=(rate,), host_copy=copy, host_fresh=fresh)


def seconds(hardware: HardwareProfile, phase: str, *, kept: tuple[int, ...] = (), size: int = 0, stage: int = BLOCK,
            clip: float | None = None, spec: ModelSpec = SPEC, there: bool = False) -> float:  # fmt: skip
    """Returns the seconds of one visit. `size`: bytes of outputs that a micro-batch keeps; `there`: all stay on a GPU."""
    every = tuple(kept if index == BLOCK else () for index in range(len(spec.stages)))
    request = PlanRequest(
        numerics=NUMERICS, model_name="test", device="cuda" if there else "cpu", clip_grad_norm=clip, cpu_budget=1 << 40,
        kept=every, kept_there="room" if there else None, free_pages=True,
    )  # fmt: skip
    chosen = plan(spec, hardware, request)

    def wanted(visit: Visit) -> bool:
        return (visit.phase, visit.stage) == (phase, stage)

    visit = next(filter(wanted, plan_schedule(spec, chosen).visits))
    return Costs.of(spec, hardware, chosen).compute_seconds(visit, size)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([128, 256, 512, 1024]), st.integers(1, 10**12))
def test_a_gpu_adds_whole_gradients_once_per_micro_batch(micro: int, rated: int, memory: int) -> None:
    """A rate of other tokens includes more or less of that. What it measured itself stays as it is."""
    numerics = replace(NUMERICS, batch_size=8, micro_batch_size=micro, max_seq_len=128)
    rate = replace(machine(given=GIVEN).stage_rates[0], tokens=rated)
    stage, once = SPEC.stages[BLOCK], PARAMS * (2 + 2 * 4) / memory
    found = {}
    for device in ("cuda", "cpu"):
        hardware = replace(HARDWARE, device=device, stage_rates=(rate,), device_memory_rate=float(memory))
        costs = Costs(model=SPEC, hardware=hardware, numerics=numerics, device=device)
        found[device] = costs.rate(stage)
    whole = 3 * stage.forward_flops
    before, after = (whole / found[device].backward for device in ("cpu", "cuda"))
    assert found["cpu"] == rate and found["cuda"].forward == rate.forward
    assert after == pytest.approx(max(before / 2, before + once * (1 - micro * 128 / rated)))
    assert (after == before) == (micro * 128 == rated)


def test_a_described_gpu_has_no_sum_in_its_rate() -> None:
    """The first gradient of a step is a copy. A head adds once per piece."""
    hardware = replace(HARDWARE, device="cuda", device_memory_rate=1e9)
    for micro, chunk, sums in ((8, 0, 0), (4, 0, 1), (1, 0, 7), (8, 64, 15)):
        numerics = replace(NUMERICS, batch_size=8, micro_batch_size=micro, max_seq_len=128, head_chunk_tokens=chunk)
        costs = Costs(model=SPEC, hardware=hardware, numerics=numerics, device="cuda")
        stage = SPEC.stages[-1 if chunk else BLOCK]
        more = 3 * stage.forward_flops * (1 / costs.rate(stage).backward - 1 / HARDWARE.matmul_flops)
        assert costs.micro_batches * more == pytest.approx(sums * PARAMS * 10 / 1e9, abs=1e-12)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 64]), st.floats(0.0, 1e3), st.floats(0.0, 1e3))
def test_a_gpu_waits_for_the_host_that_launches(micro: int, chunk: int, forward: float, backward: float) -> None:
    """Takes no less time for a micro-batch, of a head for a piece, than its launches take. A processor launches nothing."""
    numerics = replace(NUMERICS, batch_size=8, micro_batch_size=micro, max_seq_len=128, head_chunk_tokens=chunk)
    block = replace(machine(given=GIVEN).stage_rates[0], tokens=micro * 128)
    for stage, rate in (
        (SPEC.stages[BLOCK], block),
        (SPEC.stages[-1], replace(block, kind="head", tokens=chunk or micro * 128)),
    ):
        pieces = micro * 128 // rate.tokens
        seconds = {}
        for device in ("cuda", "cpu"):
            for launches in (True, False):
                rated = replace(rate, forward_launch=forward, backward_launch=backward) if launches else rate
                hardware = replace(HARDWARE, device=device, stage_rates=(rated,), device_memory_rate=1e9)
                found = Costs(model=SPEC, hardware=hardware, numerics=numerics, device=device).rate(stage)
                flops = stage.forward_flops
                seconds[device, launches] = (flops / found.forward, 3 * flops / found.backward)
        least = [pieces * each for each in (forward, backward)]
        assert seconds["cuda", True] == pytest.approx(tuple(map(max, seconds["cuda", False], least)))
        assert seconds["cpu", True] == seconds["cpu", False]


def test_sums_go_at_the_rate_of_the_described_cards_memory() -> None:
    card = described("rtx4090,gen4,64GiB")
    stage, numerics = SPEC.stages[BLOCK], replace(NUMERICS, batch_size=8, micro_batch_size=4)
    taken = []
    for hardware in (card, replace(card, device_memory_rate=0.0)):
        rate = Costs(model=SPEC, hardware=hardware, numerics=numerics, device="cuda").rate(stage)
        taken.append(3 * stage.forward_flops * (1 / rate.backward - 1 / card.matmul_flops))
    assert taken[0] == pytest.approx(PARAMS * 10 / (0.73 * 1008e9) / 2) and taken[0] < 0.75 * taken[1]


def test_compiled_blocks_take_the_time_that_was_measured_of_them() -> None:
    base = machine(given=0.0)
    compiled = replace(base.stage_rates[0], kind="compiled block", forward=2 * WHOLE, backward=4 * WHOLE)
    hardware = replace(base, stage_rates=(*base.stage_rates, compiled))
    for phase, faster in (("forward", 2.0), ("backward", 4.0)):
        taken = [seconds(hardware, phase, spec=spec) for spec in (SPEC, replace(SPEC, compiled=True))]
        assert taken[0] == pytest.approx(faster * taken[1]), phase
    heads = [seconds(hardware, "head", stage=len(SPEC.stages) - 1, spec=replace(SPEC, compiled=each)) for each in (False, True)]
    assert heads[0] == heads[1]


def test_a_kept_graph_spares_the_seconds_of_its_forward() -> None:
    base = machine(given=0.0)
    hardware = replace(base, stage_rates=(replace(base.stage_rates[0], kind="compiled block", forward=2 * WHOLE),))
    spec = with_graphs(SPEC, size=1 << 16)
    forward, recomputed = (seconds(hardware, phase, spec=spec) for phase in ("forward", "backward"))
    assert seconds(hardware, "backward", spec=spec, there=True) == pytest.approx(recomputed - forward)


def test_a_backward_lies_between_those_with_all_outputs_and_without() -> None:
    hardware = machine(given=GIVEN)
    assert seconds(hardware, "backward") == pytest.approx(FLOPS / WHOLE)
    least = (FLOPS - PRODUCTS) / GIVEN
    assert seconds(hardware, "backward", kept=EVERY) == pytest.approx(least) and least < FLOPS / WHOLE
    some = chain.from_iterable(combinations(EVERY, count) for count in range(len(EVERY) + 1))
    for kept in some:
        spared = MICRO_BATCHES * sum(operator.flops for operator in OPERATORS if operator.index in kept)
        between = FLOPS / WHOLE - (FLOPS / WHOLE - least) * spared / PRODUCTS
        assert seconds(hardware, "backward", kept=kept) == pytest.approx(between)


def test_keeping_never_makes_a_backward_longer_and_says_nothing_of_a_forward() -> None:
    """Compares also where the rate with outputs was found on a slower machine than the one without."""
    slower = machine(given=GIVEN / 10)
    assert seconds(slower, "backward", kept=EVERY) == pytest.approx(FLOPS / WHOLE)
    assert seconds(slower, "forward", kept=EVERY) == seconds(slower, "forward") == pytest.approx(FLOPS / 3 / WHOLE)


def test_what_is_spared_goes_at_the_one_rate_that_is_known() -> None:
    assert seconds(machine(given=0.0), "backward", kept=EVERY) == pytest.approx((FLOPS - PRODUCTS) / WHOLE)


def test_boundaries_go_to_new_pages_and_kept_outputs_to_pages_that_are_there() -> None:
    plain = machine(given=GIVEN)
    slow_fresh, slow_copy = machine(given=GIVEN, fresh=1e6), machine(given=GIVEN, copy=1e6)
    more = seconds(slow_fresh, "forward", size=100) - seconds(plain, "forward")
    assert more == pytest.approx(4 * WHOLE_BATCH / 1e6)  # kept for backward, and gathered from micro-batches
    more = seconds(slow_copy, "forward", kept=EVERY, size=100) - seconds(plain, "forward", kept=EVERY)
    assert more == pytest.approx(2 * MICRO_BATCHES * 100 / 1e6)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_gradients_are_looked_at_where_they_are(clip: float | None) -> None:
    more = seconds(machine(given=GIVEN, copy=1e6), "backward", clip=clip) - seconds(machine(given=GIVEN), "backward", clip=clip)
    assert more == pytest.approx(4 * PARAMS / 1e6)


def test_memory_that_nobody_measured_goes_at_the_updates_rate() -> None:
    hardware = replace(machine(given=GIVEN, copy=0.0, fresh=0.0), adamw=((1, 1e6),))
    more = seconds(hardware, "forward", size=100, kept=EVERY) - seconds(machine(given=GIVEN), "forward")
    assert more == pytest.approx((4 * WHOLE_BATCH + 2 * MICRO_BATCHES * 100) / 1e6)


def test_what_feeds_a_device_is_charged_where_it_takes_longer_than_compute() -> None:
    """Charges bytes of the launching thread per visit: ids and targets, nothing of a block."""
    none = ((),) * len(SPEC.stages)
    request = PlanRequest(
        numerics=NUMERICS, model_name="test", device="cuda", clip_grad_norm=None, cpu_budget=1 << 40, kept=none
    )  # fmt: skip
    ids = 2 * 8 * 4 * 64.0  # read and written
    for copy, compared in ((1e30, 0.0), (1e-6, 1e6), (4.0, 0.25)):
        hardware = machine(given=GIVEN, copy=copy)
        chosen = plan(SPEC, hardware, request)
        costs, without = (Costs.of(SPEC, one, chosen) for one in (hardware, machine(given=GIVEN)))
        for visit in plan_schedule(SPEC, chosen).visits:
            fed = ids * compared if SPEC.stages[visit.stage].kind == "embedding" or visit.phase == "head" else 0.0
            fed *= 1 if visit.index else 2  # which ids differ, before the first visit
            assert costs.compute_seconds(visit) == pytest.approx(max(without.compute_seconds(visit), fed)), visit


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_of_a_cut_head_cross_and_the_launching_thread_adds_nothing(dtype: Any) -> None:
    """Sends float32, as wide as one boundary or two; the first piece needs none, and the last one's leave in the compute
    dtype."""
    spec = replace(
        cut(SPEC, *[PARAMS // 4] * 3), compute_dtype=dtype, boundary_bytes_per_token=1024 * (2 if dtype == "bfloat16" else 4)
    )
    wide = 2 if dtype == "bfloat16" else 1
    numerics = replace(NUMERICS, compute_dtype=dtype)
    request = PlanRequest(numerics=numerics, model_name="test", device="cuda", clip_grad_norm=None, cpu_budget=1 << 40)
    made = plan(spec, HARDWARE, request)
    visits = [visit for visit in plan_schedule(spec, made).visits if visit.phase == "head"]
    assert [staged_bytes(spec, request.numerics, visit) for visit in visits] == [0] * 3
    found = [crossing(spec, visit.stage, visit.phase, stash=visit.stash) for visit in visits]
    assert found == [(1, wide), (1 + wide, wide), (1 + wide, 1)]
    assert any(span.size >= 4 * 1024 * 4 * 64 for span in made.batch_slots)  # where they rest


ON_A_GPU = PlanRequest(
    numerics=NUMERICS, model_name="test", device="cuda", cpu_budget=1 << 40, clip_grad_norm=None, batch_on_device=False
)
EXPERTS = ExpertWork(flops=0.8 * SPEC.stages[BLOCK].forward_flops, rows=96.0, products=24)


def mixture(work: ExpertWork = EXPERTS) -> ModelSpec:
    """Makes the same model, whose blocks send tokens to experts."""
    stages = (replace(stage, expert_work=work) if stage.kind == "block" else stage for stage in SPEC.stages)
    return replace(SPEC, stages=tuple(stages))


def of_a_mixture(hardware: HardwareProfile, work: ExpertWork = EXPERTS) -> StageRate:
    """Returns the rates of its first block on a GPU."""
    spec = mixture(work)
    return Costs.of(spec, hardware, ON_A_GPU).rate(spec.stages[BLOCK])


def test_a_gpu_multiplies_the_rows_of_an_expert_in_whole_tiles() -> None:
    dense = replace(machine(given=0.0), tile_rows=1, product_launch=0.0)
    plain, tiled = of_a_mixture(dense), of_a_mixture(replace(dense, tile_rows=64))
    more = 0.8 * (128 / 96 - 1)  # half a tile more for 96 rows, on the part of the FLOPs that is of experts
    assert WHOLE / plain.forward * (1 + more) == pytest.approx(WHOLE / tiled.forward)
    assert plain.backward / tiled.backward == pytest.approx(1 + more)
    few = of_a_mixture(replace(dense, tile_rows=64), replace(EXPERTS, rows=4.0))
    assert plain.forward / few.forward == pytest.approx(1 + 0.8 * (64 / 4 - 1))


def test_the_host_submits_every_product_with_an_expert() -> None:
    """Frozen ones have no gradients of their own. Where products take longer than that, it costs nothing."""
    slow = replace(machine(given=0.0), tile_rows=1, product_launch=10.0)
    forward = SPEC.stages[BLOCK].forward_flops
    found, frozen = of_a_mixture(slow), of_a_mixture(slow, replace(EXPERTS, frozen_flops=EXPERTS.flops))
    assert forward / found.forward == pytest.approx(24 * 10.0)
    assert [3 * forward / rate.backward for rate in (found, frozen)] == pytest.approx([3 * 24 * 10.0, 2 * 24 * 10.0])
    quick = replace(slow, product_launch=1e-12)
    assert of_a_mixture(quick) == of_a_mixture(replace(quick, product_launch=0.0))


def test_rates_of_a_mixture_are_charged_nothing_twice() -> None:
    """They have the tiles of their own rows and all launches in them."""
    dense = machine(given=0.0)
    (rate,) = dense.stage_rates
    own = replace(rate, params=PARAMS * 8, expert_rows=96.0, forward=WHOLE / 2, forward_launch=1e-9, backward_launch=1e-9)
    both = replace(dense, stage_rates=(rate, own), product_launch=10.0)
    assert of_a_mixture(both).forward == pytest.approx(WHOLE / 2)  # not that of the dense block with as many parameters
    more = of_a_mixture(both, replace(EXPERTS, rows=24.0))
    assert WHOLE / 2 / more.forward == pytest.approx(1 + 0.8 * (64 / 24 - 128 / 96))
    assert Costs.of(SPEC, both, ON_A_GPU).rate(SPEC.stages[BLOCK]).forward == pytest.approx(WHOLE)


def test_a_processor_multiplies_whole_tiles_too() -> None:
    """A mixture was timed with few tokens and with many: few take as long as a tile, so many are not told by them."""
    few = StageRate(
        kind="block", dtype="bfloat16", hidden=1024, params=PARAMS, tokens=16, width=16, forward=2.0, backward=2.0,
        forward_flops=16.0, backward_flops=48.0, expert_rows=8.0,
    )  # fmt: skip
    many = replace(
        few, tokens=128, width=128, forward=8.0, backward=8.0, forward_flops=128.0, backward_flops=384.0, expert_rows=64.0
    )
    spec = mixture(replace(EXPERTS, rows=few.expert_rows / few.tokens * NUMERICS.micro_batch_tokens))
    request = replace(ON_A_GPU, device="cpu")
    both, alone = (replace(HARDWARE, stage_rates=rates) for rates in ((few, many), (many,)))
    found, wanted = (Costs.of(spec, hardware, request).rate(spec.stages[BLOCK]) for hardware in (both, alone))
    assert NUMERICS.micro_batch_tokens == 128 and found == wanted


# ---- a few shapes that were timed: seconds of any micro-batch, and rates at the run's own ----------------------------------

TIMED = ((128, 128), (1024, 512), (1024, 128), (1024, 256), (2048, 512))  # tokens, width
TIMED_BLOCK, TIMED_HEAD = SMALL.stages[1], SMALL.stages[-1]
PARTS = st.floats(1e-4, 1.0)


def timed(stage: StageSpec, seconds: Shaped, shapes: tuple[tuple[int, int], ...], *, threads: int = 2) -> tuple[StageRate, ...]:
    """Returns what a stage is measured at whose forward takes so long, and its backward three times that."""
    per_token = stage.forward_flops / NUMERICS.micro_batch_tokens
    found = []
    for tokens, width in shapes:
        taken, flops = seconds.of(tokens, width), per_token * tokens
        found.append(
            StageRate(
                kind="head" if stage.kind == "head" else "block", dtype="bfloat16", hidden=SMALL.hidden_size,
                params=stage.params, tokens=tokens, width=width, threads=threads, layers="own/512", forward=flops / taken,
                forward_flops=flops, backward=flops / taken, backward_flops=3 * flops,
            )
        )  # fmt: skip
    return tuple(found)


def timed_costs(*rates: StageRate, rows: int = 2, width: int = 64, chunk: int = 0) -> Costs:
    numerics = replace(NUMERICS, batch_size=8 * rows, micro_batch_size=rows, max_seq_len=width, head_chunk_tokens=chunk)
    hardware = replace(HARDWARE, stage_rates=rates)
    times = rows * width / NUMERICS.micro_batch_tokens  # specifications are of one micro-batch
    stages = tuple(replace(stage, forward_flops=times * stage.forward_flops) for stage in SMALL.stages)
    return Costs(model=replace(SMALL, stages=stages), hardware=hardware, numerics=numerics, device="cpu")


@example(fixed=0.5, token=1.0, pair=1.0, row=0.001953125, rows=1, width=1)  # few rows were left out: 0.1 % off for one token
@given(PARTS, PARTS, PARTS, PARTS, st.integers(1, 64), st.integers(1, 4096))
def test_a_fit_finds_the_parts_that_made_the_times(
    fixed: float, token: float, pair: float, row: float, rows: int, width: int
) -> None:
    made = Shaped(fixed=100 * fixed, per_token=token, per_pair=pair / 100, per_row=30 * row)
    found = fitted([(tokens, width, made.of(tokens, width)) for tokens, width in TIMED])
    assert found.of(rows * width, width) == pytest.approx(made.of(rows * width, width), rel=1e-3)
    assert found.of(1000, 300, rows=9) == pytest.approx(
        made.of(1000, 1) - 991 * made.per_row + 299_000 * made.per_pair, rel=1e-3
    )


@given(st.lists(st.tuples(st.sampled_from(TIMED), st.floats(0.7, 1.4)), min_size=1, max_size=12))
def test_no_fit_of_noise_gives_a_micro_batch_for_nothing(noise: list[tuple[tuple[int, int], float]]) -> None:
    found = fitted([(*shape, factor * (0.01 + 1e-5 * shape[0])) for shape, factor in noise])
    assert found.fixed >= 0 and found.of(64, 64) > 0 and found.of(4096, 4096) > 0
    for tokens, width in TIMED:
        assert found.of(2 * tokens, width) >= found.of(tokens, width)


def test_one_shape_tells_what_a_token_takes() -> None:
    assert fitted([(512, 512, 4.0)]).of(1024, 128) == 8.0
    two = fitted([(512, 512, 4.0), (1024, 512, 6.0)])
    assert (two.fixed, two.per_token, two.per_pair) == pytest.approx((2.0, 2 / 512, 0.0))


def test_small_micro_batches_pay_what_each_costs() -> None:
    """Told apart only by the model's own times: at the nearest stage's rate both take the same."""
    own = timed(TIMED_BLOCK, Shaped(fixed=0.02, per_token=1e-4), TIMED)
    for rates, more in ((own, 7 * 0.02), (tuple(replace(rate, forward_flops=0.0) for rate in own[:1]), 0.0)):
        one, eight = (timed_costs(*rates, rows=rows, width=512) for rows in (1, 8))
        found = [each.model.stages[1].forward_flops / each.rate(TIMED_BLOCK).forward for each in (one, eight)]
        assert 8 * found[0] - found[1] == pytest.approx(more, abs=1e-9)


def test_own_times_count_for_their_stage_alone() -> None:
    own = timed(TIMED_BLOCK, Shaped(fixed=0.02, per_token=1e-4), TIMED)
    for change in ({"params": 3}, {"hidden": 3}, {"dtype": "float32"}, {"kind": "head"}):
        rates = tuple(replace(rate, **change) for rate in own)
        assert timed_costs(*rates).rate(TIMED_BLOCK).forward in {HARDWARE.matmul_flops, *(rate.forward for rate in own)}
    other = timed(TIMED_BLOCK, Shaped(per_token=7e-4), TIMED, threads=1)
    both, alone = timed_costs(*own, *other).rate(TIMED_BLOCK), timed_costs(*own).rate(TIMED_BLOCK)
    assert (both.forward, both.backward) == (alone.forward, alone.backward)  # those on the threads of the run
    assert timed_costs(*other).rate(TIMED_BLOCK).forward == pytest.approx(other[0].forward)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_visit_takes_the_sum_of_its_micro_batches(phase: str) -> None:
    """In full training, and where a part of backward is spared, with own times and without."""
    own = timed(TIMED_BLOCK, Shaped(fixed=0.02, per_token=1e-4, per_pair=1e-8), TIMED)
    for rates in (own, tuple(replace(rate, forward_flops=0.0) for rate in own)):
        for spared in (0.0, 0.5):
            made = timed_costs(*rates, rows=4, width=100)
            stage = replace(made.model.stages[1], frozen_flops=spared * made.model.stages[1].forward_flops)
            rate, whole = made.rate(stage), 3 * stage.forward_flops - stage.frozen_flops
            uniform = stage.forward_flops / rate.forward if phase == "forward" else whole / rate.backward
            assert made.micro_batch_seconds(stage, phase, 400, 100) == pytest.approx(uniform)
            shorter, longer = (made.micro_batch_seconds(stage, phase, 4 * width, width) for width in (50, 200))
            assert shorter < uniform < longer


def test_a_head_takes_its_fixed_part_once_a_piece() -> None:
    own = timed(TIMED_HEAD, Shaped(fixed=0.02, per_token=1e-4), ((64, 1), (256, 1)))
    for chunk, rows, width, pieces in ((0, 4, 100, 1), (256, 4, 100, 2), (64, 4, 100, 8), (256, 1, 512, 2)):
        made = timed_costs(*own, rows=rows, width=width, chunk=chunk)
        seconds = made.micro_batch_seconds(made.model.stages[-1], "logits", rows * width, width)
        assert seconds == pytest.approx(pieces * 0.02 + rows * width * 1e-4)


def test_a_gpu_has_the_rate_of_the_nearest_micro_batch() -> None:
    """Its times are no sum of parts: a launch takes as long for few tokens as for many."""
    own = timed(TIMED_BLOCK, Shaped(fixed=0.02, per_token=1e-4), TIMED)
    hardware: HardwareProfile = replace(HARDWARE, device="cuda", stage_rates=own, device_memory_rate=1e30)
    numerics = replace(NUMERICS, micro_batch_size=2, max_seq_len=512)
    found = Costs(model=SMALL, hardware=hardware, numerics=numerics, device="cuda").rate(TIMED_BLOCK)
    assert found.forward == next(rate.forward for rate in own if (rate.tokens, rate.width) == (1024, 128))


def test_a_typical_step_takes_the_time_of_its_micro_batches() -> None:
    """A step of two short micro-batches where four whole ones are planned for."""
    own = timed(TIMED_BLOCK, Shaped(fixed=0.02, per_token=1e-4, per_pair=1e-8), TIMED)
    whole = timed_costs(*own, rows=4, width=100)
    typical = replace(whole, typical=TypicalStep(parts=(Computed(400, 50, 8), Computed(96, 30, 4)), tokens=450))
    expected = sum(whole.micro_batch_seconds(TIMED_BLOCK, "forward", *part) for part in ((400, 50), (96, 30)))
    planned = whole.numerics.micro_batches * whole.micro_batch_seconds(TIMED_BLOCK, "forward", 400, 100)
    assert typical._share(TIMED_BLOCK, "forward") == pytest.approx(expected / planned)
    assert whole._share(TIMED_BLOCK, "forward") == 1.0
    assert typical.boundary == int(whole.boundary * 496 / whole.numerics.tokens)
