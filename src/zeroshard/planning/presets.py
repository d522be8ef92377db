"""Models that many know, with the shapes and names of their published weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from .shapes import ModelShape, ParamShape

Named = Iterator[tuple[str, tuple[int, ...]]]


class Family(Protocol):
    """Models that are built alike."""

    def parameters(self) -> Named: ...


@dataclass(frozen=True)
class Gpt2:
    """Its head is its embedding."""

    layers: int
    width: int
    words: int = 50257
    context: int = 1024

    def parameters(self) -> Named:
        width = self.width
        yield "transformer.wte.weight", (self.words, width)
        yield "transformer.wpe.weight", (self.context, width)
        for layer in range(self.layers):
            block = f"transformer.h.{layer}"
            yield from _with_bias(f"{block}.ln_1", (width,), width)
            yield from _with_bias(f"{block}.attn.c_attn", (width, 3 * width), 3 * width)
            yield from _with_bias(f"{block}.attn.c_proj", (width, width), width)
            yield from _with_bias(f"{block}.ln_2", (width,), width)
            yield from _with_bias(f"{block}.mlp.c_fc", (width, 4 * width), 4 * width)
            yield from _with_bias(f"{block}.mlp.c_proj", (4 * width, width), width)
        yield from _with_bias("transformer.ln_f", (width,), width)


@dataclass(frozen=True)
class Llama:
    """Also Mistral, Mixtral and Qwen: keys and values have heads of their own number."""

    layers: int
    width: int
    inner: int
    words: int
    keys: int
    """Elements of all heads of keys together."""
    biased: bool = False
    """Queries, keys and values have biases."""
    experts: int = 0

    def parameters(self) -> Named:
        yield "model.embed_tokens.weight", (self.words, self.width)
        for layer in range(self.layers):
            yield from self._block(f"model.layers.{layer}")
        yield "model.norm.weight", (self.width,)
        yield "lm_head.weight", (self.words, self.width)

    def _block(self, block: str) -> Named:
        for name, rows in (("q_proj", self.width), ("k_proj", self.keys), ("v_proj", self.keys)):
            yield f"{block}.self_attn.{name}.weight", (rows, self.width)
            if self.biased:
                yield f"{block}.self_attn.{name}.bias", (rows,)
        yield f"{block}.self_attn.o_proj.weight", (self.width, self.width)
        if self.experts:
            yield f"{block}.block_sparse_moe.gate.weight", (self.experts, self.width)
        for expert in range(self.experts):
            yield from self._feed(f"{block}.block_sparse_moe.experts.{expert}", ("w1", "w3", "w2"))
        if not self.experts:
            yield from self._feed(f"{block}.mlp", ("gate_proj", "up_proj", "down_proj"))
        yield f"{block}.input_layernorm.weight", (self.width,)
        yield f"{block}.post_attention_layernorm.weight", (self.width,)

    def _feed(self, block: str, names: tuple[str, str, str]) -> Named:
        yield f"{block}.{names[0]}.weight", (self.inner, self.width)
        yield f"{block}.{names[1]}.weight", (self.inner, self.width)
        yield f"{block}.{names[2]}.weight", (self.width, self.inner)


@dataclass(frozen=True)
class Bert:
    """The encoder with its pooler, without a head."""

    layers: int
    width: int
    words: int = 30522
    context: int = 512

    def parameters(self) -> Named:
        width = self.width
        for name, rows in (("word", self.words), ("position", self.context), ("token_type", 2)):
            yield f"embeddings.{name}_embeddings.weight", (rows, width)
        yield from _with_bias("embeddings.LayerNorm", (width,), width)
        for layer in range(self.layers):
            block = f"encoder.layer.{layer}"
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                yield from _with_bias(f"{block}.attention.{name}", (width, width), width)
            yield from _with_bias(f"{block}.attention.output.LayerNorm", (width,), width)
            yield from _with_bias(f"{block}.intermediate.dense", (4 * width, width), 4 * width)
            yield from _with_bias(f"{block}.output.dense", (width, 4 * width), width)
            yield from _with_bias(f"{block}.output.LayerNorm", (width,), width)
        yield from _with_bias("pooler.dense", (width, width), width)


@dataclass(frozen=True)
class Vit:
    """As in torchvision, for 1,000 classes and pictures of 224 x 224."""

    layers: int
    width: int
    patch: int = 16

    def parameters(self) -> Named:
        width = self.width
        yield "class_token", (1, 1, width)
        yield from _with_bias("conv_proj", (width, 3, self.patch, self.patch), width)
        yield "encoder.pos_embedding", (1, (224 // self.patch) ** 2 + 1, width)
        for layer in range(self.layers):
            block = f"encoder.layers.{layer}"
            yield from _with_bias(f"{block}.ln_1", (width,), width)
            yield f"{block}.self_attention.in_proj_weight", (3 * width, width)
            yield f"{block}.self_attention.in_proj_bias", (3 * width,)
            yield from _with_bias(f"{block}.self_attention.out_proj", (width, width), width)
            yield from _with_bias(f"{block}.ln_2", (width,), width)
            yield from _with_bias(f"{block}.mlp.0", (4 * width, width), 4 * width)
            yield from _with_bias(f"{block}.mlp.3", (width, 4 * width), width)
        yield from _with_bias("encoder.ln", (width,), width)
        yield from _with_bias("heads.head", (1000, width), 1000)


PRESETS: dict[str, Family] = {
    "gpt2": Gpt2(12, 768),
    "gpt2-medium": Gpt2(24, 1024),
    "gpt2-large": Gpt2(36, 1280),
    "gpt2-xl": Gpt2(48, 1600),
    "llama-2-7b": Llama(32, 4096, 11008, 32000, keys=4096),
    "llama-2-13b": Llama(40, 5120, 13824, 32000, keys=5120),
    "llama-2-70b": Llama(80, 8192, 28672, 32000, keys=1024),
    "llama-3-8b": Llama(32, 4096, 14336, 128256, keys=1024),
    "llama-3-70b": Llama(80, 8192, 28672, 128256, keys=1024),
    "llama-3.1-405b": Llama(126, 16384, 53248, 128256, keys=1024),
    "mistral-7b": Llama(32, 4096, 14336, 32000, keys=1024),
    "mixtral-8x7b": Llama(32, 4096, 14336, 32000, keys=1024, experts=8),
    "qwen2.5-7b": Llama(28, 3584, 18944, 152064, keys=512, biased=True),
    "bert-base": Bert(12, 768),
    "bert-large": Bert(24, 1024),
    "vit-b-16": Vit(12, 768),
    "vit-l-16": Vit(24, 1024),
}


def preset(name: str) -> ModelShape:
    """In float32. Raises KeyError for a name that is not among `PRESETS`."""
    return ModelShape(name, tuple(ParamShape(label, shape) for label, shape in PRESETS[name].parameters()))


def _with_bias(name: str, shape: tuple[int, ...], bias: int) -> Named:
    yield f"{name}.weight", shape
    yield f"{name}.bias", (bias,)
