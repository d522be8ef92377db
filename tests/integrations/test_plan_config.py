"""Shapes of what a Transformers configuration describes, beside the model that Transformers itself makes of it."""

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
WRITERS = ("GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration", "BartForConditionalGeneration")
UNNAMED = (*WRITERS, "ViTModel")


def saved(folder: Path, name: str) -> Any:
    """The model of that name, saved there and loaded, in the dtype that its configuration has."""
    kind, sizes = MODELS[name]
    config = getattr(transformers, kind)(vocab_size=32, **sizes)
    model = getattr(transformers, name)(config)
    if config.dtype:
        model.to(config.dtype)
    model.save_pretrained(folder)
    return getattr(transformers, name).from_pretrained(folder)


def change(folder: Path, **changes: Any) -> None:
    """Of the configuration; `None` takes out what is there."""
    path = folder / "config.json"
    given = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in given.items() if value is not None}))


def assert_planned(folder: Path, model: nn.Module) -> None:
    found = load_model_shape(str(folder))
    assert [(it.name, it.shape, it.dtype, it.trainable) for it in found.params] == [
        (name, tuple(it.shape), it.dtype, it.requires_grad) for name, it in model.named_parameters()
    ]
    assert found == ModelShape.from_module(model, folder.name), "and the bytes of buffers"


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_is_planned_as_the_class_that_it_names(tmp_path: Path, name: str) -> None:
    assert_planned(tmp_path, saved(tmp_path, name))


@pytest.mark.parametrize("named", [None, [], ["NoSuchModel"], ["Trainer"], ["BertForMaskedLM"], ["PreTrainedModel"]])
@pytest.mark.parametrize("name", UNNAMED)
def test_a_configuration_without_a_class_of_its_own(tmp_path: Path, name: str, named: list[str] | None) -> None:
    """Is that of a model that writes text, with its encoder if it has one, or else of the bare model."""
    model = saved(tmp_path, name)
    change(tmp_path, architectures=named)
    assert_planned(tmp_path, model)


@pytest.mark.parametrize("kernel", ["flash_attention_2", "somebody/attention", "kernels-community/flash-attn"])
def test_a_kernel_that_a_configuration_asks_for_is_not_fetched(tmp_path: Path, kernel: str) -> None:
    model = saved(tmp_path, "LlamaForCausalLM")
    change(tmp_path, attn_implementation=kernel)
    assert_planned(tmp_path, model)


# ---- code that comes with a model


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there as soon as code next to a configuration runs, or somebody is asked whether it may."""
    sprung = tmp_path / "sprung"

    def asked(*_: Any) -> str:
        sprung.touch()
        return "yes"

    (tmp_path / "modeling_trap.py").write_text(
        "from pathlib import Path\n"
        "from transformers import ViTConfig, ViTModel\n"
        f"Path({str(sprung)!r}).touch()\n"
        "class Config(ViTConfig):\n"
        "    model_type = 'trap'\n"
        "class Model(ViTModel):\n"
        "    config_class = Config\n"
    )
    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    return sprung


KINDS = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
CODE = dict.fromkeys(KINDS, "modeling_trap.Model") | {"AutoConfig": "modeling_trap.Config"}


@pytest.mark.parametrize("named", [None, ["Model"]])
@pytest.mark.parametrize("name", UNNAMED)
def test_code_beside_a_known_model_is_not_run(tmp_path: Path, trap: Path, name: str, named: Any) -> None:
    model = saved(tmp_path, name)
    change(tmp_path, architectures=named, auto_map=CODE)
    assert_planned(tmp_path, model)
    assert not trap.exists()


def test_code_of_an_unknown_model_is_not_run(tmp_path: Path, trap: Path) -> None:
    saved(tmp_path, "ViTModel")
    change(tmp_path, model_type="trap", architectures=["Model"], auto_map=CODE)
    with pytest.raises(ConfigError, match="describes no model that transformers can make"):
        load_model_shape(str(tmp_path))
    assert not trap.exists()
    transformers.AutoConfig.from_pretrained(str(tmp_path), trust_remote_code=True)
    assert trap.exists(), "where it is trusted, it does run"
