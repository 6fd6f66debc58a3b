"""Lists everything in fuyou that reads a file of somebody else: what such a file looks like, and how it is read.

Each parser reads from a folder of its own and writes nothing. It may return a value or raise a UsageError. Libraries are loaded
by the first input of the parser that needs them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from fuyou_cli.checkpoint.files import INDEX_NAME, SINGLE_NAME
from fuyou_cli.core.errors import UsageError
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelFacts, ModelSpec
from fuyou_cli.spec.plan import Numerics
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.manifest import Manifest, RankShare, StoredExtent, StoredStage, StoredTensor
from fuyou_cli.training.state.store_folders import PART_FILE, read_part

_DIGEST = b',\n"digest": "'


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parser:
    """Describes a parser. `read` gets the folder. `beside`: other files in it. `seal` makes an input into what is written: a
    correct digest, a length in front. `share`: how often it runs beside the others."""

    name: str
    file: str
    read: Callable[[Path], object]
    seeds: Callable[[], list[bytes]]
    seal: Callable[[bytes], bytes] = bytes
    beside: Mapping[str, bytes] = field(default_factory=dict)
    share: float = 1.0

    def lay_out(self, folder: Path) -> None:
        """Makes the folder before an input is in it."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.beside.items():
            (folder / name).write_bytes(content)

    def __call__(self, folder: Path, data: bytes) -> object:
        """Raises what the parser raises."""
        (folder / self.file).write_bytes(self.seal(data))
        return self.read(folder)


# ---- small values of dataclasses -------------------------------------------------------------------------------------


_PLAIN: dict[Any, Any] = {int: 1, float: 1.0, str: "x", bool: False, Any: 1}
Kind = TypeVar("Kind")


def example(kind: type[Kind]) -> Kind:
    """Returns a value of ones, with one item of everything that there may be several of."""
    found = _of(kind)
    assert isinstance(found, kind)
    return found


def _of(hint: Any) -> Any:
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return inner[0]
    if origin is Annotated:
        return _of(inner[0])
    if origin is tuple:
        return (_of(inner[0]),) if inner[-1] is Ellipsis else tuple(map(_of, inner))
    if origin is dict:
        return {"x": _of(inner[1])}
    if isinstance(hint, type) and issubclass(hint, tuple):  # with names
        return hint(*map(_of, get_type_hints(hint).values()))
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return hint(**{field.name: _of(hints[field.name]) for field in fields(hint) if field.init})  # type: ignore[operator]
    return _of(next(one for one in inner if one is not NoneType))  # `int | None`


# ---- stores ----------------------------------------------------------------------------------------------------------


def manifest() -> Manifest:
    """Makes the manifest of a store with a stage of two tensors, and one without parameters."""
    params = 2048
    tensor = replace(
        example(StoredTensor), name="layers.0", stored_as="layers.0", shape=(32, 32), offset=0, first=0, count=1024
    )
    head = replace(tensor, name="head", stored_as="head", shape=(16, 32), offset=1024, first=256, count=256)
    moments = [StoredExtent(offset=at, size=4 * params, sum=(1 << 64) - at) for at in (1 << 20, 1 << 21)]
    stage = replace(
        example(StoredStage), name="layers.0", params=params, trained=params, generation=3, zero_moments=False,
        zero_remainder=False, quantised=0, frozen=None, weights=StoredExtent(offset=4096, size=2 * params, sum=7),
        remainder=StoredExtent(offset=8192, size=2 * params, sum=8),
        momentum=moments[0], variance=moments[1], tensors=(tensor, head), pieces=(), piece_sums=(),
    )  # fmt: skip
    bare = replace(
        stage,
        name="norm",
        params=0,
        trained=0,
        weights=None,
        remainder=None,
        momentum=None,
        variance=None,
        tensors=(),
        generation=0,
    )
    return replace(
        example(Manifest), files=("/nowhere/run/store.bin",), parts=("/nowhere/run/part.json",),
        companions=("/nowhere/run/companions/config.json", "/nowhere/run/spare"), stripe=1 << 22, store_size=1 << 23,
        state="committed", step=3, model_dir="/nowhere/model", compute_dtype="bfloat16",
        sources=(), numerics=replace(example(Numerics), compute_dtype="bfloat16"), fingerprints={"model": "00", "data": "11"},
        random={"python": [3, [1, 2, 3], None], "torch": "00ff"}, stages=(stage, bare), share=None,
    )  # fmt: skip


def _manifest_bytes() -> list[bytes]:
    filling = replace(manifest(), state="loading", stages=())
    shared = replace(manifest(), share=RankShare(rank=1, count=2, owners=(1, 0), commit=4, folders=("/a", "/b")))
    with TemporaryDirectory() as folder:
        written = []
        for one in (manifest(), filling, shared):
            manifests.write(Path(folder), one)
            written.append((Path(folder) / manifests.NAME).read_bytes())
    return written


def with_digest(data: bytes) -> bytes:
    """Returns a manifest whose digest is correct, whatever it says."""
    body, mark, _ = data.rpartition(_DIGEST)
    if not mark:  # JSON that was written anew, in one line
        try:
            content = json.loads(data)
            content.pop("digest", None)
            body = b"{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(content[key])}" for key in content).encode()
        except (ValueError, TypeError, AttributeError, RecursionError):  # no object
            body = data.rstrip(b"}\n ")
    return body + _DIGEST + sha256(body).hexdigest().encode() + b'"\n}\n'


def _part_bytes() -> list[bytes]:
    return [b'{"fuyou_part": 1, "run": "0123456789abcdef", "index": 1, "count": 2, "first": "/nowhere/run"}\n']


def _cleaned(folder: Path) -> object:
    from fuyou_cli.training.state.store_folders import read_store

    return read_store(folder / manifests.NAME)


# ---- plans and machines ----------------------------------------------------------------------------------------------


def _machine() -> HardwareProfile:
    return replace(example(HardwareProfile), device="cpu")


def _profile_bytes() -> list[bytes]:
    from fuyou_cli.machine.profile import write_profile

    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        write_profile(_machine(), path)
        return [json.dumps(json.loads(path.read_bytes())).encode()]


def _profiled(folder: Path) -> object:
    from fuyou_cli.machine.profile import read_profile

    return read_profile(folder / "profile.json")


def _facts() -> ModelFacts:
    return replace(example(ModelFacts), frozen_with=(("a", "b"),))


def _known(folder: Path) -> object:
    """Reads a kept description as a plan does, of either kind."""
    from fuyou_cli.training.known_model import read_description

    try:
        return read_description(ModelFacts, folder / "known.json")
    except UsageError:
        return read_description(ModelSpec, folder / "known.json")


def _known_bytes() -> list[bytes]:
    from fuyou_cli.training.known_model import written

    return [written(value) for value in (_facts(), example(ModelSpec))]


def _described(folder: Path) -> object:
    from fuyou_cli.machine.described import described

    return described(folder / "machine.yaml")


def _history(folder: Path) -> object:
    """Reads a log as `fuyou report` does, up to what it shows."""
    from fuyou_cli.cli.render.report_screen import page
    from fuyou_cli.training.run_log import read_history

    return page(read_history(folder / "log.jsonl"))


def _log_bytes() -> list[bytes]:
    from fuyou_cli.training.report import Compared, StepReport
    from fuyou_cli.training.run_log import LoggedEnd, LoggedPlan, LoggedTimeline

    end = replace(example(LoggedEnd), compared=(example(Compared).as_data(),))
    records = {"plan": example(LoggedPlan), "step": example(StepReport), "timeline": example(LoggedTimeline), "end": end}
    lines = [json.dumps({"event": event, **asdict(record)}).encode() + b"\n" for event, record in records.items()]
    return [b"".join(lines), b"".join(lines[:2])]


# ---- recipes ---------------------------------------------------------------------------------------------------------

_RECIPE = b"""version: 1
output_dir: out
model: {name_or_path: model, attn_implementation: eager}
dataset:
  train:
    - {path: rows.jsonl, format: prompt_completion, columns: {prompt: question, completion: answer}}
  max_seq_len: 64
  packing: concat
train: {max_steps: 3, batch_size: 4, clip_grad_norm: 1.0}
lr_scheduler: {name: cosine, warmup_ratio: 0.1}
optimizer: {lr: 1e-5, betas: [0.9, 0.95]}
offload:
  dir: [a, b]
  max_memory: {cpu: 2GiB}
checkpoint: {commit_every_steps: 1}
seed: ${train.batch_size}
"""
_MACHINE = b"""parts: rtx4090,2xgen4,128GiB
matmul_flops: 162TFLOPS
store_read: 21GB/s
adamw: {1: 4GB/s, 8: 20GB/s}
drives:
  - {model: x, capacity: 2TB}
"""


def _recipe(folder: Path) -> object:
    from fuyou_cli.recipe.load import load_recipe

    return load_recipe(folder / "recipe.yaml")


# ---- data ------------------------------------------------------------------------------------------------------------

_ROWS = (
    b'{"prompt": "What? \\ud83d\\ude42", "completion": "That."}\n',
    b'{"instruction": "Say it", "input": "x", "output": "y", "history": []}\n',
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": [{"name": "t"}]}\n',
    b'{"text": "a document"}\n{"text": "another"}\n',
    b'{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "train": true}], "system": "s"}\n',
    b'{"segments": [{"label": true, "text": "a"}, {"label": false, "text": "b"}]}\n',
    b'{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "completion": [{"role": "assistant", '
    b'"content": "b", "tool_calls": [{"function": {"name": "t", "arguments": {"x": null}}}]}],'
    b' "tools": ["{\\"name\\": \\"t\\"}"]}\n',
    b'{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 0], "loss_mask": [0, 1, 1]}\n',
)


def _understood(place: str, row: dict[str, Any]) -> object:
    from fuyou_cli.data.formats import RowError, choose_format, read_example

    try:
        return read_example(row, choose_format("auto", frozenset(row), {}), {})
    except RowError as error:  # as the worker tells it
        raise UsageError(f"{place}: {error}") from None


def _saved_set(folder: Path) -> object:
    from fuyou_cli.data.sources import locate

    return locate(str(folder), "train")


def _table(name: str) -> Callable[[Path], object]:
    """Reads a table as the worker does."""

    def read(folder: Path) -> object:
        from fuyou_cli.data.reading import read_rows

        return [_understood(place, row) for place, row in read_rows(folder / name)]

    return read


_CSV = b'prompt,completion,other\n"What, then?",That.,1\n\n"two\nlines","""quoted""",\n'

_TOKENIZER: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": {"type": "Lowercase"},
    "added_tokens": [
        {
            "id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True,
        }
    ],
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"<s>": 0, "a": 1, "<unk>": 2}, "unk_token": "<unk>"},
}  # fmt: skip
_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<s>", "unk_token": "<unk>", "pad_token": "<s>",
    "model_max_length": 10**30, "clean_up_tokenization_spaces": False, "added_tokens_decoder": {},
    "chat_template": "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
}  # fmt: skip
_GENERATION = b'{"eos_token_id": [0, 2], "transformers_version": "5.0.0"}'


def _tokenised(folder: Path) -> object:
    from fuyou_cli.data.formats import Chat, RowError, Texts
    from fuyou_cli.data.tokenise import Tokeniser, load_tokenizer

    tokeniser = Tokeniser(load_tokenizer(folder, chat_template=None, pad_token=None), directory=folder)
    try:
        rows = tokeniser.encode([Texts(parts=(("a b a", True),))], target="all")
        talk = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "a"})
        return rows + tokeniser.encode([Chat(messages=talk)], target="all")
    except RowError as error:
        raise UsageError(f"rows.jsonl:1: {error.args[0]}") from None


_TOKENIZER_FILES = {
    "tokenizer.json": json.dumps(_TOKENIZER).encode(),
    "tokenizer_config.json": json.dumps(_SETTINGS).encode(),
    "generation_config.json": _GENERATION,
}


def _tokenizer(file: str, name: str) -> Parser:
    beside = {other: content for other, content in _TOKENIZER_FILES.items() if other != file}
    return Parser(name=name, file=file, read=_tokenised, seeds=lambda: [_TOKENIZER_FILES[file]], beside=beside, share=0.005)


# ---- files of checkpoints --------------------------------------------------------------------------------------------


TABLES = (
    b'{"a.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"format":"pt"}}',
    b'{"b.weight":{"dtype":"BF16","shape":[1,4],"data_offsets":[0,8]}}',
)
SHARDS = ("one.safetensors", "two.safetensors")


def framed(table: bytes, size: int = 8) -> bytes:
    """Makes a safetensors file with this header and so many bytes of data."""
    return struct.pack("<Q", len(table)) + table + bytes(size)


def read_header(folder: Path) -> object:
    from fuyou_cli.checkpoint.reader import parse_file

    return parse_file(folder / SINGLE_NAME)


def read_index(folder: Path) -> object:
    from fuyou_cli.checkpoint.files import open_checkpoint

    return open_checkpoint(folder)


def index_bytes() -> list[bytes]:
    places = {"a.weight": SHARDS[0], "b.weight": SHARDS[1]}
    return [json.dumps({"metadata": {"total_size": 16}, "weight_map": places}).encode()]


def quantised(state: bytes) -> bytes:
    """Makes a file with a tensor of 8 x 8 in nf4 that says `state` of itself."""
    from fuyou_cli.swap.kernels import nf4_levels

    parts = {
        "a.weight": ("U8", bytes(32)), "a.weight.absmax": ("F32", struct.pack("<f", 1)),
        "a.weight.quant_map": ("F32", nf4_levels().tobytes()), "a.weight.quant_state.bitsandbytes__nf4": ("U8", state),
    }  # fmt: skip
    table, end = dict[str, Any](), 0
    for name, (dtype, data) in parts.items():
        begin, end = end, end + len(data)
        table[name] = {"dtype": dtype, "shape": [len(data) // (4 if dtype == "F32" else 1)], "data_offsets": [begin, end]}
    return framed(json.dumps(table).encode(), 0) + b"".join(data for _, data in parts.values())


QUANT_STATE = b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 8]}'

OWN_FORMATS = (  # a tensor of experts in mxfp4, and a matrix in fp8: 42 bytes
    b'{"e_blocks":{"dtype":"U8","shape":[1,2,1,16],"data_offsets":[0,32]},"e_scales":{"dtype":"U8","shape":[1,2,1],'
    b'"data_offsets":[32,34]},"w":{"dtype":"F8_E4M3","shape":[2,2],"data_offsets":[34,38]},'
    b'"w_scale_inv":{"dtype":"F32","shape":[1,1],"data_offsets":[38,42]}}'
)


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "hidden_act": "silu", "dtype": "float32", "eos_token_id": [1, 2],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


_QUANTISED = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["lm_head"],
}  # fmt: skip
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}


def configs() -> list[bytes]:
    said = ({}, {"quantization_config": _QUANTISED}, {"quantization_config": _FP8})
    return [json.dumps(CONFIG | one).encode() for one in said]


def read_config(folder: Path) -> object:
    """Reads a configuration as an export does."""
    from fuyou_cli.checkpoint.files import companion_files

    return companion_files(folder, dtype="bfloat16")


def read_model(folder: Path) -> object:
    """Reads a model as a run does, up to a model without weights."""
    from fuyou_cli.engine.skeleton import build, load_config

    return build(load_config(folder), dtype="bfloat16", attention="eager")


# ---- all of them -----------------------------------------------------------------------------------------------------


LIGHT = (
    Parser(name="manifest", file=manifests.NAME, read=manifests.read, seeds=_manifest_bytes),
    Parser(name="sealed-manifest", file=manifests.NAME, read=manifests.read, seeds=_manifest_bytes, seal=with_digest),
    Parser(name="clean", file=manifests.NAME, read=_cleaned, seeds=_manifest_bytes),
    Parser(name="part", file=PART_FILE, read=read_part, seeds=_part_bytes),
    Parser(name="profile", file="profile.json", read=_profiled, seeds=_profile_bytes),
    Parser(name="known", file="known.json", read=_known, seeds=_known_bytes, share=0.2),
    Parser(name="log", file="log.jsonl", read=_history, seeds=_log_bytes, share=0.1),
    Parser(
        name="index", file=INDEX_NAME, read=read_index, seeds=index_bytes,
        beside={name: framed(table) for name, table in zip(SHARDS, TABLES, strict=True)},
    ),
    Parser(
        name="safetensors", file=SINGLE_NAME, read=read_index, seeds=lambda: [*map(framed, TABLES), framed(OWN_FORMATS, 42)],
    ),
    Parser(name="header", file=SINGLE_NAME, read=read_header, seeds=lambda: list(TABLES), seal=framed),
    Parser(name="quant-state", file=SINGLE_NAME, read=read_index, seeds=lambda: [QUANT_STATE], seal=quantised),
    Parser(name="config", file="config.json", read=read_config, seeds=lambda: [json.dumps(CONFIG).encode()]),
    Parser(name="rows", file="rows.jsonl", read=_table("rows.jsonl"), seeds=lambda: list(_ROWS)),
    Parser(name="array", file="rows.json", read=_table("rows.json"), seeds=lambda: [b"[" + b",\n".join(_ROWS[:3]) + b"]\n"]),
    Parser(
        name="saved-set", file="state.json", read=_saved_set, beside={"data.arrow": b"rows"},
        seeds=lambda: [b'{"_data_files": [{"filename": "data.arrow"}], "_split": null, "_indices_data_files": null}'],
    ),
    Parser(name="csv", file="rows.csv", read=_table("rows.csv"), seeds=lambda: [_CSV]),
    Parser(name="recipe", file="recipe.yaml", read=_recipe, seeds=lambda: [_RECIPE], share=0.02),
    Parser(name="machine", file="machine.yaml", read=_described, seeds=lambda: [_MACHINE], share=0.02),
)  # fmt: skip
HEAVY = (  # torch or transformers
    Parser(name="model", file="config.json", read=read_model, seeds=configs, share=0.005),
    _tokenizer("tokenizer.json", "tokenizer"),
    _tokenizer("tokenizer_config.json", "tokenizer-config"),
    _tokenizer("generation_config.json", "generation-config"),
)
