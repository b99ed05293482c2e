"""The tower of Gemma 4 computes what its definition says, and its files are read in all layouts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten

from mlxpaged.models.features import Feature
from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.vision.loading import load_vision
from mlxpaged.vision import blocks
from mlxpaged.vision.embedding import embedding_of
from mlxpaged.vision.families.gemma.format import Gemma4Format
from mlxpaged.vision.families.gemma.gemma4 import Gemma4Sizes, Gemma4Tower
from mlxpaged.vision.tower import Vision
from tests.models.architectures import make_architecture
from tests.vision.definitions import Array, gelu_of_tanh
from tests.vision.tiny import images
from tests.vision.tiny_gemma import features, weights_of, with_random_weights

STANDARDIZED = Gemma4Sizes(
    width=20,
    hidden=28,
    blocks=2,
    heads=3,
    head=8,
    patch=4,
    places=11,
    pool=3,
    rope_base=100.0,
    eps=1e-3,
    clipped=False,
    standardized=True,
    output=15,
)
"""Of a dense Gemma 4."""

CLIPPED = replace(STANDARDIZED, clipped=True, standardized=False)
"""Of a Gemma 4 E."""

BOTH = pytest.mark.parametrize("sizes", [STANDARDIZED, CLIPPED], ids=["standardized", "clipped"])

VOCABULARY = {"<|image>": 10, "<image|>": 11, "<|image|>": 12}


def tiny_tower(sizes: Gemma4Sizes, dtype: mx.Dtype = mx.float32) -> Gemma4Tower:
    return with_random_weights(Gemma4Tower(sizes), dtype)


def rms_norm(x: Array, weight: Array | float, eps: float) -> Array:
    normed: Array = weight * x / math.sqrt((x * x).mean() + eps)
    return normed


def bounded(x: Array, weights: dict[str, Array], name: str) -> Array:
    lowest, highest = weights.get(f"{name}.input_min", -np.inf), weights.get(f"{name}.input_max", np.inf)
    y = weights[f"{name}.linear.weight"] @ np.clip(x, lowest, highest)
    lowest, highest = weights.get(f"{name}.output_min", -np.inf), weights.get(f"{name}.output_max", np.inf)
    clipped: Array = np.clip(y, lowest, highest)
    return clipped


def turned(x: Array, row: int, column: int, base: float) -> Array:
    """A head's values. The first half turns with the column, the second with the row."""
    quarter, out = len(x) // 4, x.copy()
    for half, place in ((0, column), (1, row)):
        for i in range(quarter):
            first, second = 2 * quarter * half + i, 2 * quarter * half + quarter + i
            angle = place * base ** (-i / quarter)
            out[first] = x[first] * math.cos(angle) - x[second] * math.sin(angle)
            out[second] = x[second] * math.cos(angle) + x[first] * math.sin(angle)
    return out


def attention(normed: list[Array], places: list[tuple[int, int]], own: dict[str, Array], sizes: Gemma4Sizes) -> Array:
    """Returns [patches, heads * size]."""
    q, k, v = ([bounded(x, own, f"self_attn.{n}_proj").reshape(sizes.heads, -1) for x in normed] for n in "qkv")
    mixed = np.zeros((len(normed), sizes.heads, sizes.head))
    for head in range(sizes.heads):
        queries, keys = (
            [
                turned(rms_norm(x[head], own[f"self_attn.{n}_norm.weight"], sizes.eps), *place, sizes.rope_base)
                for x, place in zip(projected, places, strict=True)
            ]
            for n, projected in (("q", q), ("k", k))
        )
        for i, query in enumerate(queries):
            scores = np.array([query @ key for key in keys])
            scores = np.exp(scores - scores.max())
            for score, value in zip(scores / scores.sum(), v, strict=True):
                mixed[i, head] += score * rms_norm(value[head], 1.0, sizes.eps)
    return mixed.reshape(len(normed), -1)


def reference_features(tower: Gemma4Tower, image: npt.NDArray[np.uint8], factor: float) -> Array:
    """Of one image, [height, width, 3], in float64, with one loop for each sum. factor: of the text model."""
    weights = weights_of(tower)
    of_tower = {name.removeprefix("vision_tower."): w for name, w in weights.items()}
    sizes, side = tower.sizes, tower.sizes.patch
    rows, columns = image.shape[0] // side, image.shape[1] // side
    places = [(row, column) for row in range(rows) for column in range(columns)]
    table = of_tower["patch_embedder.position_embedding_table"]
    state = []
    for row, column in places:
        patch = image[row * side : (row + 1) * side, column * side : (column + 1) * side]
        colours = ((patch / 255 - np.array(sizes.mean)) / np.array(sizes.std)).reshape(-1)
        state.append(of_tower["patch_embedder.input_proj.weight"] @ colours + table[0, column] + table[1, row])
    for number in range(sizes.blocks):
        own = {name.removeprefix(f"encoder.layers.{number}."): w for name, w in of_tower.items()}

        def normed(x: Array, name: str, own: dict[str, Array] = own) -> Array:
            return rms_norm(x, own[f"{name}.weight"], sizes.eps)

        mixed = attention([normed(x, "input_layernorm") for x in state], places, own, sizes)
        for i, x in enumerate(state):
            x = x + normed(bounded(mixed[i], own, "self_attn.o_proj"), "post_attention_layernorm")
            y = normed(x, "pre_feedforward_layernorm")
            inner = gelu_of_tanh(bounded(y, own, "mlp.gate_proj")) * bounded(y, own, "mlp.up_proj")
            state[i] = x + normed(bounded(inner, own, "mlp.down_proj"), "post_feedforward_layernorm")
    out = []
    for row in range(0, rows, sizes.pool):
        for column in range(0, columns, sizes.pool):
            pooled = np.zeros(sizes.width)
            for i in range(sizes.pool):
                for j in range(sizes.pool):
                    pooled += state[(row + i) * columns + column + j] / sizes.pool**2
            pooled *= math.sqrt(sizes.width)
            if sizes.standardized:
                pooled = (pooled - of_tower["std_bias"]) * of_tower["std_scale"]
            out.append(weights["embed_vision.embedding_projection.weight"] @ rms_norm(pooled, 1.0, sizes.eps) / factor)
    return np.array(out)


@BOTH
@pytest.mark.parametrize(("width", "height"), [(12, 12), (36, 24), (24, 36)])
def test_features_are_those_of_the_definition(sizes: Gemma4Sizes, width: int, height: int) -> None:
    tower, [image] = tiny_tower(sizes), images(1, width, height)
    wanted = reference_features(tower, image, math.sqrt(sizes.output))
    assert wanted.shape == (width // 12 * (height // 12), sizes.output)
    assert features(tower, image[None])[0] == pytest.approx(wanted, abs=5e-5 * float(np.abs(wanted).max()))


@BOTH
def test_a_batch_has_the_features_of_each_image_alone(sizes: Gemma4Sizes) -> None:
    tower, several = tiny_tower(sizes), images(3, 36, 24)
    together = features(tower, several)
    for image, found in zip(several, together, strict=True):
        assert found == pytest.approx(features(tower, image[None])[0], abs=1e-5 * float(np.abs(found).max()))


def test_an_encoding_has_parts() -> None:
    tower, pixels = tiny_tower(CLIPPED), images(2, 36, 24)
    whole, parts = features(tower, pixels), []
    for part in tower.encode(mx.array(pixels)):
        mx.eval(part)
        parts.append(part)
    assert len(parts) == 2 * CLIPPED.blocks + 1
    assert np.array_equal(np.array(parts[-1]), whole)


@BOTH
def test_a_block_is_computed_for_some_patches_at_a_time(sizes: Gemma4Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    tower, several = tiny_tower(sizes), images(2, 36, 24)
    whole, num_parts = features(tower, several), len(list(tower.encode(mx.array(several))))
    monkeypatch.setattr(blocks.pace, "patches", {"heads": 24, "rest": 24})
    assert features(tower, several) == pytest.approx(whole, abs=1e-5 * float(np.abs(whole).max()))
    assert len(list(tower.encode(mx.array(several)))) > num_parts


@pytest.mark.parametrize(("dtype", "factor"), [(mx.float16, math.sqrt(15)), (mx.bfloat16, 3.875)])
@BOTH
def test_half_precision_weights_give_near_features_of_their_type(
    sizes: Gemma4Sizes, dtype: mx.Dtype, factor: float
) -> None:
    tower, pixels = tiny_tower(sizes, dtype), images(1, 36, 24)
    *_, last = tower.encode(mx.array(pixels))
    assert last.dtype == dtype
    wanted = reference_features(tower, pixels[0], factor)
    assert features(tower, pixels)[0] == pytest.approx(wanted, abs=0.1 * float(np.abs(wanted).max()))


@pytest.mark.parametrize(
    ("size", "of_280", "of_70"),
    [
        ((1, 1), (768, 768), (384, 384)),
        ((10, 7), (960, 672), (480, 336)),
        ((48, 48), (768, 768), (384, 384)),
        ((640, 480), (912, 672), (432, 336)),
        ((1000, 333), (1344, 432), (672, 192)),
        ((3000, 2000), (960, 624), (480, 288)),
        ((1080, 1920), (576, 1056), (288, 528)),
        ((7680, 4320), (1056, 576), (528, 288)),
        ((50, 2000), (96, 5040), (48, 2496)),
        ((8, 1500), (48, 10992), (48, 3360)),
        ((1500, 8), (10992, 48), (3360, 48)),
        ((1, 5000), (48, 13440), (48, 3360)),
        ((16384, 82), (11328, 48), (3360, 48)),
    ],
)
def test_sizes_are_those_of_transformers(
    size: tuple[int, int], of_280: tuple[int, int], of_70: tuple[int, int]
) -> None:
    """Values of get_aspect_ratio_preserving_size of transformers 5.24, for 280 and for 70 tokens."""
    for most, expected in ((280, of_280), (70, of_70)):
        form = Gemma4Format(start=10, placeholder=12, end=11, side=48, most=most)
        assert form.size(*size) == expected
        count = expected[0] * expected[1] // 48**2
        assert count <= most
        assert form.tokens(*expected) == [10, *[12] * count, 11]
        assert form.grid(*expected) == (expected[1] // 48, expected[0] // 48)
        assert (form.template_token, form.placeholder) == (12, 12)


def test_settings_differ_if_pixels_do() -> None:
    form = Gemma4Format(start=10, placeholder=12, end=11, side=48, most=280)
    other: list[dict[str, Any]] = [{}, {"side": 32}, {"most": 70}, {"resampling": "BILINEAR"}]
    assert len({replace(form, **change).settings for change in other}) == 4


def config_of(sizes: Gemma4Sizes) -> dict[str, Any]:
    return {
        "model_type": "gemma4",
        "boi_token_id": 10,
        "eoi_token_id": 11,
        "image_token_id": 12,
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": sizes.width,
            "intermediate_size": sizes.hidden,
            "num_hidden_layers": sizes.blocks,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.heads,
            "head_dim": sizes.head,
            "patch_size": sizes.patch,
            "position_embedding_size": sizes.places,
            "pooling_kernel_size": sizes.pool,
            "rope_parameters": {"rope_theta": sizes.rope_base, "rope_type": "axial"},
            "rms_norm_eps": sizes.eps,
            "use_clipped_linears": sizes.clipped,
            "standardize": sizes.standardized,
        },
        "text_config": {"model_type": "gemma4_text", "hidden_size": sizes.output},
    }


CONFIG = config_of(CLIPPED)
PREPROCESSOR: dict[str, Any] = {
    "do_normalize": False,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": 3,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "resample": 3,
}


def files(path: Path, tower: Gemma4Tower, prefix: str = "model.", preprocessor: dict[str, Any] = PREPROCESSOR) -> Path:
    """Writes a checkpoint that has parts of other towers, too."""
    weights: dict[str, mx.array] = dict(tree_flatten(tower.parameters()))
    stored = {prefix + name: weight for name, weight in weights.items()}
    stored[f"{prefix}embed_audio.embedding_projection.weight"] = mx.zeros((16, 20))
    stored[f"{prefix}audio_tower.layers.0.norm_out.weight"] = mx.zeros(20)
    stored[f"{prefix}language_model.norm.weight"] = mx.ones(16)
    mx.save_safetensors(str(path / "model.safetensors"), stored)
    (path / "processor_config.json").write_text(json.dumps({"image_processor": preprocessor}))
    return path


def load(path: Path, config: dict[str, Any], **more: int) -> tuple[Vision | None, str]:
    return load_vision(ModelFiles(path), config, lambda: VOCABULARY, lambda done, total: None, **more)


@BOTH
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_checkpoint_gives_its_tower(tmp_path: Path, sizes: Gemma4Sizes, prefix: str) -> None:
    vision, reason = load(files(tmp_path, tiny_tower(sizes), prefix), config_of(sizes))
    assert vision is not None, reason
    assert vision.format == vision.small == Gemma4Format(start=10, placeholder=12, end=11, side=12, most=3)
    assert (vision.axes, vision.num_deep) == (None, 0)
    assert vision.tower.nbytes == tiny_tower(sizes).nbytes
    pixels = images(2, 36, 12)
    assert np.array_equal(features(vision.tower, pixels), features(tiny_tower(sizes), pixels))


def test_quantized_layers_stay_quantized(tmp_path: Path) -> None:
    sizes = replace(CLIPPED, width=64, hidden=64, head=32, heads=2)
    tower = tiny_tower(sizes)
    nn.quantize(tower, 32, 4, class_predicate=lambda name, module: name.endswith(("linear", "projection")))
    vision, reason = load(files(tmp_path, tower), config_of(sizes))
    assert vision is not None, reason
    pixels = images(2, 36, 12)
    assert np.array_equal(features(vision.tower, pixels), features(tower, pixels))
    assert vision.tower.nbytes == tower.nbytes


@pytest.mark.parametrize(("value", "mutual"), [("vision", "windows"), (None, "none")])
def test_the_tokens_of_an_image_see_one_another_if_the_text_model_says_so(
    tmp_path: Path, value: str | None, mutual: str
) -> None:
    text = CONFIG["text_config"] | {"use_bidirectional_attention": value}
    vision, reason = load(files(tmp_path, tiny_tower(CLIPPED)), CONFIG | {"text_config": text})
    assert vision is not None, reason
    assert vision.mutual == mutual
    vision, reason = load(tmp_path, CONFIG)
    assert vision is not None, reason
    assert vision.mutual == "none"


def test_pixels_are_normalized_if_the_files_say_so(tmp_path: Path) -> None:
    colours = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.25, 0.5, 0.2]}
    files(tmp_path, tiny_tower(CLIPPED), preprocessor=PREPROCESSOR | colours)
    vision, reason = load(tmp_path, CONFIG)
    assert vision is not None, reason
    assert isinstance(vision.tower, Gemma4Tower)
    assert (vision.tower.sizes.mean, vision.tower.sizes.std) == ((0.5,) * 3, (0.5,) * 3)
    files(tmp_path, tiny_tower(CLIPPED), preprocessor=PREPROCESSOR | colours | {"do_normalize": True})
    vision, reason = load(tmp_path, CONFIG)
    assert vision is not None, reason
    assert isinstance(vision.tower, Gemma4Tower)
    # The tower takes 2 * (normalized - 0.5).
    assert vision.tower.sizes.mean == pytest.approx((0.625, 0.65, 0.4))
    assert vision.tower.sizes.std == pytest.approx((0.125, 0.25, 0.1))


def test_an_image_has_no_more_pixels_than_the_server_is_told(tmp_path: Path) -> None:
    files(tmp_path, tiny_tower(CLIPPED))
    vision, reason = load(tmp_path, CONFIG, most_pixels=2 * 144)
    assert vision is not None, reason
    assert vision.format.size(640, 320) == (24, 12)
    vision, reason = load(tmp_path, CONFIG, most_pixels=143)
    assert vision is None
    assert "--max-image-pixels 143 is less than a token's 144" in reason


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("vision_config", {"hidden_activation": "gelu"}, "its activation gelu is not"),
        ("vision_config", {"num_key_value_heads": 1}, "its 3 heads of 8 have 1 of keys and values"),
        ("vision_config", {"head_dim": 6}, "its 3 heads of 6 have 3"),
        ("vision_config", {"head_dim": 4}, "shape"),
        (
            "vision_config",
            {"position_embedding_size": 8},
            "its images have up to 9 patches in a row, and its tower embeds 8",
        ),
        ("vision_config", {"pooling_kernel_size": 2}, "its tower takes patches of 4 pixels, in squares of 2 x 2"),
        ("vision_config", {"pooling_kernel_size": 0}, "its pooling_kernel_size is 0"),
        ("vision_config", {"standardize": True}, "std_bias"),
        ("vision_config", {"use_clipped_linears": False}, "input_max"),
        ("text_config", {"use_bidirectional_attention": "all"}, "its use_bidirectional_attention is all"),
        ("text_config", {"pad_token_id": 3}, "its images have the inputs of token 3 in its layers"),
    ],
)
def test_a_configuration_that_does_not_fit_is_told(
    tmp_path: Path, part: str, change: dict[str, Any], reason: str
) -> None:
    vision, why = load(files(tmp_path, tiny_tower(CLIPPED)), CONFIG | {part: CONFIG[part] | change})
    assert vision is None
    assert reason in why


@pytest.mark.parametrize("missing", list(VOCABULARY))
def test_a_tokenizer_without_the_images_tokens_is_told(tmp_path: Path, missing: str) -> None:
    vocabulary = {text: token for text, token in VOCABULARY.items() if text != missing}
    config = {name: value for name, value in CONFIG.items() if "token_id" not in name}
    path = files(tmp_path, tiny_tower(CLIPPED))
    vision, reason = load_vision(ModelFiles(path), config, lambda: vocabulary, lambda done, total: None)
    assert vision is None
    assert reason == f"its vision tower cannot be loaded: its tokenizer has no {missing}"
    vision, reason = load(path, config)
    assert vision is not None, reason
    assert vision.format.tokens(12, 12) == [10, 12, 11]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """A Gemma 4 E: its layers have inputs by tokens, and images are causal."""
    path = make_architecture(tmp_path_factory.mktemp("seeing") / "m", "gemma4")
    config = json.loads((path / "config.json").read_text())
    sizes = replace(CLIPPED, output=config["text_config"]["hidden_size"])
    weights: Any = tree_flatten(tiny_tower(sizes).parameters())
    mx.save_safetensors(str(path / "model-tower.safetensors"), {f"model.{name}": each for name, each in weights})
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (path / "config.json").write_text(json.dumps(config_of(sizes) | config))
    return load_model(str(path))


def test_a_model_with_inputs_in_its_layers_sees(served: ServedModel) -> None:
    assert served.missing[Feature.IMAGES] == ""
    assert served.vision is not None
    assert served.vision.mutual == "none"
    assert isinstance(served.vision.tower, Gemma4Tower)


def test_the_layers_take_the_inputs_of_token_0_for_images(served: ServedModel) -> None:
    """So does Gemma4Model of transformers, whose padding is token 0. And no row of features is scaled there."""
    assert served.vision is not None
    model: Any = served.model
    text = model.language_model.model
    embedding: Any = embedding_of(model)
    assert embedding is text.embed_tokens
    ids, where = mx.array([[5, 0, 0, 0, 17, 9]]), mx.array([1, 2, 3])
    shown = mx.random.normal((3, embedding.weight.shape[1]), key=mx.random.key(1))
    rows = served.vision.rows
    plain = model(ids)
    rows.where, rows.features = where, shown / text.embed_scale
    try:
        seen = model(ids)
    finally:
        rows.clear()
    embedded = embedding(ids)
    embedded[:, 1:4] = shown / text.embed_scale
    inputs = text.embed_tokens_per_layer(ids) * 16**0.5
    wanted = model(ids, input_embeddings=embedded, per_layer_inputs=inputs.reshape(1, 6, 6, 16))
    assert np.array(seen) == pytest.approx(np.array(wanted), abs=1e-4)
    assert np.array(seen) != pytest.approx(np.array(plain), abs=1e-2)
