"""Where the shapes of a model come from: code, a configuration, files of weights, a well-known name, a number."""

import re
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib import import_module
from math import isqrt
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from .code import USER_CODE_ERRORS, describe_error, import_object, script_environment
from .headers import read_safetensors, read_safetensors_index
from .presets import PRESETS, load_preset
from .shapes import ModelShape, ParamShape

_INDEX_FILE = "model.safetensors.index.json"
_PARAM_COUNT_PATTERN = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)([KMBT]?)", re.IGNORECASE)
_COUNT_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUM_MATRICES = 100
_MAX_NUMEL = 10**16


def load_model_shape(source: str) -> ModelShape:
    """What `source` names.

    - `package.module:callable` or `file.py:callable`, which is called with the meta device as the default one and
      returns a module
    - a Transformers `config.json`, or a directory with one; this needs the package transformers
    - a `.safetensors` file, or a `model.safetensors.index.json`
    - one of `PRESETS`, such as "gpt2-xl"
    - a number of parameters, such as "7.5B": so many, in 100 equal matrices
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
    """With parameters whose names match, as `embed*` does, or lie below such a name, excluded from training."""
    for pattern in patterns:
        if not any(_matches_pattern(it.name, pattern) for it in model.params):
            raise ConfigError(
                f"no parameter of {model.name} is named {pattern!r}: the first is {model.params[0].name!r}"
            )
    frozen = [
        replace(it, trainable=False) if any(_matches_pattern(it.name, pattern) for pattern in patterns) else it
        for it in model.params
    ]
    return replace(model, params=tuple(frozen))


def _matches_pattern(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _shape_from_count(name: str, numel: int) -> ModelShape:
    if not _NUM_MATRICES <= numel <= _MAX_NUMEL:
        raise ConfigError(f"{name} parameters cannot be planned: expected {_NUM_MATRICES} to {_MAX_NUMEL:.0e}")
    each, rest = divmod(numel, _NUM_MATRICES)
    rows = next(it for it in range(isqrt(each), 0, -1) if each % it == 0)
    params = [ParamShape(f"blocks.{number}.weight", (each // rows, rows)) for number in range(_NUM_MATRICES)]
    return ModelShape(name, tuple(params + [ParamShape("rest", (rest,))] * bool(rest)))


# ---- files


def _shape_from_path(path: Path) -> ModelShape:
    if path.is_dir():
        inside = [path / name for name in ("config.json", _INDEX_FILE, "model.safetensors") if (path / name).is_file()]
        if not inside:
            raise ConfigError(f"{path} has no config.json and no model.safetensors: expected the directory of a model")
        return _shape_from_path(inside[0])
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
    """Of the model that a configuration describes, without its weights and without code that comes with it."""
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
    # A configuration may ask for a kernel for attention, which would be fetched and run. Parameters are the same.
    plain: dict[str, Any] = {"attn_implementation": "eager"}
    if kind := _find_architecture_class(transformers, config):
        return kind._from_config(config, **plain)
    # Of an encoder and a decoder some have a class for the decoder alone, which would be taken for all of it.
    both = getattr(config, "is_encoder_decoder", False)
    writer = transformers.AutoModelForSeq2SeqLM if both else transformers.AutoModelForCausalLM
    plain["trust_remote_code"] = False  # left out, the terminal is asked whether to run code that comes with it
    try:
        return writer.from_config(config, **plain)
    except ValueError:  # not one that writes text
        return transformers.AutoModel.from_config(config, **plain)


def _find_architecture_class(transformers: Any, config: Any) -> Any:
    """The class that the configuration names, if it is one of transformers' models for such a configuration."""
    names = getattr(config, "architectures", None) or [None]
    found: Any = getattr(transformers, str(names[0]), None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model and isinstance(config, found.config_class or ()) else None


# ---- code


def _shape_from_code(source: str) -> ModelShape:
    make = import_object(source, "a callable that returns a torch.nn.Module")
    if not callable(make):
        raise ConfigError(f"{source} is a {type(make).__name__}: expected a callable that returns a torch.nn.Module")
    with script_environment(source), torch.device("meta"):
        made = _call_model_fn(source, make)
    if isinstance(made, ModelShape):
        return made
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(f"{source}() returned a {type(made).__name__}: expected a torch.nn.Module")
    return ModelShape.from_module(made, source.rpartition(":")[2])


def _call_model_fn(source: str, model_fn: Any) -> Any:
    try:
        return model_fn()
    except USER_CODE_ERRORS as error:
        raise ConfigError(
            f"{source}() failed on the meta device, without arguments: {describe_error(error)}. "
            "Give a function that takes none and only makes the model."
        ) from error
