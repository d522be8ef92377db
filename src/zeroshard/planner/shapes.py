"""Model shapes for the planner: names, shapes and dtypes of parameters, without weights.

`load_model_shape` reads them from user code, a Transformers config, safetensors headers, a preset or a number of
parameters. It allocates nothing. Files are untrusted: only headers are read, and every value is validated.
"""

import json
import math
import os
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property, partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, ConfigError

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
            raise ConfigError(f"{self.name} has no floating-point parameters: there is nothing to train")

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

    def freeze(self, patterns: Sequence[str]) -> "ModelShape":
        """Return the model with the parameters frozen that match a pattern such as `embed*`, or lie below a match."""

        def matches(param: ParamShape, pattern: str) -> bool:
            return fnmatchcase(param.name, pattern) or fnmatchcase(param.name, f"{pattern}.*")

        for pattern in patterns:
            if not any(matches(param, pattern) for param in self.params):
                raise ConfigError(f"{self.name} has no parameter {pattern!r}: the first is {self.params[0].name!r}")
        frozen = [
            replace(param, trainable=param.trainable and not any(matches(param, pattern) for pattern in patterns))
            for param in self.params
        ]
        return replace(self, params=tuple(frozen))

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


# ---------------------------------------------------------------------------------------------------------------------
# User code: `package.module:name` and `file.py:name`, run like a script in its directory.


_LIBRARY_PREFIXES = tuple(str(Path(str(file)).parent) + os.sep for file in (torch.__file__, os.__file__, __file__))
"""Directories of code that is not the user's: torch's, Python's and ours."""
USER_CODE_ERRORS = (Exception, SystemExit)
"""What user code may raise, including `sys.exit()` in a script."""


def _describe_error(error: BaseException) -> str:
    """Return the error, with the last line of user code in its traceback if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith((*_LIBRARY_PREFIXES, "<"))]
    where = f" ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno})" if user_frames else ""
    return f"{type(error).__name__}: {error}{where}"


def import_object(source: str, expected: str) -> Any:
    """Import `package.module:name` or `file.py:name`. `expected` describes it in error messages."""
    location, _, name = source.rpartition(":")
    if location.endswith(".py") and not Path(location).is_file():
        raise ConfigError(f"there is no file {location}: expected file.py:name or package.module:name")
    try:
        with _script_environment(location):
            target = _import_file(location) if location.endswith(".py") else import_module(location)
    except USER_CODE_ERRORS as error:
        raise ConfigError(f"failed to import {location}: {_describe_error(error)}") from error
    for attribute in name.split("."):
        if not hasattr(target, attribute):
            raise ConfigError(f"{location} has no {name!r}: expected {expected}")
        target = getattr(target, attribute)
    return target


@contextmanager
def _script_environment(location: str) -> Iterator[None]:
    """Run user code as a script: extend `sys.path` by its directory and the current one, and hide our `sys.argv`."""
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


def _import_file(path: str) -> Any:
    """Import a file under a unique module name, registered in `sys.modules` so that its classes find their module."""
    name = f"zeroshard_plans_{Path(path).stem}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _shape_from_code(source: str) -> ModelShape:
    build_model = import_object(source, "a callable that returns a torch.nn.Module")
    if not callable(build_model):
        raise ConfigError(
            f"{source} is of type {type(build_model).__name__}: expected a callable that returns a torch.nn.Module"
        )
    location, _, name = source.rpartition(":")
    try:
        with _script_environment(location), torch.device("meta"):
            model = build_model()
    except USER_CODE_ERRORS as error:
        raise ConfigError(
            f"{source}() failed, called without arguments on the meta device: {_describe_error(error)}. Name a "
            "function that needs no arguments and only builds the model."
        ) from error
    if isinstance(model, ModelShape):
        return model
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{source}() returned a {type(model).__name__}: expected a torch.nn.Module")
    return ModelShape.from_module(model, name)


# ---------------------------------------------------------------------------------------------------------------------
# Presets: well-known models, with the shapes and names of their published weights.


NamedShapes = Iterator[tuple[str, tuple[int, ...]]]


def _weights_and_biases(prefix: str, shapes: dict[str, tuple[int, ...]], bias_dim: int = 0) -> NamedShapes:
    for name, shape in shapes.items():
        yield f"{prefix}{name}.weight", shape
        yield f"{prefix}{name}.bias", (shape[bias_dim],)


def _gpt2(layers: int, width: int) -> NamedShapes:
    """GPT-2. The head is tied to the embedding."""
    yield "transformer.wte.weight", (50257, width)
    yield "transformer.wpe.weight", (1024, width)
    attention = {"ln_1": (width,), "attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
    mlp = {"ln_2": (width,), "mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}
    for layer in range(layers):
        yield from _weights_and_biases(f"transformer.h.{layer}.", {**attention, **mlp}, bias_dim=-1)
    yield from _weights_and_biases("transformer.", {"ln_f": (width,)})


def _llama(
    layers: int, width: int, mlp_width: int, vocab: int, kv_width: int, *, qkv_bias: bool = False, experts: int = 0
) -> NamedShapes:
    """Llama, Mistral, Mixtral and Qwen, with grouped-query attention. `kv_width`: total width of all key heads."""
    mlps = [(f"block_sparse_moe.experts.{expert}", ("w1", "w3", "w2")) for expert in range(experts)]
    yield "model.embed_tokens.weight", (vocab, width)
    for block in (f"model.layers.{layer}" for layer in range(layers)):
        for name, rows in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)):
            yield f"{block}.self_attn.{name}.weight", (rows, width)
            if qkv_bias:
                yield f"{block}.self_attn.{name}.bias", (rows,)
        yield f"{block}.self_attn.o_proj.weight", (width, width)
        if experts:
            yield f"{block}.block_sparse_moe.gate.weight", (experts, width)
        for mlp, (gate, up, down) in mlps or [("mlp", ("gate_proj", "up_proj", "down_proj"))]:
            yield f"{block}.{mlp}.{gate}.weight", (mlp_width, width)
            yield f"{block}.{mlp}.{up}.weight", (mlp_width, width)
            yield f"{block}.{mlp}.{down}.weight", (width, mlp_width)
        yield f"{block}.input_layernorm.weight", (width,)
        yield f"{block}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (vocab, width)


def _bert(layers: int, width: int) -> NamedShapes:
    """The BERT encoder with its pooler, without a head."""
    for name, rows in (("word", 30522), ("position", 512), ("token_type", 2)):
        yield f"embeddings.{name}_embeddings.weight", (rows, width)
    yield from _weights_and_biases("embeddings.", {"LayerNorm": (width,)})
    attention = dict.fromkeys(("self.query", "self.key", "self.value", "output.dense"), (width, width))
    mlp = {"intermediate.dense": (4 * width, width), "output.dense": (width, 4 * width), "output.LayerNorm": (width,)}
    for layer in range(layers):
        block = f"encoder.layer.{layer}."
        yield from _weights_and_biases(f"{block}attention.", {**attention, "output.LayerNorm": (width,)})
        yield from _weights_and_biases(block, mlp)
    yield from _weights_and_biases("pooler.", {"dense": (width, width)})


def _vit(layers: int, width: int) -> NamedShapes:
    """Vision transformer as in torchvision, for 1,000 classes, images of 224 x 224 and patches of 16 x 16."""
    yield "class_token", (1, 1, width)
    yield from _weights_and_biases("", {"conv_proj": (width, 3, 16, 16)})
    yield "encoder.pos_embedding", (1, (224 // 16) ** 2 + 1, width)
    mlp = {"ln_2": (width,), "mlp.0": (4 * width, width), "mlp.3": (width, 4 * width)}
    for layer in range(layers):
        block = f"encoder.layers.{layer}."
        yield f"{block}self_attention.in_proj_weight", (3 * width, width)
        yield f"{block}self_attention.in_proj_bias", (3 * width,)
        yield from _weights_and_biases(block, {"ln_1": (width,), "self_attention.out_proj": (width, width), **mlp})
    yield from _weights_and_biases("", {"encoder.ln": (width,), "heads.head": (1000, width)})


PRESETS: dict[str, Callable[[], NamedShapes]] = {
    "gpt2": partial(_gpt2, 12, 768),
    "gpt2-medium": partial(_gpt2, 24, 1024),
    "gpt2-large": partial(_gpt2, 36, 1280),
    "gpt2-xl": partial(_gpt2, 48, 1600),
    "llama-2-7b": partial(_llama, 32, 4096, 11008, 32000, 4096),
    "llama-2-13b": partial(_llama, 40, 5120, 13824, 32000, 5120),
    "llama-2-70b": partial(_llama, 80, 8192, 28672, 32000, 1024),
    "llama-3-8b": partial(_llama, 32, 4096, 14336, 128256, 1024),
    "llama-3-70b": partial(_llama, 80, 8192, 28672, 128256, 1024),
    "llama-3.1-405b": partial(_llama, 126, 16384, 53248, 128256, 1024),
    "mistral-7b": partial(_llama, 32, 4096, 14336, 32000, 1024),
    "mixtral-8x7b": partial(_llama, 32, 4096, 14336, 32000, 1024, experts=8),
    "qwen2.5-7b": partial(_llama, 28, 3584, 18944, 152064, 512, qkv_bias=True),
    "bert-base": partial(_bert, 12, 768),
    "bert-large": partial(_bert, 24, 1024),
    "vit-b-16": partial(_vit, 12, 768),
    "vit-l-16": partial(_vit, 24, 1024),
}


# ---------------------------------------------------------------------------------------------------------------------
# safetensors: only headers are read, and all their values are validated.


_MAX_HEADER_BYTES = 100 * 10**6
"""Limit of a header, as in the format's specification, and of an index."""
SAFETENSORS_DTYPES = {
    f"{letter}{bits}": getattr(torch, f"{kind}{bits}")
    for letter, kind, sizes in (
        ("F", "float", (16, 32, 64)),
        ("I", "int", (8, 16, 32, 64)),
        ("U", "uint", (8, 16, 32, 64)),
    )
    for bits in sizes
} | {"BF16": torch.bfloat16, "BOOL": torch.bool, "C64": torch.complex64}
SAFETENSORS_DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def read_safetensors(path: Path) -> ModelShape:
    """Read the shapes of one `.safetensors` file. Integer tensors cannot train and count as buffers."""
    return _make_model_shape(path, path.stem, _read_tensor_shapes(path))


def _read_safetensors_index(path: Path) -> ModelShape:
    """Read the shapes of all files that a `model.safetensors.index.json` lists. They must lie next to it."""
    if path.stat().st_size > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes: expected at most {_MAX_HEADER_BYTES:,}")
    weight_map = _parse_json_object(path, path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no 'weight_map': expected an index of safetensors files")
    shapes: dict[str, dict[str, ParamShape]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.isprintable() or file != Path(file).name:
            raise CheckpointError(f"{path} lists a file {_short_repr(file)}: expected a plain file name")
        if not (path.parent / file).is_file():
            raise CheckpointError(f"{path} lists {_short_repr(file)}, which is not next to it. Download all files.")
        if file not in shapes:
            shapes[file] = {param.name: param for param in _read_tensor_shapes(path.parent / file)}
        if name not in shapes[file]:
            raise CheckpointError(f"{path} lists {_short_repr(name)} in {file}, but that file does not contain it")
    return _make_model_shape(
        path, path.parent.resolve().name, [shapes[file][name] for name, file in weight_map.items()]
    )


def _make_model_shape(path: Path, name: str, tensors: Sequence[ParamShape]) -> ModelShape:
    trainable = tuple(tensor for tensor in tensors if tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    if not trainable:
        raise CheckpointError(f"{path} has no floating-point tensors: there is nothing to train")
    buffer_bytes = sum(tensor.nbytes for tensor in tensors) - sum(tensor.nbytes for tensor in trainable)
    return ModelShape(name, trainable, buffer_bytes)


def _read_tensor_shapes(path: Path) -> list[ParamShape]:
    """Return all tensors of a file, without the optimizer state that `zeroshard checkpoint convert` may write."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length, longest = int.from_bytes(prefix, "little"), min(size - 8, _MAX_HEADER_BYTES)
        if len(prefix) < 8 or not 2 <= length <= longest:
            raise CheckpointError(
                f"{path} is not a safetensors file: its first 8 bytes announce a header of {length:,} bytes, expected "
                f"2 to {max(2, longest):,} in a file of {size:,}"
            )
        header = _parse_json_object(path, stream.read(length))
    header.pop("__metadata__", None)
    if not header:
        raise CheckpointError(f"{path} contains no tensors")
    shapes = [_parse_tensor_entry(path, name, entry, size - 8 - length) for name, entry in header.items()]
    if not any(shape.name.startswith("optim.state.") for shape in shapes):
        return shapes
    return [replace(shape, name=shape.name[6:]) for shape in shapes if shape.name.startswith("model.")]


def _parse_json_object(path: Path, text: bytes) -> dict[str, Any]:
    def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        reason = (str(error) or type(error).__name__)[:200]
        raise CheckpointError(f"{path} contains invalid JSON: {reason}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} contains a JSON {type(parsed).__name__}: expected an object of tensor names")
    return parsed


def _parse_tensor_entry(path: Path, name: str, entry: Any, data_nbytes: int) -> ParamShape:
    keys = ("dtype", "shape", "data_offsets")
    fields: list[Any] = [entry.get(key) if isinstance(entry, dict) else None for key in keys]
    dtype, shape, span = fields
    label = f"{path}: {_short_repr(name)} has"
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"{label} dtype {_short_repr(dtype)}: expected one of {', '.join(SAFETENSORS_DTYPES)}")
    if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
        raise CheckpointError(f"{label} an invalid shape or invalid data_offsets: expected lists of sizes")
    tensor = ParamShape(name, tuple(shape), SAFETENSORS_DTYPES[dtype])
    if not span[0] <= span[1] <= data_nbytes or tensor.nbytes != span[1] - span[0]:
        raise CheckpointError(
            f"{label} shape {_short_repr(shape)}, dtype {dtype} and data_offsets {_short_repr(span)} in a file with "
            f"{data_nbytes:,} bytes of data, which is inconsistent. Download the file again."
        )
    return tensor


def _are_sizes(values: Any) -> bool:
    """Return whether the values are valid sizes. Bounded, so that their product cannot become huge."""
    is_short_list = isinstance(values, list) and len(values) <= 64
    return is_short_list and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _short_repr(value: Any) -> str:
    if isinstance(value, list) and len(value) <= 8:
        return f"[{', '.join(map(_short_repr, value))}]"[:200]
    return repr(value)[:80] if isinstance(value, (str, int, float, type(None))) else type(value).__name__


# ---------------------------------------------------------------------------------------------------------------------
# Sources: a number, a preset, files, code.


_PARAM_COUNT_PATTERN = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)([KMBT]?)", re.IGNORECASE)
_COUNT_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUM_MATRICES = 100
_MAX_NUMEL = 10**16


def load_model_shape(source: str) -> ModelShape:
    """Load the model shape that `source` names.

    - `package.module:callable` or `file.py:callable`: called without arguments under the meta device, returns a module
    - a Transformers `config.json`, or a directory with one (needs the package transformers)
    - a `.safetensors` file, or a `model.safetensors.index.json`
    - one of `PRESETS`, such as "gpt2-xl", in float32
    - a number of parameters, such as "7.5B", divided into 100 equal matrices
    """
    if match := _PARAM_COUNT_PATTERN.fullmatch(source):
        return _shape_from_count(source, round(float(match[1]) * _COUNT_SUFFIXES[match[2].upper()]))
    if (name := source.lower()) in PRESETS:
        return ModelShape(name, tuple(ParamShape(label, shape) for label, shape in PRESETS[name]()))
    if Path(source).exists():
        return _shape_from_path(Path(source))
    if ":" in source:
        return _shape_from_code(source)
    close = get_close_matches(name, PRESETS, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ConfigError(
        f"unknown model {source!r}{hint}: expected package.module:callable, file.py:callable, a config.json, a "
        f".safetensors file, a number such as 7.5B, or one of {', '.join(PRESETS)}"
    )


def _shape_from_count(name: str, numel: int) -> ModelShape:
    if not _NUM_MATRICES <= numel <= _MAX_NUMEL:
        raise ConfigError(f"cannot plan {name} parameters: expected {_NUM_MATRICES} to {_MAX_NUMEL:.0e}")
    matrix_numel, remainder = divmod(numel, _NUM_MATRICES)
    rows = next(size for size in range(math.isqrt(matrix_numel), 0, -1) if matrix_numel % size == 0)
    params = [ParamShape(f"blocks.{index}.weight", (matrix_numel // rows, rows)) for index in range(_NUM_MATRICES)]
    return ModelShape(name, tuple(params + [ParamShape("rest", (remainder,))] * bool(remainder)))


def _shape_from_path(path: Path) -> ModelShape:
    if path.is_dir():
        files = ("config.json", "model.safetensors.index.json", "model.safetensors")
        found = [path / file for file in files if (path / file).is_file()]
        if not found:
            raise ConfigError(f"{path} has no config.json and no model.safetensors: expected the directory of a model")
        return _shape_from_path(found[0])
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    if path.name.endswith(".index.json"):
        return _read_safetensors_index(path)
    if path.suffix == ".json":
        return _shape_from_transformers(path)
    hint = f", or {path}:callable" if path.suffix == ".py" else ""
    raise ConfigError(f"cannot read shapes from {path}: expected a config.json, a .safetensors file or its index{hint}")


def _shape_from_transformers(path: Path) -> ModelShape:
    """Build the model of a configuration on the meta device. Code that comes with the configuration is not run."""
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"{path} needs the package transformers. Run: pip install transformers") from error
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            module = _build_transformers_model(transformers, config)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"transformers cannot build the model of {path}: {reason}") from error
    return ModelShape.from_module(module, path.parent.resolve().name)


def _build_transformers_model(transformers: Any, config: Any) -> Any:
    """Build the class that the configuration names, else a language model, else the bare model."""
    # A configuration may request an attention kernel, which would be fetched and run. It does not change parameters.
    options: dict[str, Any] = {"attn_implementation": "eager"}
    named: Any = getattr(transformers, str((getattr(config, "architectures", None) or [None])[0]), None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        model_class: Any = named
        if isinstance(config, model_class.config_class or ()):
            return model_class._from_config(config, **options)
    # Some encoder-decoder models have a class for the decoder alone, which AutoModelForCausalLM would build.
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    auto_class = transformers.AutoModelForSeq2SeqLM if is_encoder_decoder else transformers.AutoModelForCausalLM
    options["trust_remote_code"] = False  # by default it asks in the terminal whether to run remote code
    try:
        return auto_class.from_config(config, **options)
    except ValueError:  # not a language model
        return transformers.AutoModel.from_config(config, **options)
