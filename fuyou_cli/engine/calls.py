"""Finds how a model's own forward calls its stages, and what they return; keeps what modules hold between forwards.

`stage_calls` runs the forward on fake tensors, so it computes nothing and needs no weights. It refuses a model that cannot be
streamed, by name, before it is planned. A run refuses it again if it meets the problem.
"""

from __future__ import annotations

import logging
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..core.errors import UsageError
from ..spec.plan import MicroBatch
from .attention import Documents, attending_apart, check_arguments, laid_out, turns
from .experts import BANK, is_experts
from .fake_mode import RememberingMode
from .operators import DEVICE_OF, device_of
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
    positional: tuple[Any, ...]
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
        positional = args[1:] if key is None else args
        call = cls(name, original, positional, {k: _of_one_row(k, v, x) for k, v in kwargs.items() if k != key}, key)
        check_shared((call.positional, {k: v for k, v in call.named.items() if not _is_by_head(k, v)}), name)
        return call, x

    def map_tensors(self, place: Callable[[torch.Tensor], torch.Tensor]) -> StageCall:
        """Returns the same call with `place` applied to every tensor."""
        positional, named = tree_map_only(torch.Tensor, place, (self.positional, self.named))
        return replace(self, positional=positional, named=named)

    def output(self, x: torch.Tensor) -> Any:
        if self.documents is not None:
            whole = replace(self, documents=None, named=laid_out(self.named, self.documents))
            with attending_apart(self.documents, self.document_step):
                return whole.output(x)
        named = {key: _of_rows(key, value, x.shape[0]) for key, value in self.named.items()}
        if self.key is None:
            return self.original(x, *self.positional, **named)
        return self.original(*self.positional, **{self.key: x}, **named)

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
        self.draws = self.in_stage = False
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        if func is DEVICE_OF:
            return device_of(*args)
        self.draws = self.draws or (not self.in_stage and torch.Tag.nondeterministic_seeded in func.tags)
        return func(*args, **(kwargs or {}))


def stage_calls(
    model: PreTrainedModel, stages: Mapping[nn.Module, str], *, shape: tuple[int, int], between: Between | None = None,
    isolated: bool = False, made: list[Made] | None = None, reuse: bool = False,
) -> list[tuple[StageCall, torch.Tensor]]:  # fmt: skip
    """Finds every call of one of `stages` (module to name) in the base model's forward, in order, with its fake input, for ids
    of `shape`. `isolated`: each row is one document. `made` gets what each call returns. `reuse`: blocks that an earlier call
    ran in another shape do not run. Raises UsageError for a call that cannot be streamed."""
    calls: list[tuple[StageCall, torch.Tensor]] = []
    between = between or Between()
    # Blocks are alike: only one of each sort runs, and the others return what it returned.
    outputs: dict[object, Any] = _RETURNED.setdefault(model, {}) if reuse else {}

    def answer(module: nn.Module, call: StageCall, x: torch.Tensor) -> Any:
        if isolated:
            check_arguments(call.name, call.positional, call.named, shape[1])
            call = replace(call, documents=[[shape[1]]] * shape[0])
        calls.append((call, x))
        sort = (type(module), tuple(parameter.shape for parameter in module.parameters()))
        y, out = x, outputs.get(sort)
        if sort not in outputs:
            between.in_stage = True
            with with_fake_parameters(module), _LooksBack(call.name):
                out = call.output(x)
            between.in_stage = False
            y = boundary_of(out, call.name)
            if y.shape == x.shape and y.dtype == x.dtype:
                y, out = x, outputs.setdefault(sort, with_boundary(out, None, call.name))
        if made is not None:
            made.append(Made(with_boundary(out, None, call.name), y.shape[-1], y.dtype))
        return with_boundary(out, y, call.name)

    with only_refusals(model, shape=shape), tracing(model, length=shape[1]), between, _NothingLeftOut():
        _run_answered(model, stages, answer, torch.zeros(shape, dtype=torch.long), torch.arange(shape[1]).unsqueeze(0))
    _RETURNED.setdefault(model, {}).update(outputs)
    return calls


def _run_answered(
    model: PreTrainedModel, stages: Mapping[nn.Module, str], answer: Callable[[nn.Module, StageCall, torch.Tensor], Any],
    ids: torch.Tensor, positions: torch.Tensor,
) -> None:  # fmt: skip
    """Runs the base model's own forward, where `answer` returns what each call of a stage returns."""

    def stand_in(module: nn.Module, name: str) -> Callable[..., Any]:
        original = own_forward(module)
        return lambda *args, **kwargs: answer(module, *StageCall.split(name, original, args, kwargs))

    forwards = {module: stand_in(module, name) for module, name in stages.items()}
    with torch.no_grad(), replaced_forwards(forwards), one_row_masks(model):
        model.base_model(input_ids=ids, position_ids=positions, use_cache=False)


class CallsByLength:
    """Finds how a model's own forward calls its stages for rows of any length.

    Positions and masks depend on the length of a row. The model's own forward runs with the stages left out, on one row of
    zeros, and only the arguments that it gives its stages are kept. Positions of padding repeat the last one, so that code that
    looks for the longest position finds that of the longest row (rope types longrope and dynamic)."""

    def __init__(self, model: PreTrainedModel, stages: Mapping[nn.Module, str], state: ModuleState) -> None:
        """`stages`: their own forwards may be replaced; `state`: of what lies between them."""
        self._model, self._stages, self._state = model, stages, state
        self._by_length = bool(turns(model))
        self._made: list[Made] = []  # what each call returns

    def of(
        self, parts: Sequence[MicroBatch], width: int, place: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> tuple[Sequence[StageCall] | None, ...]:
        """Returns the calls of each micro-batch; None for one that is as wide as the whole batch, `width` tokens, if its
        longest row does not matter. `place`: brings a tensor to where stages compute; `device`: where the model's own forward
        computes."""
        seen: dict[tuple[int, int], list[StageCall]] = {}
        calls: list[Sequence[StageCall] | None] = []
        for part in parts:
            if part.width == width and not self._by_length:
                calls.append(None)
                continue
            key = part.width, part.longest if self._by_length else part.width
            if key not in seen:
                seen[key] = [call.map_tensors(place) for call, _ in self.called(*key, device)]
            calls.append(seen[key])
        return tuple(calls)

    def called(self, width: int, longest: int, device: torch.device) -> list[tuple[StageCall, torch.Tensor]]:
        """Returns every call of a stage, with an input of zeros, for a row of `width` tokens, `longest` of them no padding."""
        if not self._made:
            stage_calls(self._model, self._stages, shape=(1, 3), made=self._made)
        calls: list[tuple[StageCall, torch.Tensor]] = []

        def answer(module: nn.Module, call: StageCall, x: torch.Tensor) -> Any:
            calls.append((call, x))
            return self._made[len(calls) - 1].like(x, call.name)

        self._state.put_back()
        ids = torch.zeros(1, width, dtype=torch.long, device=device)
        positions = torch.arange(width, device=device).clamp(max=longest - 1).unsqueeze(0)
        _run_answered(self._model, self._stages, answer, ids, positions)
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
    for name, module in model.named_modules():
        if any(is_experts(part) for part in module.children()):
            for own, parameter in module.named_parameters():
                if parameter.dtype == torch.float32 or stays_float32(model, f"{name}.{own}"):
                    return f"{name}.{own}"
    return None


def _experts(model: PreTrainedModel) -> str | None:
    """Names a module that holds experts, or chooses among them, where nobody else can compute them (`experts.routed`).
    Configurations of dense models may count some too: defaults of their classes."""
    experts_name: str | None = None
    modules: Iterator[tuple[str, nn.Module]] = model.base_model.named_modules()
    for name, module in modules:
        if is_experts(module):
            return None
        if "Expert" in type(module).__name__:
            return name
        counts = [vars(module).get(key) for key in EXPERT_KEYS if module is not model.base_model]
        if experts_name is None and any(isinstance(count, int) and count > 1 for count in counts):
            experts_name = name
    return experts_name


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., object]]) -> Iterator[None]:
    """Sets `forward` on instances inside the context, and then what they had there before. Parameter names and classes stay as
    they are."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, own in before.items():
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own


@contextmanager
def with_fake_parameters(module: nn.Module) -> Iterator[None]:
    """Replaces parameters by fake tensors of their shapes inside the context (and inside a fake mode)."""
    with put_back(module):
        for holder in module.modules():
            for name, parameter in holder._parameters.items():
                if parameter is not None:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    holder._parameters[name] = nn.Parameter(empty, requires_grad=False)
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


# ---- what modules keep ---------------------------------------------------------------------------------------------
# Keeps what modules hold between forwards as it was: buffers, plain attributes, and what lies in these.
#
# Some modules remember things of a forward: rotary embeddings frequencies and the longest row so far, recurrent blocks their
# state. A trace on fake tensors must leave none of it behind (`tracing`), and a forward must not depend on the ones before it
# (`ModuleState.put_back`). Parameters, hooks, replaced forwards and the mode (training or not) are others' business.


_COPIED = 1 << 16  # bytes of a tensor of which a copy is kept, so that what is written into it can be undone
_MISSING = object()
_NOT_STATE = {*vars(nn.Module()), "forward", BANK} - {"_buffers"}
_SHARED = (PreTrainedConfig, GenerationConfig)  # by all modules of a model; forwards read them
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_WITHOUT_PARTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
_LEAVES = (*_WITHOUT_PARTS, *_CODE)
_OF_LEAVES, _HOLDERS = frozenset(_LEAVES), frozenset((dict, OrderedDict, list, set, tuple))


class ModuleState:
    """Remembers what modules hold at the time it is made.

    Make it while the model is as loaded, after its buffers were placed on their device. `excluded`: modules that are left out,
    with all that is under them. `writes`: tensors may be written into (not so on fake tensors).
    """

    def __init__(self, root: nn.Module, *, name: str = "", excluded: Container[nn.Module] = (), writes: bool = True) -> None:
        self._holders: list[tuple[str, dict[Any, Any] | list[Any] | deque[Any] | set[Any], Any, bool]] = []
        self._tensors: dict[int, tuple[str, torch.Tensor, int, torch.Tensor | None]] = {}
        self._seen: set[int] = set()
        self._looked_at: list[object] = []  # what `_seen` holds the addresses of
        self._excluded, self._writes = excluded, writes
        self._look(name or type(root).__name__, root)
        self._seen.clear()
        self._looked_at.clear()

    def put_back(self) -> list[str]:
        """Gives everything back what it held, and returns the names of what had changed. Raises UsageError for a tensor that
        was written into and is too large to have a copy."""
        changed: list[str] = []
        for name, holder, before, is_module in self._holders:
            if isinstance(holder, dict):
                changed += _put_back_items(name, holder, before, is_module)
            elif isinstance(holder, (list, deque)):
                if len(holder) != len(before) or any(map(_differs, holder, before)):
                    holder.clear()
                    holder.extend(before)
                    changed.append(name)
            elif holder != before:
                holder.clear()
                holder.update(before)
                changed.append(name)
        for key, (name, tensor, version, copy) in self._tensors.items():
            if tensor._version == version:
                continue
            if copy is None:
                raise UsageError(f"{name}: a forward writes into this tensor, and fuyou does not undo that; it is too large")
            with torch.no_grad():
                tensor.copy_(copy)
            self._tensors[key] = name, tensor, tensor._version, copy
            changed.append(name)
        return changed

    def _look(self, name: str, value: Any) -> None:
        if isinstance(value, (*_WITHOUT_PARTS, *_CODE, *_SHARED)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._looked_at.append(value)
        if isinstance(value, torch.Tensor):
            self._note(name, value)
        elif isinstance(value, nn.Module):
            if value not in self._excluded:
                self._look_into_module(name, value)
        elif isinstance(value, dict):
            self._hold(name, value, dict(value))
        elif isinstance(value, (list, deque, set)):
            self._holders.append((name, value, value.copy(), False))
            self._look_at_all(name, enumerate(value))
        elif isinstance(value, (tuple, frozenset)):
            self._look_at_all(name, enumerate(value))
        elif isinstance(value, partial):
            self._look_at_all(name, enumerate((*value.args, *value.keywords.values())))
        elif hasattr(value, "__dict__"):
            self._hold(name, vars(value), dict(vars(value)))

    def _look_into_module(self, name: str, module: nn.Module) -> None:
        own = {key: value for key, value in vars(module).items() if key not in _NOT_STATE and key != "_buffers"}
        self._hold(name, vars(module), own, is_module=True)
        self._hold(name, module._buffers, dict(module._buffers))
        self._look_at_all(name, module._modules.items())

    def _hold(self, name: str, holder: dict[Any, Any], before: dict[Any, Any], *, is_module: bool = False) -> None:
        self._holders.append((name, holder, before, is_module))
        self._look_at_all(name, before.items())

    def _look_at_all(self, name: str, parts: Any) -> None:
        for key, value in list(parts):
            self._look(f"{name}.{key}", value)

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        if not self._writes or isinstance(tensor, (FakeTensor, nn.Parameter)) or tensor.is_meta or tensor.is_inference():
            return
        copy = tensor.detach().clone() if tensor.nbytes <= _COPIED else None
        self._tensors[id(tensor)] = name, tensor, tensor._version, copy


def _differs(now: Any, before: Any) -> bool:
    """Tells values apart by identity, and plain values by what they say."""
    if now is before:
        return False
    return not (type(now) is type(before) and isinstance(before, _WITHOUT_PARTS) and bool(now == before))


def _put_back_items(name: str, holder: dict[Any, Any], before: dict[Any, Any], is_module: bool) -> Iterator[str]:
    """Makes `holder` hold what was in it before; yields the names of items that differed. Of a module's attributes, those that
    are no state are left alone."""
    for key, value in before.items():
        now = holder.get(key, _MISSING)
        if now is not value and _differs(now, value):
            holder[key] = value
            yield f"{name}.{key}"
    if len(holder) > len(before):
        left = _NOT_STATE | {"_buffers"} if is_module else ()
        for key in [key for key in holder if key not in before and key not in left]:
            del holder[key]
            yield f"{name}.{key}"


# ---- traces ----------------------------------------------------------------------------------------------------------


@contextmanager
def tracing(root: nn.Module, *, mode: FakeTensorMode | None = None, length: int | None = None) -> Iterator[FakeTensorMode]:
    """Runs forwards of `root` on fake tensors inside the context, and leaves nothing of them behind: no fake tensor, and no
    number that a module took from one. Every trace goes through here. Parameters are put back by whoever replaced them.

    `mode`: of an earlier trace, whose tensors are used again. `length`: tokens of the rows, for code that reads the last
    position: rotary embeddings choose frequencies by it. Raises UsageError if a fake tensor stays.
    """
    state = ModuleState(root, writes=False)
    mode = mode or RememberingMode()
    try:
        with mode, LastPosition(length):
            yield mode
    finally:
        state.put_back()
        check_no_fakes(root)


class LastPosition(TorchFunctionMode):
    """Tells the largest of some positions, because a fake tensor has no values. Positions are whole numbers, as many in a row
    as there are tokens."""

    def __init__(self, length: int | None) -> None:
        super().__init__()
        self._length = length

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._length is not None and func in (torch.max, torch.Tensor.max) and len(args) == 1 and not kwargs:
            (of,) = args
            if of.dtype == torch.long and of.dim() and 1 <= of.shape[-1] <= self._length:
                return torch.tensor(self._length - 1, device=of.device)
        return func(*args, **(kwargs or {}))


def check_no_fakes(root: nn.Module) -> None:
    """Raises UsageError, with its name, if a fake tensor is anywhere under `root`."""
    name = next(_fakes(type(root).__name__, root), None)
    if name is not None:
        owner = type(root).__name__ if isinstance(root, PreTrainedModel) else f"a block ({type(root).__name__})"
        raise UsageError(f"{owner} keeps a tensor of an inspection in {name}, so a run would compute with it; not supported")


def _fakes(name: str, root: Any) -> Iterator[str]:
    """Yields the names of fake tensors under `root`. Of a mixture's modules there are a hundred thousand parts, so a part's
    name is joined only where it is yielded."""
    waiting: list[tuple[tuple[Any, ...], Any]] = [((name,), root)]
    seen: set[int] = set()
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor) or isinstance(value.grad, FakeTensor):
                yield _joined(path)
            continue
        waiting += [((path, key), part) for key, part in reversed(_parts_of(value)) if not _is_leaf(part)]


def _joined(path: tuple[Any, ...]) -> str:
    """Returns a name from the path of its holder, if it has one, and its own key."""
    return path[0] if len(path) == 1 else _joined(path[0]) if path[1] is None else f"{_joined(path[0])}.{path[1]}"


def _is_leaf(value: Any) -> bool:
    return type(value) in _OF_LEAVES or isinstance(value, _LEAVES) or (type(value) in _HOLDERS and not value)


def _parts_of(value: Any) -> list[tuple[Any, Any]]:
    """Returns what is in a value by name or place; None for what a module keeps its own parts in."""
    if isinstance(value, nn.Module):
        inside = ("_modules", "_parameters", "_buffers")
        return [(None if key in inside else key, part) for key, part in vars(value).items()]
    if isinstance(value, partial):
        return list(enumerate((*value.args, *value.keywords.values())))
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, deque, tuple, set, frozenset)):
        return list(enumerate(value))
    return list(vars(value).items()) if hasattr(value, "__dict__") else []
