"""Towers beside those of mlx-vlm, with the same random weights, on the same pixels, and pixels beside those of
transformers, of the same files: `make test-mlx-vlm`.

Where mlx-vlm has another epsilon or activation than the models' own code, its modules get that of the code first.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten
from PIL import Image

from mlxpaged.models.features import Feature
from mlxpaged.models.loader import load_model
from mlxpaged.models.vision.loading import load_vision
from mlxpaged.vision.families.gemma.format import Gemma3Format, Gemma4Format
from mlxpaged.vision.families.gemma.gemma3 import Gemma3Tower, factor_of_text
from mlxpaged.vision.families.gemma.gemma4 import Gemma4Sizes
from mlxpaged.vision.families.lfm2.format import Lfm2Format, Tiles
from mlxpaged.vision.families.lfm2.tower import Lfm2Tower
from mlxpaged.vision.families.pixtral.format import PixtralFormat
from mlxpaged.vision.families.qwen.format import QwenFormat
from mlxpaged.vision.families.qwen.tower import QwenSizes
from mlxpaged.vision.image import ImageFormat
from mlxpaged.vision.patches import normalized as ours_normalized
from mlxpaged.vision.reading import ClientImage, check, decode
from mlxpaged.vision.tower import Tower
from tests.models.architectures import make_architecture
from tests.vision import test_gemma3, test_gemma4, test_qwen2_5, tiny, tiny_kimi, tiny_lfm2, tiny_qwen
from tests.vision.tiny_gemma import with_random_weights

pytestmark = pytest.mark.mlxvlm

Pixels = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]

ALLOWED = 1e-5
"""The largest difference, by the largest value."""


def vlm(name: str) -> Any:
    return importlib.import_module(f"mlx_vlm.models.{name}")


class Parts(nn.Module):
    """Modules of mlx-vlm by their names in a checkpoint."""

    def __init__(self, weights: Mapping[str, mx.array], **parts: nn.Module) -> None:
        super().__init__()
        self.parts = list(parts)
        for name, part in parts.items():
            setattr(self, name, part)
        self.load_weights(list(weights.items()))

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name) if name in self.parts else super().__getitem__(name)


def weights_of(tower: Tower) -> dict[str, mx.array]:
    return dict(tree_flatten(tower.parameters()))


def as_convolution(weights: dict[str, mx.array], name: str, side: int) -> None:
    weights[name] = weights[name].reshape(-1, side, side, 3)


def normalized(pixels: Pixels, sizes: Any) -> mx.array:
    """In float32, [n, H, W, 3]."""
    return mx.array(((pixels / 255 - np.array(sizes.mean)) / np.array(sizes.std)).astype(np.float32))


def patches_of(pixels: mx.array, side: int) -> mx.array:
    """[n, patches, side, side, 3], row by row."""
    n, height, width, _ = pixels.shape
    grid = pixels.reshape(n, height // side, side, width // side, side, 3).swapaxes(2, 3)
    return grid.reshape(n, -1, side, side, 3)


def compare(tower: Tower, pixels: Pixels, theirs: mx.array, allowed: float = ALLOWED) -> None:
    *_, ours = tower.encode(mx.array(pixels))
    wanted, found = np.array(theirs), np.array(ours).reshape(theirs.shape)
    difference = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    print(f"{type(tower).__name__}: the largest difference is {difference:.1e} of the largest value")
    assert difference <= allowed


def two_frames(values: mx.array, side: int, merge: int) -> mx.array:
    """The patches of an image as Qwen's processors make them: square by square, of two frames that are the same."""
    _, height, width, _ = values.shape
    frames = mx.repeat(values.transpose(0, 3, 1, 2), 2, axis=0)
    squares = frames.reshape(2, 3, height // side // merge, merge, side, width // side // merge, merge, side)
    return squares.transpose(2, 5, 3, 6, 1, 0, 4, 7).reshape(height // side * (width // side), -1)


SHAPES = pytest.mark.parametrize(("width", "height"), [(8, 8), (24, 16), (16, 40), (40, 24)])


@SHAPES
@pytest.mark.parametrize(
    ("kind", "sizes"), [("qwen2_vl", tiny_qwen.OLD), ("qwen3_vl", tiny_qwen.DEEP), ("qwen3_5", tiny_qwen.PLAIN)]
)
def test_qwen(kind: str, sizes: QwenSizes, width: int, height: int) -> None:
    tower, side, merge = tiny_qwen.tiny_tower(sizes), sizes.patch, sizes.merge
    config = tiny_qwen.old_config() if kind == "qwen2_vl" else tiny_qwen.config_of(sizes, kind)
    rename: Callable[[str], str] = tiny_qwen.old_name if kind == "qwen2_vl" else str
    weights = {rename(name): weight for name, weight in weights_of(tower).items()}
    of_one = weights["patch_embed.proj.weight"].reshape(-1, 1, side, side, 3)
    weights["patch_embed.proj.weight"] = mx.concatenate([of_one / 2, of_one / 2], axis=1)
    theirs = vlm(f"{kind}.vision").VisionModel(vlm(f"{kind}.config").VisionConfig.from_dict(config["vision_config"]))
    theirs.load_weights(list(weights.items()))
    pixels = tiny.images(1, width, height)
    rows, columns = height // side, width // side
    found = theirs(two_frames(normalized(pixels, sizes), side, merge), mx.array([[1, rows, columns]]))
    last, deep = (found, []) if isinstance(found, mx.array) else found
    compare(tower, pixels, mx.stack([last, *deep], axis=1) if deep else last)


@SHAPES
def test_qwen2_5_vl(width: int, height: int) -> None:
    sizes, tower = test_qwen2_5.SIZES, test_qwen2_5.tiny_tower()
    side, merge = sizes.patch, sizes.merge
    names = {"merger.linear_fc1.": "merger.mlp.0.", "merger.linear_fc2.": "merger.mlp.2."}
    weights = {}
    for name, weight in weights_of(tower).items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        weights[name] = weight
    of_one = weights["patch_embed.proj.weight"].reshape(-1, 1, side, side, 3)
    weights["patch_embed.proj.weight"] = mx.concatenate([of_one / 2, of_one / 2], axis=1)
    config = vlm("qwen2_5_vl.config").VisionConfig.from_dict(
        {
            "model_type": "qwen2_5_vl",
            "hidden_size": sizes.width,
            "intermediate_size": sizes.hidden,
            "depth": sizes.blocks,
            "num_heads": sizes.heads,
            "patch_size": side,
            "spatial_merge_size": merge,
            "window_size": sizes.window * side,
            "fullatt_block_indexes": list(sizes.whole),
            "out_hidden_size": sizes.output,
        }
    )
    tower_of_vlm = vlm("qwen2_5_vl.vision").VisionModel(config)
    tower_of_vlm.load_weights(list(weights.items()))
    pixels = tiny.images(1, width, height)
    grid = mx.array([[1, height // side, width // side]])
    compare(tower, pixels, tower_of_vlm(two_frames(normalized(pixels, sizes), side, merge), grid))


def test_gemma_3() -> None:
    sizes = test_gemma3.SIZES
    tower = with_random_weights(Gemma3Tower(sizes))
    weights = weights_of(tower)
    as_convolution(weights, "vision_tower.embeddings.patch_embedding.weight", sizes.patch)
    weights = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in weights.items()}
    config = vlm("gemma3.config")
    seen = config.VisionConfig.from_dict(test_gemma3.CONFIG["vision_config"])
    text = config.TextConfig.from_dict(
        {"model_type": "gemma3_text", "hidden_size": sizes.output, "mm_tokens_per_image": 4, "num_hidden_layers": 1}
        | {"intermediate_size": 8}
    )
    whole = SimpleNamespace(vision_config=seen, text_config=text, mm_tokens_per_image=4)
    projector = vlm("gemma3.gemma3").Gemma3MultiModalProjector(whole)
    theirs = Parts(weights, vision_tower=vlm("gemma3.vision").VisionModel(seen), multi_modal_projector=projector)
    theirs["vision_tower"].vision_model.post_layernorm.eps = sizes.eps
    pixels = tiny.images(2, test_gemma3.SIDE, test_gemma3.SIDE)
    hidden, *_ = theirs["vision_tower"](normalized(pixels, sizes))
    compare(tower, pixels, projector(hidden) / factor_of_text(sizes.output))


@pytest.mark.parametrize("sizes", [test_gemma4.STANDARDIZED, test_gemma4.CLIPPED], ids=["standardized", "clipped"])
def test_gemma_4(sizes: Gemma4Sizes) -> None:
    sizes = replace(sizes, eps=1e-6)
    tower = test_gemma4.tiny_tower(sizes)
    seen = vlm("gemma4.config").VisionConfig.from_dict(test_gemma4.config_of(sizes)["vision_config"])
    embedder = vlm("gemma4.gemma4").MultimodalEmbedder(sizes.width, sizes.output, sizes.eps)
    theirs = Parts(weights_of(tower), vision_tower=vlm("gemma4.vision").VisionModel(seen), embed_vision=embedder)
    pixels = tiny.images(1, 36, 24)
    values = mx.array((pixels / 255).astype(np.float32)).transpose(0, 3, 1, 2)
    compare(tower, pixels, embedder(theirs["vision_tower"](values)) / sizes.output**0.5)


def lfm2_features(sizes: Any, weights: dict[str, mx.array], views: list[Pixels]) -> mx.array:
    """The features of views of any sizes, one after the other, as mlx-vlm makes those of an image's tiles."""
    config = vlm("lfm2_vl.config")
    settings = tiny_lfm2.config_of(sizes)
    seen = config.VisionConfig.from_dict(settings["vision_config"])
    text = SimpleNamespace(hidden_size=sizes.output)
    whole = SimpleNamespace(
        **{name: value for name, value in settings.items() if not name.endswith("_config")},
        vision_config=seen,
        text_config=text,
    )
    module = vlm("lfm2_vl.lfm2_vl")
    tower, projector = vlm("lfm2_vl.vision").VisionModel(seen), module.Lfm2VlMultiModalProjector(whole)
    parts = Parts(weights, vision_tower=tower, multi_modal_projector=projector)
    parts.pixel_unshuffle = module.PixelUnshuffleBlock(sizes.merge)
    patches = [patches_of(normalized(view, sizes), sizes.patch)[0].flatten(1) for view in views]
    most = max(map(len, patches))
    padded = mx.stack([mx.pad(each, [(0, most - len(each)), (0, 0)]) for each in patches])
    mask = mx.array([[int(i < len(each)) for i in range(most)] for each in patches])
    shapes = mx.array([[size // sizes.patch for size in view.shape[1:3]] for view in views])
    return mx.concatenate(
        module.Model.encode_images(parts, padded, spatial_shapes=shapes, pixel_attention_mask=mask), axis=0
    )


@SHAPES
@pytest.mark.parametrize("sizes", [tiny_lfm2.NORMED, tiny_lfm2.PLAIN], ids=["normed", "plain"])
def test_lfm2_vl(sizes: Any, width: int, height: int) -> None:
    sizes = replace(sizes, eps=1e-6)
    tower = tiny_lfm2.tiny_tower(sizes)
    pixels = tiny.images(1, width, height)
    compare(tower, pixels, lfm2_features(sizes, tiny_lfm2.stored_weights(tower, "mlx-vlm"), [pixels]))


def test_tiles_of_lfm2_vl() -> None:
    """The image has the size of its tiles, so they are its own pixels."""
    sizes = replace(tiny_lfm2.NORMED, eps=1e-6)
    tiles = Tiles(side=16, least=2, most=6, tolerance=1.0, pixels=10**6, thumbnail=False)
    form = Lfm2Format(placeholder=9, around=None, side=8, least=1, most=4, tiles=tiles)
    plain = tiny_lfm2.tiny_tower(sizes)
    tower = Lfm2Tower(sizes, form)
    tower.update(plain.parameters())
    pixels = tiny.images(1, 48, 32)
    views = [pixels[:, top : top + 16, left : left + 16] for top in (0, 16) for left in (0, 16, 32)]
    compare(tower, pixels, lfm2_features(sizes, tiny_lfm2.stored_weights(plain, "mlx-vlm"), views))


@pytest.mark.parametrize("kind", ["kimi_vl", "kimi_k25"])
def test_kimi(kind: str) -> None:
    """Of an image with the grid's own rows and columns: mlx-vlm's bicubic interpolation has another border."""
    sizes = replace(tiny_kimi.SIZES, places=(6, 6))
    tower = tiny_kimi.tiny_tower(sizes)
    stored = tiny_kimi.stored_weights if kind == "kimi_vl" else tiny_kimi.stored_weights_of_k2_5
    seen = vlm(f"{kind}.config").VisionConfig.from_dict(
        tiny_kimi.config_of(sizes)["vision_config"]
        | {"embed_dim": sizes.width, "depth": sizes.blocks, "num_heads": sizes.heads}
    )
    whole = SimpleNamespace(vision_config=seen, text_config=SimpleNamespace(hidden_size=sizes.output))
    seeing = vlm(f"{kind}.vision").VisionModel(seen)
    module = vlm(f"{kind}.{kind}")
    if kind == "kimi_vl":
        parts = {"multi_modal_projector": module.KimiVLMultiModalProjector(whole)}
    else:
        parts = {"mm_projector": module.KimiK25MultiModalProjector(whole)}
    theirs = Parts(stored(tower, True), vision_tower=seeing, **parts)
    for block in seeing.blocks:
        block.norm0.eps = block.norm1.eps = 1e-5
        block.mlp.activation_fn = nn.GELU(approx="precise")
    seeing.final_layernorm.eps = 1e-5
    pixels = tiny.images(1, 24, 24)
    patches = patches_of(normalized(pixels, sizes), sizes.patch)[0]
    hidden = seeing(patches, mx.array([[6, 6]]))
    found = theirs[next(iter(parts))](hidden)
    compare(tower, pixels, found if isinstance(found, mx.array) else mx.concatenate(found))


@SHAPES
def test_mistral_3(width: int, height: int) -> None:
    sizes = replace(tiny.MERGED, rope_base=10000.0)
    tower = tiny.tiny_tower(sizes)
    weights = weights_of(tower)
    as_convolution(weights, "vision_tower.patch_conv.weight", sizes.patch)
    weights = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in weights.items()}
    seen = vlm("pixtral.config").VisionConfig.from_dict(
        {
            "hidden_size": sizes.width,
            "head_dim": sizes.width // sizes.heads,
            "intermediate_size": sizes.hidden,
            "num_hidden_layers": sizes.blocks,
            "num_attention_heads": sizes.heads,
            "image_size": 64,
            "patch_size": sizes.patch,
            "rope_theta": sizes.rope_base,
        }
    )
    whole = SimpleNamespace(
        vision_config=seen,
        text_config=SimpleNamespace(hidden_size=sizes.output, rms_norm_eps=sizes.merger_eps),
        spatial_merge_size=sizes.merge,
        vision_feature_layer=-1,
        multimodal_projector_bias=sizes.bias,
    )
    seeing = vlm("pixtral.vision").VisionModel(seen)
    projector = vlm("mistral3.mistral3").Mistral3MultiModalProjector(whole)
    Parts(weights, vision_tower=seeing, multi_modal_projector=projector)
    pixels = tiny.images(1, width, height)
    *_, states = seeing(normalized(pixels, sizes), output_hidden_states=True, image_sizes=[(height, width)])
    compare(tower, pixels, projector(states[-1][0], [(height, width)]))


@dataclass(frozen=True)
class Borrowed:
    """A model whose tower is mlx-vlm's. seen: its vision_config. more: of config.json. tokens: of its prompts.
    processor: mlx-vlm's class that makes its pixels. limits: of an image's size, as the processor takes them. grid: the
    argument with an image's rows and columns of patches. sizes: of images."""

    seen: dict[str, Any]
    more: dict[str, Any]
    tokens: tuple[str, ...]
    processor: str
    limits: dict[str, int]
    grid: str = "image_grid_thw"
    sizes: tuple[tuple[int, int], ...] = ((10, 13), (24, 32), (120, 90))


LAYERS = {"hidden_size": 48, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 32}
BORROWED = {
    "kimi_k3": Borrowed(
        {f"vt_{name}": size for name, size in LAYERS.items()}
        | {"patch_size": 4, "qkv_hidden_size": 32, "mm_hidden_size": 48},
        {"media_placeholder_token_id": 9},
        ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "image", "x", "Ġ", *"0123456789"),
        "ImageProcessor",
        {"in_patch_limit": 128},
        "grid_thws",
        sizes=((24, 16), (16, 40)),  # of whole squares: it puts black pixels beside other ones
    ),
    "minimax_m3_vl": Borrowed(
        LAYERS | {"patch_size": 4},
        {"image_token_index": 9, "projector_hidden_size": 40},
        ("]<]start of image[>[", "]<]end of image[>["),
        "MiniMaxM3VLImageProcessor",
        {"min_pixels": 512, "max_pixels": 2048},
    ),
    "muse_glimmer": Borrowed(
        LAYERS | {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        {"image_token_id": 9, "out_hidden_size": 4 * 48, "projector_hidden_size": 40},
        ("<|image_start|>", "<|image_end|>"),
        "MuseGlimmerImageProcessor",
        {"max_image_tokens": 32},
    ),
}
"""Those for which mlx-vlm has a processor that needs no tokenizer."""


class Normed(Tower):
    """A tower whose features the text model normalizes."""

    def __init__(self, tower: Tower, eps: float) -> None:
        super().__init__()
        self.tower, self.eps = tower, eps

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        for state in self.tower.encode(pixels):
            yield mx.fast.rms_norm(state, None, self.eps)


@pytest.mark.parametrize("kind", BORROWED)
def test_borrowed_towers(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is loaded with its tower, and passes the probe. Its features are those that mlx-vlm's model makes of the
    pixels of mlx-vlm's processor, of images that are enlarged, reduced and kept."""
    borrowed, package = BORROWED[kind], vlm(kind)
    path = make_architecture(tmp_path / "m", kind)
    config = json.loads((path / "config.json").read_text())
    config = {"text_config": config} | config | borrowed.more | {"vision_config": borrowed.seen}
    (path / "config.json").write_text(json.dumps(config))
    colours = {"image_mean": HALF.mean, "image_std": HALF.std}
    (path / "preprocessor_config.json").write_text(json.dumps(colours | borrowed.limits))
    known = {text: 20 + i for i, text in enumerate(borrowed.tokens)}

    def load(files: Any, own_config: Any, vocabulary: Any, *more: Any) -> Any:
        return load_vision(files, own_config, lambda: vocabulary() | known, *more)

    monkeypatch.setattr("mlxpaged.models.loader.load_vision", load)
    model_config = package.ModelConfig.from_dict(config)
    for name, part in (("text_config", package.TextConfig), ("vision_config", package.VisionConfig)):
        if isinstance(found := getattr(model_config, name), dict):
            setattr(model_config, name, part.from_dict(found))
    theirs = package.Model(model_config)
    names: Any = tree_flatten(theirs.parameters())
    mx.random.seed(3)
    weights = {
        name: mx.random.normal(each.shape) * (1.5 / each.shape[-1] ** 0.5 if each.ndim > 1 else 0.5)
        for name, each in names
        if not name.startswith("language_model.")
    }
    theirs.load_weights(list(weights.items()), strict=False)
    mx.save_safetensors(str(path / "model-tower.safetensors"), weights)
    served = load_model(str(path))
    assert served.vision is not None, served.missing[Feature.IMAGES]
    form, tower = served.vision.format, served.vision.tower
    parts = list(tower.encode(mx.zeros((1, *reversed(form.size(24, 16)), 3), mx.uint8)))
    assert len(parts) >= LAYERS["num_hidden_layers"] + 1, "each block is a part of the work"
    if kind == "muse_glimmer":
        tower = Normed(tower, model_config.text_config.rms_norm_eps)
    processor = getattr(package, borrowed.processor)(patch_size=4, **colours, **borrowed.limits)
    for width, height in borrowed.sizes:
        source = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
        made = {name: mx.array(np.array(each)) for name, each in processor([Image.fromarray(source)]).items()}
        pixels = decoded(source, form)[None]
        ids = mx.full((1, form.tokens(pixels.shape[2], pixels.shape[1]).count(form.placeholder)), form.placeholder)
        grid = {borrowed.grid: made[borrowed.grid]}
        compare(tower, pixels, theirs.get_input_embeddings(ids, made["pixel_values"], **grid).inputs_embeds)


def decoded(pixels: Pixels, form: ImageFormat) -> Pixels:
    """The pixels at the size that the tower takes, from a PNG in base64."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    return decode(check(ClientImage(text, is_url=False), form))


def processor(kind: str, name: str, **settings: Any) -> Any:
    module = importlib.import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
    return getattr(module, name)(**settings)


CLIP = SimpleNamespace(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
HALF = SimpleNamespace(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


@pytest.mark.parametrize(("width", "height"), [(300, 200), (57, 911), (1280, 720), (20, 20)])
@pytest.mark.parametrize("kind", ["qwen2_vl", "pixtral", "gemma3", "gemma4"])
def test_pixels(kind: str, width: int, height: int) -> None:
    """transformers multiplies by 1/255 where they are divided here, so the numbers may differ in the last bit."""
    source = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    form: ImageFormat
    if kind == "qwen2_vl":
        form, colours = QwenFormat(placeholder=1, side=28, least=56 * 56, most=28 * 28 * 1280), CLIP
        found = processor(kind, "Qwen2VLImageProcessorPil")(source, return_tensors="np")["pixel_values"]
    elif kind == "pixtral":
        form, colours = PixtralFormat(placeholder=1, row_end=2, end=3, longest=(1024, 1024), side=16), CLIP
        found = processor(kind, "PixtralImageProcessorPil")(source, return_tensors="np")["pixel_values"]
    elif kind == "gemma3":
        form, colours = Gemma3Format(start=1, placeholder=2, end=3, newlines=4, side=224, rows=4), HALF
        found = processor(kind, "Gemma3ImageProcessorPil")(source, return_tensors="np")["pixel_values"]
    else:
        form = Gemma4Format(start=1, placeholder=2, end=3, side=48, most=280)
        colours = SimpleNamespace(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
        found = processor(kind, "Gemma4ImageProcessorPil")(source, return_tensors="np")["pixel_values"]
    values = ours_normalized(mx.array(decoded(source, form))[None], colours.mean, colours.std)
    if kind == "qwen2_vl":
        ours = np.array(two_frames(values, 14, 2))
    elif kind == "gemma4":
        ours = np.array(patches_of(values, 16).flatten(2))
        found = found[:, : ours.shape[1]]
    else:
        ours = np.array(values.transpose(0, 3, 1, 2))
    assert float(np.abs(ours - np.array(found).reshape(ours.shape)).max()) <= 1e-6
