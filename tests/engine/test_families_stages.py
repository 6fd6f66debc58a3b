"""Tests stages found in real families, what is refused by name, and that a model gets its own forwards back."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.autograd.graph import get_gradient_edge
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.anatomy import dissect
from fuyou_cli.engine.describe import inspect
from fuyou_cli.engine.skeleton import build
from fuyou_cli.engine.streamed import StreamedModel, Tape, streamed_forward
from fuyou_cli.spec.model import STAGE_ALIGN, TENSOR_ALIGN

from .families import FAMILIES, llama, opt
from .rig import Rig, Shape, Subject

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import models_table

from .families import VOCABULARY, falcon

GATED = ["embedding", "block", "block", "norm", "head"]
POSITIONED = ["embedding", "embedding", "block", "block", "norm", "head"]
KINDS = {**dict.fromkeys(FAMILIES, GATED), "gpt2": POSITIONED, "opt": POSITIONED, "gpt_neo": POSITIONED}
TIED = {"gemma2", "gemma3", "gpt2", "opt", "gpt_neo", "falcon"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_one_stage(family: str) -> None:
    skeleton = build(FAMILIES[family], dtype="float32", attention="sdpa")
    anatomy = dissect(skeleton)
    assert [stage.kind for stage in anatomy.stages] == KINDS[family]
    assert anatomy.tied_head == (family in TIED)
    names = [tensor.name for stage in anatomy.stages for tensor in stage.tensors]
    assert sorted(names) == sorted(name for name, _ in skeleton.named_parameters())
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}
    assert {b.device.type for b in skeleton.buffers()} <= {"cpu"}
    for stage in anatomy.stages:
        end = 0
        for spec in stage.tensors:
            assert spec.offset % TENSOR_ALIGN == 0 and spec.offset >= end
            assert spec.decay == (len(spec.shape) >= 2)
            end = spec.offset + spec.numel
        assert stage.params % STAGE_ALIGN == 0 and end <= stage.params < end + STAGE_ALIGN


def test_projections_are_stages_in_running_order() -> None:
    anatomy = dissect(build(opt(projected_to=16), dtype="float32", attention="sdpa"))
    names = [name.rsplit(".", 1)[-1] for name in (stage.name for stage in anatomy.stages)]
    assert names.index("project_in") < names.index("0") < names.index("1") < names.index("project_out")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_close_gives_the_model_its_forwards_back(family: str, tmp_path: Path) -> None:
    subject = Subject(FAMILIES[family], Shape())
    model = subject.anatomy.model
    before = sorted(name for name, _ in model.named_parameters())
    with Rig(subject, tmp_path) as rig:
        replaced = [module for module in model.modules() if "forward" in vars(module)]
        assert len(replaced) == len(subject.spec.stages) - 1
        rig.run(1)
    assert [module for module in model.modules() if "forward" in vars(module)] == []
    assert sorted(name for name, _ in model.named_parameters()) == before
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_model_without_blocks_is_refused() -> None:
    model = build(llama(), dtype="float32", attention="sdpa")
    model.base_model.layers = nn.ModuleList()
    with pytest.raises(UsageError, match="has no decoder blocks"):
        dissect(model)


def test_a_block_that_runs_twice_is_refused() -> None:
    model = build(llama(), dtype="float32", attention="sdpa")
    shared: list[GradientCheckpointingLayer] = [model.base_model.layers[0]] * 2
    model.base_model.layers = nn.ModuleList(shared)
    with pytest.raises(UsageError, match=r"layers\.0 runs 2 times"):
        dissect(model)


def test_an_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(UsageError, match="causal language model"):
        build(config, dtype="float32", attention="sdpa")


class _Passes:
    """Runs a stage's own forward as the executor would, without weights of its own."""

    def forward(self, call: Any, x: torch.Tensor) -> torch.Tensor:
        return call.run(x)

    def backward(self, call: Any, ids: torch.Tensor | None, grad_y: torch.Tensor) -> torch.Tensor | None:
        return grad_y

    def shared(self, value: torch.Tensor) -> torch.Tensor:
        return value


def _called(original: Any, *args: Any, **kwargs: Any) -> Any:
    passes = _Passes()
    return streamed_forward(3, "layers.3", original, Tape(passes), passes)(*args, **kwargs)


class _Weighed(_Passes):
    """Weighs gradients, which grow by stage; every visit is told with its gradient."""

    def __init__(self) -> None:
        self.visited: list[tuple[int, float]] = []

    def backward(self, call: Any, ids: torch.Tensor | None, grad_y: torch.Tensor) -> torch.Tensor | None:
        assert not torch.is_grad_enabled()
        self.visited.append((call.stage, float(grad_y.sum())))
        return None if ids is not None else grad_y * 10


def test_gradients_go_back_through_what_the_model_does_between_stages() -> None:
    """Adds and scales two embeddings, and gives the first block's output a user beside the second."""
    passes = _Weighed()
    tape = Tape(passes)

    def stage(index: int, x: torch.Tensor) -> torch.Tensor:
        original: Any = lambda part: part.float() + 1  # noqa: E731
        return streamed_forward(index, str(index), original, tape, passes)(x)

    ids = torch.zeros(1, dtype=torch.long)
    first = stage(2, (stage(0, ids) + stage(1, ids)) * 3)
    last = stage(3, first) + first
    tape.hand_on(get_gradient_edge(last), torch.ones(1))
    tape.backward()
    assert passes.visited == [(3, 1.0), (2, 11.0), (1, 330.0), (0, 330.0)]


def test_what_differs_between_rows_or_learns_is_refused_by_name() -> None:
    x = torch.zeros(2, 4, 8)
    per_row, learning = torch.zeros(2, 4), torch.zeros(1, 4, requires_grad=True)
    for kwargs, message in (
        ({"mask": per_row}, r"layers\.3 takes a tensor of shape \(2, 4\) that differs between rows"),
        ({"nested": (torch.zeros(1), [per_row])}, "differs between rows"),
        ({"position_embeddings": (learning,)}, r"layers\.3 takes a second tensor that needs a gradient"),
        ({"past": transformers.DynamicCache()}, "called with a cache"),
    ):
        with pytest.raises(UsageError, match=message):
            _called(lambda part, **rest: part, x, **kwargs)


def test_what_is_returned_beside_the_boundary_may_be_dropped_but_not_used() -> None:
    x = torch.zeros(2, 4, 8)
    assert _called(lambda part: (part + 1, None), x)[1] is None
    y, beside = _called(lambda part: (part + 1, torch.ones(1)), x)
    assert torch.equal(y, x + 1)
    uses: list[Any] = [
        bool, list, len, lambda value: value[0], lambda value: value.sum(),
        lambda value: _called(lambda part, state: part, x, state=value),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(UsageError, match=r"layers\.3 returns more than its boundary, and the model uses it"):
            use(beside)
    for use in (lambda value: x + value, lambda value: torch.add(x, value)):
        with pytest.raises((TypeError, UsageError)):
            use(beside)
    with pytest.raises(UsageError, match=r"layers\.3 returns dict, not a tensor first"):
        _called(lambda part: {"y": part}, x)


def test_an_input_given_by_name() -> None:
    x = torch.zeros(2, 4, 8)
    assert torch.equal(_called(lambda hidden_states, scale: hidden_states + scale, hidden_states=x, scale=2.0), x + 2)


def test_buffers_are_put_back_when_the_stages_are() -> None:
    """Another run in this process finds them as they were: it looks at the model on the processor."""
    anatomy = dissect(build(FAMILIES["gemma3"], dtype="float32", attention="sdpa"))
    before = dict(anatomy.model.named_buffers())
    streamed = StreamedModel(anatomy, _Passes(), torch.device("meta"), None, on_device=True)
    assert before and all(buffer.is_meta for buffer in anatomy.model.buffers())
    streamed.close()
    assert all(buffer is before[name] for name, buffer in anatomy.model.named_buffers())


# ---- refused families ----------------------------------------------------------------------------------------------


_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def _with_layerdrop() -> PreTrainedConfig:
    config = opt()
    config.layerdrop = 0.5
    return config


def _gemma4(**changes: int) -> PreTrainedConfig:
    types = ["sliding_attention", "full_attention"] * 2
    sizes = {**_SMALL, "num_hidden_layers": 4, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    return transformers.Gemma4TextConfig(
        **{**sizes, "layer_types": types, "global_head_dim": 8, "hidden_size_per_layer_input": 0, **changes},
        architectures=["Gemma4ForCausalLM"],
    )


REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "falcon with alibi": (falcon(alibi=True), "differs between rows"),
    "blt": (models_table.small("blt"), "depends on the values of tensors (modeling_blt.py, line "),
    "xglm": (
        transformers.XGLMConfig(
            vocab_size=VOCABULARY, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4, max_position_embeddings=64
        ),
        "Attention mask should be of size",
    ),
    "bert": (transformers.BertConfig(**_SMALL, intermediate_size=64, is_decoder=True), "a block that takes token ids"),
    "rwkv": (
        transformers.RwkvConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, intermediate_size=64
        ),
        "it divides its own weights before it is evaluated",
    ),
    "gemma 4 with an embedding per layer": (_gemma4(hidden_size_per_layer_input=8), "an embedding of every token"),
    "gemma 4 that shares keys": (_gemma4(num_kv_shared_layers=2), "its last 2 blocks take keys and values of earlier blocks"),
    "mixtral whose router jitters": (
        transformers.MixtralConfig(
            **_SMALL, num_key_value_heads=4, intermediate_size=64, num_local_experts=4, router_jitter_noise=0.1
        ),
        "router_jitter_noise is above 0 in its config.json",
    ),
    "ernie 4.5": (models_table.small("ernie4_5_moe"), "mlp.gate.weight of its router stays float32"),
    "jetmoe": (
        models_table.small("jetmoe"),
        "its experts (layers.0.mlp.input_linear) are computed by code of this family alone",
    ),
    "doge with experts": (
        transformers.DogeConfig(**_SMALL, intermediate_size=64, is_moe=True, num_experts=16, num_experts_per_tok=4),
        "its experts (layers.0.mlp) are computed by code of this family alone",
    ),
    "opt with layerdrop": (_with_layerdrop(), "layerdrop is above 0"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_name(family: str, caplog: pytest.LogCaptureFixture) -> None:
    config, reason = REFUSED[family]
    with pytest.raises(UsageError) as caught:
        dissect(build(config, dtype="bfloat16", attention="sdpa"))
    name = config.architectures[0] if config.architectures else type(config).__name__.removesuffix("Config")
    assert caught.value.message.startswith(name) and " cannot be streamed: " in caught.value.message
    assert reason in caught.value.message
    hint = caught.value.hint or ""
    assert hint.endswith("scripts/results/MODELS.md lists every family that was tried") and len(hint) < 120
    assert [record for record in caplog.records if record.name.startswith("torch")] == []


@pytest.mark.parametrize("name", ["doge", "nemotron_h", "granitemoehybrid", "jamba"])
def test_dense_models_whose_classes_count_experts_are_not_refused(name: str) -> None:
    config = models_table.made(name, models_table.variants(name)["no experts"])
    assert {stage.kind for stage in dissect(build(config, dtype="bfloat16", attention="sdpa")).stages} >= {"block", "head"}


def test_a_boundary_wider_than_the_compute_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(UsageError, match=r"layers\.1 takes float32, but the model computes in bfloat16") as caught:
        dissect(build(config, dtype="bfloat16", attention="sdpa"))
    assert "residual_in_fp32 to false" in (caught.value.hint or "")
    dissect(build(config, dtype="float32", attention="sdpa"))
    config.residual_in_fp32 = False
    dissect(build(config, dtype="bfloat16", attention="sdpa"))


def test_a_shape_no_tensor_can_have_is_refused_as_well() -> None:
    anatomy = dissect(build(llama(), dtype="float32", attention="eager"))
    with pytest.raises(UsageError, match="LlamaForCausalLM cannot be streamed at micro-batches of 1073741824 x 16777216"):
        inspect(anatomy, dtype="float32", micro_batch_size=1 << 30, max_seq_len=1 << 24, head_chunk_tokens=0)


def test_the_logger_speaks_again_afterwards() -> None:
    dissect(build(llama(), dtype="float32", attention="sdpa"))
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled
