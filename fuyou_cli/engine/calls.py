"""How a model's own forward calls its stages: found by running it on fake tensors, so nothing is computed and no weight
need be there. What cannot be streamed is refused here, by name, before a plan is made of it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..core.errors import UsageError
from .skeleton import LIBRARY_ERRORS, said, setting
from .streamed import boundary_of, check_shared, find_input, with_boundary

WORKING = (
    "dense decoder-only models are streamed; tested families: Llama, Qwen 3, Mistral, Gemma 2 and 3, GPT-2, GPT-J, GPT-Neo, "
    "GPT-NeoX, Falcon, OPT, Phi-3"
)

TRIED = (2, 3)  # rows and tokens of a first look: more than one row, so that what differs between rows shows


@dataclass(frozen=True, slots=True)
class StageCall:
    """One call of a stage; tensors are fake, of `mode`. `key`: the keyword of the stage's input, None for the first
    positional argument."""

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: str | None
    mode: FakeTensorMode

    @property
    def x(self) -> torch.Tensor:
        x = self.args[0] if self.key is None else self.kwargs[self.key]
        assert isinstance(x, torch.Tensor)
        return x

    def run(self, x: torch.Tensor) -> Any:
        """What the stage's own forward makes of `x` in the place of its input."""
        original = type(self.module).forward.__get__(self.module)
        if self.key is None:
            return original(x, *self.args[1:], **self.kwargs)
        return original(*self.args, **{**self.kwargs, self.key: x})

    def check(self) -> None:
        """What `streamed` would refuse in the run."""
        check_shared(self.args if self.key is not None else self.args[1:], self.name)
        check_shared({key: value for key, value in self.kwargs.items() if key != self.key}, self.name)


def stage_calls(model: PreTrainedModel, stages: Mapping[nn.Module, str], *, shape: tuple[int, int]) -> list[StageCall]:
    """Every call of one of `stages` (module to name) in the forward pass of the base model, in order, for ids of `shape`.
    Raises UsageError for a call that cannot be streamed."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    calls: list[StageCall] = []
    outputs: dict[object, Any] = {}  # blocks are alike: one of each sort is run, the others return what it returned

    def stand_in(module: nn.Module, name: str) -> Callable[..., Any]:
        sort = (type(module), tuple(parameter.shape for parameter in module.parameters()))

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = StageCall(module, name, *find_input(args, kwargs, name), mode)
            call.check()
            calls.append(call)
            if sort not in outputs:
                with _parameters_and_buffers(module):
                    out = call.run(call.x)
                y = boundary_of(out, name)
                if y.shape != call.x.shape or y.dtype != call.x.dtype:
                    return with_boundary(out, y, name)
                outputs[sort] = with_boundary(out, y, name)
            return with_boundary(outputs[sort], call.x, name)

        return forward

    forwards = {module: stand_in(module, name) for module, name in stages.items()}
    with (
        only_refusals(model, shape=shape), torch.no_grad(), replaced_forwards(forwards), one_row_masks(model), mode,
        _NothingLeftOut(),
    ):  # fmt: skip
        ids = torch.zeros(shape, dtype=torch.long)
        positions = torch.arange(shape[1]).unsqueeze(0)
        model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    return calls


class _NothingLeftOut(TorchFunctionMode):
    """Inside, the number that a training model draws to leave out a block by chance (OPT and XGLM of transformers 5.17 do so
    with layerdrop 0 as well) is one that leaves out none: a fake one has no value to look at. Others were refused before."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.rand and args in (([],), ((),)):
            return torch.tensor(1.0)
        return func(*args, **(kwargs or {}))


def _line_of_a_model(error: BaseException) -> str:
    """Where the library's own code looked at a value."""
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(transformers.__file__).parent
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    return f" ({Path(ours[-1].filename).name}, line {ours[-1].lineno}: {ours[-1].line})" if ours else ""


@contextmanager
def only_refusals(model: PreTrainedModel, *, shape: tuple[int, int]) -> Iterator[None]:
    """Inside, whatever a library raises over a model that it was not made for becomes an error that names the model."""
    large = f" at micro-batches of {shape[0]} x {shape[1]} tokens" if shape != TRIED else ""
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # it logs a traceback of what it raises as well
    silenced, logger.disabled = logger.disabled, True
    try:
        yield
    except UsageError as error:
        raise _refusal(model, error.message) from None
    except DataDependentOutputException as error:
        raise _refusal(model, f"its forward depends on the values of tensors{_line_of_a_model(error)}") from error
    except LIBRARY_ERRORS as error:
        raise _refusal(model, said(error), large) from error
    finally:
        logger.disabled = silenced


def _refusal(model: PreTrainedModel, reason: str, large: str = "") -> UsageError:
    start = f"{type(model).__name__} cannot be streamed"
    return UsageError(reason if reason.startswith(start) else f"{start}{large}: {reason}", hint=WORKING)


def refuse_by_configuration(model: PreTrainedModel) -> None:
    """Raises UsageError for what a run on fake tensors does not show, or shows in words nobody understands."""
    text = model.config.get_text_config()

    def number(*names: str) -> float:
        values = [setting(text, name) for name in names]
        return max((value for value in values if isinstance(value, (int, float))), default=0)

    if number("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") > 1:
        raise _refusal(model, "its blocks choose among experts (mixture of experts), which is not built yet")
    if number("layerdrop", "decoder_layerdrop") > 0:
        raise _refusal(model, "layerdrop is above 0 in its config.json: it would leave out blocks by chance; set it to 0")
    if number("num_attention_heads") == 0:
        raise _refusal(model, "it has no attention heads: recurrent and state-space models are not built yet")


@contextmanager
def replaced_forwards(forwards: dict[nn.Module, Callable[..., object]]) -> Iterator[None]:
    """Set `forward` on instances and undo it. Parameter names and classes stay as they are."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)


@contextmanager
def _parameters_and_buffers(module: nn.Module) -> Iterator[None]:
    """Inside (and inside a fake mode), parameters are fake tensors of their shapes. Some modules keep what they computed
    in a buffer: those are put back as well."""
    before = [(holder, dict(holder._parameters), dict(holder._buffers)) for holder in module.modules()]
    try:
        for holder, parameters, _ in before:
            for name, parameter in parameters.items():
                if parameter is not None:
                    made = torch.empty(parameter.shape, dtype=parameter.dtype)
                    holder._parameters[name] = nn.Parameter(made, requires_grad=False)
        yield
    finally:
        for holder, parameters, buffers in before:
            holder._parameters.update(parameters)
            holder._buffers.update(buffers)


@contextmanager
def one_row_masks(model: PreTrainedModel) -> Iterator[None]:
    """Inside, attention masks are built for one row and broadcast. Rows are padded on the right and causal, so every
    row's mask is the same; a mask of the whole step's batch could be gigabytes."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = model.config._attn_implementation
    if name not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
        yield
        return
    build_mask = ALL_MASK_ATTENTION_FUNCTIONS[name]

    def build_one_row(*args: object, **kwargs: object) -> object:
        if args:
            args = (1, *args[1:])
        else:
            kwargs["batch_size"] = 1
        return build_mask(*args, **kwargs)

    ALL_MASK_ATTENTION_FUNCTIONS[name] = build_one_row
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[name]
