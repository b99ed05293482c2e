"""Tiny encoders give the states and scores of transformers' own classes, which need torch: `make test-encoders`.

transformers reads the same directories, so the published names of weights and fields are compared too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxpaged.models.encoders.encoder_model import EncoderModel
from mlxpaged.models.loader import load_embedding_model
from tests.models.encoders import HEADS, HIDDEN, LAYERS, LONGEST, PAIRS, VOCABULARY, WIDTH, make_encoder

pytestmark = pytest.mark.encoders

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "roberta": ("roberta", {}),
    "xlm-roberta": ("xlm-roberta", {}),
    "mpnet": ("mpnet", {}),
    "nomic_bert": (
        "nomic_bert",
        {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
        | {"max_position_embeddings": 128, "auto_map": {}},
    ),
    "gte": ("new", {"model_type": "gte", "rope_scaling": None, "auto_map": {}}),
    "modernbert": ("modernbert", {"classifier_pooling": "mean", "pad_token_id": 0}),
}
"""Kinds by transformers' names: kinds of `encoders.py`, and the fields that transformers reads by other names."""


def texts(kind: str) -> list[list[int]]:
    rng = np.random.default_rng(5)
    lengths = [1, 2, 3, 40, 17, 1, 90, 31, 32, 33, 100, LONGEST[kind]]
    return [rng.integers(5, len(VOCABULARY), length).tolist() for length in lengths]


def load(path: Path) -> EncoderModel:
    model = load_embedding_model(str(path), None, 8192)
    assert isinstance(model, EncoderModel)
    return model


def by_transformers(path: Path, kind: str, class_name: str) -> Callable[..., Any]:
    torch = pytest.importorskip("torch")
    import transformers

    model = getattr(transformers, class_name).from_pretrained(str(path), dtype=torch.float32).eval()

    def run(tokens: list[int], second: int) -> Any:
        types = {"token_type_ids": torch.tensor([[int(i >= second) for i in range(len(tokens))]])}
        has_types = model.config.model_type in ("bert", "nomic_bert", "gte")
        with torch.no_grad():
            return model(
                input_ids=torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                **(types if has_types else {}),
            )

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    own_kind, fields = KINDS[kind]
    path = make_encoder(tmp_path / "m", own_kind, **fields)
    run, encoder = by_transformers(path, kind, "AutoModel"), load(path).encoder
    inputs = texts(own_kind)
    together = encoder.texts(inputs)
    states = np.array(encoder(together)).astype(np.float64)
    worst = 1.0
    for tokens, end in zip(inputs, together.ends, strict=True):
        own, expected = states[end - len(tokens) : end], run(tokens, len(tokens)).last_hidden_state[0].numpy()
        cosines = (own * expected).sum(1) / np.linalg.norm(own, axis=1) / np.linalg.norm(expected, axis=1)
        worst = min(worst, float(cosines.min()))
    print(f"{kind}: the least cosine similarity of a token's state is {worst:.9f}")
    assert worst >= 0.99999


@pytest.mark.parametrize("kind", [kind for kind, (own_kind, _) in KINDS.items() if own_kind in PAIRS])
def test_scores_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    own_kind, fields = KINDS[kind]
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    path = make_encoder(tmp_path / "m", own_kind, pairs=True, **fields, **labels)
    run, model = by_transformers(path, kind, "AutoModelForSequenceClassification"), load(path)
    inputs = texts(own_kind)[1:]
    seconds = [len(tokens) // 2 for tokens in inputs]
    together = model.encoder.texts(inputs, seconds)
    found = np.array(model.vectors(model.encoder(together), together.ends))[:, 0]
    logits = [float(run(*pair).logits[0, 0]) for pair in zip(inputs, seconds, strict=True)]
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-np.array(logits))), atol=1e-5)
