"""Tests what is made of a few shapes that were timed: seconds of any micro-batch, and rates at the run's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.planner.costs import Costs, Shaped, fitted
from fuyou_cli.spec.hardware import HardwareProfile, StageRate
from fuyou_cli.spec.model import StageSpec
from fuyou_cli.spec.plan import Computed, TypicalStep

from .models import HARDWARE, NUMERICS, SPEC

TIMED = ((128, 128), (1024, 512), (1024, 128), (1024, 256), (2048, 512))  # tokens, width
BLOCK, HEAD = SPEC.stages[1], SPEC.stages[-1]
PARTS = st.floats(1e-4, 1.0)


def timed(stage: StageSpec, seconds: Shaped, shapes: tuple[tuple[int, int], ...], *, threads: int = 2) -> tuple[StageRate, ...]:
    """Returns what a stage is measured at whose forward takes so long, and its backward three times that."""
    per_token = stage.forward_flops / NUMERICS.micro_batch_tokens
    found = []
    for tokens, width in shapes:
        taken, flops = seconds.of(tokens, width), per_token * tokens
        found.append(
            StageRate(
                kind="head" if stage.kind == "head" else "block", dtype="bfloat16", hidden=SPEC.hidden_size,
                params=stage.params, tokens=tokens, width=width, threads=threads, layers="own/512", forward=flops / taken,
                forward_flops=flops, backward=flops / taken, backward_flops=3 * flops,
            )
        )  # fmt: skip
    return tuple(found)


def costs(*rates: StageRate, rows: int = 2, width: int = 64, chunk: int = 0) -> Costs:
    numerics = replace(NUMERICS, batch_size=8 * rows, micro_batch_size=rows, max_seq_len=width, head_chunk_tokens=chunk)
    hardware = replace(HARDWARE, stage_rates=rates)
    times = rows * width / NUMERICS.micro_batch_tokens  # specifications are of one micro-batch
    stages = tuple(replace(stage, forward_flops=times * stage.forward_flops) for stage in SPEC.stages)
    return Costs(model=replace(SPEC, stages=stages), hardware=hardware, numerics=numerics, device="cpu")


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
    own = timed(BLOCK, Shaped(fixed=0.02, per_token=1e-4), TIMED)
    for rates, more in ((own, 7 * 0.02), (tuple(replace(rate, forward_flops=0.0) for rate in own[:1]), 0.0)):
        one, eight = (costs(*rates, rows=rows, width=512) for rows in (1, 8))
        found = [each.model.stages[1].forward_flops / each.rate(BLOCK).forward for each in (one, eight)]
        assert 8 * found[0] - found[1] == pytest.approx(more, abs=1e-9)


def test_own_times_count_for_their_stage_alone() -> None:
    own = timed(BLOCK, Shaped(fixed=0.02, per_token=1e-4), TIMED)
    for change in ({"params": 3}, {"hidden": 3}, {"dtype": "float32"}, {"kind": "head"}):
        rates = tuple(replace(rate, **change) for rate in own)
        assert costs(*rates).rate(BLOCK).forward in {HARDWARE.matmul_flops, *(rate.forward for rate in own)}
    other = timed(BLOCK, Shaped(per_token=7e-4), TIMED, threads=1)
    both, alone = costs(*own, *other).rate(BLOCK), costs(*own).rate(BLOCK)
    assert (both.forward, both.backward) == (alone.forward, alone.backward)  # those on the threads of the run
    assert costs(*other).rate(BLOCK).forward == pytest.approx(other[0].forward)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_visit_takes_the_sum_of_its_micro_batches(phase: str) -> None:
    """In full training, and where a part of backward is spared, with own times and without."""
    own = timed(BLOCK, Shaped(fixed=0.02, per_token=1e-4, per_pair=1e-8), TIMED)
    for rates in (own, tuple(replace(rate, forward_flops=0.0) for rate in own)):
        for spared in (0.0, 0.5):
            made = costs(*rates, rows=4, width=100)
            stage = replace(made.model.stages[1], frozen_flops=spared * made.model.stages[1].forward_flops)
            rate, whole = made.rate(stage), 3 * stage.forward_flops - stage.frozen_flops
            uniform = stage.forward_flops / rate.forward if phase == "forward" else whole / rate.backward
            assert made.micro_batch_seconds(stage, phase, 400, 100) == pytest.approx(uniform)
            shorter, longer = (made.micro_batch_seconds(stage, phase, 4 * width, width) for width in (50, 200))
            assert shorter < uniform < longer


def test_a_head_takes_its_fixed_part_once_a_piece() -> None:
    own = timed(HEAD, Shaped(fixed=0.02, per_token=1e-4), ((64, 1), (256, 1)))
    for chunk, rows, width, pieces in ((0, 4, 100, 1), (256, 4, 100, 2), (64, 4, 100, 8), (256, 1, 512, 2)):
        made = costs(*own, rows=rows, width=width, chunk=chunk)
        seconds = made.micro_batch_seconds(made.model.stages[-1], "logits", rows * width, width)
        assert seconds == pytest.approx(pieces * 0.02 + rows * width * 1e-4)


def test_a_gpu_has_the_rate_of_the_nearest_micro_batch() -> None:
    """Its times are no sum of parts: a launch takes as long for few tokens as for many."""
    own = timed(BLOCK, Shaped(fixed=0.02, per_token=1e-4), TIMED)
    hardware: HardwareProfile = replace(HARDWARE, device="cuda", stage_rates=own, device_memory_rate=1e30)
    numerics = replace(NUMERICS, micro_batch_size=2, max_seq_len=512)
    found = Costs(model=SPEC, hardware=hardware, numerics=numerics, device="cuda").rate(BLOCK)
    assert found.forward == next(rate.forward for rate in own if (rate.tokens, rate.width) == (1024, 128))


def test_a_typical_step_takes_the_time_of_its_micro_batches() -> None:
    """A step of two short micro-batches where four whole ones are planned for."""
    own = timed(BLOCK, Shaped(fixed=0.02, per_token=1e-4, per_pair=1e-8), TIMED)
    whole = costs(*own, rows=4, width=100)
    typical = replace(whole, typical=TypicalStep(parts=(Computed(400, 50, 8), Computed(96, 30, 4)), tokens=450))
    expected = sum(whole.micro_batch_seconds(BLOCK, "forward", *part) for part in ((400, 50), (96, 30)))
    planned = whole.numerics.micro_batches * whole.micro_batch_seconds(BLOCK, "forward", 400, 100)
    assert typical._share(BLOCK, "forward") == pytest.approx(expected / planned)
    assert whole._share(BLOCK, "forward") == 1.0
    assert typical.boundary == int(whole.boundary * 496 / whole.numerics.tokens)
