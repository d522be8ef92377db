"""Shapes planned from a Transformers configuration, compared with the model that Transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import dynamic_module_utils

from zeroshard import ConfigError
from zeroshard.planner.shapes import ModelShape, load_model_shape

WIDTH = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
DECODER = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
ENCODER = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
    "GPT2Model": ("GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
    "LlamaForCausalLM": ("LlamaConfig", {**WIDTH, "dtype": torch.bfloat16}),
    "LlamaForSequenceClassification": ("LlamaConfig", {**WIDTH, "num_labels": 7, "dtype": torch.float16}),
    "BertForSequenceClassification": ("BertConfig", {**WIDTH, "num_labels": 5}),
    "BertForPreTraining": ("BertConfig", WIDTH),
    "T5ForConditionalGeneration": ("T5Config", {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}),
    "T5EncoderModel": ("T5Config", {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}),
    "BartForConditionalGeneration": ("BartConfig", {**ENCODER, **DECODER}),
    "ViTModel": ("ViTConfig", {**WIDTH, "image_size": 16, "patch_size": 4}),
}
LANGUAGE_MODELS = (
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
)
DEFAULT_MODELS = (*LANGUAGE_MODELS, "ViTModel")
"""Models that are planned if a configuration names no usable class."""


def save_model(directory: Path, name: str) -> Any:
    """Save a model of this class and return it as it is loaded, in the dtype of its configuration."""
    config_class, sizes = MODELS[name]
    config = getattr(transformers, config_class)(vocab_size=32, **sizes)
    model = getattr(transformers, name)(config)
    if config.dtype:
        model.to(config.dtype)
    model.save_pretrained(directory)
    return getattr(transformers, name).from_pretrained(directory)


def edit_config(directory: Path, **changes: Any) -> None:
    """Change entries of the saved configuration; `None` removes an entry."""
    path = directory / "config.json"
    entries = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in entries.items() if value is not None}))


def assert_planned_shape_matches(directory: Path, model: nn.Module) -> None:
    found = load_model_shape(str(directory))
    assert [(param.name, param.shape, param.dtype, param.trainable) for param in found.params] == [
        (name, tuple(param.shape), param.dtype, param.requires_grad) for name, param in model.named_parameters()
    ]
    assert found == ModelShape.from_module(model, directory.name), "buffers differ"


@pytest.mark.parametrize("name", MODELS)
def test_config_is_planned_as_the_class_it_names(tmp_path: Path, name: str) -> None:
    assert_planned_shape_matches(tmp_path, save_model(tmp_path, name))


@pytest.mark.parametrize(
    "architectures", [None, [], ["NoSuchModel"], ["Trainer"], ["BertForMaskedLM"], ["PreTrainedModel"]]
)
@pytest.mark.parametrize("name", DEFAULT_MODELS)
def test_config_without_a_usable_class(tmp_path: Path, name: str, architectures: list[str] | None) -> None:
    """It is planned as a generative model, with an encoder if the model has one, otherwise as the base model."""
    model = save_model(tmp_path, name)
    edit_config(tmp_path, architectures=architectures)
    assert_planned_shape_matches(tmp_path, model)


@pytest.mark.parametrize("kernel", ["flash_attention_2", "somebody/attention", "kernels-community/flash-attn"])
def test_kernel_requested_by_a_config_is_not_fetched(tmp_path: Path, kernel: str) -> None:
    model = save_model(tmp_path, "LlamaForCausalLM")
    edit_config(tmp_path, attn_implementation=kernel)
    assert_planned_shape_matches(tmp_path, model)


# ---- code that is saved with a model


@pytest.fixture
def code_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that exists once code next to a configuration has run, or the user was asked whether it may run."""
    marker = tmp_path / "marker"

    def answer_yes(*_: Any) -> str:
        marker.touch()
        return "yes"

    (tmp_path / "modeling_trap.py").write_text(
        "from pathlib import Path\n"
        "from transformers import ViTConfig, ViTModel\n"
        f"Path({str(marker)!r}).touch()\n"
        "class Config(ViTConfig):\n"
        "    model_type = 'trap'\n"
        "class Model(ViTModel):\n"
        "    config_class = Config\n"
    )
    monkeypatch.setattr("builtins.input", answer_yes)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    return marker


AUTO_CLASSES = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
AUTO_MAP = dict.fromkeys(AUTO_CLASSES, "modeling_trap.Model") | {"AutoConfig": "modeling_trap.Config"}


@pytest.mark.parametrize("architectures", [None, ["Model"]])
@pytest.mark.parametrize("name", DEFAULT_MODELS)
def test_code_next_to_a_known_model_is_not_run(
    tmp_path: Path, code_marker: Path, name: str, architectures: Any
) -> None:
    model = save_model(tmp_path, name)
    edit_config(tmp_path, architectures=architectures, auto_map=AUTO_MAP)
    assert_planned_shape_matches(tmp_path, model)
    assert not code_marker.exists()


def test_code_of_an_unknown_model_is_not_run(tmp_path: Path, code_marker: Path) -> None:
    save_model(tmp_path, "ViTModel")
    edit_config(tmp_path, model_type="trap", architectures=["Model"], auto_map=AUTO_MAP)
    with pytest.raises(ConfigError, match="transformers cannot build the model"):
        load_model_shape(str(tmp_path))
    assert not code_marker.exists()
    transformers.AutoConfig.from_pretrained(str(tmp_path), trust_remote_code=True)
    assert code_marker.exists(), "trusted code must run, or this test cannot fail"
