"""Model shapes for the planner: names, shapes and dtypes of parameters, without any weights.

`load_model_shape` reads them from user code, a Transformers config, safetensors headers, a preset or a plain number
of parameters. Nothing is allocated, and files are treated as untrusted: only headers are read, and all are validated.
"""

import json
import math
import os
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from math import isqrt, prod
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import CheckpointError, ConfigError
from ..layout.spec import ParamSpec

_BLOCK_PREFIX = re.compile(r"^(?:\w+\.)*?(?:\w+_)?\d+(?=\.)")
"""The prefix of a name up to its first number, as in `h.3.` and `encoder_layer_3.`: one block of a list."""


@dataclass(frozen=True)
class ParamShape:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    trainable: bool = True

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def to_meta_param(self) -> torch.nn.Parameter:
        """Return a parameter of this shape on the meta device."""
        return torch.nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device="meta"), self.trainable)


@dataclass(frozen=True)
class ModelShape:
    """The parameters of a model, in its order, and the bytes of its buffers."""

    name: str
    params: tuple[ParamShape, ...]
    buffer_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.params:
            raise ConfigError(f"{self.name} has no parameters of floating-point numbers: there is nothing to train")

    @classmethod
    def from_module(cls, module: torch.nn.Module, name: str | None = None) -> "ModelShape":
        """Return the shape of a module, which may be on the meta device."""
        params = [
            ParamShape(label, tuple(param.shape), param.dtype, param.requires_grad)
            for label, param in module.named_parameters()
        ]
        buffers = sum(buffer.nbytes for buffer in module.buffers())
        return cls(name or type(module).__name__, tuple(params), buffers)

    def cast(self, dtype: torch.dtype) -> "ModelShape":
        """Return the model with all floating-point parameters in another dtype."""
        cast = [replace(param, dtype=dtype) if param.dtype.is_floating_point else param for param in self.params]
        return replace(self, params=tuple(cast))

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def trainable_params(self) -> list[ParamShape]:
        return [param for param in self.params if param.trainable]

    @cached_property
    def blocks(self) -> list[list[ParamShape]]:
        """Parameters grouped by block prefix, such as `layers.3.`. The first list holds those outside all blocks."""
        blocks: dict[str, list[ParamShape]] = defaultdict(list, {"": []})
        for param in self.params:
            match = _BLOCK_PREFIX.match(param.name)
            blocks[match.group() if match else ""].append(param)
        return list(blocks.values())


def make_param_specs(groups: Iterable[Iterable[ParamShape]], device: torch.device) -> list[ParamSpec]:
    """Return specs for a layout: contiguous tensors, indexed group by group."""
    members = [(group_id, param) for group_id, group in enumerate(groups) for param in group]
    return [
        ParamSpec(
            index,
            param.name,
            param.shape,
            _contiguous_strides(param.shape),
            param.dtype,
            device,
            group_id,
            param.trainable,
        )
        for index, (group_id, param) in enumerate(members)
    ]


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


# ---------------------------------------------------------------------------------------------------------------------
# User code: `package.module:name` and `file.py:name`, run like a script in its directory.


_LIBRARY_PREFIXES = tuple(
    f"{Path(str(file)).parent}{os.sep}" for file in (torch.__file__, os.__file__, Path(__file__).parent)
)
"""Directories of code that is not the user's: torch's, Python's and ours."""
USER_CODE_ERRORS = (Exception, SystemExit)
"""What user code may raise, including `sys.exit()` in a script."""


def describe_error(error: BaseException) -> str:
    """Return the error, with the last line of user code in its traceback if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith((*_LIBRARY_PREFIXES, "<"))]
    where = f" ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno})" if user_frames else ""
    return f"{type(error).__name__}: {error}{where}"


def import_object(source: str, expected: str) -> Any:
    """Import `package.module:name` or `file.py:name`. `expected` describes it in error messages."""
    location, _, name = source.rpartition(":")
    with script_environment(source):
        target = _import_source(location)
    for attribute in name.split("."):
        if not hasattr(target, attribute):
            raise ConfigError(f"{location} has no {name!r}: expected {expected}")
        target = getattr(target, attribute)
    return target


@contextmanager
def script_environment(source: str) -> Iterator[None]:
    """Run user code as a script: extend `sys.path` by its directory and the current one, and hide our `sys.argv`."""
    location = source.rpartition(":")[0]
    directories, argv = [str(Path.cwd())], sys.argv
    if location.endswith(".py"):
        directories.insert(0, str(Path(location).resolve().parent))
    sys.path[:0], sys.argv = directories, [location]
    try:
        yield
    finally:
        sys.argv = argv
        for directory in directories:
            with suppress(ValueError):
                sys.path.remove(directory)


def _import_source(location: str) -> Any:
    if location.endswith(".py") and not Path(location).is_file():
        raise ConfigError(f"{location} is no file: expected file.py:name or package.module:name")
    try:
        return _import_file(location) if location.endswith(".py") else import_module(location)
    except USER_CODE_ERRORS as error:
        raise ConfigError(f"{location} cannot be imported: {describe_error(error)}") from error


def _import_file(path: str) -> Any:
    """Import a file under a unique module name, registered in `sys.modules` so that its classes find their module."""
    name = f"zeroshard_plans_{Path(path).stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# ---------------------------------------------------------------------------------------------------------------------
# Presets: well-known models, with the shapes and names of their published weights.


NamedShapes = Iterator[tuple[str, tuple[int, ...]]]


class ModelFamily(Protocol):
    """A model architecture of any size."""

    def named_shapes(self) -> NamedShapes: ...


@dataclass(frozen=True)
class Gpt2:
    """GPT-2. The head is tied to the embedding."""

    num_layers: int
    hidden_size: int
    vocab_size: int = 50257
    max_positions: int = 1024

    def named_shapes(self) -> NamedShapes:
        width = self.hidden_size
        yield "transformer.wte.weight", (self.vocab_size, width)
        yield "transformer.wpe.weight", (self.max_positions, width)
        for layer in range(self.num_layers):
            block = f"transformer.h.{layer}"
            yield from _weight_and_bias(f"{block}.ln_1", (width,), width)
            yield from _weight_and_bias(f"{block}.attn.c_attn", (width, 3 * width), 3 * width)
            yield from _weight_and_bias(f"{block}.attn.c_proj", (width, width), width)
            yield from _weight_and_bias(f"{block}.ln_2", (width,), width)
            yield from _weight_and_bias(f"{block}.mlp.c_fc", (width, 4 * width), 4 * width)
            yield from _weight_and_bias(f"{block}.mlp.c_proj", (4 * width, width), width)
        yield from _weight_and_bias("transformer.ln_f", (width,), width)


@dataclass(frozen=True)
class Llama:
    """Llama, Mistral, Mixtral and Qwen, with grouped-query attention."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    kv_size: int
    """Total width of all key heads."""
    has_qkv_bias: bool = False
    num_experts: int = 0

    def named_shapes(self) -> NamedShapes:
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        for layer in range(self.num_layers):
            yield from self._block_shapes(f"model.layers.{layer}")
        yield "model.norm.weight", (self.hidden_size,)
        yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def _block_shapes(self, prefix: str) -> NamedShapes:
        for name, rows in (("q_proj", self.hidden_size), ("k_proj", self.kv_size), ("v_proj", self.kv_size)):
            yield f"{prefix}.self_attn.{name}.weight", (rows, self.hidden_size)
            if self.has_qkv_bias:
                yield f"{prefix}.self_attn.{name}.bias", (rows,)
        yield f"{prefix}.self_attn.o_proj.weight", (self.hidden_size, self.hidden_size)
        if self.num_experts:
            yield f"{prefix}.block_sparse_moe.gate.weight", (self.num_experts, self.hidden_size)
        for expert in range(self.num_experts):
            yield from self._mlp_shapes(f"{prefix}.block_sparse_moe.experts.{expert}", ("w1", "w3", "w2"))
        if not self.num_experts:
            yield from self._mlp_shapes(f"{prefix}.mlp", ("gate_proj", "up_proj", "down_proj"))
        yield f"{prefix}.input_layernorm.weight", (self.hidden_size,)
        yield f"{prefix}.post_attention_layernorm.weight", (self.hidden_size,)

    def _mlp_shapes(self, prefix: str, names: tuple[str, str, str]) -> NamedShapes:
        yield f"{prefix}.{names[0]}.weight", (self.intermediate_size, self.hidden_size)
        yield f"{prefix}.{names[1]}.weight", (self.intermediate_size, self.hidden_size)
        yield f"{prefix}.{names[2]}.weight", (self.hidden_size, self.intermediate_size)


@dataclass(frozen=True)
class Bert:
    """The BERT encoder with its pooler, without a head."""

    num_layers: int
    hidden_size: int
    vocab_size: int = 30522
    max_positions: int = 512

    def named_shapes(self) -> NamedShapes:
        width = self.hidden_size
        for name, rows in (("word", self.vocab_size), ("position", self.max_positions), ("token_type", 2)):
            yield f"embeddings.{name}_embeddings.weight", (rows, width)
        yield from _weight_and_bias("embeddings.LayerNorm", (width,), width)
        for layer in range(self.num_layers):
            block = f"encoder.layer.{layer}"
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                yield from _weight_and_bias(f"{block}.attention.{name}", (width, width), width)
            yield from _weight_and_bias(f"{block}.attention.output.LayerNorm", (width,), width)
            yield from _weight_and_bias(f"{block}.intermediate.dense", (4 * width, width), 4 * width)
            yield from _weight_and_bias(f"{block}.output.dense", (width, 4 * width), width)
            yield from _weight_and_bias(f"{block}.output.LayerNorm", (width,), width)
        yield from _weight_and_bias("pooler.dense", (width, width), width)


@dataclass(frozen=True)
class Vit:
    """Vision transformer as in torchvision, for 1,000 classes and images of 224 x 224."""

    num_layers: int
    hidden_size: int
    patch_size: int = 16

    def named_shapes(self) -> NamedShapes:
        width = self.hidden_size
        yield "class_token", (1, 1, width)
        yield from _weight_and_bias("conv_proj", (width, 3, self.patch_size, self.patch_size), width)
        yield "encoder.pos_embedding", (1, (224 // self.patch_size) ** 2 + 1, width)
        for layer in range(self.num_layers):
            block = f"encoder.layers.{layer}"
            yield from _weight_and_bias(f"{block}.ln_1", (width,), width)
            yield f"{block}.self_attention.in_proj_weight", (3 * width, width)
            yield f"{block}.self_attention.in_proj_bias", (3 * width,)
            yield from _weight_and_bias(f"{block}.self_attention.out_proj", (width, width), width)
            yield from _weight_and_bias(f"{block}.ln_2", (width,), width)
            yield from _weight_and_bias(f"{block}.mlp.0", (4 * width, width), 4 * width)
            yield from _weight_and_bias(f"{block}.mlp.3", (width, 4 * width), width)
        yield from _weight_and_bias("encoder.ln", (width,), width)
        yield from _weight_and_bias("heads.head", (1000, width), 1000)


PRESETS: dict[str, ModelFamily] = {
    "gpt2": Gpt2(12, 768),
    "gpt2-medium": Gpt2(24, 1024),
    "gpt2-large": Gpt2(36, 1280),
    "gpt2-xl": Gpt2(48, 1600),
    "llama-2-7b": Llama(32, 4096, 11008, 32000, kv_size=4096),
    "llama-2-13b": Llama(40, 5120, 13824, 32000, kv_size=5120),
    "llama-2-70b": Llama(80, 8192, 28672, 32000, kv_size=1024),
    "llama-3-8b": Llama(32, 4096, 14336, 128256, kv_size=1024),
    "llama-3-70b": Llama(80, 8192, 28672, 128256, kv_size=1024),
    "llama-3.1-405b": Llama(126, 16384, 53248, 128256, kv_size=1024),
    "mistral-7b": Llama(32, 4096, 14336, 32000, kv_size=1024),
    "mixtral-8x7b": Llama(32, 4096, 14336, 32000, kv_size=1024, num_experts=8),
    "qwen2.5-7b": Llama(28, 3584, 18944, 152064, kv_size=512, has_qkv_bias=True),
    "bert-base": Bert(12, 768),
    "bert-large": Bert(24, 1024),
    "vit-b-16": Vit(12, 768),
    "vit-l-16": Vit(24, 1024),
}


def load_preset(name: str) -> ModelShape:
    """Return a preset in float32. Raises KeyError for a name that is not in `PRESETS`."""
    return ModelShape(name, tuple(ParamShape(label, shape) for label, shape in PRESETS[name].named_shapes()))


def _weight_and_bias(name: str, shape: tuple[int, ...], bias_size: int) -> NamedShapes:
    yield f"{name}.weight", shape
    yield f"{name}.bias", (bias_size,)


# ---------------------------------------------------------------------------------------------------------------------
# safetensors: only headers are read, and all their values are validated.


_MAX_HEADER_BYTES = 100 * 10**6
"""Limit of a header, as in the format's specification, and of an index."""
_MODEL_PREFIX, _STATE_PREFIX = "model.", "optim.state."
"""Key prefixes in files of `zeroshard checkpoint convert`, which also hold optimizer state."""
_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def read_safetensors(path: Path) -> ModelShape:
    """Read the shapes of one `.safetensors` file. Integer tensors cannot train and count as buffers."""
    return _make_model_shape(path, path.stem, _read_tensor_shapes(path))


def read_safetensors_index(path: Path) -> ModelShape:
    """Read the shapes of all files that a `model.safetensors.index.json` lists. They must lie next to it."""
    if path.stat().st_size > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} has {path.stat().st_size:,} bytes: expected an index of {_MAX_HEADER_BYTES:,} at most"
        )
    weight_map = _parse_json_object(path, path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no 'weight_map' of names to files: expected an index of safetensors")
    files = {name: _resolve_weight_file(path, file) for name, file in weight_map.items()}
    shapes = {
        file: {param.name: param for param in _read_tensor_shapes(file)} for file in dict.fromkeys(files.values())
    }
    missing = [name for name, file in files.items() if name not in shapes[file]]
    if missing:
        raise CheckpointError(
            f"{path} says that {_short_repr(missing[0])} is in {files[missing[0]].name}, which has none"
        )
    return _make_model_shape(path, path.parent.resolve().name, [shapes[file][name] for name, file in files.items()])


def _resolve_weight_file(index: Path, file: Any) -> Path:
    if not isinstance(file, str) or not file.isprintable() or file != Path(file).name:
        raise CheckpointError(f"{index} names a file {_short_repr(file)}: expected the plain name of one next to it")
    if not (index.parent / file).is_file():
        raise CheckpointError(
            f"{index} names {_short_repr(file)}, which is not next to it. Download all files of the model."
        )
    return index.parent / file


def _make_model_shape(path: Path, name: str, tensors: Iterable[ParamShape]) -> ModelShape:
    shapes = list(tensors)
    trainable = [shape for shape in shapes if shape.dtype.is_floating_point or shape.dtype.is_complex]
    if not trainable:
        raise CheckpointError(f"{path} holds no tensor of floating-point numbers: there is nothing to train")
    return ModelShape(
        name, tuple(trainable), sum(shape.nbytes for shape in shapes) - sum(shape.nbytes for shape in trainable)
    )


def _read_tensor_shapes(path: Path) -> list[ParamShape]:
    header, data_nbytes = _read_header(path)
    header.pop("__metadata__", None)
    if not header:
        raise CheckpointError(f"{path} holds no tensors")
    shapes = [_parse_tensor_entry(path, name, entry, data_nbytes) for name, entry in header.items()]
    if not any(shape.name.startswith(_STATE_PREFIX) for shape in shapes):
        return shapes
    return [
        replace(shape, name=shape.name.removeprefix(_MODEL_PREFIX))
        for shape in shapes
        if shape.name.startswith(_MODEL_PREFIX)
    ]


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the number of bytes that follow it."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path} is no file of safetensors: its first 8 bytes claim a header of {length:,} bytes, expected 2 "
                f"to {max(2, min(size - 8, _MAX_HEADER_BYTES)):,} in a file of {size:,}"
            )
        return _parse_json_object(path, stream.read(length)), size - 8 - length


def _parse_json_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has no JSON where it should have: {_error_reason(error)}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} has a JSON {type(parsed).__name__} where names of tensors are expected")
    return parsed


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name occurs twice")
    return unique


def _parse_tensor_entry(path: Path, name: str, entry: Any, data_nbytes: int) -> ParamShape:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, span = (fields.get(key, "nothing") for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"{path}: {_short_repr(name)} has the dtype {_short_repr(dtype)}: expected one of "
            f"{', '.join(_SAFETENSORS_DTYPES)}"
        )
    if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
        raise CheckpointError(
            f"{path}: {_short_repr(name)} has no shape, or no place in the file, that is made of numbers"
        )
    tensor = ParamShape(name, tuple(shape), _SAFETENSORS_DTYPES[dtype])
    if not span[0] <= span[1] <= data_nbytes or prod(tensor.shape) * tensor.dtype.itemsize != span[1] - span[0]:
        raise CheckpointError(
            f"{path}: {_short_repr(name)} of shape {_short_repr(shape)} and dtype {dtype} is said to lie at "
            f"{_short_repr(span)} of "
            f"the {data_nbytes:,} bytes that there are, where it does not fit. Download the file again."
        )
    return tensor


def _are_sizes(values: Any) -> bool:
    """Return whether the values are valid sizes. Bounded, so that their product cannot become huge."""
    return (
        isinstance(values, list)
        and len(values) <= 64
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )


def _short_repr(value: Any) -> str:
    text = repr(value)[:80] if isinstance(value, (str, int, float, type(None))) else f"{type(value).__name__}"
    if isinstance(value, list) and len(value) <= 8:
        text = "[" + ", ".join(map(_short_repr, value)) + "]"
    return text[:200]


def _error_reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:200]


# ---------------------------------------------------------------------------------------------------------------------
# Sources: code, a configuration, weight files, a preset, a number.


_INDEX_FILE = "model.safetensors.index.json"
_PARAM_COUNT_PATTERN = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)([KMBT]?)", re.IGNORECASE)
_COUNT_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUM_MATRICES = 100
_MAX_NUMEL = 10**16


def load_model_shape(source: str) -> ModelShape:
    """Load the model shape that `source` names.

    - `package.module:callable` or `file.py:callable`: called without arguments under the meta device, returns a module
    - a Transformers `config.json`, or a directory with one (needs the package transformers)
    - a `.safetensors` file, or a `model.safetensors.index.json`
    - one of `PRESETS`, such as "gpt2-xl"
    - a number of parameters, such as "7.5B", divided into 100 equal matrices
    """
    if match := _PARAM_COUNT_PATTERN.fullmatch(source):
        return _shape_from_count(source, int(Decimal(match[1]) * _COUNT_SUFFIXES[match[2].upper()]))
    if source.lower() in PRESETS:
        return load_preset(source.lower())
    path = Path(source)
    if path.exists():
        return _shape_from_path(path)
    if ":" in source:
        return _shape_from_code(source)
    close = get_close_matches(source.lower(), PRESETS, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ConfigError(
        f"{source!r} names no model{hint}: expected package.module:callable, file.py:callable, a config.json, a "
        f".safetensors file, a number such as 7.5B, or one of {', '.join(PRESETS)}"
    )


def freeze_params(model: ModelShape, patterns: Sequence[str]) -> ModelShape:
    """Return the model with all parameters frozen that match a pattern such as `embed*`, or lie below a match."""
    for pattern in patterns:
        if not any(_matches_pattern(param.name, pattern) for param in model.params):
            raise ConfigError(
                f"no parameter of {model.name} is named {pattern!r}: the first is {model.params[0].name!r}"
            )
    frozen = [
        replace(param, trainable=False) if any(_matches_pattern(param.name, pattern) for pattern in patterns) else param
        for param in model.params
    ]
    return replace(model, params=tuple(frozen))


def _matches_pattern(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _shape_from_count(name: str, numel: int) -> ModelShape:
    if not _NUM_MATRICES <= numel <= _MAX_NUMEL:
        raise ConfigError(f"{name} parameters cannot be planned: expected {_NUM_MATRICES} to {_MAX_NUMEL:.0e}")
    matrix_numel, remainder = divmod(numel, _NUM_MATRICES)
    rows = next(size for size in range(isqrt(matrix_numel), 0, -1) if matrix_numel % size == 0)
    params = [ParamShape(f"blocks.{index}.weight", (matrix_numel // rows, rows)) for index in range(_NUM_MATRICES)]
    return ModelShape(name, tuple(params + [ParamShape("rest", (remainder,))] * bool(remainder)))


# ---- files


def _shape_from_path(path: Path) -> ModelShape:
    if path.is_dir():
        candidates = [
            path / name for name in ("config.json", _INDEX_FILE, "model.safetensors") if (path / name).is_file()
        ]
        if not candidates:
            raise ConfigError(f"{path} has no config.json and no model.safetensors: expected the directory of a model")
        return _shape_from_path(candidates[0])
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    if path.name.endswith(".index.json"):
        return read_safetensors_index(path)
    if path.suffix == ".json":
        return _shape_from_transformers(path)
    raise ConfigError(
        f"{path} is no source of shapes: expected a config.json, a .safetensors file or an index of those"
        + (f", or with what is to be called {path}:callable" if path.suffix == ".py" else "")
    )


def _shape_from_transformers(path: Path) -> ModelShape:
    """Build the model of a configuration on the meta device. Code that comes with the configuration is not run."""
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"{path} is read by the package transformers, which cannot be imported: {error}. Try: "
            "pip install transformers"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            module = _build_transformers_model(transformers, config)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{path} describes no model that transformers can make: {reason}") from error
    return ModelShape.from_module(module, path.parent.resolve().name)


def _build_transformers_model(transformers: Any, config: Any) -> Any:
    # A configuration may request an attention kernel, which would be fetched and run. It does not change parameters.
    options: dict[str, Any] = {"attn_implementation": "eager"}
    if model_class := _find_architecture_class(transformers, config):
        return model_class._from_config(config, **options)
    # Some encoder-decoder models have a class for the decoder alone, which AutoModelForCausalLM would build.
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    auto_class = transformers.AutoModelForSeq2SeqLM if is_encoder_decoder else transformers.AutoModelForCausalLM
    options["trust_remote_code"] = False  # by default it asks in the terminal whether to run remote code
    try:
        return auto_class.from_config(config, **options)
    except ValueError:  # not a language model
        return transformers.AutoModel.from_config(config, **options)


def _find_architecture_class(transformers: Any, config: Any) -> Any:
    """Return the class that the configuration names, if it is a transformers model for such a configuration."""
    names = getattr(config, "architectures", None) or [None]
    model_class: Any = getattr(transformers, str(names[0]), None)
    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    return model_class if is_model and isinstance(config, model_class.config_class or ()) else None


# ---- code


def _shape_from_code(source: str) -> ModelShape:
    model_fn = import_object(source, "a callable that returns a torch.nn.Module")
    if not callable(model_fn):
        raise ConfigError(
            f"{source} is a {type(model_fn).__name__}: expected a callable that returns a torch.nn.Module"
        )
    with script_environment(source), torch.device("meta"):
        model = _call_model_fn(source, model_fn)
    if isinstance(model, ModelShape):
        return model
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{source}() returned a {type(model).__name__}: expected a torch.nn.Module")
    return ModelShape.from_module(model, source.rpartition(":")[2])


def _call_model_fn(source: str, model_fn: Any) -> Any:
    try:
        return model_fn()
    except USER_CODE_ERRORS as error:
        raise ConfigError(
            f"{source}() failed on the meta device, without arguments: {describe_error(error)}. "
            "Give a function that takes none and only makes the model."
        ) from error
