"""Encoders compute what their papers say, texts of any length together as one by one; wrong files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import QuantizedLinear

from mlxpaged.models.encoders import ragged_attention
from mlxpaged.models.encoders.embedding import Pooling
from mlxpaged.models.encoders.encoder import Encoder
from mlxpaged.models.encoders.encoder_files import load_encoder
from mlxpaged.models.encoders.encoder_model import EncoderModel, pool
from mlxpaged.models.encoders.ragged_attention import plan_attention
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import load_embedding_model
from mlxpaged.models.sources.model_files import ModelFiles
from tests.models.encoders import CONFIGS, LONGEST, PAIRS, VOCABULARY, WIDTH, Reference, make_dense, make_encoder

LENGTHS = [1, 2, 3, 40, 17, 1, 90, 31, 32, 33, 100, 64, 5, 40]


def encoder(path: Path) -> Encoder:
    model = load_encoder(json.loads((path / "config.json").read_text()), ModelFiles(path).tensors())
    mx.eval(model.parameters())  # before a test changes the file
    return model


def random_texts(lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(5, len(VOCABULARY), length).tolist() for length in lengths]


def separate(states: mx.array, ends: Sequence[int]) -> list[Any]:
    return [np.array(states[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def cosine(a: Any, b: Any) -> float:
    a, b = np.ravel(a), np.ravel(b)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_states_of_texts_together_are_those_of_the_papers_one_by_one(tmp_path: Path, kind: str) -> None:
    path = make_encoder(tmp_path / "m", kind)
    model, reference = encoder(path), Reference(path, kind)
    inputs = random_texts([*LENGTHS, LONGEST[kind]])
    texts = model.texts(inputs)
    together = separate(model(texts), texts.ends)
    for tokens, states in zip(inputs, together, strict=True):
        expected = reference.states(tokens)
        assert cosine(states, expected) > 0.999999
        np.testing.assert_allclose(states, expected, atol=2e-4)
        alone = model(model.texts([tokens]))
        np.testing.assert_allclose(states, np.array(alone), atol=1e-4)


@pytest.mark.parametrize("kind", PAIRS)
def test_scores_of_pairs_are_those_of_the_papers(tmp_path: Path, kind: str) -> None:
    path = make_encoder(tmp_path / "m", kind, pairs=True)
    model, reference = load(path), Reference(path, kind)
    assert (model.is_reranker, model.dimensions) == (True, 1)
    inputs = random_texts([9, 30, 31, 4, 100])
    seconds = [3, 10, 30, 2, 50]
    texts = model.encoder.texts(inputs, seconds)
    found = np.array(model.vectors(model.encoder(texts), texts.ends))[:, 0]
    expected = [reference.score(*pair) for pair in zip(inputs, seconds, strict=True)]
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["mpnet", "modernbert", "new"])
@pytest.mark.parametrize("most", [1, 500, 5_000])
def test_texts_with_too_many_scores_attend_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, most: int
) -> None:
    monkeypatch.setattr(ragged_attention, "MAX_SCORES", most)
    path = make_encoder(tmp_path / "m", kind)
    model, inputs = encoder(path), random_texts([70, 3, 68, 1, 20])
    texts = model.texts(inputs)
    for tokens, states in zip(inputs, separate(model(texts), texts.ends), strict=True):
        np.testing.assert_allclose(states, Reference(path, kind).states(tokens), atol=2e-4)


def test_local_layers_of_a_long_text_compute_few_scores_outside_of_the_window() -> None:
    plan = plan_attention([2000, 1500, 12], heads=2, window=8)
    scores = sum(group.size * group.num_queries * group.num_keys for group in plan.groups)
    assert scores < 2.5 * 17 * (2000 + 1500 + 12)
    assert len(plan.groups) <= 6


def test_texts_of_near_lengths_attend_together_with_little_padding() -> None:
    lengths = sorted(np.random.default_rng(1).integers(3, 500, 300).tolist(), reverse=True)
    plan = plan_attention(lengths, heads=2)
    assert len(plan.groups) < 40
    assert sum(group.size * group.num_keys for group in plan.groups) < 1.2 * sum(lengths)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_poolings(pooling: Pooling) -> None:
    states = np.random.default_rng(1).normal(size=(9, 4)).astype(np.float32)
    found = np.array(pool(mx.array(states), [1, 6, 9], pooling))
    expected: dict[Pooling, Callable[[Any], Any]] = {
        Pooling.CLS: lambda own: own[0],
        Pooling.LAST: lambda own: own[-1],
        Pooling.MAX: lambda own: own.max(axis=0),
        Pooling.MEAN: lambda own: own.mean(axis=0),
        Pooling.MEAN_SQRT_LENGTH: lambda own: own.sum(axis=0) / np.sqrt(len(own)),
        Pooling.WEIGHTED_MEAN: lambda own: np.average(own, axis=0, weights=np.arange(1, len(own) + 1)),
    }
    for vector, own in zip(found, (states[:1], states[1:6], states[6:]), strict=True):
        np.testing.assert_allclose(vector, expected[pooling](own), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_types_give_nearly_the_same_states(tmp_path: Path, kind: str, dtype: mx.Dtype) -> None:
    path = make_encoder(tmp_path / "m", kind, dtype=dtype)
    model, inputs = encoder(path), random_texts([20, 7])
    texts = model.texts(inputs)
    states = model(texts)
    assert states.dtype == dtype
    for tokens, own in zip(inputs, separate(states.astype(mx.float32), texts.ends), strict=True):
        assert cosine(own, Reference(path, kind).states(tokens)) > (0.9999 if dtype == mx.float16 else 0.995)


@pytest.mark.parametrize("kind", CONFIGS)
def test_files_may_have_some_weights_in_another_type(tmp_path: Path, kind: str) -> None:
    """Converters keep norms and small tables in float32."""
    path = make_encoder(tmp_path / "m", kind, dtype=mx.float16)
    weights = stored_weights(path)
    kept = ("norm", "Norm", "_ln", "relative", "position", "type")
    wide = {name: array.astype(mx.float32) for name, array in weights.items() if any(part in name for part in kept)}
    save_weights(path, weights | wide)
    model, [tokens] = encoder(path), random_texts([20])
    states = model(model.texts([tokens]))
    assert cosine(states.astype(mx.float32), Reference(path, kind).states(tokens)) > 0.9999


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_files_are_read_as_mlx_writes_them(tmp_path: Path, kind: str, bits: int) -> None:
    path = make_encoder(tmp_path / "m", kind)
    rounded = quantize_files(path, bits)
    save_weights(make_encoder(tmp_path / "rounded", kind), rounded)
    inputs = random_texts([20, 7])
    models = encoder(path), encoder(tmp_path / "rounded")
    assert isinstance(models[0].layers[0].qkv, QuantizedLinear)
    np.testing.assert_allclose(*(np.array(model(model.texts(inputs))) for model in models), atol=2e-4)


def quantize_files(path: Path, bits: int) -> dict[str, mx.array]:
    """Quantize all matrices that can be, as programs that convert models do. Returns the weights with the values that
    are left."""
    weights: dict[str, mx.array] = {}
    rounded = stored_weights(path)
    for name, array in rounded.items():
        weights[name] = array
        if array.ndim == 2 and array.shape[1] % 32 == 0:
            parts, base = mx.quantize(array, group_size=32, bits=bits), name.removesuffix(".weight")
            weights |= dict(zip((name, f"{base}.scales", f"{base}.biases"), parts, strict=True))
            rounded[name] = mx.dequantize(*parts, group_size=32, bits=bits)
    mx.eval(rounded)
    save_weights(path, weights)
    edit(path / "config.json", quantization={"group_size": 32, "bits": bits})
    return rounded


def test_old_names_of_norms_and_names_with_a_prefix_are_known(tmp_path: Path) -> None:
    def older(name: str) -> str:
        for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
            name = name.replace(new, old)
        return f"bert.{name}"

    inputs = random_texts([20, 7])
    models = [encoder(make_encoder(tmp_path / str(i), "bert", rename=each)) for i, each in enumerate((str, older))]
    assert mx.array_equal(*(model(model.texts(inputs)) for model in models))


def test_the_parts_that_embeddings_do_not_need_may_be_there_or_not(tmp_path: Path) -> None:
    path = make_encoder(tmp_path / "m", "bert")
    weights = stored_weights(path)
    bare = {name: array for name, array in weights.items() if not name.startswith("pooler.")}
    assert len(bare) < len(weights)
    inputs, states = random_texts([20]), []
    for each in (weights, bare, bare | {"cls.predictions.bias": mx.zeros(9), "embeddings.position_ids": mx.zeros(9)}):
        save_weights(path, each)
        model = encoder(path)
        states.append(model(model.texts(inputs)))
    assert mx.array_equal(states[0], states[1])
    assert mx.array_equal(states[0], states[2])


def test_limits_and_prompt_are_what_the_directory_states(tmp_path: Path) -> None:
    path = make_encoder(tmp_path / "m", "xlm-roberta")
    assert load(path).max_tokens == 128  # 130 positions, of which two are for padding
    edit(path / "tokenizer_config.json", model_max_length=64)
    assert load(path).max_tokens == 64
    edit(path / "sentence_bert_config.json", max_seq_length=100, do_lower_case=True)
    edit(path / "config_sentence_transformers.json", prompts={"q": "query: "}, default_prompt_name="q")
    model = load(path)
    assert (model.max_tokens, model.context_length, model.dimensions) == (100, 128, WIDTH)
    assert model.spec.text("Blue") == "query: blue"
    assert load_embedding_model(str(path), None, 60).max_tokens == 60


def edited(name: str, **fields: Any) -> Callable[[Path], None]:
    return lambda path: edit(path / name, **fields)


def changed(name: str, array: mx.array | None) -> Callable[[Path], None]:
    """Replaces a weight, or removes it."""

    def change(path: Path) -> None:
        weights = stored_weights(path) | {name: mx.zeros(1) if array is None else array}
        save_weights(path, {each: weights[each] for each in weights if array is not None or each != name})

    return change


def only_pickle(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


REFUSED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a lost weight": ("bert", changed("encoder.layer.1.output.dense.bias", None), r"lack layers\.1\.down\.bias"),
    "an unknown weight": ("new", changed("x.y", mx.zeros(2)), r"also have x\.y"),
    "a wrong shape": ("bert", changed("emb_ln.bias", mx.zeros(2)), r"have norm\.bias twice"),
    "a smaller one": (
        "nomic_bert",
        changed("encoder.layers.0.mlp.fc2.weight", mx.zeros((WIDTH, 8))),
        r"layers\.0\.down\.weight of \[32, 8\], but \[32, 64\] by its config",
    ),
    "pickle": ("bert", only_pickle, r"only in files named pytorch_model\*\.bin, which can run code"),
    "positions": ("bert", edited("config.json", position_embedding_type="relative_key"), "only 'absolute' is supp"),
    "activation": ("bert", edited("config.json", hidden_act="mish"), "its activation is 'mish'"),
    "experts": ("nomic_bert", edited("config.json", num_experts=8), "num_experts 8"),
    "norms first": ("nomic_bert", edited("config.json", prenorm=True), "prenorm True"),
    "dynamic": ("new", edited("config.json", rope_scaling={"type": "dynamic", "factor": 2}), "scaled by 'dynamic'"),
    "no size": ("new", edited("config.json", hidden_size=None), "config.json has no hidden_size"),
    "a size below 1": ("new", edited("config.json", num_attention_heads=0), "num_attention_heads 0, which is no size"),
    "heads": ("new", edited("config.json", num_attention_heads=5), "5 heads cannot divide states of 32"),
    "layer types": (
        "modernbert",
        edited("config.json", layer_types=["other"] * 3),
        "one of two layer_types for each of 3 layers",
    ),
    "layer types that are lists": ("modernbert", edited("config.json", layer_types=[[]] * 3), "one of two layer_types"),
    "an activation that is a list": ("bert", edited("config.json", hidden_act=[]), r"its activation is \[\]"),
    "padding": ("roberta", edited("config.json", pad_token_id="1"), "pad_token_id '1', which is no size"),
    "no positions": ("roberta", edited("config.json", max_position_embeddings=2), "has no positions"),
    "rope": (
        "modernbert",
        edited("config.json", rope_parameters="x"),
        "rotary positions in its config.json are no obj",
    ),
    "4 bits of another kind": ("bert", edited("config.json", quantization={"mode": "mxfp4"}), ""),
    "no modules": ("bert", lambda path: (path / "modules.json").unlink(), r"has no modules\.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_here_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    kind, change, message = REFUSED[case]
    path = make_encoder(tmp_path / "m", kind)
    if case == "4 bits of another kind":
        quantize_files(path, bits=4)
        message = "quantized as 'mxfp4'"
    change(path)
    with pytest.raises(UnsupportedModelError, match=f"^{path} cannot be (used for embeddings|loaded): .*{message}"):
        load(path)


REFUSED_PAIRS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "classes": (
        "bert",
        changed("classifier.weight", mx.zeros((3, WIDTH))),
        r"classifier\.weight of \[3, 32\], but \[1,",
    ),
    "no head": ("roberta", changed("classifier.dense.bias", None), r"lack dense\.bias"),
    "softmax": ("new", edited("config.json", sbert_ce_default_activation_function="torch.Softmax"), "made by Softmax"),
}


@pytest.mark.parametrize("case", REFUSED_PAIRS)
def test_cross_encoders_that_give_no_score_are_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    kind, change, message = REFUSED_PAIRS[case]
    change(path := make_encoder(tmp_path / "m", kind, pairs=True))
    with pytest.raises(UnsupportedModelError, match=f"^{path} cannot be (used as a reranker|loaded): .*{message}"):
        load(path)


def test_a_score_is_not_squashed_if_the_directory_says_so(tmp_path: Path) -> None:
    scores = []
    for name in ("Sigmoid", "Identity"):
        activation = {"activation_fn": f"torch.nn.modules.linear.{name}"}
        model = load(make_encoder(tmp_path / name, "bert", pairs=True, sentence_transformers=activation))
        texts = model.encoder.texts(random_texts([9]), [4])
        scores.append(float(model.vectors(model.encoder(texts), texts.ends).item()))
    assert scores[0] == pytest.approx(1 / (1 + np.exp(-scores[1])))


@pytest.mark.parametrize("activation", ["torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"])
def test_dense_layers_follow_the_pooling(tmp_path: Path, activation: str) -> None:
    path = make_encoder(tmp_path / "m", "bert")
    weight, bias = make_dense(path, activation, outputs=8)
    model = load(path)
    [dense] = model.spec.dense
    x = np.linspace(-1, 1, WIDTH, dtype=np.float32)
    expected = weight @ x + bias
    np.testing.assert_allclose(dense(x), np.tanh(expected) if "Tanh" in activation else expected, rtol=1e-4, atol=1e-5)
    assert model.dimensions == 8
    edit(path / "2_Dense" / "config.json", out_features=9)
    with pytest.raises(UnsupportedModelError, match="weights of its 2_Dense do not fit"):
        load(path)


def load(path: Path) -> EncoderModel:
    model = load_embedding_model(str(path), None, 8192)
    assert isinstance(model, EncoderModel)
    return model


def edit(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | fields))


def stored_weights(path: Path) -> dict[str, mx.array]:
    stored: Any = mx.load(str(path / "model.safetensors"))
    mx.eval(stored)
    return dict(stored)


def save_weights(path: Path, weights: dict[str, mx.array]) -> None:
    mx.eval(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights)
