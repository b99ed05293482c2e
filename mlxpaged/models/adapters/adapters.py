"""Loads LoRA adapters as layers of mlx-lm, and checks them. They stay beside the weights of their model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_reduce, tree_unflatten
from mlx_lm.tuner.utils import load_adapters as load_with_mlx_lm

from mlxpaged.cpu.float32 import Storage, widen
from mlxpaged.models.adapters import peft
from mlxpaged.models.adapters.adapted_layers import AdapterLayer, PartsOf, adapt_layers, adapter_layer
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.adapters.step_adapters import StepAdapters
from mlxpaged.models.checks.probe import probe
from mlxpaged.models.checks.probe_steps import ROUNDING_TOKENS
from mlxpaged.models.checks.reference import Reference, forward, measure_rounding
from mlxpaged.models.errors import AdapterError, UnsupportedModelError
from mlxpaged.models.files.json_files import read_object
from mlxpaged.models.layers import LayerSpec
from mlxpaged.models.sources.weight_headers import read_shapes
from mlxpaged.models.turns import Turns
from mlxpaged.progress import Stage

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
LEAVES = ("lora_a", "lora_b", "m")
"""Weights of an adapted layer. Only DoRA has the last one."""
MAX_HEADER_BYTES = 2**20
"""The header of the weights. An adapter for 7 modules of 126 layers has 1,764 tensors, of about 200 bytes each."""
MAX_KEYS = 4096
"""Names of layers in a config. mlx-lm looks for each layer of the model in this list."""
MAX_REASON = 300
"""Characters of a message of mlx-lm, which names every layer that does not fit."""


@dataclass(frozen=True)
class LoadedAdapter:
    """layers: mlx-lm's layers, by their paths in the model. bases: the model's layers of the same paths. reference:
    what mlx-lm computes with the adapter."""

    name: str
    layers: Mapping[str, AdapterLayer]
    bases: Mapping[str, Module]
    reference: Reference
    nbytes: int
    cache_seed: bytes


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model. cache_seeds: by their names, what makes their blocks in the prefix cache differ from
    those of others. step: the adapters of the running step."""

    cache_seeds: Mapping[str, bytes] = field(default_factory=dict)
    nbytes: int = 0
    step: StepAdapters = field(default_factory=StepAdapters)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.cache_seeds)

    def cache_seed(self, name: str | None) -> bytes:
        """Raises ValueError if there is no such adapter."""
        if name is None:
            return b""
        if name not in self.cache_seeds:
            raise ValueError(f"there is no adapter {name!r}")
        return self.cache_seeds[name]


def check_files(adapters: Sequence[AdapterPath]) -> int:
    """Check what the files say, before gigabytes are loaded. Returns the bytes of their weights. Raises
    AdapterError."""
    num_bytes = 0
    for name, path in adapters:
        try:
            check_directory(path)
        except UnsupportedModelError as error:
            raise AdapterError(f"the adapter {name!r} cannot be loaded: {error}") from None
        num_bytes += weights_file(path).stat().st_size
    return num_bytes


def is_peft(path: Path) -> bool:
    """Whether an adapter's directory has the format of PEFT, not that of mlx-lm."""
    return (path / CONFIG).is_file() and peft.TYPE in read_object(path / CONFIG)


def weights_file(path: Path) -> Path:
    return path / (peft.WEIGHTS if is_peft(path) else WEIGHTS)


def check_directory(path: Path) -> None:
    """Raises UnsupportedModelError if there is no adapter of mlx-lm or PEFT, or a damaged one."""
    if not path.is_dir():
        raise UnsupportedModelError(f"no such directory: {path}")
    if not (path / CONFIG).is_file():
        raise UnsupportedModelError(f"{path} has no {CONFIG}; use a directory that mlx_lm.lora or PEFT has made")
    config = read_object(path / CONFIG)
    if peft.TYPE in config:
        peft.check(path, config, MAX_HEADER_BYTES)
    else:
        check_config(path, config)
        read_shapes(path / WEIGHTS, MAX_HEADER_BYTES)


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError if the adapter of mlx-lm in this directory has a config that cannot be used."""
    if not (path / WEIGHTS).is_file():
        of_peft = f", and its {CONFIG} has no {peft.TYPE}, which PEFT writes" * (path / peft.WEIGHTS).is_file()
        raise UnsupportedModelError(f"{path} has no {WEIGHTS}{of_peft}; use a directory that mlx_lm.lora has made")
    if config.get("fine_tune_type") == "full":
        raise UnsupportedModelError(
            f"{path} is a full fine-tune, whose weights replace those of the model: make a model of it with "
            f"`mlx_lm.fuse --model MODEL --adapter-path {path} --save-path DIRECTORY`, and serve that"
        )
    if not isinstance(config.get("num_layers"), int) or not isinstance(config.get("lora_parameters"), dict):
        raise UnsupportedModelError(f"its {CONFIG} has no num_layers and lora_parameters, which mlx_lm.lora writes")
    keys = config["lora_parameters"].get("keys") or ()
    if not isinstance(keys, Sequence) or len(keys) > MAX_KEYS:
        raise UnsupportedModelError(f"the keys in its {CONFIG} are not a list of at most {MAX_KEYS:,} names")


def load_adapters(
    model: Module,
    model_name: str,
    wanted: Sequence[AdapterPath],
    base: Reference,
    turns: Turns,
    storage: Storage = Storage.MODEL,
) -> list[LoadedAdapter]:
    """Load adapters as layers of mlx-lm, one after the other, and leave the model as it is. base: what it computes
    without any. storage: of the model's weights, and so of the adapters'.

    Raises AdapterError."""
    loaded = []
    for name, path in wanted:
        turns.begin(Stage.CHECKING_ADAPTERS)
        try:
            loaded.append(load_adapter(model, name, path, base, storage))
        except Exception as error:  # mlx and mlx-lm raise any type for a missing field or a damaged file
            raise AdapterError(
                f"the adapter {name!r} in {path} cannot be used with {model_name}: {reason_of(error)}"
            ) from error
        layers, size = len(loaded[-1].layers), loaded[-1].nbytes / 1e6
        logger.info("adapter %s: %d layers, %.1f MB, from %s", name, layers, size, path)
    return loaded


def reason_of(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 3]}..."
    return text if isinstance(error, (UnsupportedModelError, ValueError)) else f"{type(error).__name__}: {text}"


def attach(model: Module, path: Path) -> dict[str, mx.array]:
    """Let mlx-lm replace the layers that its adapter changes. Returns the adapter's weights, by their paths in the
    model."""
    stored: Any = mx.load(str(path / WEIGHTS))
    rank = read_object(path / CONFIG)["lora_parameters"].get("rank")
    for key, array in stored.items():
        if key.endswith(".lora_a") and rank not in array.shape:  # mlx-lm refuses it since 0.32
            raise UnsupportedModelError(f"its {CONFIG} says rank {rank}, and {key} has the shape {array.shape}")
    load_with_mlx_lm(model, str(path))
    return dict(stored)


def load_adapter(model: Module, name: str, path: Path, base: Reference, storage: Storage) -> LoadedAdapter:
    before = dict(model.named_modules())
    weights_name = weights_file(path).name
    stored = peft.attach(model, path, MAX_HEADER_BYTES) if is_peft(path) else attach(model, path)
    model.eval()  # no dropout
    after = dict(model.named_modules())
    replaced = {key: module for key, module in before.items() if key in after and after[key] is not module}
    trained = {key: after[key] for key in replaced if any(array.startswith(f"{key}.") for array in stored)}
    if not trained:
        raise UnsupportedModelError(f"its {weights_name} has no weights for any layer of the model")
    if len({id(replaced[key]) for key in trained}) < len(trained):
        raise UnsupportedModelError("it adapts layers that share their weights")
    if storage is not Storage.MODEL:
        for layer in trained.values():
            widen(layer, storage)
    # mlx-lm makes what the file lacks, as large as the rank says.
    model.update_modules(tree_unflatten([(key, module) for key, module in replaced.items() if key not in trained]))
    parameters: Any = tree_flatten(model.parameters())
    weights = {key: array for key, array in parameters if key in stored}
    if missing := sorted(stored.keys() - weights.keys()):
        raise UnsupportedModelError(f"the model has no layer for its weights {', '.join(missing)}")
    made = [f"{path}.{name}" for path, layer in trained.items() for name in LEAVES if name in layer]
    if lacking := [key for key in made if key not in stored]:
        raise UnsupportedModelError(f"its {weights_name} has no {', '.join(lacking)}")
    if not all(mx.isfinite(array).all().item() for array in weights.values()):
        raise UnsupportedModelError(f"its {weights_name} has weights that are not finite")
    logits = forward(model, base.tokens, base.positions)
    if not mx.isfinite(logits).all():
        raise UnsupportedModelError("the model's logits with it are not finite")
    rounding = measure_rounding(model, base.tokens[:ROUNDING_TOKENS], logits[:ROUNDING_TOKENS])
    model.update_modules(tree_unflatten(list(replaced.items())))
    return LoadedAdapter(
        name,
        {key: adapter_layer(layer, replaced[key]) for key, layer in trained.items()},
        {key: replaced[key] for key in trained},
        replace(base, logits=logits, rounding=rounding),
        tree_reduce(lambda total, array: total + int(array.nbytes), list(weights.values()), 0),
        f"{name}|{digest(path)}".encode(),
    )


def digest(path: Path) -> str:
    """A digest of the adapter's content."""
    found = hashlib.blake2b(digest_size=16)
    for each in (path / CONFIG, weights_file(path)):
        with each.open("rb") as file:
            while piece := file.read(2**20):
                found.update(piece)
    return found.hexdigest()


def install_adapters(model: Module, loaded: Sequence[LoadedAdapter], parts_of: PartsOf) -> Adapters:
    """Let the model compute these adapters. Call it after all that changes its linear layers, except for the selection
    of the output head's rows."""
    seeds = {adapter.name: adapter.cache_seed for adapter in loaded}
    adapters = Adapters(seeds, sum(adapter.nbytes for adapter in loaded))
    bases = {path: module for adapter in loaded for path, module in adapter.bases.items()}
    if bases:
        adapt_layers(model, bases, {adapter.name: adapter.layers for adapter in loaded}, adapters.step, parts_of)
    return adapters


def check_adapters(
    model: Module, specs: Sequence[LayerSpec], loaded: Sequence[LoadedAdapter], step: StepAdapters, turns: Turns
) -> None:
    """Check that batches of an adapter's sequences and the base's have the logits that mlx-lm computes with the
    adapter. Raises AdapterError."""
    for adapter in loaded:
        try:
            probe(model, specs, adapter.reference, turns, step, adapter.name)
        except UnsupportedModelError as error:
            raise AdapterError(f"the adapter {adapter.name!r} cannot be served: {error}") from None
