"""Finds how a model's own forward calls its stages, and what they return.

`stage_calls` runs the forward on fake tensors, so it computes nothing and needs no weights. It refuses a model that cannot be
streamed, by name, before it is planned. A run refuses it again if it meets the problem.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from ..core.errors import UsageError
from .attention import Documents, attending_apart, check_arguments, laid_out
from .experts import is_experts
from .module_state import tracing
from .skeleton import EXPERT_KEYS, LIBRARY_ERRORS, said, setting, stays_float32

WORKING = "decoders such as Llama, Qwen and their mixtures train; scripts/results/MODELS.md lists every family that was tried"

# What attention adds by head and by the distance of tokens: of Bloom, and of MPT (for its longest row).
_BY_HEAD = ("alibi", "position_bias")

TRIED = (2, 3)  # rows and tokens of a first trial; with more than one row, differences between rows show


# ---- one call --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageCall:
    """Describes one call of a stage's own forward, without the stage's input, so that it can be repeated with other inputs."""

    name: str
    original: Callable[..., Any]
    rest: tuple[Any, ...]
    named: dict[str, Any]
    key: str | None  # keyword of the input; None: the input is the first positional argument
    documents: Documents | None = None  # of the input's rows, which do not see each other; None: rows are whole
    document_step: int = 0  # of `documents.attended`

    @classmethod
    def split(
        cls, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[StageCall, torch.Tensor]:
        """Separates the stage's input from the arguments that are the same for all rows. Raises UsageError for any other
        argument."""
        key = _input_key(args, kwargs, name)
        x = args[0] if key is None else kwargs[key]
        assert isinstance(x, torch.Tensor)
        rest = args[1:] if key is None else args
        call = cls(name, original, rest, {k: _of_one_row(k, v, x) for k, v in kwargs.items() if k != key}, key)
        check_shared((call.rest, {k: v for k, v in call.named.items() if not _is_by_head(k, v)}), name)
        return call, x

    def placed(self, place: Callable[[torch.Tensor], torch.Tensor]) -> StageCall:
        """Returns the same call with `place` applied to every tensor."""
        rest, named = tree_map_only(torch.Tensor, place, (self.rest, self.named))
        return replace(self, rest=rest, named=named)

    def output(self, x: torch.Tensor) -> Any:
        """Returns the output of the stage's own forward for `x`."""
        if self.documents is not None:
            whole = replace(self, documents=None, named=laid_out(self.named, self.documents))
            with attending_apart(self.documents, self.document_step):
                return whole.output(x)
        named = {key: _of_rows(key, value, x.shape[0]) for key, value in self.named.items()}
        if self.key is None:
            return self.original(x, *self.rest, **named)
        return self.original(*self.rest, **{self.key: x}, **named)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return boundary_of(self.output(x), self.name)


def _is_by_head(key: str, value: Any) -> bool:
    """Whether an argument holds distances between tokens by head, and for all rows: constants, made of no input."""
    return key in _BY_HEAD and isinstance(value, torch.Tensor) and value.dim() == 3 and not value.requires_grad


def _of_one_row(key: str, value: Any, x: torch.Tensor) -> Any:
    """Returns an argument as it is for one row of `x`: Bloom repeats its distances for every row."""
    repeated = key == "alibi" and _is_by_head(key, value) and value.shape[0] % x.shape[0] == 0
    return value[: value.shape[0] // x.shape[0]] if repeated else value


def _of_rows(key: str, value: Any, rows: int) -> Any:
    """Returns an argument for so many rows."""
    return value.repeat(rows, 1, 1) if key == "alibi" and _is_by_head(key, value) else value


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Returns the forward of the module's class, even if the instance's `forward` was replaced."""
    forward: Callable[..., Any] = type(module).forward.__get__(module)
    return forward


def _input_key(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> str | None:
    """Returns the keyword of the stage's input, or None if it is the first positional argument."""
    if isinstance(kwargs.get("position_ids"), torch.Tensor) and name.rsplit(".", 1)[-1] == "embed_positions":
        return "position_ids"
    if args and isinstance(args[0], torch.Tensor):
        return None
    for key in ("hidden_states", "input", "input_ids", "x"):
        if isinstance(kwargs.get(key), torch.Tensor):
            return key
    raise UsageError(f"{name} is called without a tensor fuyou recognises as its input")


def check_shared(value: Any, name: str) -> None:
    """Refuses tensors beside the input that differ between rows or need a gradient, because results would be wrong without a
    sign."""
    if isinstance(value, dict):
        for item in value.values():
            check_shared(item, name)
    elif isinstance(value, (tuple, list)):
        for item in value:
            check_shared(item, name)
    elif isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise UsageError(f"{name} takes a second tensor that needs a gradient; fuyou cannot stream it")
        per_row = value.dim() >= 2 and value.shape[0] != 1
        if per_row and not (value.dim() == 2 and name.rsplit(".", 1)[-1] == "embed_positions"):
            raise UsageError(f"{name} takes a tensor of shape {tuple(value.shape)} that differs between rows")
    elif isinstance(value, NotKept):
        value.refuse()
    elif value is not None and not isinstance(value, (bool, int, float, str)) and type(value).__name__.endswith("Cache"):
        raise UsageError(f"{name} is called with a cache; fuyou trains with use_cache=False")


@dataclass(frozen=True, slots=True)
class Made:
    """Describes what a call of a stage returns. `structure`: without its boundary; `size`: of the boundary's last axis."""

    structure: Any
    size: int
    dtype: torch.dtype

    def like(self, x: torch.Tensor, name: str) -> Any:
        """Returns the same with a boundary of zeros, for ids or a boundary `x`."""
        axes = x.shape[:-1] if x.is_floating_point() else x.shape
        return with_boundary(self.structure, torch.zeros(*axes, self.size, dtype=self.dtype, device=x.device), name)


class NotKept:
    """Stands for what a stage returned in addition to its boundary. It gets no gradient, so a model that uses it is refused."""

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def refuse(self, *_: object) -> NoReturn:
        raise UsageError(f"{self._stage} returns more than its boundary, and the model uses it; fuyou cannot stream it")

    __getattr__ = __getitem__ = __iter__ = __bool__ = __len__ = refuse


def boundary_of(out: Any, name: str) -> torch.Tensor:
    """Returns the hidden state among what a stage returned: the first of a tuple, or all of it."""
    first = out[0] if isinstance(out, tuple) and out else out
    if not isinstance(first, torch.Tensor):
        raise UsageError(f"{name} returns {type(out).__name__}, not a tensor first; fuyou cannot stream it")
    return first


def with_boundary(out: Any, boundary: torch.Tensor | None, name: str) -> Any:
    """Returns the structure of `out` with `boundary` and nothing else in it. The model's own forward gets only that."""
    if not isinstance(out, tuple):
        return boundary
    return (boundary, *(None if value is None else NotKept(name) for value in out[1:]))


# ---- all calls of a forward ------------------------------------------------------------------------------------------


class Between(TorchDispatchMode):
    """Finds out whether the model's own forward draws random numbers between its stages. There it draws for all rows at
    once. `operators`: counted in all of the forward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = self.within = False
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        self.draws = self.draws or (not self.within and torch.Tag.nondeterministic_seeded in func.tags)
        return func(*args, **(kwargs or {}))


def stage_calls(
    model: PreTrainedModel,
    stages: Mapping[nn.Module, str],
    *,
    shape: tuple[int, int],
    between: Between | None = None,
    isolated: bool = False,
    made: list[Made] | None = None,
    again: bool = False,
) -> list[tuple[StageCall, torch.Tensor]]:
    """Finds every call of one of `stages` (module to name) in the base model's forward, in order, with its fake input, for ids
    of `shape`. `isolated`: each row is one document. `made` gets what each call returns. `again`: blocks that an earlier call
    ran in another shape do not run. Raises UsageError for a call that cannot be streamed."""
    calls: list[tuple[StageCall, torch.Tensor]] = []
    between = between or Between()
    # Blocks are alike: only one of each sort runs, and the others return what it returned.
    outputs: dict[object, Any] = _RETURNED.setdefault(model, {}) if again else {}

    def stand_in(module: nn.Module, name: str) -> Callable[..., Any]:
        sort = (type(module), tuple(parameter.shape for parameter in module.parameters()))
        original = own_forward(module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            call, x = StageCall.split(name, original, args, kwargs)
            if isolated:
                check_arguments(name, call.rest, call.named, shape[1])
                call = replace(call, documents=[[shape[1]]] * shape[0])
            calls.append((call, x))
            if sort not in outputs:
                between.within = True
                with with_fake_parameters(module), _LooksBack(name):
                    out = call.output(x)
                between.within = False
                y = boundary_of(out, name)
                if y.shape != x.shape or y.dtype != x.dtype:
                    note(out, y)
                    return with_boundary(out, y, name)
                outputs[sort] = with_boundary(out, None, name)
            note(outputs[sort], x)
            return with_boundary(outputs[sort], x, name)

        def note(out: Any, y: torch.Tensor) -> None:
            if made is not None:
                made.append(Made(with_boundary(out, None, name), y.shape[-1], y.dtype))

        return forward

    forwards = {module: stand_in(module, name) for module, name in stages.items()}
    with (
        only_refusals(model, shape=shape), torch.no_grad(), replaced_forwards(forwards), one_row_masks(model),
        tracing(model, length=shape[1]), between, _NothingLeftOut(),
    ):  # fmt: skip
        ids = torch.zeros(shape, dtype=torch.long)
        positions = torch.arange(shape[1]).unsqueeze(0)
        model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    _RETURNED.setdefault(model, {}).update(outputs)
    return calls


# What blocks return beside their boundary, by sort: it does not depend on the shape of a micro-batch.
_RETURNED: WeakKeyDictionary[PreTrainedModel, dict[object, Any]] = WeakKeyDictionary()


class _NothingLeftOut(TorchFunctionMode):
    """Makes a training model leave out no block by chance, inside the context: it replaces the random number that decides,
    because a fake number has no value. OPT and XGLM of transformers 5.17 draw this number even with layerdrop 0. Models with
    another layerdrop are refused before."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.rand and args in (([],), ((),)):
            return torch.tensor(1.0)
        return func(*args, **(kwargs or {}))


class _LooksBack(TorchFunctionMode):
    """Raises UsageError for a stage whose tokens attend to later ones, by torch's own attention: they would see what they are
    to predict, and a row's padding. PaliGemma does without an image."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
            if given.get("attn_mask") is None and not given.get("is_causal") and given["query"].shape[-2] > 1:
                raise UsageError(
                    f"tokens of {self._name} attend to later ones (with model.attn_implementation: eager they may not)"
                )
        return func(*args, **kwargs)


def _line_of_a_model(error: BaseException) -> str:
    """Returns the line of the library's own code that read a value."""
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(transformers.__file__).parent
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    return f" ({Path(ours[-1].filename).name}, line {ours[-1].lineno}: {ours[-1].line})" if ours else ""


@contextmanager
def only_refusals(model: PreTrainedModel, *, shape: tuple[int, int]) -> Iterator[None]:
    """Turns errors that a library raises inside the context, for a model it was not made for, into one error that names the
    model."""
    large = f" at micro-batches of {shape[0]} x {shape[1]} tokens" if shape != TRIED else ""
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # it also logs a traceback of what it raises
    silenced, logger.disabled = logger.disabled, True
    try:
        yield
    except UsageError as error:
        raise _refusal(model, error.message) from None
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _refusal(model, f"its forward depends on the values of tensors{_line_of_a_model(error)}") from error
    except LIBRARY_ERRORS as error:
        raise _refusal(model, said(error), large) from error
    finally:
        logger.disabled = silenced


def _refusal(model: PreTrainedModel, reason: str, large: str = "") -> UsageError:
    start = f"{type(model).__name__} cannot be streamed"
    return UsageError(reason if reason.startswith(start) else f"{start}{large}: {reason}", hint=WORKING)


def refuse_by_configuration(model: PreTrainedModel) -> None:
    """Raises UsageError for obstacles that a run on fake tensors does not show, or shows only in unclear words."""
    text = model.config.get_text_config()

    def number(*names: str) -> float:
        values = [setting(text, name) for name in names]
        return max((value for value in values if isinstance(value, (int, float))), default=0)

    if (experts := _experts(model)) is not None:
        raise _refusal(model, f"its experts ({experts}) are computed by code of this family alone, which fuyou cannot stream")
    if number("router_jitter_noise") > 0:
        raise _refusal(
            model, "router_jitter_noise is above 0 in its config.json: a forward that is computed again would choose other "
            "experts; set it to 0",
        )  # fmt: skip
    if model.dtype != torch.float32 and (wide := _wide_router(model)) is not None:
        raise _refusal(
            model, f"{wide} of its router stays float32 whatever the compute dtype, which fuyou cannot stream beside others; "
            "use precision.compute=float32"
        )  # fmt: skip
    if number("layerdrop", "decoder_layerdrop") > 0:
        raise _refusal(model, "layerdrop is above 0 in its config.json: it would leave out blocks by chance; set it to 0")
    if number("hidden_size_per_layer_input") > 0:
        raise _refusal(
            model, "each block also takes an embedding of every token for it (hidden_size_per_layer_input): not built yet"
        )
    if (shared := number("num_kv_shared_layers")) > 0:
        raise _refusal(model, f"its last {shared:.0f} blocks take keys and values of earlier blocks, which is not built yet")
    if hasattr(model.base_model, "layers_are_rescaled"):  # RWKV
        raise _refusal(model, "it divides its own weights before it is evaluated, and multiplies them before it is trained")


def _wide_router(model: PreTrainedModel) -> str | None:
    """Names a parameter beside experts that the family keeps in float32."""
    for name, module in model.named_modules():
        if any(is_experts(part) for part in module.children()):
            for own, parameter in module.named_parameters():
                if parameter.dtype == torch.float32 or stays_float32(model, f"{name}.{own}"):
                    return f"{name}.{own}"
    return None


def _experts(model: PreTrainedModel) -> str | None:
    """Names a module that holds experts, or chooses among them, where nobody else can compute them (`experts.routed`).
    Configurations of dense models may count some too: defaults of their classes."""
    found: str | None = None
    modules: Iterator[tuple[str, nn.Module]] = model.base_model.named_modules()
    for name, module in modules:
        if is_experts(module):
            return None
        if "Expert" in type(module).__name__:
            return name
        counts = [vars(module).get(key) for key in EXPERT_KEYS if module is not model.base_model]
        if found is None and any(isinstance(count, int) and count > 1 for count in counts):
            found = name
    return found


@contextmanager
def replaced_forwards(forwards: dict[nn.Module, Callable[..., object]]) -> Iterator[None]:
    """Sets `forward` on instances inside the context. Parameter names and classes stay as they are."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)


@contextmanager
def with_fake_parameters(module: nn.Module) -> Iterator[None]:
    """Replaces parameters by fake tensors of their shapes inside the context (and inside a fake mode)."""
    with put_back(module):
        for holder in module.modules():
            for name, parameter in holder._parameters.items():
                if parameter is not None:
                    made = torch.empty(parameter.shape, dtype=parameter.dtype)
                    holder._parameters[name] = nn.Parameter(made, requires_grad=False)
        yield


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Puts back the original parameters and buffers at the end. Some modules store what they computed in a buffer."""
    before = [(holder, dict(holder._parameters), dict(holder._buffers)) for holder in module.modules()]
    try:
        yield
    finally:
        for holder, parameters, buffers in before:
            holder._parameters.update(parameters)
            holder._buffers.update(buffers)


@contextmanager
def one_row_masks(model: PreTrainedModel, length: int | None = None) -> Iterator[None]:
    """Builds attention masks for one row inside the context, the same for all rows. A mask for the whole batch could take
    gigabytes. Positions are those of one document and are not read: on a device that would wait for all submitted work.
    `length`: tokens that a mask is for; None: all of a row."""
    from transformers import masking_utils
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
        if length is not None:
            kwargs |= {"q_length": length, "kv_length": length}
        return build_mask(*args, **kwargs)

    ALL_MASK_ATTENTION_FUNCTIONS[name] = build_one_row
    find_documents = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[name]
        masking_utils.find_packed_sequence_indices = find_documents
