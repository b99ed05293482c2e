"""Runs the saved demo model that sees on one conversation, without a server or its engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from demo_model.vision import tasks
from demo_model.vision.model import CONFIG
from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.vision.loading import load_vision

MOST_TOKENS = 100


class Reader:
    """The saved model, without a server."""

    def __init__(self, directory: Path) -> None:
        self._model, tokenizer, *_ = mlx_lm.load(str(directory))
        self._tokenizer: Any = tokenizer
        vision, reason = load_vision(ModelFiles(directory), CONFIG, tokenizer.get_vocab, lambda done, total: None)
        if vision is None:
            raise SystemExit(reason)
        self._vision = vision

    def answer(self, messages: Sequence[tasks.Message], pictures: Sequence[np.ndarray[Any, Any]]) -> str:
        """pictures: those of the messages, in order, as the tower takes them."""
        shown = [tasks.for_template(message) for message in messages]
        form, waiting = self._vision.format, list(pictures)
        tokens: list[int] = []
        for token in self._tokenizer.apply_chat_template(shown, add_generation_prompt=True):
            if token == form.template_token:
                height, width = waiting.pop(0).shape[:2]
                tokens += form.tokens(width, height)
            else:
                tokens.append(token)
        language = self._model.language_model
        rows = language.model.embed_tokens(mx.array(tokens))
        if pictures:
            encoded = [list(self._vision.tower.encode(mx.array(each[None])))[-1][0] for each in pictures]
            places = np.flatnonzero(np.array(tokens) == form.placeholder)
            rows[mx.array(places)] = mx.concatenate(encoded)
        cache = make_prompt_cache(self._model)
        logits = language(mx.array([tokens]), cache=cache, input_embeddings=rows[None])
        answer: list[int] = []
        while len(answer) < MOST_TOKENS:
            answered: Any = mx.argmax(logits[0, -1]).item()
            if answered in self._tokenizer.eos_token_ids:
                break
            answer.append(answered)
            logits = language(mx.array([[answered]]), cache=cache)
        return str(self._tokenizer.decode(answer))
