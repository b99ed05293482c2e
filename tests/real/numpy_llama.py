"""Llama in NumPy, float32: what the server's logits are compared with. Written from the paper (Touvron et al. 2023),
and from transformers' convention for the rotary embedding, which turns the halves of a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[np.float32]


class Llama:
    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.weights: dict[str, Array] = load_file(str(directory / "model.safetensors"))

    def logits(self, tokens: list[int]) -> Array:
        """[T, V] of one text."""
        config, embedding = self.config, self.weights["model.embed_tokens.weight"]
        states = embedding[tokens]
        for layer in range(config["num_hidden_layers"]):
            states = states + self._attention(layer, self._norm(states, f"layers.{layer}.input_layernorm"))
            states = states + self._mlp(layer, self._norm(states, f"layers.{layer}.post_attention_layernorm"))
        head = embedding if config["tie_word_embeddings"] else self.weights["lm_head.weight"]
        return self._norm(states, "norm") @ head.T

    def _norm(self, states: Array, name: str) -> Array:
        scale = np.sqrt(np.mean(states**2, axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return np.asarray(states / scale * self.weights[f"model.{name}.weight"], np.float32)

    def _project(self, layer: int, name: str, states: Array) -> Array:
        return np.asarray(states @ self.weights[f"model.layers.{layer}.{name}_proj.weight"].T)

    def _attention(self, layer: int, states: Array) -> Array:
        size, count = self.config["head_dim"], len(states)
        # [H, T, size], and the keys and values of a group of heads as often as it has heads
        q, k, v = (
            self._project(layer, f"self_attn.{name}", states).reshape(count, -1, size).swapaxes(0, 1) for name in "qkv"
        )
        q, k = self._rotated(q), self._rotated(k)
        k, v = (np.repeat(each, len(q) // len(each), axis=0) for each in (k, v))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(np.float32(size)) + np.triu(np.full((count, count), -np.inf), 1)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        found = (shares / shares.sum(axis=-1, keepdims=True)).astype(np.float32) @ v
        return self._project(layer, "self_attn.o", found.swapaxes(0, 1).reshape(count, -1))

    def _rotated(self, heads: Array) -> Array:
        size = heads.shape[-1]
        angles = np.outer(np.arange(heads.shape[1]), self.config["rope_theta"] ** (-np.arange(0, size, 2) / size))
        cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = np.split(heads, 2, axis=-1)
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

    def _mlp(self, layer: int, states: Array) -> Array:
        gate = self._project(layer, "mlp.gate", states)
        return self._project(layer, "mlp.down", gate / (1 + np.exp(-gate)) * self._project(layer, "mlp.up", states))


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
