"""Takes vision towers of mlx-vlm, if it is installed, for families that have none here.

Only the tower and its projector are mlx-vlm's: sizes, tokens and pixels of an image are decided here. mlx-vlm's
processors need a tokenizer of their own, allow code of the model's directory to run, and that of Llama 4 makes fewer
tiles than its prompt has.
"""

from __future__ import annotations

import importlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlxpaged.models.errors import in_one_line
from mlxpaged.vision.families.gemma.family import joins_of
from mlxpaged.vision.families.gemma.format import Gemma3Format
from mlxpaged.vision.families.kimi.family import images_of, merge_of
from mlxpaged.vision.families.kimi.format import Kimi3Format
from mlxpaged.vision.families.llama4.format import Llama4Format
from mlxpaged.vision.families.muse.format import MuseFormat
from mlxpaged.vision.families.pixtral.tower import MEAN as CLIP_MEAN
from mlxpaged.vision.families.pixtral.tower import STD as CLIP_STD
from mlxpaged.vision.families.qwen.family import pixels_of
from mlxpaged.vision.families.qwen.format import QwenFormat
from mlxpaged.vision.family import Family, Settings, colours_of, number, resampling_of
from mlxpaged.vision.image import ImageFormat
from mlxpaged.vision.interpolation import resized_part
from mlxpaged.vision.patches import in_squares, normalized
from mlxpaged.vision.tower import Tower, Vision

CONFIGURATIONS = ("text_config", "vision_config", "audio_config")

HALVES = (0.5, 0.5, 0.5)
"""The usual mean and standard deviation of a colour."""

NUMBER = re.compile("[0-9]{1,3}")
"""What Kimi's tokenizer has as a token at most: it splits numbers after each third digit."""

EXPANSION = "vision_tower.timm_model.blocks.0.0.conv_exp.weight"
"""A convolution of 3 x 3 in the tower of Gemma 3n, whose shape shows the layout of all."""

CONVOLUTION = "vision_tower.patch_embed.proj.weight"
"""The layer of the patches in the tower of Kimi K3."""


@dataclass
class NoText:
    """What mlx-vlm's models ask of their language model when they make features. Some set attributes of it. width: of
    its embeddings."""

    width: int

    @property
    def model(self) -> NoText:
        return self

    def embed_tokens(self, token_ids: mx.array) -> mx.array:
        return mx.zeros((*token_ids.shape, self.width))

    def embed_norm(self, embedded: mx.array) -> mx.array:
        return embedded

    def get_per_layer_inputs(self, token_ids: mx.array) -> None:
        return None


@dataclass(frozen=True)
class Grid:
    """How a model is told the rows and columns of patches of each image. name: of the argument. patch: side of a patch
    in pixels."""

    name: str
    patch: int

    def of(self, num_images: int, width: int, height: int) -> dict[str, mx.array]:
        return {self.name: mx.array([[1, height // self.patch, width // self.patch]] * num_images)}


def blocks_of(part: Any) -> Iterator[Module]:
    """Yields the modules that a tower has in lists, such as its blocks, without those within them."""
    within = part.children() if isinstance(part, Module) else part
    for each in within.values() if isinstance(within, dict) else within:
        if isinstance(within, list) and isinstance(each, Module):
            yield each
        else:
            yield from blocks_of(each)


def note_outputs(block: Module, outputs: deque[mx.array]) -> None:
    """Changes the block in place, by its class, so that it adds what it returns to the outputs."""
    kind: Any = type(block)

    class Noting(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            found = super().__call__(*args, **kwargs)
            if isinstance(found, mx.array):
                outputs.append(found)
            return found

    block.__class__ = Noting


class BorrowedTower(Tower):
    """One of mlx-vlm's models without its language model. Each of its blocks is a part: MLX computes nothing before it
    is asked to, so what the blocks return is noted while the model is called, and computed later.

    inputs: makes its pixel values of those of images. divisor: the text model multiplies embeddings by it. grid: None
    if the model finds it by itself.
    """

    library = "mlx-vlm"

    def __init__(
        self,
        model: Any,
        form: ImageFormat,
        inputs: Callable[[mx.array], mx.array],
        divisor: float = 1.0,
        grid: Grid | None = None,
    ) -> None:
        super().__init__()
        self.model, self.form, self.inputs, self.divisor, self.patches = model, form, inputs, divisor, grid
        self.outputs: deque[mx.array] = deque()  # of the blocks; MLX's modules keep lists as weights, and no deque
        for block in blocks_of(model):
            note_outputs(block, self.outputs)

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        weights: Any = tree_flatten(self.model.parameters())
        dtype = next(array.dtype for _, array in weights if mx.issubdtype(array.dtype, mx.floating))
        n, height, width, _ = pixels.shape
        rows, columns = self.form.grid(width, height)
        ids = mx.full((n, rows * columns), self.form.placeholder)
        more = {} if self.patches is None else self.patches.of(n, width, height)
        self.outputs.clear()  # an error may have left some
        found = self.model.get_input_embeddings(ids, self.inputs(pixels).astype(dtype), **more).inputs_embeds
        parts = self.outputs.copy()
        self.outputs.clear()
        while parts:  # none is kept after its turn
            yield parts.popleft()
        yield (found.astype(mx.float32) / self.divisor).astype(dtype)


def model_of(config: Mapping[str, Any]) -> Any:
    """Returns mlx-vlm's model without its language model. Its weights are not evaluated. Raises ValueError if mlx-vlm
    cannot be imported."""
    kind = config["model_type"]
    try:
        package = importlib.import_module(f"mlx_vlm.models.{kind}")
    except ImportError as error:
        advice = "`pip install requests` and `pip install --no-deps mlx-vlm` let this model see"
        raise ValueError(f"{kind} models take it from mlx-vlm, and {in_one_line(error)}: {advice}") from error
    model_config = package.ModelConfig.from_dict(deepcopy(dict(config)))
    for name in CONFIGURATIONS:
        found = getattr(model_config, name, None)
        if hasattr(model_config, name) and (found is None or isinstance(found, dict)):
            class_name = name.replace("_", " ").title().replace(" ", "")
            setattr(model_config, name, getattr(package, class_name).from_dict(dict(config.get(name) or {})))
    model = package.Model(model_config)
    model.language_model = NoText(number(config["text_config"], "hidden_size"))
    model.audio_tower = None
    model.eval()
    return model


def require_side(settings: Settings, side: int) -> None:
    """Raises ValueError if the files ask for images or tiles of another size."""
    size = settings.images.get("size") or {"height": side, "width": side}
    if (size.get("height"), size.get("width")) != (side, side):
        raise ValueError(f"its images have the size {str(size)[:100]}, and its tower takes {side} x {side} pixels")


def make_gemma3n(settings: Settings) -> tuple[Vision, Module]:
    """Every image has the same size. The text model multiplies embeddings by the root of their width."""
    config = settings.config
    side, count = 768, number(config, "vision_soft_tokens_per_image", 256)
    require_side(settings, side)
    model = model_of(config)
    start, end, newlines = map(settings.token, ("<start_of_image>", "<end_of_image>", "\n\n"))
    form = Gemma3Format(
        start=start,
        placeholder=int(model.config.image_token_id),
        end=end,
        newlines=newlines,
        side=side,
        rows=round(count**0.5),
        joins=joins_of(settings.vocabulary),
        resampling=resampling_of(settings.images, "BILINEAR"),
        shown_as_placeholder=True,
    )
    mean, std = colours_of({"do_normalize": False, **settings.images}, HALVES, HALVES)

    def inputs(pixels: mx.array) -> mx.array:
        return normalized(pixels, mean, std).transpose(0, 3, 1, 2)

    divisor = number(config["text_config"], "hidden_size") ** 0.5
    return Vision(form, BorrowedTower(model, form, inputs, divisor)), model


def make_llama4(settings: Settings) -> tuple[Vision, Module]:
    config = settings.config
    seen = config["vision_config"]
    side, patch = number(seen, "image_size", 336), number(seen, "patch_size", 14)
    require_side(settings, side)
    model = model_of(config)
    texts = ("<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
    template, start, end, across, down = map(settings.token, texts)
    most = number({"max_patches": settings.images.get("max_patches", 16)}, "max_patches")
    form = Llama4Format(
        template_token=template,
        start=start,
        placeholder=int(model.config.image_token_index),
        end=end,
        across=across,
        down=down,
        side=side,
        rows=round(side // patch * float(seen.get("pixel_shuffle_ratio", 0.5))),
        most=min(most, max(1, settings.most_pixels // side**2)),
        resampling=resampling_of(settings.images, "BILINEAR"),
    )
    mean, std = colours_of(settings.images, HALVES, HALVES)

    def inputs(pixels: mx.array) -> mx.array:
        return normalized(tiles_of(pixels, form), mean, std).transpose(0, 3, 1, 2)

    return Vision(form, BorrowedTower(model, form, inputs)), model


def tiles_of(pixels: mx.array, form: Llama4Format) -> mx.array:
    """Returns the tiles of images, [n * tiles, side, side, 3]. Black fills up the last ones of rows and columns. The
    last tile of an image with several is the whole image. pixels: uint8 [n, H, W, 3]."""
    n, height, width, colours = pixels.shape
    rows, columns, side = *form.tiles(width, height), form.side
    filled = mx.pad(pixels, [(0, 0), (0, rows * side - height), (0, columns * side - width), (0, 0)])
    tiles = filled.reshape(n, rows, side, columns, side, colours).swapaxes(2, 3).reshape(n, -1, side, side, colours)
    if rows * columns > 1:
        whole = resized_part(pixels, side, side, slice(0, side), slice(0, side))
        tiles = mx.concatenate([tiles, whole[:, None]], axis=1)
    return tiles.flatten(0, 1)


def make_kimi_k3(settings: Settings) -> tuple[Vision, Module]:
    """The prompt says the image's size before it. Patches of 14 pixels, squares of four of them are a row."""
    config = settings.config
    seen, images = config["vision_config"], images_of(settings)
    patch, merge = number(seen, "patch_size", 14), merge_of(seen)
    model = model_of(config)
    opening = tuple(map(settings.token, ("<|media_begin|>", "image", "Ġ")))
    times, content, end = map(settings.token, ("x", "<|media_content|>", "<|media_end|>"))
    digits = {digit: settings.token(digit) for digit in "0123456789"}
    form = Kimi3Format(
        placeholder=int(model.config.image_token_index),
        side=patch * merge,
        merge=merge,
        most=min(number(images, "in_patch_limit", 65_536), max(1, settings.most_pixels // patch**2)),
        longest=number(images, "patch_limit_on_one_side", 512),
        opening=opening,
        times=times,
        content=content,
        end=end,
        numbers=digits | {text: token for text, token in settings.vocabulary.items() if NUMBER.fullmatch(text)},
    )
    mean, std = colours_of(images, HALVES, HALVES)

    def inputs(pixels: mx.array) -> mx.array:
        patches = grid_of(normalized(pixels, mean, std), patch)
        return patches.reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2)

    return Vision(form, BorrowedTower(model, form, inputs, grid=Grid("grid_thws", patch))), model


def make_minimax_m3(settings: Settings) -> tuple[Vision, Module]:
    """An image is a film of a few frames that are the same. Its patches come square by square."""
    model = model_of(settings.config)
    patch, merge, frames = sizes_of(model, "patch_size", "spatial_merge_size", "temporal_patch_size")
    least, most = pixels_of(settings, 4 * 28**2, 672**2)
    form = QwenFormat(
        placeholder=int(model.config.image_token_id),
        side=patch * merge,
        around=(settings.token("]<]start of image[>["), settings.token("]<]end of image[>[")),
        least=least,
        most=most,
        resampling=resampling_of(settings.images, "BICUBIC"),
    )
    mean, std = colours_of(settings.images, CLIP_MEAN, CLIP_STD)

    def inputs(pixels: mx.array) -> mx.array:
        squares = in_squares(grid_of(normalized(pixels, mean, std), patch), merge)
        patches = squares.reshape(-1, 1, patch, patch, 3).transpose(0, 4, 1, 2, 3)
        return mx.repeat(patches, frames, axis=2).flatten(1)

    return Vision(form, BorrowedTower(model, form, inputs, grid=Grid("image_grid_thw", patch))), model


def make_muse_glimmer(settings: Settings) -> tuple[Vision, Module]:
    """An image is a film of a few frames that are the same. The text model normalizes features as it does
    embeddings."""
    model = model_of(settings.config)
    model.perception_emb_norm = model.language_model.embed_norm
    patch, merge, frames = sizes_of(model, "patch_size", "merge_size", "patch_temporal")
    side = patch * merge
    form = MuseFormat(
        placeholder=int(model.config.image_token_id),
        side=side,
        around=(settings.token("<|image_start|>"), settings.token("<|image_end|>")),
        most=min(number(settings.images, "max_image_tokens", 4096), max(1, settings.most_pixels // side**2)),
        resampling=resampling_of(settings.images, "LANCZOS"),
    )
    mean, std = colours_of(settings.images, HALVES, HALVES)

    def inputs(pixels: mx.array) -> mx.array:
        patches = grid_of(normalized(pixels, mean, std), patch).reshape(-1, 1, patch, patch, 3)
        return mx.repeat(patches.transpose(0, 1, 4, 2, 3), frames, axis=1).flatten(1)

    return Vision(form, BorrowedTower(model, form, inputs, grid=Grid("image_grid_thw", patch))), model


def sizes_of(model: Any, *names: str) -> list[int]:
    """Returns sizes of mlx-vlm's tower, whose configuration has the defaults. Raises ValueError."""
    return [number({name: getattr(model.config.vision_config, name)}, name) for name in names]


def grid_of(values: mx.array, side: int) -> mx.array:
    """Returns the patches of images, [n, rows, columns, side, side, 3]. values: [n, H, W, 3]."""
    n, height, width, colours = values.shape
    return values.reshape(n, height // side, side, width // side, side, colours).swapaxes(2, 3)


def prepare_kimi_k3(stored: dict[str, mx.array]) -> None:
    """Makes the layout of the convolution MLX's."""
    patches = stored.get(CONVOLUTION)
    if patches is not None and patches.ndim == 4 and patches.shape[2] == patches.shape[3]:  # torch's
        stored[CONVOLUTION] = patches.transpose(0, 2, 3, 1)


def prepare_gemma3n(stored: dict[str, mx.array]) -> None:
    """Makes the layout of the convolutions MLX's."""
    expansion = stored.get(EXPANSION)
    if expansion is not None and expansion.ndim == 4 and expansion.shape[2] == expansion.shape[3]:  # torch's
        stored.update({name: array.transpose(0, 2, 3, 1) for name, array in stored.items() if array.ndim == 4})


def named(*parts: str) -> Callable[[str], str | None]:
    """Returns a `Family.name_of` that leaves the names as they are. parts: how the weights' names begin."""
    return lambda name: name if name.startswith(parts) else None


BORROWED: Mapping[str, Family] = {
    "gemma3n": Family(
        {"gemma3n_vision", "gemma3n"},
        named("vision_tower.", "embed_vision.", "embed_audio."),
        make_gemma3n,
        prepare_gemma3n,
    ),
    "kimi_k3": Family(
        {"moonvit3d", "kimi_k3"},
        named("vision_tower.", "mm_projector."),
        make_kimi_k3,
        prepare_kimi_k3,
    ),
    "minimax_m3_vl": Family(
        {"clip_vision_model", "minimax_m3_vl_vision", "minimax_m3_vl"},
        named("vision_tower.", "multi_modal_projector.", "patch_merge_mlp."),
        make_minimax_m3,
    ),
    "muse_glimmer": Family(
        {"muse_glimmer_vision", "muse_glimmer"},
        named("vision_tower.", "vision_adapter.", "vision_projection."),
        make_muse_glimmer,
    ),
    "llama4": Family(
        {"llama4_vision_model", "llama4"},
        named("vision_model.", "multi_modal_projector."),
        make_llama4,
    ),
}
"""Families by the model type, which is the name of mlx-vlm's package too."""
