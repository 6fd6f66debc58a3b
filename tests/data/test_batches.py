"""Tests how samples become rows, and rows of unlike length micro-batches: no token is lost or invented, nothing is mixed, and
shapes are few. What the recipe asks to lose, counts show."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as some
from served import Labelled

from fuyou_cli.core.errors import UsageError
from fuyou_cli.data.batches import Batch, deal, lay_out, passes, typical_step
from fuyou_cli.data.rows import BEGINS, LABEL, NO_LOSS, OPEN_ROWS, Counts, Row, Sample, concat, has_loss, isolated, pack
from fuyou_cli.spec.plan import Numerics, Padding, lengths_up_to, rounded_up
from fuyou_cli.training.numerics import divided

NUMERICS = Numerics(
    compute_dtype="float32", accumulate_dtype="float32", batch_size=8, micro_batch_size=2, max_seq_len=64, head_chunk_tokens=0,
    torch_threads=1, seed=0, padding="none", width_step=16,
)  # fmt: skip
PAIRS = replace(NUMERICS, max_seq_len=512)
PADDINGS: list[Padding] = ["none", "micro_batch"]

lengths_of_rows = some.lists(some.integers(1, 64), min_size=8, max_size=8)


def rows_of(lengths: list[int]) -> Labelled:
    """Makes every token of all rows a number of its own; of each row the second half is labels."""
    firsts = np.cumsum([0, *lengths])
    return Labelled(
        [list(range(first + 1, first + 1 + size)) for first, size in zip(firsts, lengths, strict=False)],
        [(size + 1) // 2 for size in lengths],
    )


def assert_holds(batch: Batch, rows: Labelled, indices: list[int]) -> None:
    """Checks that each row stands whole where its place says, and nothing else is a label."""
    labels = 0
    for index, place in zip(indices, batch.places, strict=True):
        tokens, mask = rows.tokens(index), rows.mask(index)
        assert batch.input_ids[place.row, place.begin : place.end].tolist() == tokens.tolist()
        # Nothing predicts a row's first token.
        assert batch.labels[place.row, place.begin + 1 : place.end].tolist() == np.where(mask, tokens, NO_LOSS)[1:].tolist()
        labels += int(mask[1:].sum())
    assert batch.label_tokens == labels == int((batch.labels[:, 1:] != NO_LOSS).sum())
    assert batch.tokens == sum(len(rows.tokens(index)) for index in indices)


def assert_divided(batch: Batch, numerics: Numerics) -> None:
    """Checks that micro-batches follow each other, hold all that is no padding, and are no larger than planned."""
    assert batch.sweeps is not None
    parts = [part for sweep in batch.sweeps for part in sweep]
    assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == len(batch.input_ids)
    for part in parts:
        assert part.tokens <= numerics.micro_batch_tokens
        assert part.width % numerics.width_step == 0 or part.width == numerics.widest
        inside = [place for place in batch.places if part.first <= place.row < part.end]
        assert max((place.end for place in inside), default=0) <= part.width
        assert part.longest == max((place.end - place.begin for place in inside), default=part.width)
        for row in range(part.first, part.end):
            if batch.documents is not None:
                sizes = [place.end - place.begin for place in sorted(inside, key=lambda p: p.begin) if place.row == row]
                assert batch.documents[row] == [*sizes, *([part.width - sum(sizes)] if sum(sizes) < part.width else [])]


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("sweeps", [1, 2, 4])
@examples(share_fixtures=True)
@given(lengths=lengths_of_rows, step=some.sampled_from([16, 24]))
def test_every_row_is_in_one_micro_batch(padding: Padding, sweeps: int, lengths: list[int], step: int) -> None:
    """`step`: one that divides the widest micro-batch, and one that does not."""
    numerics, rows = replace(NUMERICS, padding=padding, width_step=step), rows_of(lengths)
    batch = lay_out(rows, range(8), pad_id=0, numerics=numerics, sweeps=sweeps)
    assert_holds(batch, rows, list(range(8)))
    assert_divided(batch, numerics)
    assert batch.sweeps is not None and len(batch.sweeps) == sweeps
    assert all(1 <= len(sweep) <= numerics.micro_batches // sweeps for sweep in batch.sweeps)  # as planned, or fewer
    assert (batch.documents is not None) == (padding == "none")
    once = lay_out(rows, range(8), pad_id=0, numerics=numerics)
    assert batch.places == once.places  # micro-batches are numerics
    assert np.array_equal(batch.input_ids[: len(once.input_ids)], once.input_ids)
    assert not batch.input_ids[len(once.input_ids) :].any()  # an empty micro-batch where sweeps are more


@pytest.mark.parametrize("padding", PADDINGS)
@examples(share_fixtures=True)
@given(lengths=lengths_of_rows)
def test_lanes_are_dealt_in_turn(padding: Padding, lengths: list[int]) -> None:
    """So that those of each replica take about as long."""
    numerics, rows = replace(NUMERICS, padding=padding), rows_of(lengths)
    once, batch = (lay_out(rows, range(8), pad_id=0, numerics=replace(numerics, lanes=lanes)) for lanes in (1, 2))
    assert_holds(batch, rows, list(range(8)))
    assert_divided(batch, numerics)
    assert once.sweeps is not None and batch.sweeps is not None and len(batch.sweeps) == 2
    widths = [part.width for part in once.sweeps[0]]
    first, second = ([part.width for part in lane] for lane in batch.sweeps)
    assert first == widths[::2] and second[: len(widths) // 2] == widths[1::2] and len(second) == max(1, len(widths) // 2)


@pytest.mark.parametrize("padding", [*PADDINGS, "step"])
@examples(share_fixtures=True)
@given(lengths=some.lists(some.integers(1, 64), min_size=1, max_size=40), most=some.integers(1, 5))
def test_passes_hold_all_rows_once(padding: Padding, lengths: list[int], most: int) -> None:
    numerics, rows = replace(NUMERICS, padding=padding), rows_of(lengths)
    seen: list[int] = []
    for chosen, batch in passes(rows, range(len(lengths)), pad_id=0, numerics=numerics, most=most):
        assert_holds(batch, rows, chosen)
        if batch.sweeps is not None:
            assert_divided(batch, numerics)
            assert len(batch.sweeps[0]) <= most
        seen += chosen
    assert sorted(seen) == list(range(len(lengths)))


def test_cost_follows_tokens() -> None:
    """Seven short rows and a long one: they were padded to eight long ones."""
    lengths, whole = [64, *[8] * 7], 8 * 64
    one = replace(NUMERICS, micro_batch_size=1, width_step=8)
    for padding in PADDINGS:
        numerics = replace(one, padding=padding)
        assert lay_out(rows_of(lengths), range(8), pad_id=0, numerics=numerics).computed == 64 + 56
        assert lay_out(rows_of([64] * 8), range(8), pad_id=0, numerics=numerics).computed == whole


def test_rows_of_one_length_are_dealt_as_before() -> None:
    assert next(deal([64] * 8, NUMERICS)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert next(deal([64] * 8, replace(NUMERICS, padding="micro_batch"))) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_rows_of_like_length_share_their_padding() -> None:
    assert next(deal([8, 64, 16, 64], replace(NUMERICS, padding="micro_batch"))) == [[1, 3], [2, 0]]


@examples()
@given(tokens=some.integers(1, 1 << 17), step=some.sampled_from([0, 8, 64]))
def test_documents_have_few_lengths(tokens: int, step: int) -> None:
    length = rounded_up(tokens, step)
    assert length >= tokens and length - tokens < max(step, tokens / 4, 1)
    assert rounded_up(length, step) == length


def test_a_typical_step_of_a_vast_batch_takes_seconds() -> None:
    """33 steps of it were drawn before, whatever their rows: of 200 million, that was an array of 49 GiB."""
    vast = replace(NUMERICS, batch_size=1 << 19, micro_batch_size=1 << 10, padding="micro_batch")
    begin = time.process_time()
    typical = typical_step([16, 64], vast)
    assert time.process_time() - begin < 20
    assert typical is not None and typical.tokens == pytest.approx(40 * vast.batch_size, rel=0.01)


def test_many_small_micro_batches_are_dealt_at_once() -> None:
    """Each row looked through all before it, whatever room they had: four times as long for twice as many."""
    rng = random.Random(3)
    lengths = [rng.randint(33, 64) for _ in range(1 << 15)]
    numerics = replace(NUMERICS, micro_batch_size=1, padding="none")
    begin = time.process_time()
    dealt = next(deal(lengths, numerics))
    assert time.process_time() - begin < 3
    assert sorted(number for micro in dealt for number in micro) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in micro) <= numerics.micro_batch_tokens for micro in dealt)


@examples()
@given(lengths=some.lists(some.integers(0, 64), min_size=1, max_size=40), most=some.sampled_from([None, 1, 3]))
def test_a_row_goes_to_the_first_micro_batch_with_room(lengths: list[int], most: int | None) -> None:
    numerics = replace(NUMERICS, padding="none")
    wanted: list[list[list[int]]] = [[]]
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        room = numerics.micro_batch_tokens - lengths[number]
        micro = next((micro for micro in wanted[-1] if sum(lengths[n] for n in micro) <= room), None)
        if micro is None:
            if len(wanted[-1]) == most:
                wanted.append([])
            wanted[-1].append(micro := [])
        micro.append(number)
    assert list(deal(lengths, numerics, most=most)) == wanted


def test_a_typical_step_is_the_mean_of_steps() -> None:
    """Whole rows have none."""
    every = typical_step([16] * 100, NUMERICS)
    assert every is not None and every.tokens == 8 * 16 and every.computed == 128 and every.parts == ((128, 16, 8),)
    padded = typical_step([16, 64], replace(NUMERICS, padding="micro_batch"))
    assert padded is not None and 8 * 16 < padded.tokens <= padded.computed < 8 * 64
    fine, coarse = (typical_step([16, 64], replace(NUMERICS, micro_batch_size=8, width_step=step)) for step in (8, 128))
    assert fine is not None and coarse is not None
    assert fine.tokens == coarse.tokens, "micro-batches are compared on other rows"
    assert fine.computed < coarse.computed and coarse.computed % 128, "what padding costs in the mean is left out"
    assert typical_step([64] * 3, NUMERICS) is None
    assert typical_step([16] * 3, replace(NUMERICS, padding="step")) is None


def test_lengths_are_counted() -> None:
    assert lengths_up_to(512, 64) == 8 and lengths_up_to(1024, 64) == 12 and lengths_up_to(4096, 64) == 20
    assert lengths_up_to(100, 0) == 100


@pytest.mark.parametrize("apart", [True, False])
@examples(20)
@given(lengths=some.lists(some.integers(1, 512), min_size=8, max_size=8))
def test_shapes_are_few_where_libraries_keep_code_for_each(apart: bool, lengths: list[int]) -> None:
    """On a CPU in bfloat16: eight widths of micro-batches, eight lengths of documents up to 512 tokens."""
    numerics = divided(replace(PAIRS, compute_dtype="bfloat16"), apart=apart, on_cpu=True)
    batch = lay_out(rows_of(lengths), range(8), pad_id=0, numerics=numerics)
    assert batch.sweeps is not None
    widths = {part.width for part in batch.sweeps[0]}
    assert widths <= {numerics.widest * eighth // 8 for eighth in range(1, 9)}
    if apart:
        assert batch.documents is not None
        assert {rounded_up(size, numerics.document_step) for row in batch.documents for size in row} <= set(range(64, 513, 64))
    else:
        assert len({(part.end - part.first) for part in batch.sweeps[0]}) == 1


def test_other_devices_and_dtypes_pad_less() -> None:
    few, many, there = (
        divided(replace(PAIRS, compute_dtype=dtype), apart=True, on_cpu=on_cpu)
        for on_cpu, dtype in ((True, "bfloat16"), (True, "float32"), (False, "bfloat16"))
    )
    assert few.width_step == 128 and many.width_step == there.width_step == 32
    assert few.document_step == 64 and many.document_step == there.document_step == 0
    packed = divided(replace(PAIRS, compute_dtype="bfloat16"), apart=True, on_cpu=True, packing="isolated")
    assert (packed.padding, packed.width_step, packed.document_step) == ("micro_batch", 64, 64)


# ---- packing ---------------------------------------------------------------------------------------------------------


@some.composite
def sample(draw: some.DrawFn) -> Sample:
    size = draw(some.integers(0, 40))
    tokens = draw(some.lists(some.integers(0, 2**31 - 1), min_size=size, max_size=size))
    mask = draw(some.lists(some.integers(0, 1), min_size=size, max_size=size))
    return Sample(tokens=np.array(tokens, np.int32), mask=np.array(mask, np.uint8), place="here")


samples_of = some.lists(sample(), max_size=20)
lengths = some.integers(2, 17)


def joined(rows: list[Row]) -> tuple[list[int], list[int]]:
    return [int(t) for tokens, _ in rows for t in tokens], [int(m) for _, mask in rows for m in mask]


@given(samples=samples_of, max_seq_len=lengths)
def test_concat_conserves_tokens_and_mask(samples: list[Sample], max_seq_len: int) -> None:
    rows = list(concat(samples, max_seq_len=max_seq_len, counts=Counts()))
    assert joined(rows) == joined([(s.tokens, s.mask) for s in samples])
    assert all(len(tokens) == max_seq_len for tokens, _ in rows[:-1])
    assert all(1 <= len(tokens) == len(mask) <= max_seq_len for tokens, mask in rows)


@given(samples=samples_of, max_seq_len=lengths)
def test_concat_counts_the_samples_that_rows_cut(samples: list[Sample], max_seq_len: int) -> None:
    counts = Counts()
    list(concat(samples, max_seq_len=max_seq_len, counts=counts))
    ends = np.cumsum([0, *[len(s.tokens) for s in samples]]).tolist()
    crossing = [a // max_seq_len != (b - 1) // max_seq_len for a, b in pairwise(ends) if b > a]
    assert counts.split == sum(crossing)


@given(samples=samples_of, max_seq_len=lengths, packing=some.sampled_from([False, "concat"]))
def test_split_loses_no_label_but_those_that_begin_rows(samples: list[Sample], max_seq_len: int, packing: str | bool) -> None:
    counts = Counts()
    rows = list(pack(samples, packing=packing, overlong="split", max_seq_len=max_seq_len, counts=counts))
    assert all(has_loss(mask) for _, mask in rows)
    assert counts.samples == len(samples) and counts.truncated == counts.dropped == 0
    kept = sum(int(mask.sum()) for _, mask in rows)
    whole = sum(int(s.mask.sum()) for s in samples)
    # A row is left out only when no label of it counts: at most its first token's mark is lost with it.
    assert whole - counts.without_loss <= kept <= whole


def three() -> list[Sample]:
    return [Sample(tokens=np.arange(n, dtype=np.int32), mask=np.ones(n, np.uint8), place=f"f:{n}") for n in (3, 10, 4)]


@pytest.mark.parametrize(
    ("overlong", "lengths", "told"),
    [
        ("truncate", [3, 4, 4], {"truncated": 1, "lost": 6}),
        ("drop", [3, 4], {"dropped": 1, "lost": 10}),
        ("split", [3, 4, 4, 2, 4], {"split": 1}),
    ],
)
def test_overlong_samples(overlong: str, lengths: list[int], told: dict[str, int]) -> None:
    counts = Counts()
    rows = list(pack(three(), packing=False, overlong=overlong, max_seq_len=4, counts=counts))
    assert [len(tokens) for tokens, _ in rows] == lengths
    assert counts.samples == 3
    assert {name: getattr(counts, name) for name in ("truncated", "dropped", "split", "lost") if getattr(counts, name)} == told


@pytest.mark.parametrize("packing", [False, "concat"])
def test_overlong_error_names_the_place(packing: str | bool) -> None:
    with pytest.raises(UsageError, match=r"f:10: 10 tokens, more than dataset.max_seq_len \(4\)"):
        list(pack(three(), packing=packing, overlong="error", max_seq_len=4, counts=Counts()))


def test_packing_with_drop_leaves_long_samples_out() -> None:
    counts = Counts()
    rows = list(pack(three(), packing="concat", overlong="drop", max_seq_len=4, counts=counts))
    assert joined(rows)[0] == [0, 1, 2, 0, 1, 2, 3]
    assert counts.dropped == 1


def test_rows_without_a_label_are_left_out_and_counted() -> None:
    masks = [[0, 0, 0], [1, 0, 0], [0, 0, 1]]  # the mark on a first token is no label
    samples = [Sample(tokens=np.zeros(3, np.int32), mask=np.array(m, np.uint8), place="") for m in masks]
    counts = Counts()
    rows = list(pack(samples, packing=False, overlong="truncate", max_seq_len=8, counts=counts))
    assert [mask.tolist() for _, mask in rows] == [[0, 0, 1]]
    assert counts.without_loss == 2


def test_isolated_keeps_documents_whole_and_marks_where_they_begin() -> None:
    documents = [(np.full(size, size, np.int32), np.ones(size, np.uint8)) for size in (5, 6, 3, 2, 8)]
    rows = [(tokens.tolist(), mask.tolist()) for tokens, mask in isolated(documents, max_seq_len=8)]
    first, rest = BEGINS, LABEL
    assert rows == [
        ([5] * 5 + [3] * 3, [first, *[rest] * 4, first, *[rest] * 2]),
        ([6] * 6 + [2] * 2, [first, *[rest] * 5, first, rest]),
        ([8] * 8, [first, *[rest] * 7]),
    ]


@given(samples=some.lists(sample(), max_size=80), max_seq_len=some.integers(2, 30))
def test_isolated_conserves_documents_with_loss(samples: list[Sample], max_seq_len: int) -> None:
    """Gives the same documents and labels as rows of their own do, but for the order."""
    alone = list(pack(samples, packing=False, overlong="split", max_seq_len=max_seq_len, counts=(ours := Counts())))
    rows = list(pack(samples, packing="isolated", overlong="split", max_seq_len=max_seq_len, counts=(theirs := Counts())))
    assert ours == theirs
    assert all(len(tokens) <= max_seq_len and mask[0] == BEGINS for tokens, mask in rows)
    documents = [
        (tokens.tolist(), (mask & LABEL).tolist())
        for row in rows
        for tokens, mask in zip(*(np.split(part, np.flatnonzero(row[1] & BEGINS)[1:]) for part in row), strict=True)
    ]
    assert sorted(documents) == sorted((tokens.tolist(), [0, *mask[1:].tolist()]) for tokens, mask in alone)
    assert len(rows) <= len(alone)


def test_isolated_fills_a_bounded_number_of_rows() -> None:
    """Opens more rows than that only at the end; a row with room for no document so far is done when another is begun."""
    documents = [(np.zeros(5, np.int32), np.ones(5, np.uint8))] * (OPEN_ROWS + 3)
    taken = 0

    def counted():
        nonlocal taken
        for document in documents:
            taken += 1
            yield document

    next(isolated(counted(), max_seq_len=8))
    assert taken == OPEN_ROWS + 1
