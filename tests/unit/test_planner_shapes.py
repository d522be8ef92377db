"""Sources of model shapes: presets, numbers, code, Transformers configs, and safetensors files."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.planner.shapes import PRESETS, ModelShape, load_model_shape

PUBLISHED_NUMEL = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
}


def small_module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))


def shapes_by_name(model: ModelShape) -> dict[str, tuple[int, ...]]:
    return {param.name: param.shape for param in model.params}


# ---- names and numbers


def test_presets_have_published_numel() -> None:
    assert {name: load_model_shape(name).numel for name in PRESETS} == PUBLISHED_NUMEL


def test_presets_have_blocks_and_unique_names() -> None:
    for name in PRESETS:
        model = load_model_shape(name)
        assert len(shapes_by_name(model)) == len(model.params)
        assert 10 <= len(model.blocks) <= 200
    assert len(load_model_shape("gpt2-xl").blocks) == 1 + 48


def test_preset_names_are_case_insensitive() -> None:
    assert load_model_shape("GPT2") == load_model_shape("gpt2")


@pytest.mark.parametrize(
    ("text", "elements"),
    [("7.5B", 7_500_000_000), ("124M", 124_000_000), ("12345", 12_345), ("1.5k", 1500), ("2T", 2 * 10**12)],
)
def test_number_gives_equal_matrices(text: str, elements: int) -> None:
    model = load_model_shape(text)
    assert model.numel == elements
    matrices = [param.shape for param in model.params if len(param.shape) == 2]
    assert len(matrices) == 100
    assert len(set(matrices)) == 1


def test_misspelled_preset_gets_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"did you mean llama-3-8b\?"):
        load_model_shape("llama3-8b")


@pytest.mark.parametrize("text", ["7", "0", "99999999T", "no-such-model", "7.5X", "missing/config.json"])
def test_unknown_model_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        load_model_shape(text)


def test_freeze_params() -> None:
    model = load_model_shape("gpt2").freeze(("transformer.w?e.weight", "transformer.h.0"))
    frozen = {param.name for param in model.params if not param.trainable}
    assert {"transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.bias"} <= frozen
    assert len(frozen) == 2 + 12
    with pytest.raises(ConfigError, match=r"gpt2 has no parameter 'nothing'"):
        load_model_shape("gpt2").freeze(("nothing",))


# ---- code


@pytest.fixture
def model_code_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory that contains model code."""
    (tmp_path / "models_of_a_test.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Large(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(1_000_000, 1_000_000, dtype=torch.bfloat16)\n"
        "        self.register_buffer('seen', torch.zeros(7))\n"
        "def fails():\n"
        "    raise RuntimeError('not today')\n"
        "def other():\n"
        "    return 3\n"
        "def takes(width):\n"
        "    return None\n"
        "def leaves():\n"
        "    raise SystemExit(3)\n"
        "def empty():\n"
        "    return nn.ReLU()\n"
        "number = 4\n"
    )
    (tmp_path / "program_of_a_test.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--no'])\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "models_of_a_test", raising=False)
    return tmp_path


@pytest.mark.parametrize("module", ["models_of_a_test", "models_of_a_test.py", "./models_of_a_test.py"])
def test_model_code_runs_without_allocating(model_code_dir: Path, module: str) -> None:
    model = load_model_shape(f"{module}:Large")
    assert (model.name, model.numel, model.buffer_bytes) == ("Large", 10**12 + 10**6, 28)
    assert {param.dtype for param in model.params} == {torch.bfloat16}
    assert str(model_code_dir) not in sys.path


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("models_of_a_test:fails", r"RuntimeError: not today \(models_of_a_test\.py, line 9\)\. Name"),
        ("models_of_a_test:takes", r"TypeError: .* missing 1 required positional argument: 'width'\. Name"),
        ("models_of_a_test:other", "returned a int"),
        ("models_of_a_test:number", "is of type int"),
        ("models_of_a_test:nothing", "has no 'nothing'"),
        ("models_of_a_test:leaves", "SystemExit: 3"),
        ("models_of_a_test:empty", "empty has no floating-point parameters"),
        ("program_of_a_test:make", "failed to import .*: SystemExit: 2"),
        ("program_of_a_test.py:make", "failed to import .*: SystemExit: 2"),
        ("no_such_module_at_all:make", "failed to import"),
        ("no_such_file.py:make", "there is no file"),
    ],
)
@pytest.mark.usefixtures("model_code_dir")
def test_invalid_model_code_is_rejected(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model_shape(source)


def test_file_runs_like_a_script(model_code_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can define dataclasses and import its neighbours, and does not see the arguments of `zeroshard plan`."""
    (model_code_dir / "sub").mkdir()
    (model_code_dir / "sub" / "neighbour_of_a_test.py").write_text("width = 3\n")
    (model_code_dir / "sub" / "model.py").write_text(
        "from __future__ import annotations\n"
        "import argparse\n"
        "from dataclasses import dataclass\n"
        "from torch import nn\n"
        "from neighbour_of_a_test import width\n"
        "argparse.ArgumentParser().parse_args()\n"
        "@dataclass\n"
        "class Options:\n"
        "    width: int = width\n"
        "def make():\n"
        "    return nn.Linear(Options().width, 2)\n"
    )
    monkeypatch.setattr(sys, "argv", ["zeroshard", "plan", "--ranks", "8"])
    before = list(sys.path)
    assert shapes_by_name(load_model_shape("sub/model.py:make")) == {"weight": (2, 3), "bias": (2,)}
    assert (sys.path, sys.argv) == (before, ["zeroshard", "plan", "--ranks", "8"])
    assert "model" not in sys.modules


def test_failed_import_leaves_no_module(model_code_dir: Path) -> None:
    before = set(sys.modules)
    with pytest.raises(ConfigError):
        load_model_shape("program_of_a_test.py:make")
    assert not {name for name in set(sys.modules) - before if "program_of_a_test" in name}


# ---- Transformers configs; the package need not be installed


class FakePreTrainedModel:
    """Stands in for transformers.PreTrainedModel."""

    config_class: Any = None


def install_fake_transformers(monkeypatch: pytest.MonkeyPatch, *fails: str) -> list[str]:
    """Install a fake package that builds `small_module`; return the list of classes that were called."""
    called: list[str] = []

    def make_auto_class(name: str) -> Any:
        def from_config(config: Any, *, attn_implementation: str, trust_remote_code: bool) -> nn.Module:
            assert (config.width, attn_implementation, trust_remote_code) == (5, "eager", False)
            called.append(name)
            if name in fails:
                raise ValueError("not of this kind")
            return small_module()

        return SimpleNamespace(from_config=from_config)

    def make_model_class(name: str, kind: type) -> type:
        def build(config: Any, *, attn_implementation: str) -> nn.Module:
            assert (config.width, attn_implementation) == (5, "eager")
            called.append(name)
            return small_module()

        return type(name, (FakePreTrainedModel,), {"config_class": kind, "_from_config": staticmethod(build)})

    def from_pretrained(path: str, *, local_files_only: bool, trust_remote_code: bool) -> Any:
        assert (local_files_only, trust_remote_code) == (True, False)
        return SimpleNamespace(**json.loads(Path(path).read_text()))

    package: Any = ModuleType("transformers")
    package.AutoConfig = SimpleNamespace(from_pretrained=from_pretrained)
    package.AutoModelForCausalLM = make_auto_class("causal")
    package.AutoModelForSeq2SeqLM = make_auto_class("seq2seq")
    package.AutoModel = make_auto_class("plain")
    package.PreTrainedModel = FakePreTrainedModel
    package.Sorter, package.Other = make_model_class("Sorter", SimpleNamespace), make_model_class("Other", int)
    monkeypatch.setitem(sys.modules, "transformers", package)
    return called


@pytest.mark.parametrize("as_directory", [True, False])
def test_transformers_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_directory: bool) -> None:
    called = install_fake_transformers(monkeypatch)
    (tmp_path / "config.json").write_text('{"width": 5}')
    model = load_model_shape(str(tmp_path if as_directory else tmp_path / "config.json"))
    assert (model.name, model.numel, called) == (tmp_path.name, 30, ["causal"])


@pytest.mark.parametrize("name", ["Sorter", "Other", "AutoModel", "PreTrainedModel", "json", "NoSuchModel", None, 3])
def test_transformers_config_selects_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any) -> None:
    """The named class is used only if it is a Transformers model for this type of config."""
    called = install_fake_transformers(monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps({"width": 5, "architectures": name and [name]}))
    assert load_model_shape(str(tmp_path)).numel == 30
    assert called == ["Sorter" if name == "Sorter" else "causal"]


@pytest.mark.parametrize(("is_encoder_decoder", "first"), [(True, "seq2seq"), (False, "causal")])
def test_transformers_config_falls_back_to_auto_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_encoder_decoder: bool, first: str
) -> None:
    called = install_fake_transformers(monkeypatch, first)
    (tmp_path / "config.json").write_text(json.dumps({"width": 5, "is_encoder_decoder": is_encoder_decoder}))
    assert load_model_shape(str(tmp_path)).numel == 30
    assert called == [first, "plain"]


def test_transformers_config_without_model_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_transformers(monkeypatch, "causal", "plain")
    (tmp_path / "config.json").write_text('{"width": 5}')
    with pytest.raises(ConfigError, match="cannot build the model"):
        load_model_shape(str(tmp_path))


def test_missing_transformers_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="pip install transformers"):
        load_model_shape(str(tmp_path))


def test_empty_directory_and_unknown_file_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model_shape(str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match="cannot read shapes"):
        load_model_shape(str(tmp_path / "notes.txt"))


# ---- safetensors


def test_safetensors_file(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(3, 4, dtype=torch.bfloat16),
        "b": torch.zeros((), dtype=torch.float64),
        "count": torch.zeros(6, dtype=torch.int64),
    }
    save_file(tensors, str(tmp_path / "it.safetensors"), {"format": "pt"})
    model = load_model_shape(str(tmp_path / "it.safetensors"))
    assert model.name == "it"
    assert sorted((param.name, param.shape, param.dtype) for param in model.params) == [
        ("a", (3, 4), torch.bfloat16),
        ("b", (), torch.float64),
    ]
    assert model.buffer_bytes == 48


def write_index(folder: Path, weight_map: dict[str, Any]) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_safetensors_without_trainable_params_is_rejected(tmp_path: Path) -> None:
    save_file({"count": torch.zeros(6, dtype=torch.int64)}, str(tmp_path / "it.safetensors"))
    with pytest.raises(CheckpointError, match="nothing to train"):
        load_model_shape(str(tmp_path / "it.safetensors"))


def test_safetensors_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, str(tmp_path / "1.safetensors"))
    save_file({"b": torch.zeros(3), "c": torch.zeros(4)}, str(tmp_path / "2.safetensors"))
    index = write_index(tmp_path, {"c": "2.safetensors", "a": "1.safetensors", "b": "2.safetensors"})
    assert shapes_by_name(load_model_shape(str(index))) == {"c": (4,), "a": (2,), "b": (3,)}
    assert shapes_by_name(load_model_shape(str(tmp_path))) == shapes_by_name(load_model_shape(str(index)))


@pytest.mark.parametrize("file", ["../1.safetensors", "/etc/passwd", "..", "", 3, None, "a\0b", "sub/1.safetensors"])
def test_index_with_paths_outside_the_directory_is_rejected(tmp_path: Path, file: Any) -> None:
    with pytest.raises(CheckpointError, match=r"expected a plain file name|not next to it"):
        load_model_shape(str(write_index(tmp_path, {"a": file})))


def test_inconsistent_index_is_rejected(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, str(tmp_path / "1.safetensors"))
    with pytest.raises(CheckpointError, match=r"lists 'b' in 1\.safetensors, but"):
        load_model_shape(str(write_index(tmp_path, {"b": "1.safetensors"})))
    with pytest.raises(CheckpointError, match="not next to it"):
        load_model_shape(str(write_index(tmp_path, {"b": "2.safetensors"})))
    with pytest.raises(CheckpointError, match="weight_map"):
        load_model_shape(str(write_index(tmp_path, {})))


def make_safetensors(header: Any, *, data: int = 16, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + b"\0" * data


def make_entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


CORRUPT: dict[str, bytes] = {
    "empty file": b"",
    "too short": b"\1\0\0",
    "empty header": struct.pack("<Q", 0),
    "header longer than the file": make_safetensors(make_entry(), length=10**6),
    "header longer than memory": make_safetensors(make_entry(), length=2**63),
    "invalid JSON": make_safetensors(b"{]"),
    "invalid UTF-8": make_safetensors(b"\xff\xfe{}"),
    "a list": make_safetensors(b"[1, 2]"),
    "a number": make_safetensors(b"17"),
    "no tensors": make_safetensors({"__metadata__": {}}),
    "deeply nested": make_safetensors(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "duplicate name": make_safetensors(b'{"a":{"dtype":"F32"},"a":{"dtype":"F32"}}'),
    "huge number": make_safetensors(b'{"a":' + b"9" * 10_000 + b"}"),
    "entry is not a dict": make_safetensors({"a": 3}),
    "unknown dtype": make_safetensors(make_entry(dtype="X7")),
    "dtype is not a string": make_safetensors(make_entry(dtype=["F32"])),
    "shape is not a list": make_safetensors(make_entry(shape="4")),
    "negative size": make_safetensors(make_entry(shape=[-4])),
    "float size": make_safetensors(make_entry(shape=[4.0])),
    "boolean size": make_safetensors(make_entry(shape=[True])),
    "enormous size": make_safetensors(make_entry(shape=[2**62, 2**62])),
    "too many dimensions": make_safetensors(make_entry(shape=[2**62] * 10_000)),
    "shape does not match offsets": make_safetensors(make_entry(shape=[5])),
    "offsets beyond the end": make_safetensors(make_entry(data_offsets=[8, 24])),
    "reversed offsets": make_safetensors(make_entry(data_offsets=[16, 0])),
    "three offsets": make_safetensors(make_entry(data_offsets=[0, 16, 16])),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_headers_are_rejected_with_short_errors(tmp_path: Path, case: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(CORRUPT[case])
    with pytest.raises(CheckpointError) as caught:
        load_model_shape(str(path))
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 600


def test_uncorrupted_header_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "good.safetensors").write_bytes(make_safetensors(make_entry()))
    assert shapes_by_name(load_model_shape(str(tmp_path / "good.safetensors"))) == {"a": (4,)}


def test_optimizer_state_in_the_same_file_is_ignored(tmp_path: Path) -> None:
    """`zeroshard checkpoint convert` writes such files."""
    shapes = {"model.weight": (4, 3), "optim.state.weight.exp_avg": (4, 3), "optim.state.weight.step": ()}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "all.safetensors")
    model = load_model_shape(str(tmp_path / "all.safetensors"))
    assert [(param.name, param.shape) for param in model.params] == [("weight", (4, 3))]
    assert model.buffer_bytes == 0
