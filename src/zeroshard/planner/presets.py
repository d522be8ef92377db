"""Models that many know, with the shapes and names of their published weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from .shapes import ModelShape, ParamShape

NamedShapes = Iterator[tuple[str, tuple[int, ...]]]


class ModelFamily(Protocol):
    """Models that are built alike."""

    def named_shapes(self) -> NamedShapes: ...


@dataclass(frozen=True)
class Gpt2:
    """Its head is its embedding."""

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
    """Also Mistral, Mixtral and Qwen: keys and values have heads of their own number."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    kv_size: int
    """Elements of all heads of keys together."""
    has_qkv_bias: bool = False
    """Queries, keys and values have biases."""
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
    """The encoder with its pooler, without a head."""

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
    """As in torchvision, for 1,000 classes and pictures of 224 x 224."""

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
    """In float32. Raises KeyError for a name that is not among `PRESETS`."""
    return ModelShape(name, tuple(ParamShape(label, shape) for label, shape in PRESETS[name].named_shapes()))


def _weight_and_bias(name: str, shape: tuple[int, ...], bias_size: int) -> NamedShapes:
    yield f"{name}.weight", shape
    yield f"{name}.bias", (bias_size,)
