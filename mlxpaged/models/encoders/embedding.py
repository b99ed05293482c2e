"""Embedding models: reads sentence-transformers' files of a directory, and makes a decoder of mlx-lm one.

No config.json tells which states make an embedding. So a model is refused if its directory does not state this, or
states something that is not implemented here. The message has the reason. Encoders: see encoder_model.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_reduce
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.json_files import model_config, read, read_object
from mlxpaged.models.files.transformers_fields import add_earlier_fields
from mlxpaged.models.files.weight_names import known_classes
from mlxpaged.models.sources.weight_headers import read_shapes
from mlxpaged.models.text.tokenizer import Tokenizer
from mlxpaged.models.token_cost import TokenCost, token_cost

Vector = NDArray[np.float32]

MODULES, POOLING, TRANSFORMER = "modules.json", "config.json", "sentence_bert_config.json"
SETTINGS = "tokenizer_config.json"
PROMPTS, DENSE_WEIGHTS = "config_sentence_transformers.json", "model.safetensors"
MOST_TOKENS = 2**32
"""More tokens than a text can have."""
PROBE = [3, 1, 4, 1, 5, 9, 2]
MIN_COSINE = 0.98
"""Half types round differently in other chunks. A model that runs incorrectly is far below this."""


ACTIVATIONS: Mapping[str, Callable[[Vector], Vector]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: (1 / (1 + np.exp(-x))).astype(np.float32),
}
"""Activations of Dense modules, by torch's names."""


class Pooling(Enum):
    """How the states of an input's tokens become one vector; sentence-transformers' names."""

    CLS = "cls"
    LAST = "lasttoken"
    MAX = "max"
    MEAN = "mean"
    MEAN_SQRT_LENGTH = "mean_sqrt_len"
    WEIGHTED_MEAN = "weightedmean"

    def weights(self, positions: mx.array, length: mx.array) -> mx.array:
        """The weight of the state at each position, [...] float32, in an input of `length` tokens; 0 after its end. MAX
        has none."""
        inside = (positions < length).astype(mx.float32)
        if self is Pooling.CLS:
            return (positions == 0).astype(mx.float32)
        if self is Pooling.LAST:
            return (positions == length - 1).astype(mx.float32)
        if self is Pooling.MEAN:
            return inside / length
        if self is Pooling.MEAN_SQRT_LENGTH:
            return inside / mx.sqrt(length)
        assert self is Pooling.WEIGHTED_MEAN
        return inside * (positions + 1) / (length * (length + 1) / 2)


@dataclass(frozen=True)
class Dense:
    """A layer after the pooling. weight[out, in], bias[out], float32."""

    weight: Vector
    bias: Vector | None
    activation: str

    def __call__(self, vector: Vector) -> Vector:
        """[in] -> [out]"""
        out = self.weight @ vector
        return ACTIVATIONS[self.activation](out if self.bias is None else out + self.bias)


@dataclass(frozen=True)
class EmbeddingSpec:
    """What a directory states.

    prompt: put before every text. prompts: that a request may name instead. max_tokens: limit of an input, None for the
    context. matryoshka: sizes that an embedding may be cut to; True for all, False for none. lower_case: whether texts
    are made lower-case. dense: the layers after the pooling.
    """

    pooling: Pooling
    normalize: bool
    prompt: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)
    max_tokens: int | None = None
    matryoshka: frozenset[int] | bool = False
    lower_case: bool = False
    dense: tuple[Dense, ...] = field(default=(), compare=False)

    def dimensions(self, width: int) -> int:
        """The size of an embedding, from that of a state."""
        return self.dense[-1].weight.shape[0] if self.dense else width

    def text(self, text: str, prompt_name: str | None = None) -> str:
        """What is tokenized for a text. prompt_name: one of `prompts`; None for the default one."""
        whole = (self.prompt if prompt_name is None else self.prompts[prompt_name]) + text
        return whole.lower() if self.lower_case else whole

    def can_be_cut_to(self, dimensions: int) -> bool:
        return self.matryoshka if isinstance(self.matryoshka, bool) else dimensions in self.matryoshka


@dataclass(frozen=True)
class EmbeddingFacts:
    """What the API knows of an embedding model, without its weights. context_length: of the model. max_tokens: limit of
    an input. is_reranker: whether an input is a pair of texts, and its only dimension is their score."""

    name: str
    tokenizer: Tokenizer
    spec: EmbeddingSpec
    dimensions: int
    vocab_size: int
    context_length: int
    max_tokens: int
    weight_bytes: int
    is_reranker: bool

    @property
    def facts(self) -> EmbeddingFacts:
        return EmbeddingFacts(**{each.name: getattr(self, each.name) for each in fields(EmbeddingFacts)})


@dataclass(frozen=True)
class EmbeddingModel(EmbeddingFacts):
    """A decoder. decode: tokens [B, T] and a cache of `make_cache` or None -> states [B, T, width]. kv_bytes: keys and
    values of the longest input. cost: of its tokens."""

    decode: Callable[[mx.array, list[Any] | None], mx.array]
    make_cache: Callable[[], list[Any]]
    kv_bytes: int
    cost: TokenCost


def embedding_spec(path: Path, dense: Callable[[Path], Dense] | None = None) -> EmbeddingSpec:
    """dense: reads a layer after the pooling; None for `read_dense`. Raises UnsupportedModelError if the directory does
    not state how its model makes embeddings, or states something that is not implemented here."""
    if not (path / MODULES).is_file():
        raise UnsupportedModelError(f"its directory has no {MODULES}, which describes how an embedding is computed")
    modules = read(path / MODULES)
    try:
        stated = [(str(module["type"]).rpartition(".")[2], str(module.get("path", ""))) for module in modules]
    except (TypeError, KeyError, AttributeError):
        raise UnsupportedModelError(f"its {MODULES} is not a list of modules") from None
    kinds = [kind for kind, _ in stated]
    num_dense = kinds.count("Dense")
    if kinds[: 2 + num_dense] != ["Transformer", "Pooling"] + ["Dense"] * num_dense or kinds[2 + num_dense :] not in (
        [],
        ["Normalize"],
    ):
        known = "only Transformer, Pooling, Dense and Normalize, in this order, are supported"
        raise UnsupportedModelError(f"its {MODULES} asks for {', '.join(kinds)}; {known}")
    config = model_config(path)
    pooling = read_object(path / stated[1][1] / POOLING)
    prompts = read_object(path / PROMPTS, missing_is_empty=True)
    transformer = read_object(path / TRANSFORMER, missing_is_empty=True)
    stated_prompts = prompts.get("prompts") or {}
    if not isinstance(stated_prompts, dict):
        raise UnsupportedModelError(f"the prompts in its {PROMPTS} are no object")
    named = {str(name): str(text) for name, text in stated_prompts.items()}
    prompt = named.get(str(prompts.get("default_prompt_name")), "")
    if pooling.get("include_prompt") is False:
        if prompt:
            raise UnsupportedModelError("its pooling leaves out the tokens of its prompt, which is not supported")
        named = {}
    sizes = config.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
        raise UnsupportedModelError(f"its config.json has matryoshka_dimensions {sizes!r:.60}, which are no sizes")
    return EmbeddingSpec(
        pooling=stated_pooling(pooling),
        normalize="Normalize" in kinds,
        prompt=prompt,
        prompts=named,
        max_tokens=stated_length(path),
        matryoshka=frozenset(sizes) if sizes else bool(config.get("is_matryoshka")),
        lower_case=bool(transformer.get("do_lower_case")),
        dense=tuple((dense or read_dense)(path / place) for kind, place in stated if kind == "Dense"),
    )


def stated_length(path: Path) -> int | None:
    """The most tokens of a text. sentence-transformers before 6 states them in its own file, and 6 in that of the
    tokenizer. None if neither does. Raises UnsupportedModelError."""
    settings = read_object(path / SETTINGS, missing_is_empty=True)
    limit: Any = read_object(path / TRANSFORMER, missing_is_empty=True).get("max_seq_length")
    limit = settings.get("model_max_length") if limit is None else limit
    # transformers writes 1e30, as an integer or not, for no limit.
    return int(limit) if type(limit) in (int, float) and 1 <= limit < MOST_TOKENS else None


def stated_pooling(config: Mapping[str, Any]) -> Pooling:
    """The pooling that "pooling_mode": NAME or "pooling_mode_NAME": true names. Raises UnsupportedModelError."""
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [key.removeprefix("pooling_mode_") for key, on in config.items() if on is True]
    names = modes if isinstance(modes, list) else [modes]
    names = [str(name).removesuffix("_tokens").removesuffix("_token") for name in names if name != "include_prompt"]
    try:
        (name,) = names
        return Pooling(name)
    except ValueError:
        known = ", ".join(pooling.value for pooling in Pooling)
        asked = " and ".join(names) or "nothing"
        raise UnsupportedModelError(f"its pooling is {asked}; only one of {known} is supported") from None


def stated_dense(path: Path) -> Dense:
    """A layer in a directory of its own, of zeros: its weights are not read. Raises UnsupportedModelError."""
    config = read_object(path / "config.json")
    outputs, inputs = (config.get(name) for name in ("out_features", "in_features"))
    if not (isinstance(outputs, int) and isinstance(inputs, int) and min(outputs, inputs) > 0):
        raise UnsupportedModelError(f"the sizes of its {path.name} are {outputs!r:.40} and {inputs!r:.40}")
    return Dense(np.broadcast_to(np.float32(0), (outputs, inputs)), None, "Identity")


def read_dense(path: Path) -> Dense:
    """A layer in a directory of its own. Raises UnsupportedModelError."""
    config, file = read_object(path / "config.json"), path / DENSE_WEIGHTS
    activation = str(config.get("activation_function", "Identity")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedModelError(f"the activation of its {path.name} is {activation}; only {known} are supported")
    if not file.is_file():
        raise UnsupportedModelError(f"its {path.name} has no {DENSE_WEIGHTS}; files of other formats are not read")
    read_shapes(file)
    stored: Any = mx.load(str(file))
    arrays = {name: np.array(array.astype(mx.float32)) for name, array in stored.items()}
    weight, bias = arrays.get("linear.weight"), arrays.get("linear.bias")
    stated = (config.get("out_features"), config.get("in_features"))
    if weight is None or weight.shape != stated or (bias is None) is bool(config.get("bias", True)):
        raise UnsupportedModelError(f"the weights of its {path.name} do not fit its config.json")
    return Dense(weight, bias, activation)


def check_causal(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError if mlx-lm would run the weights as another kind of model."""
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("its tokens attend to later tokens, but mlx-lm's decoders are causal")
    if "AutoModel" in (config.get("auto_map") or {}):
        raise UnsupportedModelError("its config.json asks for code of its own (auto_map), which mlx-lm does not run")


def load_decoder(path: Path) -> tuple[Module, dict[str, Any]]:
    """The model, without an output head if its architecture allows that. Raises the errors of mlx-lm."""

    def classes(config: dict[str, Any]) -> tuple[type[Module], type]:
        add_earlier_fields(config)
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
    if spec.pooling is Pooling.MAX:
        raise UnsupportedModelError("its pooling is max, which only encoders have here")
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
    check_dense(spec, int(whole.shape[-1]))
    most = min(max_tokens, context, spec.max_tokens or context)
    return EmbeddingModel(
        name=name,
        decode=decode,
        make_cache=functools.partial(make_prompt_cache, model),
        tokenizer=tokenizer,
        spec=spec,
        dimensions=spec.dimensions(int(whole.shape[-1])),
        vocab_size=vocab_size,
        context_length=context,
        max_tokens=most,
        kv_bytes=most * sum(map(bytes_per_token, cache)),
        cost=token_cost(decoder, cache, facts_of(model)),
        weight_bytes=weight_bytes(model),
        is_reranker=False,
    )


def facts_of(model: Module) -> dict[str, Any]:
    """The fields of its text model's config.json that mlx-lm reads; nothing if it keeps none."""
    config = dict(getattr(getattr(model, "args", None), "__dict__", {}))
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def check_dense(spec: EmbeddingSpec, width: int) -> None:
    """Raises UnsupportedModelError if a layer after the pooling takes another size than it gets."""
    for dense in spec.dense:
        if dense.weight.shape[1] != width:
            raise UnsupportedModelError(f"a Dense module takes {dense.weight.shape[1]} elements, but gets {width}")
        width = dense.weight.shape[0]


def weight_bytes(model: Module) -> int:
    total: int = tree_reduce(lambda total, array: total + int(array.nbytes), model.parameters(), 0)
    return total


def bytes_per_token(cache: Any) -> int:
    """KV bytes of one layer; 0 if it keeps no keys and values."""
    arrays = (getattr(cache, "keys", None), getattr(cache, "values", None))
    return sum(int(a.shape[1] * a.shape[3] * a.dtype.size) for a in arrays if isinstance(a, mx.array) and a.ndim == 4)
