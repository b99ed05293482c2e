"""A stand-in for mlx-vlm: a package with a few tiny types of its own, and with mlx-vlm's names of modules."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from mlxpaged.models.loader import DEMO_PATH
from tests.models.architectures import VOCAB_SIZE, random_weights
from tests.models.mlx_vlm_types import Plain
from tests.support import TOKENIZER_FILES

CACHE = """
from mlx_lm.models import cache

class KVCache(cache.KVCache): pass
class RotatingKVCache(cache.RotatingKVCache): pass
class ChunkedKVCache(cache.ChunkedKVCache): pass
class CacheList(cache.CacheList): pass
class ArraysCache(cache.ArraysCache):
    def update_window(self, index, source, width, *, lengths=None):
        self.cache[index] = source[:, source.shape[1] - width :]
        return self.cache[index]
    def update_recurrent(self, index, length, update):
        output, self.cache[index] = update(self.cache[index], None)
        return output, self.cache[index]

def make_prompt_cache(model):
    return model.make_cache() if hasattr(model, "make_cache") else [KVCache() for _ in model.layers]
"""

BASE = """
from dataclasses import dataclass
import inspect
import mlx.core as mx

@dataclass
class Output:
    logits: mx.array

class Config:
    @classmethod
    def from_dict(cls, fields):
        return cls(**{name: fields[name] for name in fields if name in inspect.signature(cls).parameters})

def scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks=None):
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
"""

TALKER = '''
from dataclasses import dataclass
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from ..base import Config, Output, scaled_dot_product_attention
from ..cache import ArraysCache, KVCache, RotatingKVCache

@dataclass
class TextConfig(Config):
    hidden_size: int
    vocab_size: int
    layer_types: list

@dataclass
class VisionConfig(Config):
    depth: int = 1

@dataclass
class ModelConfig(Config):
    text_config: dict
    vision_config: dict

class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.rope = nn.RoPE(size // 4)

    def __call__(self, x, mask, cache):
        B, L, D = x.shape
        q, k, v = (p(x).reshape(B, L, 4, -1).swapaxes(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        k, v = cache.update_and_fetch(k, v)
        out = scaled_dot_product_attention(q, k, v, cache, scale=(D // 4) ** -0.5, mask=mask)
        return self.o_proj(out.swapaxes(1, 2).reshape(B, L, D))

class Recurrent(nn.Module):
    """A short convolution, and a sum that decays."""

    def __init__(self, size):
        super().__init__()
        self.conv, self.out_proj = nn.Conv1d(size, size, 3), nn.Linear(size, size, bias=False)

    def __call__(self, x, mask, cache):
        before = cache[0] if cache[0] is not None else mx.zeros((x.shape[0], 2, x.shape[2]))
        source = mx.concatenate([before, x], axis=1)
        cache.update_window(0, source, 2, lengths=cache.lengths)
        inputs = self.conv(source)

        def update(state, steps):
            state = mx.zeros_like(x[:, 0]) if state is None else state
            outputs = []
            for i in range(inputs.shape[1]):
                state = 0.5 * state + inputs[:, i]
                outputs.append(state)
            return mx.stack(outputs, axis=1), state

        outputs, _ = cache.update_recurrent(1, x.shape[1], update)
        return self.out_proj(outputs)

class Block(nn.Module):
    def __init__(self, size, kind):
        super().__init__()
        self.mixer = Recurrent(size) if kind == "recurrent" else Attention(size)
        self.norm, self.post_norm = nn.RMSNorm(size), nn.RMSNorm(size)
        self.up_proj, self.down_proj = nn.Linear(size, 96, bias=False), nn.Linear(96, size, bias=False)

    def __call__(self, x, mask, cache):
        x = x + self.mixer(self.norm(x), mask, cache)
        return x + self.down_proj(nn.silu(self.up_proj(self.post_norm(x))))

class LanguageModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.kinds = tuple(config.layer_types)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Block(config.hidden_size, kind) for kind in self.kinds]
        self.norm = nn.RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def __call__(self, inputs, inputs_embeds=None, mask=None, cache=None, **kwargs):
        x = self.embed_tokens(inputs)
        for kind, layer, each in zip(self.kinds, self.layers, cache):
            window = 12 if kind == "window" else None
            mask = None if kind == "recurrent" else self.mask(x, each, window)
            x = layer(x, mask, each)
        return Output(self.lm_head(self.norm(x)))

    def mask(self, x, cache, window):
        return create_attention_mask(x, cache, window_size=window)

    def make_cache(self):
        made = {"recurrent": lambda: ArraysCache(2), "window": lambda: RotatingKVCache(12), "full": KVCache}
        return [made[kind]() for kind in self.kinds]

    def sanitize(self, weights):
        return {name: weight for name, weight in weights.items() if "rotary_emb" not in name}

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert isinstance(config.vision_config, VisionConfig)
        self.vision_tower = nn.Linear(2**20, 2**20)  # of 4 TB, which are never evaluated
        self.language_model = LanguageModel(config.text_config)

    def sanitize(self, weights):
        known = {name.replace("model.text.", "language_model."): weight for name, weight in weights.items()}
        return known | {"vision_tower.weight": mx.zeros((1, 1))}
'''

SEES_AHEAD = """
from ..talker import LanguageModel, Model as Talker, ModelConfig, TextConfig, VisionConfig

class Blind(LanguageModel):
    def mask(self, x, cache, window):
        return None  # tokens of one pass see each other, whatever their order is

class Model(Talker):
    def __init__(self, config):
        super().__init__(config)
        self.language_model = Blind(config.text_config)
"""

FORGETS_WHERE_IT_IS = """
import mlx.nn as nn
from ..talker import Model as Talker, ModelConfig, TextConfig, VisionConfig

class Forgetful(nn.RoPE):
    def __call__(self, x, offset=0):
        return super().__call__(x, offset=0 if getattr(offset, "shape", None) == (1,) else offset)

class Model(Talker):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.language_model.layers:
            layer.mixer.rope = Forgetful(16)
"""

PACKAGES = {
    "talker": TALKER,
    "sees_ahead": SEES_AHEAD,
    "forgets": FORGETS_WHERE_IT_IS,
    "painter": "class ModelConfig: pass\nclass Model: pass\n",
    "listener": "import a_library_that_is_missing\n",
}


def install(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the stand-in the package that is imported as mlx_vlm."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_vlm"]:
        monkeypatch.delitem(sys.modules, name)
    package = directory / "mlx_vlm"
    sources = {"__init__": "", "utils": 'MODEL_REMAPPING = {"talker-2": "talker"}\n', "models/__init__": ""}
    sources |= {"models/cache": CACHE, "models/base": BASE, "models/interpolate": ""}
    sources |= {f"models/{name}/__init__": source for name, source in PACKAGES.items()}
    for name, source in sources.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        monkeypatch.setitem(sys.modules, "mlx_vlm", None)  # undone after the test, with what is imported until then
        monkeypatch.delitem(sys.modules, "mlx_vlm")
    monkeypatch.syspath_prepend(directory)


def uninstall() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_vlm"]:
        del sys.modules[name]


def config_of(model_type: str) -> dict[str, Any]:
    layers = ["full", "recurrent" if model_type.startswith("talker") else "full", "window"]
    text = {"hidden_size": 64, "vocab_size": VOCAB_SIZE, "layer_types": layers, "max_position_embeddings": 512}
    return {"model_type": model_type, "text_config": text, "vision_config": {}, "eos_token_id": 0}


def make_model(directory: Path, model_type: str, bits: int | None = None) -> Plain:
    """A directory with random weights by names of a published model. Returns what the stand-in computes with them."""
    config = config_of(model_type)
    package = importlib.import_module(f"mlx_vlm.models.{model_type.partition('-')[0]}")
    mx.random.seed(0)
    text = package.TextConfig.from_dict(config["text_config"])
    model = package.Model(package.ModelConfig(text, package.VisionConfig())).language_model
    parameters: Any = tree_flatten(model.parameters())
    model.load_weights(list(random_weights(dict(parameters), 1.0).items()))
    if bits is not None:
        quantize(model, 32, bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    parameters = tree_flatten(model.parameters())
    directory.mkdir(exist_ok=True)
    weights = {f"model.text.{name}": array for name, array in parameters}
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    (directory / "config.json").write_text(json.dumps(config))
    for file in TOKENIZER_FILES:
        shutil.copy(DEMO_PATH / file, directory / file)
    return Plain(model)
