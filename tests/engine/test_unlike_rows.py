"""Rows of unlike length: as a plain PyTorch loop over the same micro-batches, each padded to its own longest row, by a freshly
loaded model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn import crossed, every
from served import Labelled
from transformers import PreTrainedConfig

from fuyou_cli.data.batches import Batch, lay_out, passes
from fuyou_cli.engine.forward_only import ForwardOnly
from fuyou_cli.engine.updates import Optimizer
from fuyou_cli.recipe.schema import AdapterSection
from fuyou_cli.spec.plan import Numerics

from .comparing import assert_near, assert_same, relative
from .families import _COMMON, _ENDS, _GATED, FAMILIES, VOCABULARY, gpt2, llama
from .plain_torch import torch_adamw
from .rig import OPTIMIZER, Rig, Shape, Subject

SHAPE = Shape(batch=6, micro=2, tokens=32)
LENGTHS = [
    [32, 5, 9, 17, 3, 2],
    [7, 12, 12, 2, 31, 26],
    [9, 5, 3, 2, 7, 4],
]  # of three steps, the last one of short rows; windows are of 8 tokens
KEY_BIASES = replace(OPTIMIZER, epsilon=1e-6)  # see test_exact

# Half of the factors of longrope; rows of up to 12 tokens have the short ones.
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 9.0],
    "original_max_position_embeddings": 12, "factor": 4.0,
}  # fmt: skip
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

UNLIKE: dict[str, PreTrainedConfig] = {
    "llama": llama(),  # rows end to end
    "gemma3": FAMILIES["gemma3"],  # the same, with windows
    "gpt2": gpt2(),  # padded, with learned positions
    "bloom": transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0, **_ENDS),
    "gpt_neo": FAMILIES["gpt_neo"],
    "falcon": FAMILIES["falcon"],
    "mamba": transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, **_ENDS),
    "mamba2": transformers.Mamba2Config(  # products of chunks, of one more than tokens fill
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        state_size=4,
        chunk_size=16,
        residual_in_fp32=False,
        **_ENDS,
    ),
    "longrope": transformers.Phi3Config(**_GATED, **_ENDS, pad_token_id=0, rope_parameters=_LONGROPE),
    "dynamic": llama(max_position_embeddings=12, rope_parameters=_DYNAMIC),
    "opt": FAMILIES["opt"],
    "phi3": FAMILIES["phi3"],
    "gpt_neox": transformers.GPTNeoXConfig(**_COMMON, intermediate_size=64, attention_dropout=0.0, hidden_dropout=0.0),
}
END_TO_END = {"llama", "gemma3", "phi3", "gpt_neox"}
MIXTURE = transformers.Qwen3MoeConfig(
    **_GATED, **_ENDS, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
)


def numerics_of(subject: Subject) -> Numerics:
    padding: Any = "none" if subject.anatomy.isolated else "micro_batch"
    return replace(subject.numerics, padding=padding, width_step=8)


def subject_of(family: str, shape: Shape = SHAPE) -> Subject:
    subject = Subject(UNLIKE[family], shape, apart=family in END_TO_END)
    subject.numerics = numerics_of(subject)
    return subject


def batches(numerics: Numerics, *, sweeps: int = 1) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(3)
    for lengths in LENGTHS:
        tokens = [torch.randint(1, VOCABULARY, (size,), generator=generator).tolist() for size in lengths]
        rows = Labelled(tokens, [max(1, size - 2) for size in lengths])
        yield lay_out(rows, range(len(lengths)), pad_id=0, numerics=numerics, sweeps=sweeps)


def run(rig: Rig, *, sweeps: int = 1) -> list[float]:
    for number, batch in enumerate(batches(rig.plan.numerics, sweeps=sweeps), start=1):
        ids, labels = batch.tensors()
        outcome = rig.executor.step(
            ids, labels, step=number, lr=rig.optimizer.lr, last=number == len(LENGTHS), documents=batch.documents,
            sweeps=batch.sweeps, real=batch.real(),
        )  # fmt: skip
        rig.losses.append(outcome.loss)
    rig.executor.drain()
    return rig.losses


def plain(subject: Subject, optimizer: Optimizer) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of torch's AdamW. Each micro-batch is computed by a model that has computed nothing before, its rows
    padded to the longest of them; rows that lie end to end are rows of their own."""
    model = subject.fresh()
    model.load_state_dict(subject.initial)
    parameters = dict(model.named_parameters())
    adamw = torch_adamw(list(parameters.values()), optimizer)
    losses = []
    for batch in batches(subject.numerics):
        losses.append(0.0)
        for rows in micro_batches(batch):
            fresh = subject.fresh()
            for name, parameter in fresh.named_parameters():
                parameter.data = parameters[name].data
            loss = summed_loss(fresh, rows) / batch.label_tokens
            loss.backward()
            losses[-1] += float(loss.detach())
            for name, parameter in fresh.named_parameters():
                held, found = parameters[name], parameter.grad
                held.grad = found if held.grad is None or found is None else held.grad + found
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()
        adamw.zero_grad()
    return losses, {name: value.detach().clone() for name, value in parameters.items()}


Row = tuple[torch.Tensor, torch.Tensor]  # ids and labels, without padding


def micro_batches(batch: Batch) -> Iterator[list[Row]]:
    ids, labels = batch.tensors()
    assert batch.sweeps is not None
    for part in (part for sweep in batch.sweeps for part in sweep):
        places = [place for place in batch.places if part.first <= place.row < part.end]
        yield [tuple(whole[place.row, place.begin : place.end] for whole in (ids, labels)) for place in places]  # type: ignore[misc]


def summed_loss(model: Any, rows: Sequence[Row]) -> torch.Tensor:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.stack([torch.nn.functional.pad(ids, (0, width - len(ids))) for ids, _ in rows])
    labels = torch.stack([torch.nn.functional.pad(labels, (0, width - len(labels)), value=-100) for _, labels in rows])
    logits = model(input_ids=ids, position_ids=torch.arange(width)[None], use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
    )


@pytest.mark.parametrize("family", every(3, UNLIKE))
def test_as_plain_pytorch(family: str, tmp_path: Path) -> None:
    """Losses within 1e-6. AdamW's first steps enlarge the last bit of a small gradient, so weights are the same to 1e-5."""
    optimizer = KEY_BIASES if family in ("gpt2", "opt", "gpt_neox", "bloom", "gpt_neo", "falcon") else OPTIMIZER
    subject = subject_of(family)
    with Rig(subject, tmp_path, optimizer=optimizer) as rig:
        assert_near((run(rig), rig.weights()), plain(subject, optimizer), weights=1e-5)


@crossed(
    4,
    family=["llama", "gpt2", "longrope", "mamba2"],
    options=[
        {"device": "emulated", "batch_on_device": False}, {"device": "emulated", "kept": "all"},
        {"device": "emulated", "kept_there": "room", "home": "cpu"}, {"kept": "all", "home": "cpu"},
    ],
)  # fmt: skip
def test_the_same_however_bytes_move(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for number, chosen in enumerate(({}, options)):
        with Rig(subject_of(family), tmp_path / str(number), **chosen) as rig:
            found.append((run(rig), rig.weights()))
    assert_same(*found)


def test_what_dora_makes_of_weights_alone_has_one_size(tmp_path: Path) -> None:
    """Its norm multiplies A and B with no token: kept outputs of short rows are as large as those of long ones."""
    pytest.importorskip("peft", reason="peft comes with the extra lora")
    found = []
    for number, options in enumerate(({}, {"kept": "all", "home": "cpu"})):
        subject = Subject(UNLIKE["llama"], SHAPE, apart=True, adapter=AdapterSection(r=4, use_dora=True))
        subject.numerics = numerics_of(subject)
        of_weights = {o.name for stage in subject.spec.stages for o in stage.operators if o.of_weights}
        assert of_weights == {name for name in of_weights if "lora_" in name} != set()
        with Rig(subject, tmp_path / str(number), **options) as rig:
            found.append((run(rig), rig.weights()))
    assert_same(*found)


@crossed(2, family=["llama", "dynamic"], vocabulary=[0, 40])  # end to end and padded, both untied: others have one sweep
def test_sweeps_and_a_cut_vocabulary(family: str, vocabulary: int, tmp_path: Path) -> None:
    """Micro-batches are those of one sweep, and so is every bit. Of short rows there are fewer than sweeps."""
    found = []
    for sweeps in (1, 3):
        subject = subject_of(family, replace(SHAPE, vocabulary=vocabulary))
        with Rig(subject, tmp_path / str(sweeps), sweeps=sweeps, optimizer=KEY_BIASES) as rig:
            found.append((run(rig, sweeps=sweeps), rig.weights()))
    assert_same(*found)
    assert_near(found[0], plain(subject_of(family), KEY_BIASES), weights=1e-5)


def test_sweeps_of_a_mixture(tmp_path: Path) -> None:
    """Its routers count what is no padding: an empty micro-batch sends no token to any expert."""
    found = []
    for sweeps in (1, 3):
        subject = Subject(MIXTURE, SHAPE, apart=True)
        subject.numerics = numerics_of(subject)
        with Rig(subject, tmp_path / str(sweeps), sweeps=sweeps) as rig:
            found.append((run(rig, sweeps=sweeps), rig.weights()))
    assert_same(*found)


def test_a_document_is_computed_in_a_length_of_few(tmp_path: Path) -> None:
    """Attention pads documents to lengths that are multiples of a step; their values stay."""
    subject = subject_of("gemma3")
    subject.numerics = replace(subject.numerics, document_step=8)
    with Rig(subject, tmp_path) as rig:
        assert_near((run(rig), rig.weights()), plain(subject, OPTIMIZER), weights=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mamba"])
def test_evaluated_row_by_row(family: str, tmp_path: Path) -> None:
    """Losses of rows in passes of several, as transformers has them of each row alone."""
    subject = subject_of(family)
    generator = torch.Generator().manual_seed(9)
    tokens = [torch.randint(1, VOCABULARY, (size,), generator=generator).tolist() for size in (*range(2, 20), 32, 31)]
    rows = Labelled(tokens, [len(one) for one in tokens])
    found = [0.0] * len(tokens)
    with Rig(subject, tmp_path) as rig:
        forward = ForwardOnly(rig.executor)
        with forward.open():
            numerics = rig.plan.group
            for chosen, batch in passes(rows, range(len(tokens)), pad_id=0, numerics=numerics, most=numerics.micro_batches):
                of_tokens = forward.losses(batch, last=False)
                for number, place in zip(chosen, batch.places, strict=True):
                    found[number] = float(of_tokens[place.row, place.begin : place.end].sum())
            forward.stop_ahead()
    model = subject.fresh().eval()
    model.load_state_dict(subject.initial)
    with torch.no_grad():
        expected = [float(summed_loss(model, [(torch.tensor(one), torch.tensor(one))])) for one in tokens]
    assert relative(found, expected) <= 1e-6
