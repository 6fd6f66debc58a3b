"""The names of attention's kernels: those that are allowed, and the one that is taken."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn import crossed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask, sliding_window_causal_mask_function
from transformers.models.flint import modeling_flint
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.granite_swa import modeling_granite_swa
from transformers.models.granitemoe_swa import modeling_granitemoe_swa

from fuyou_cli.advice.facts import allowed_kernels
from fuyou_cli.engine.attention import (
    SINKS,
    WITH_SINKS,
    AttentionSeen,
    WithSinks,
    attend,
    attend_with_sinks,
    attention_with_sinks,
    kernel_of,
    rows_are_whole,
)
from fuyou_cli.engine.compiled import CompiledBlocks, load_compiler
from fuyou_cli.engine.describe import LiveBytes
from fuyou_cli.engine.skeleton import auto_class
from fuyou_cli.recipe.schema import AdapterSection

from .comparing import assert_near, assert_same, distance
from .families import FAMILIES, VOCABULARY, gpt2, llama
from .measuring import Seen
from .plain_torch import assert_as_plain_torch, plain_run
from .rig import Rig, Shape, Subject, outcome
from .test_mixtures import FAMILIES as MIXTURES


@pytest.mark.parametrize(
    ("device", "dtype", "deterministic", "expected"),
    [
        ("cuda", "bfloat16", False, ("flash", "cudnn", "efficient", "math")),
        ("cuda", "bfloat16", True, ("flash", "efficient", "math")),
        ("cuda", "float32", False, ("efficient", "math")),
        ("cpu", "bfloat16", True, ("flash", "math")),
    ],
)
def test_allowed(device: str, dtype: str, deterministic: bool, expected: tuple[str, ...]) -> None:
    assert allowed_kernels(device, dtype, deterministic=deterministic) == expected


def test_what_the_user_turned_off_is_not_allowed() -> None:
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        assert allowed_kernels("cuda", "bfloat16") == ("efficient", "math")


@pytest.mark.parametrize(
    ("subject", "backends", "expected"),
    [
        (lambda: Subject(llama(), Shape()), [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], "flash"),
        (lambda: Subject(llama(), Shape()), [SDPBackend.MATH], "math"),
        (lambda: Subject(gpt2(dropout=0.1), Shape()), [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], "math"),
        (lambda: Subject(FAMILIES["gemma2"], Shape()), [SDPBackend.MATH], ""),  # which has no attention by sdpa
    ],
)
def test_the_one_taken_is_seen_in_the_first_step(subject: Any, backends: Any, expected: str, tmp_path: Path) -> None:
    with Rig(subject(), tmp_path, home="cpu", kept="all") as rig, sdpa_kernel(backends):
        rig.run(2)
        assert rig.executor.attention.kernel == expected


def test_it_is_asked_once() -> None:
    q = torch.randn(1, 2, 4, 8)
    with AttentionSeen() as seen:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert seen.kernel == "flash"
        torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert seen.kernel == "flash"


def test_flash_attention_looks_at_no_values_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row alone could be a packed one: transformers looks, which an inspection without values cannot."""
    from transformers import modeling_flash_attention_utils as flash

    spec = find_spec(flash.__name__)
    assert spec is not None and spec.loader is not None
    fresh = module_from_spec(spec)  # another test may have built a model with flash attention in this process
    spec.loader.exec_module(fresh)
    monkeypatch.setattr(flash, "_is_packed_sequence", fresh._is_packed_sequence)  # is put back
    with FakeTensorMode() as fake:
        positions = fake.from_tensor(torch.arange(8).unsqueeze(0))
        with pytest.raises(RuntimeError, match=r"data.dependent|_local_scalar_dense"):
            bool(flash._is_packed_sequence(positions, 1))
        rows_are_whole()
        assert flash._is_packed_sequence(positions, 1) is False


# ---- latent attention, whose values are narrower than its queries ----------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_narrow_values_are_attended_to_as_by_torch(masked: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, 4, 48, size, generator=generator, requires_grad=True) for size in (24, 24, 16))
    mask = torch.ones(48, 48, dtype=torch.bool).tril().logical_and(torch.rand(48, 48, generator=generator) < 0.7)
    mask = (mask | torch.eye(48, dtype=torch.bool)).view(1, 1, 48, 48) if masked else None
    grad = torch.randn(2, 48, 4, 16, generator=generator)
    found = []
    for function in (attend, sdpa_attention_forward):
        out, _ = function(torch.nn.Module(), query, key, value, mask, scaling=0.3, is_causal=not masked)
        found.append((out, *torch.autograd.grad(out, (query, key, value), grad)))
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


def test_narrow_values_take_a_fused_kernel(tmp_path: Path) -> None:
    """So a block takes no scores of a row times a row."""
    with Rig(Subject(MIXTURES["deepseek_v3"], Shape()), tmp_path, home="cpu") as rig:
        rig.run(1)
        assert rig.executor.attention.kernel == "flash"
    short, long = (
        next(stage for stage in Subject(MIXTURES["deepseek_v3"], Shape(tokens=tokens)).spec.stages if stage.kind == "block")
        for tokens in (512, 2048)
    )
    assert long.backward_peak < 4.5 * short.backward_peak


# ---- sinks ---------------------------------------------------------------------------------------------------------


OWN: dict[str, Any] = {
    "gpt_oss": modeling_gpt_oss,
    "granite_swa": modeling_granite_swa,
    "granitemoe_swa": modeling_granitemoe_swa,
    "flint": modeling_flint,
}
WINDOW = 8


class Heads(torch.nn.Module):
    """What an attention function reads of a module of 8 heads, two of keys and values."""

    num_key_value_groups, is_causal = 4, True

    def __init__(self, sinks: torch.Tensor) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(sinks)


def made(rows: int, tokens: int, *, size: int = 64, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], Heads]:
    """Returns query, key and value, and a module with sinks as large as scores."""
    generator = torch.Generator().manual_seed(rows * 1000 + tokens)
    shapes = [(rows, tokens, heads, size) for heads in (8, 2, 2)]
    qkv = [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]
    return qkv, Heads(torch.randn(8, generator=generator).mul(3).to(dtype))


def masks(tokens: int, window: int | None, dtype: torch.dtype, padded: int = 0) -> tuple[Any, Any]:
    """Returns the mask that transformers makes for a fused kernel, and for its own attention. `padded`: tokens at the end of
    the row that nobody sees."""
    here = None
    if padded:
        here = torch.ones(1, tokens, dtype=torch.bool)
        here[:, tokens - padded :] = False
    options: dict[str, Any] = {"batch_size": 1, "q_length": tokens, "kv_length": tokens, "attention_mask": here}
    if window is not None:
        options |= {"mask_function": sliding_window_causal_mask_function(window), "local_size": window}
    return sdpa_mask(**options), eager_mask(**options, dtype=dtype)


def gradients(attention: Any, module: Heads, qkv: list[torch.Tensor], mask: Any) -> list[torch.Tensor]:
    """Returns the output, and the gradients of query, key, value and sinks."""
    leaves = [tensor.detach().requires_grad_(True) for tensor in qkv]
    module.zero_grad()
    out = attention(module, *leaves, mask, scaling=0.11, s_aux=module.sinks)[0]
    toward = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    out.backward(toward)
    assert module.sinks.grad is not None
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None), module.sinks.grad.clone()]


def apart(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Returns the largest relative difference of a tensor from another."""
    assert len(ours) == len(theirs) == 5
    pairs = [(our.double(), their.double()) for our, their in zip(ours, theirs, strict=True)]
    return max(float((our - their).norm() / their.norm()) for our, their in pairs)


@crossed(
    4, family=WITH_SINKS, shape=[(1, 1), (3, 2), (2, 7), (2, 8), (1, 9), (2, 61), (1, 257)], window=[None, WINDOW]
)  # fmt: skip
def test_equals_the_models_own(family: str, shape: tuple[int, int], window: int | None) -> None:
    tokens, (qkv, module) = shape[1], made(*shape)
    fused, own = masks(tokens, window, torch.float32)
    assert (fused is None) == (window is None or tokens < window)
    ours = gradients(attend_with_sinks, module, qkv, fused)
    assert apart(ours, gradients(OWN[family].eager_attention_forward, module, qkv, own)) <= 1e-6


@pytest.mark.parametrize("window", [None, WINDOW])
def test_padding_is_not_seen(window: int | None) -> None:
    qkv, module = made(2, 21)
    fused, own = masks(21, window, torch.float32, padded=5)
    ours = gradients(attend_with_sinks, module, qkv, fused)
    assert apart(ours, gradients(modeling_gpt_oss.eager_attention_forward, module, qkv, own)) <= 1e-6


def granite_swa(**changes: object) -> Any:
    """A dense family with sinks; its second block looks at a window."""
    more = {"layer_types": ["full_attention", "sliding_attention"], "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.GraniteSWAConfig(**{
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "sliding_window": WINDOW,
        "attention_multiplier": 8**-0.5, **more, **changes,
    })  # fmt: skip


def test_steps_equal_plain_pytorch_with_the_models_own_attention(tmp_path: Path) -> None:
    subject = Subject(granite_swa(), Shape())
    assert subject.attention == SINKS
    with Rig(subject, tmp_path) as rig:
        losses, weights = rig.run(20), rig.weights()
        assert rig.executor.attention.kernel == "flash"
    subject.attention = "eager"
    theirs, expected = plain_run(subject, 20)
    assert_near((losses, weights), (theirs, expected))
    sinks = {name: value for name, value in weights.items() if name.endswith(".sinks")}
    assert len(sinks) == 2 and all(float(value.norm()) > 1e-2 for value in sinks.values())  # began at zero
    assert distance(sinks, {name: expected[name] for name in sinks}) <= 1e-5


@crossed(
    2,
    dtype=["float32", "bfloat16"],
    way=[
        {"kept": "all"}, {"sweeps": 3}, {"kept": "all", "boundaries": "ssd", "device": "emulated"},
        {"kept_there": "room", "device": "emulated", "batch_on_device": False}, {"norm_first": True, "kept": "all"},
    ],
)  # fmt: skip
def test_the_same_bits_however_bytes_move(way: dict[str, Any], dtype: Any, tmp_path: Path) -> None:
    shape = Shape(dtype=dtype, accumulate=dtype, batch=6, micro=2, tokens=13)
    subject = Subject(granite_swa(tie_word_embeddings=False), shape)
    expected = outcome(subject, tmp_path / "recompute", 2, home="cpu")
    assert_same(outcome(subject, tmp_path / "other", 2, **{"home": "cpu", **way}), expected)


def _fused(func: Any, args: Any) -> Any:
    return func if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default else None


def test_kept_attention_is_one_operator_and_not_computed_again(tmp_path: Path) -> None:
    """Counts two blocks, two micro-batches, two steps; in the second step calls are known."""
    subject = Subject(granite_swa(), Shape())
    blocks = [stage for stage in subject.spec.stages if stage.kind == "block"]
    plain = [stage for stage in Subject(llama(), Shape()).spec.stages if stage.kind == "block"]
    for stage, other in zip(blocks, plain, strict=True):
        assert [(o.index, o.name, o.bytes) for o in stage.operators] == [(o.index, o.name, o.bytes) for o in other.operators]
        assert [o.name for o in stage.unneeded] == [o.name for o in other.unneeded] != []
        assert stage.forward_flops == other.forward_flops
    runs = []
    for kept in (None, "all"):
        with Rig(subject, tmp_path / str(kept), home="cpu", kept=kept) as rig, Seen(_fused) as fused:  # type: ignore[arg-type]
            rig.run(2)
        runs.append(len(fused.found))
    assert runs == [2 * 2 * 2 * 2, 2 * 2 * 2]


def test_frozen_sinks_get_no_gradient(tmp_path: Path) -> None:
    subject = Subject(granite_swa(), Shape(), adapter=AdapterSection(r=2, target_modules=["q_proj", "v_proj"]))
    subject.attention = "eager"  # of torch's
    assert_as_plain_torch(subject, tmp_path, 3, home="cpu")


@pytest.mark.parametrize("tokens", [37, 130])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_bfloat16(tokens: int, window: int | None) -> None:
    """Compares with float64 on the same values: about as near as the model's own attention."""
    qkv, module = made(2, tokens, dtype=torch.bfloat16)
    fused, own = masks(tokens, window, torch.bfloat16)
    eager = modeling_gpt_oss.eager_attention_forward
    wide = Heads(module.sinks.detach().double())
    exact = gradients(eager, wide, [tensor.double() for tensor in qkv], masks(tokens, window, torch.float64)[1])
    assert (
        apart(gradients(attend_with_sinks, module, qkv, fused), exact)
        <= 1.2 * apart(gradients(eager, module, qkv, own), exact)
        <= 1e-2
    )


def test_derivatives_in_float64() -> None:
    """Differences of values beside gradients, with a token that nothing is seen by, and groups of heads."""
    qkv, module = made(1, 6, size=8, dtype=torch.float64)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    mask[..., 2, :] = False
    leaves = [tensor.detach().requires_grad_(True) for tensor in (*qkv, module.sinks)]

    def attention(*given: torch.Tensor) -> torch.Tensor:
        return attention_with_sinks(*given[:3], mask, sinks=given[3])

    assert float(attention(*leaves).detach()[..., 2, :].abs().max()) == 0.0
    assert torch.autograd.gradcheck(attention, leaves)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_without_a_kernel(window: int | None) -> None:
    """Uses products where the user turned kernels off, and for dropout: then the weights that are left are larger."""
    qkv, module = made(2, 21)
    fused, own = masks(21, window, torch.float32)
    with sdpa_kernel([SDPBackend.MATH]):
        assert kernel_of(*qkv, fused) == "math"
        ours = gradients(attend_with_sinks, module, qkv, fused)
    assert apart(ours, gradients(modeling_gpt_oss.eager_attention_forward, module, qkv, own)) <= 1e-6
    torch.manual_seed(2)
    dropped = attend_with_sinks(module, *qkv, fused, s_aux=module.sinks, dropout=0.5)[0]
    torch.manual_seed(2)
    expected = modeling_gpt_oss.eager_attention_forward(module.train(), *qkv, own, scaling=64**-0.5, dropout=0.5)[0]
    assert kernel_of(*qkv, fused, 0.5) == "math"
    assert torch.allclose(dropped, expected, rtol=1e-5, atol=1e-6)


def test_tokens_after_a_cache_see_all_of_it() -> None:
    """Computes the last token alone, as `generate` does: its query sees every key."""
    qkv, module = made(2, 21)
    whole = attend_with_sinks(module, *qkv, None, s_aux=module.sinks)[0]
    last = attend_with_sinks(module, qkv[0][:, :, -1:], *qkv[1:], None, s_aux=module.sinks)[0]
    assert torch.allclose(last, whole[:, -1:], rtol=1e-5, atol=1e-6)


def test_generating_writes_the_same_text() -> None:
    """Prompts of unlike lengths, padded on the left, and longer than the window: some tokens see nothing."""
    ids = torch.randint(1, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(4))
    there = torch.ones_like(ids)
    there[0, :6] = 0
    found = []
    for attention in (SINKS, "eager"):
        torch.manual_seed(0)
        model = auto_class(granite_swa()).from_config(granite_swa(initializer_range=0.5), attn_implementation=attention).eval()
        options = {"max_new_tokens": 12, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
        found.append(model.generate(input_ids=ids, attention_mask=there, **options))
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert torch.allclose(torch.stack(found[0].scores), torch.stack(found[1].scores), rtol=1e-4, atol=1e-4)


def test_memory_grows_with_the_row_not_with_scores() -> None:
    """Traces gpt-oss-20b's attention, forward and backward, at 4,096 tokens. Scores of its 64 heads would take 2 GiB."""

    def peak(tokens: int, layer: int) -> int:
        config = transformers.GptOssConfig(layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2)
        config._attn_implementation = SINKS
        window = (config.sliding_window, None)[layer]
        with FakeTensorMode():
            module = modeling_gpt_oss.GptOssAttention(config, layer)
            x, half = torch.empty(1, tokens, config.hidden_size), torch.empty(1, tokens, config.head_dim // 2)
            with LiveBytes(x, half, *module.parameters()) as live:
                module(x.requires_grad_(True), (half, half), masks(tokens, window, x.dtype)[0])[0].sum().backward()
        return live.peak

    assert peak(4096, 1) <= 2.1 * peak(2048, 1)
    assert peak(4096, 0) <= 2.1 * peak(2048, 0) + 3 * 5 * 4096**2 // 4  # the mask, as boolean and in float32
    assert peak(4096, 0) < 1 << 30


def test_documents_apart(tmp_path: Path) -> None:
    """Attends document by document, longer and shorter than the window, as in rows of their own."""
    documents, shape = [[11, 1, 12], [24]], Shape(batch=2, micro=2, tokens=24)
    subject = Subject(granite_swa(), shape, apart=True)
    ids, labels = next(subject.batches(1))
    labels[:, [0, 11, 12]] = -100
    with Rig(subject, tmp_path, home="cpu") as rig:
        ours = rig.executor.step(ids, labels, step=1, lr=1e-3, last=True, documents=documents).loss
        rig.executor.drain()
    subject.attention = "eager"
    model, total, count = subject.fresh(), 0.0, 0
    for row, lengths in enumerate(documents):
        for part, wanted in zip(ids[row].split(lengths), labels[row].split(lengths), strict=True):
            logits = model(input_ids=part[None], use_cache=False).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, wanted[1:], reduction="sum", ignore_index=-100)
            total, count = total + float(losses.detach()), count + int((wanted[1:] != -100).sum())
    assert ours == pytest.approx(total / count, rel=1e-6)


def test_compiled(tmp_path: Path) -> None:
    """A compiled block is not looked into: its kernel is not known."""
    load_compiler()
    torch._dynamo.reset()
    subject, blocks = Subject(granite_swa(), Shape()), CompiledBlocks(backend="aot_eager")
    plain = outcome(subject, tmp_path / "plain", 2, home="cpu")
    with Rig(subject, tmp_path / "compiled", home="cpu", compiled=blocks) as rig:
        assert_near((rig.run(2), rig.weights()), plain, weights=1e-5)
        assert (rig.executor.attention.kernel, blocks.graphs) == ("", 2)  # one block has a window


@pytest.mark.parametrize(("kernel", "masked", "groups"), [("flash", False, 2), ("efficient", True, 8), ("efficient", False, 8)])
def test_a_gpus_kernels_take_these_arguments(kernel: Any, masked: bool, groups: int) -> None:
    """Goes forward and backward without values, by what torch knows of shapes."""
    shapes = [(2, heads, 37, 64) for heads in (8, groups, groups)]
    leaves = [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in (*shapes, (8,))]
    bias = torch.empty(1, 1, 37, 48, device="meta", dtype=torch.bfloat16)[..., :37].expand(2, 8, -1, -1) if masked else None
    out = WithSinks.apply(*leaves, bias, not masked, 0.125, kernel)
    out.backward(torch.empty_like(out))
    assert [leaf.grad.shape for leaf in leaves if leaf.grad is not None] == [leaf.shape for leaf in leaves]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("tokens", [1, 9, 37, 130])
def test_on_a_gpu(tokens: int, window: int | None, dtype: torch.dtype) -> None:
    """Compares each kernel with float64: flash where there is no mask (bfloat16), else the efficient one."""
    qkv, module = made(2, tokens, dtype=dtype)
    fused, _ = masks(tokens, window, dtype)
    exactly = [tensor.double() for tensor in qkv], masks(tokens, window, torch.float64)[1]
    exact = gradients(modeling_gpt_oss.eager_attention_forward, Heads(module.sinks.detach().double()), *exactly)
    qkv, fused = [tensor.cuda() for tensor in qkv], None if fused is None else fused.cuda()
    expected = "flash" if dtype == torch.bfloat16 and fused is None else "efficient"
    assert kernel_of(*qkv, fused, 0.0, fused is None and tokens > 1) == expected
    ours = [tensor.cpu() for tensor in gradients(attend_with_sinks, module.cuda(), qkv, fused)]
    assert apart(ours, exact) <= (1e-6 if dtype == torch.float32 else 3e-2)
