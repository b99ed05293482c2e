"""Reads LoRA adapters in the format of PEFT, as layers of mlx-lm. Adapters of mlx-lm itself are not read here.

PEFT names a weight by the module of transformers that it adapts: base_model.model.model.layers.0.self_attn.q_proj
.lora_A.weight [rank, in] and .lora_B.weight [out, rank]. The layer adds scale * B @ A to the weight of its module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.json_files import read_object
from mlxpaged.models.sources.weight_headers import StoredTensor, read_tensors

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
TYPE = "peft_type"
"""A field that only configs of PEFT have."""
MERGE = "merge the adapter into its model (merge_and_unload), convert the result, and serve that"

UNSUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
"""Fields that change what an adapter computes, if they are set."""
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the weights of the model as they are. Others (PiSSA, OLoRA, CorDA, LoftQ,
LoRA-GA) take the first values of the adapter from them, and the file fits only what remains."""
OTHER_TENSORS = {
    "lora_embedding_": "target_modules names embeddings",
    "lora_magnitude_vector": "use_dora is set",
    "modules_to_save": "modules_to_save names them",
    "lora_B.bias": "lora_bias is set",
    ".bias": "bias is not 'none'",
    ".experts.": "target_modules names experts",
}
"""Parts of the names of tensors that no pair has, and the setting that brings them."""
FOLDED = ("falcon_h1",)
"""Model types whose weights mlx-lm multiplies by constants when it loads them. An adapter fits the weights before."""

TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.\w+)?\.weight")
"""The module and the matrix. A name of the adapter after lora_A is that under which it was trained."""
FROZEN = re.compile(r"(?:base_model\.model\.)?(.+)\.base_layer\.weight")
"""The module's own weight [out, in]. PEFT saves that of an output head too, which LoRA does not change."""
OUTER = {"model", "language_model"}
"""First parts of a module's path, whose number and order differ between versions of transformers and mlx-lm."""
TYPES = ("F32", "F16", "BF16")

MAX_NAME, MAX_SHOWN = 300, 120
"""Characters of a tensor's name, and of what a message shows of it."""
MAX_PATTERNS, MAX_EXPRESSIONS, MAX_REPEATS = 2048, 16, 2
"""Entries of a field with patterns, those that repeat something, and repeats in one of them. The time of an expression
grows by a power for each of its repeats, and exponentially if one of them is inside another."""
REPEAT, REPEATED_GROUP = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")
MAX_ALPHA = 2**31


class Pair(NamedTuple):
    """The weights of one module, by their names in the file: a [rank, in] and b [out, rank]."""

    a: str
    b: str
    rank: int


@dataclass(frozen=True)
class Patterns:
    """Numbers of modules that differ from those of the others. field: of the config. found: expressions that match the
    end of a module's path, with their numbers."""

    field: str
    found: Sequence[tuple[re.Pattern[str], float]]

    def of(self, module: str, default: float) -> float:
        """The number of the first expression that matches, as in PEFT."""
        return next((number for pattern, number in self.found if pattern.match(module)), default)


@dataclass(frozen=True)
class Config:
    """What is used of an adapter_config.json. root: whether the scale is alpha / sqrt(rank), not alpha / rank."""

    rank: float
    alpha: float
    root: bool
    ranks: Patterns
    alphas: Patterns

    def scale(self, module: str, rank: int) -> float:
        """rank: of the module's weights. Raises UnsupportedModelError if the config says another one."""
        expected = self.ranks.of(module, self.rank)
        if rank != expected:
            raise UnsupportedModelError(
                f"its {CONFIG} gives {module} the rank {expected:g} (r, rank_pattern), and its weights have {rank}"
            )
        return self.alphas.of(module, self.alpha) / (math.sqrt(rank) if self.root else rank)


def check(path: Path, config: Mapping[str, Any], most_bytes: int) -> None:
    """Check what the files of an adapter say. config: its adapter_config.json. most_bytes: of the header of its
    weights. Raises UnsupportedModelError."""
    if not (path / WEIGHTS).is_file():
        pickled = f" and {PICKLED} is not read, because it may run code: save it again as safetensors"
        raise UnsupportedModelError(f"{path} has no {WEIGHTS}{pickled * (path / PICKLED).is_file()}")
    read_config(config)
    read_pairs(read_tensors(path / WEIGHTS, most_bytes))


def read_config(config: Mapping[str, Any]) -> Config:
    """Raises UnsupportedModelError, with the name of the field that is not supported."""
    if (kind := config.get(TYPE)) != "LORA":
        raise UnsupportedModelError(f"its {TYPE} is {shown(kind)}, and only 'LORA' is supported: {MERGE}")
    if found := [name for name in UNSUPPORTED if config.get(name)]:
        raise UnsupportedModelError(f"its {CONFIG} sets {', '.join(found)}, which is not supported: {MERGE}")
    start = config.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        raise UnsupportedModelError(
            f"its init_lora_weights is {shown(start)}, so it fits changed weights of its model: save it with "
            "path_initial_model_for_weight_conversion, which makes it one for the model itself"
        )
    return Config(
        read_number("r", config.get("r")),
        read_number("lora_alpha", config.get("lora_alpha")),
        bool(config.get("use_rslora")),
        read_patterns("rank_pattern", config.get("rank_pattern")),
        read_patterns("alpha_pattern", config.get("alpha_pattern")),
    )


def read_number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -MAX_ALPHA < value < MAX_ALPHA:
        raise UnsupportedModelError(f"the {field} in its {CONFIG} is {shown(value)}, which is not a usable number")
    return value


def read_patterns(field: str, value: Any) -> Patterns:
    patterns = {} if value is None else value
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise UnsupportedModelError(f"the {field} in its {CONFIG} is not an object of at most {MAX_PATTERNS:,} names")
    repeats = [len(REPEAT.findall(name)) for name in patterns]
    is_slow = max(repeats, default=0) > MAX_REPEATS or any(map(REPEATED_GROUP.search, patterns))
    if is_slow or sum(map(bool, repeats)) > MAX_EXPRESSIONS:
        raise UnsupportedModelError(
            f"the {field} in its {CONFIG} has expressions that may take too long: at most {MAX_EXPRESSIONS} may repeat "
            f"something, {MAX_REPEATS} times each, and none a group; name the modules"
        )
    try:
        found = [(re.compile(rf"(.*\.)?({name})$"), read_number(field, number)) for name, number in patterns.items()]
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedModelError(f"the {field} in its {CONFIG} has a wrong expression: {error}") from None
    return Patterns(field, found)


def read_pairs(tensors: Sequence[StoredTensor]) -> dict[str, Pair]:
    """The pairs of a file, by the paths of their modules in transformers. Raises UnsupportedModelError if it has
    anything else."""
    found: dict[str, dict[str, StoredTensor]] = {}
    frozen: dict[str, StoredTensor] = {}
    for tensor in tensors:
        if own := FROZEN.fullmatch(tensor.name):
            frozen[own[1]] = tensor
            continue
        match = TENSOR.fullmatch(tensor.name) if len(tensor.name) <= MAX_NAME else None
        if match is None or ".experts." in tensor.name:
            cause = next((f", because {cause}" for part, cause in OTHER_TENSORS.items() if part in tensor.name), "")
            raise UnsupportedModelError(
                f"its {WEIGHTS} has {shown(tensor.name)}{cause}: only pairs lora_A and lora_B of linear layers are "
                f"supported; {MERGE}"
            )
        module, matrix = match.groups()
        if matrix in found.setdefault(module, {}):
            raise UnsupportedModelError(f"its {WEIGHTS} has two of lora_{matrix} for {shown(module)}")
        if tensor.dtype not in TYPES or len(tensor.shape) != 2:
            raise UnsupportedModelError(
                f"its {WEIGHTS} has {shown(tensor.name)} in {tensor.dtype} with {len(tensor.shape)} dimensions, which "
                f"is no matrix in {', '.join(TYPES)}"
            )
        found[module][matrix] = tensor
    pairs = {module: pair_of(module, matrices) for module, matrices in found.items()}
    for module, tensor in frozen.items():
        if module not in pairs or tensor.shape != [found[module]["B"].shape[0], found[module]["A"].shape[1]]:
            raise UnsupportedModelError(f"its {WEIGHTS} has {shown(tensor.name)}, whose size was changed: {MERGE}")
    return pairs


def pair_of(module: str, matrices: Mapping[str, StoredTensor]) -> Pair:
    if lacking := {"A", "B"} - matrices.keys():
        raise UnsupportedModelError(f"its {WEIGHTS} has no lora_{lacking.pop()} for {shown(module)}, only the other")
    a, b = matrices["A"], matrices["B"]
    if a.shape[0] != b.shape[1] or not a.shape[0]:
        raise UnsupportedModelError(f"the lora_A {a.shape} and lora_B {b.shape} of {shown(module)} have no common rank")
    return Pair(a.name, b.name, a.shape[0])


def attach(model: Module, path: Path, most_bytes: int) -> dict[str, mx.array]:
    """Replace the linear layers of a model that an adapter changes by those with the adapter. most_bytes: of the header
    of its weights. Returns its weights, by their paths in the model. Raises UnsupportedModelError."""
    config = read_config(read_object(path / CONFIG))
    pairs = read_pairs(read_tensors(path / WEIGHTS, most_bytes))
    arrays: Any = mx.load(str(path / WEIGHTS))
    if (model_type := getattr(model, "model_type", "")) in FOLDED:
        raise UnsupportedModelError(f"{model_type} models have other weights here than in transformers: {MERGE}")
    linear = {name: each for name, each in model.named_modules() if isinstance(each, (Linear, QuantizedLinear))}
    layers: dict[str, Module] = {}
    for module, pair in pairs.items():
        name = place(module, linear)
        if name in layers:
            raise UnsupportedModelError(f"it adapts {name} twice")
        layers[name] = layer_of(linear[name], module, config.scale(module, pair.rank), arrays[pair.a], arrays[pair.b])
    model.update_modules(tree_unflatten(list(layers.items())))
    return dict(weights_of(layers))


def weights_of(layers: Mapping[str, Any]) -> Iterator[tuple[str, mx.array]]:
    for name, layer in layers.items():
        yield f"{name}.lora_a", layer.lora_a
        yield f"{name}.lora_b", layer.lora_b


def place(module: str, linear: Mapping[str, Module]) -> str:
    """The path in the model of a module of transformers. linear: the linear layers of the model, by their paths."""
    if module in linear:
        return module
    found = [name for name in linear if inner(name) == inner(module)]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"the model has no linear layer for {shown(module)} of its {WEIGHTS}; use the model that it was trained for"
        )
    return found[0]


def inner(path: str) -> str:
    """A path without its outer parts: "layers.0.mlp.up_proj" of "model.language_model.layers.0.mlp.up_proj"."""
    first, _, rest = path.partition(".")
    return inner(rest) if first in OUTER and rest else path


def layer_of(base: Module, module: str, scale: float, a: mx.array, b: mx.array) -> Module:
    """mlx-lm's layer, which has the matrices transposed. a [rank, in], b [out, rank]."""
    layer: Module = LoRALinear.from_base(base, r=a.shape[0], scale=scale)
    for name, array in (("lora_a", a), ("lora_b", b)):
        if array.T.shape != layer[name].shape:
            raise UnsupportedModelError(
                f"the weights of {module} are for a layer from {a.shape[1]} to {b.shape[0]} numbers; the model's is "
                f"from {layer['lora_a'].shape[0]} to {layer['lora_b'].shape[1]}: use the model that it was trained for"
            )
        layer[name] = mx.contiguous(array.T)
    return layer


def shown(value: Any) -> str:
    """A value of a file in one line that is not too long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
