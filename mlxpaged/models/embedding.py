"""Embedding models: reads sentence-transformers' files of a directory, and loads the decoder.

mlx-lm has only causal decoders, and does not know which of their states make an embedding. So a model is refused if its
directory does not state this, or states something that is not implemented here. The message has the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_reduce
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.json_files import read, read_object
from mlxpaged.models.tokenizer import Tokenizer
from mlxpaged.models.weight_names import known_classes

MODULES, POOLING, TRANSFORMER = "modules.json", "config.json", "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
PROBE = [3, 1, 4, 1, 5, 9, 2]
MIN_COSINE = 0.98
"""Half types round differently in other chunks. A model that runs incorrectly is far below this."""


class Pooling(Enum):
    """How the states of an input's tokens become one vector; sentence-transformers' names."""

    LAST = "lasttoken"
    MEAN = "mean"
    WEIGHTED_MEAN = "weightedmean"

    def weights(self, positions: mx.array, length: mx.array) -> mx.array:
        """The weight of the state at each position, [...] float32, in an input of `length` tokens; 0 after its end."""
        inside = (positions < length).astype(mx.float32)
        if self is Pooling.LAST:
            return (positions == length - 1).astype(mx.float32)
        if self is Pooling.MEAN:
            return inside / length
        return inside * (positions + 1) / (length * (length + 1) / 2)


@dataclass(frozen=True)
class EmbeddingSpec:
    """What a directory states. prompt: put before every text. max_tokens: limit of an input, None for the context.
    matryoshka: sizes that an embedding may be cut to; True for all, False for none."""

    pooling: Pooling
    normalize: bool
    prompt: str
    max_tokens: int | None
    matryoshka: frozenset[int] | bool

    def can_be_cut_to(self, dimensions: int) -> bool:
        return self.matryoshka if isinstance(self.matryoshka, bool) else dimensions in self.matryoshka


@dataclass(frozen=True)
class EmbeddingFacts:
    """What the API knows of an embedding model, without its weights. context_length: of the model. max_tokens: limit of
    an input. kv_bytes: keys and values of the longest input."""

    name: str
    tokenizer: Tokenizer
    spec: EmbeddingSpec
    dimensions: int
    vocab_size: int
    context_length: int
    max_tokens: int
    kv_bytes: int
    weight_bytes: int


@dataclass(frozen=True)
class EmbeddingModel(EmbeddingFacts):
    """decode: tokens [B, T] and a cache of `make_cache` or None -> states [B, T, dimensions]."""

    decode: Callable[[mx.array, list[Any] | None], mx.array]
    make_cache: Callable[[], list[Any]]

    @property
    def facts(self) -> EmbeddingFacts:
        return EmbeddingFacts(**{field.name: getattr(self, field.name) for field in fields(EmbeddingFacts)})


def embedding_spec(path: Path) -> EmbeddingSpec:
    """Raises UnsupportedModelError if the directory does not state how its model makes embeddings, or states something
    that is not implemented here."""
    if not (path / MODULES).is_file():
        raise UnsupportedModelError(f"its directory has no {MODULES}, which describes how an embedding is computed")
    modules = read(path / MODULES)
    try:
        stated = [(str(module["type"]).rpartition(".")[2], str(module.get("path", ""))) for module in modules]
    except (TypeError, KeyError, AttributeError):
        raise UnsupportedModelError(f"its {MODULES} is not a list of modules") from None
    kinds = [kind for kind, _ in stated]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModelError(
            f"its {MODULES} asks for {', '.join(kinds)}; only Transformer, Pooling and Normalize are supported"
        )
    config = read_object(path / "config.json")
    check_causal(config)
    pooling = read_object(path / stated[1][1] / POOLING)
    prompts = read_object(path / PROMPTS, missing_is_empty=True)
    transformer = read_object(path / TRANSFORMER, missing_is_empty=True)
    if transformer.get("do_lower_case"):
        raise UnsupportedModelError(f"its {TRANSFORMER} asks for lower-case text, which is not supported")
    name = prompts.get("default_prompt_name")
    prompt = (prompts.get("prompts") or {}).get(name, "") if name is not None else ""
    if prompt and pooling.get("include_prompt") is False:
        raise UnsupportedModelError("its pooling leaves out the tokens of its prompt, which is not supported")
    sizes = config.get("matryoshka_dimensions")
    limit = transformer.get("max_seq_length")
    return EmbeddingSpec(
        pooling=stated_pooling(pooling),
        normalize="Normalize" in kinds,
        prompt=str(prompt),
        max_tokens=limit if isinstance(limit, int) and limit > 0 else None,
        matryoshka=frozenset(map(int, sizes)) if sizes else bool(config.get("is_matryoshka")),
    )


def stated_pooling(config: Mapping[str, Any]) -> Pooling:
    """The pooling that "pooling_mode": NAME or "pooling_mode_NAME": true names. Raises UnsupportedModelError."""
    modes = config.get("pooling_mode")
    if modes is None:
        prefix = "pooling_mode_"
        modes = [key.removeprefix(prefix).removesuffix("_tokens") for key, on in config.items() if on is True]
    names = [modes] if isinstance(modes, str) else list(modes)
    names = [name for name in names if name != "include_prompt"]
    try:
        (name,) = names
        return Pooling(name)
    except ValueError:
        known = ", ".join(pooling.value for pooling in Pooling)
        asked = " and ".join(map(str, names)) or "nothing"
        raise UnsupportedModelError(f"its pooling is {asked}; only one of {known} is supported") from None


def check_causal(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError if mlx-lm would run the weights as another kind of model."""
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("its tokens attend to later tokens, but mlx-lm's decoders are causal")
    if "AutoModel" in (config.get("auto_map") or {}):
        raise UnsupportedModelError("its config.json asks for code of its own (auto_map), which mlx-lm does not run")


def load_decoder(path: Path) -> tuple[Module, dict[str, Any]]:
    """The model, without an output head if its architecture allows that. Raises the errors of mlx-lm."""

    def classes(config: dict[str, Any]) -> tuple[type[Module], type]:
        model_class, args_class = known_classes(config)

        class Decoder(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                """Qwen3-Embedding and others were saved as bare decoders, whose weights lack the prefix "model."."""
                if hasattr(self, "model") and not any(name.startswith("model.") for name in weights):
                    weights = {f"model.{name}": array for name, array in weights.items()}
                if hasattr(super(), "sanitize"):
                    weights = super().sanitize(weights)
                has_head = hasattr(self, "lm_head")
                return {name: array for name, array in weights.items() if has_head or not name.startswith("lm_head.")}

        return Decoder, args_class

    model, config = load_model(path, lazy=True, model_config={"tie_word_embeddings": True}, get_model_classes=classes)
    return model, config


def embedding_model(
    name: str, model: Module, tokenizer: Tokenizer, spec: EmbeddingSpec, vocab_size: int, context: int, max_tokens: int
) -> EmbeddingModel:
    """Make an EmbeddingModel of `model`, after a test: a whole input without a cache, and its chunks with one, must
    give the same states. context: of the model, in tokens. max_tokens: limit of an input, if the context is longer.

    Raises UnsupportedModelError.
    """
    decoder = getattr(model, "model", None)
    if decoder is None:
        raise UnsupportedModelError("mlx-lm's model of this kind has no decoder whose states can be read")

    def decode(tokens: mx.array, cache: list[Any] | None) -> mx.array:
        states: mx.array = decoder(tokens, cache=cache)
        return states

    try:
        cache, middle = make_prompt_cache(model), len(PROBE) // 2
        whole = decode(mx.array([PROBE]), None)
        decode(mx.array([PROBE[:middle]]), cache)
        rest = decode(mx.array([PROBE[middle:]]), cache)
        ends = [states[0, -1].astype(mx.float32) for states in (whole, rest)]
        cosine = float((ends[0] * ends[1]).sum() / (mx.linalg.norm(ends[0]) * mx.linalg.norm(ends[1])))
    except Exception as error:  # a decoder of another kind raises any type
        raise UnsupportedModelError(f"its states cannot be read: {type(error).__name__}: {error}") from error
    if not cosine >= MIN_COSINE:
        raise UnsupportedModelError(f"an input in chunks gives other states (cosine similarity {cosine:.4f})")
    most = min(max_tokens, context, spec.max_tokens or context)
    return EmbeddingModel(
        name=name,
        decode=decode,
        make_cache=functools.partial(make_prompt_cache, model),
        tokenizer=tokenizer,
        spec=spec,
        dimensions=int(whole.shape[-1]),
        vocab_size=vocab_size,
        context_length=context,
        max_tokens=most,
        kv_bytes=most * sum(map(bytes_per_token, cache)),
        weight_bytes=weight_bytes(model),
    )


def weight_bytes(model: Module) -> int:
    total: int = tree_reduce(lambda total, array: total + int(array.nbytes), model.parameters(), 0)
    return total


def bytes_per_token(cache: Any) -> int:
    """KV bytes of one layer; 0 if it keeps no keys and values."""
    arrays = (getattr(cache, "keys", None), getattr(cache, "values", None))
    return sum(int(a.shape[1] * a.shape[3] * a.dtype.size) for a in arrays if isinstance(a, mx.array) and a.ndim == 4)
