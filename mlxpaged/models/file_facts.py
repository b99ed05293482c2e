"""Says what a model's files tell of it: its kind, its sizes, and what it can do once it is loaded.

No weights are read and nothing is loaded. What was read is kept for as long as the files stay as they are. A damaged
file takes away what it would tell, and no more.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from mlxpaged.models.encoders.embedding import (
    MODULES,
    EmbeddingSpec,
    Pooling,
    check_causal,
    check_dense,
    embedding_spec,
    stated_dense,
)
from mlxpaged.models.encoders.encoder_files import read_config
from mlxpaged.models.encoders.encoder_model import pair_spec
from mlxpaged.models.files.architectures import Source, known_source
from mlxpaged.models.files.context_length import DEFAULT_CONTEXT_LENGTH, stated_length
from mlxpaged.models.files.files import MAX_FILES, TEMPLATES
from mlxpaged.models.files.generation_config import read_generation_config, sampling_of
from mlxpaged.models.files.json_files import CONFIG, model_config, read_object
from mlxpaged.models.files.kinds import Kind, is_encoder, judges_pairs, kind_of
from mlxpaged.models.sources.downloads import UNKNOWN, quantization
from mlxpaged.models.sources.gguf import tokenizer as gguf_tokenizer
from mlxpaged.models.sources.gguf.config import config_of
from mlxpaged.models.sources.gguf.file import read_gguf, split_paths
from mlxpaged.models.sources.preflight import weight_paths
from mlxpaged.models.sources.weight_headers import StoredTensor, read_tensors
from mlxpaged.models.text.template_facts import (
    DEFAULT,
    FOR_TOOLS,
    NO_CHAT,
    ChatFacts,
    FileVocabulary,
    GgufVocabulary,
    chat_facts,
    templates_in,
)
from mlxpaged.models.text.tokenizer_files import SETTINGS, mlx_lm_defaults, read_template
from mlxpaged.models.vision.loading import family_of

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

MAX_KEPT = 4096
"""Models whose facts are kept."""
LATEST_TIME = 253_402_300_799
"""The end of the year 9999 in Unix time: no later one can be written as a date."""
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""What config.json calls the types of a safetensors file."""
CODE = "chat_template_type"
"""A setting that names a chat template of mlx-lm in Python."""
WORD_BITS = 32
"""Bits of an item of a quantized tensor."""


@dataclass(frozen=True)
class FileFacts:
    """kind: as its files and its name say. source: of its type's code; None if no package has it. family: its
    model_type. context_length: None if its config.json cannot be read. chat: of its template and vocabulary. sees:
    whether it takes images. generates: whether it can be loaded to generate text. embeds: how it makes embeddings or
    judges pairs, and width: of its states; None if it does neither. judges_pairs: whether it is a cross-encoder.
    num_parameters: None if the files do not tell. quantization: such as "4-bit", "Q4_K" or "bfloat16". sampling: the
    parameters that it recommends. created: Unix time of its files."""

    kind: Kind
    source: Source | None = None
    family: str = ""
    context_length: int | None = None
    chat: ChatFacts = NO_CHAT
    sees: bool = False
    generates: bool = False
    embeds: EmbeddingSpec | None = None
    width: int | None = None
    judges_pairs: bool = False
    num_parameters: int | None = None
    quantization: str = ""
    is_gguf: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict)
    created: int = 0


def file_facts(name: str, path: Path, chat_template: Path | None = None, tool_parser: str | None = None) -> FileFacts:
    """name: of the repository, directory or file. path: its directory, or its GGUF file. chat_template, tool_parser:
    those that take the place of the model's own. It reads the disk, and any thread may call it."""
    return kept_facts(name, path, chat_template, tool_parser, (stamp_of(path), stamp_of(chat_template)))


@functools.lru_cache(MAX_KEPT)
def kept_facts(
    name: str, path: Path, chat_template: Path | None, tool_parser: str | None, stamp: tuple[Any, ...]
) -> FileFacts:
    """stamp: other facts are read if it is another one."""
    own = None if chat_template is None else attempt(lambda: read_template(chat_template))
    return gguf_facts(name, path, own, tool_parser) if path.is_file() else read_facts(name, path, own, tool_parser)


def stamp_of(path: Path | None) -> tuple[Any, ...]:
    """Names, sizes and times of the files of a directory, or of a file and its other parts."""
    found = []
    for each in () if path is None else attempt(lambda: paths_of(path)) or ():
        with contextlib.suppress(OSError):  # it is gone, or a link leads to nothing
            state = each.stat()
            found.append((str(each), state.st_size, state.st_mtime_ns))
    return tuple(found)


def paths_of(path: Path) -> list[Path]:
    """Raises OSError and UnsupportedModelError."""
    if not path.is_dir():
        return split_paths(path)
    own = (path / name for name in os.listdir(path)[:MAX_FILES])
    return sorted((*own, *(path / TEMPLATES).glob("*.jinja")))


def attempt(read: Callable[[], Found]) -> Found | None:
    """What `read` returns; None if a file is damaged."""
    try:
        return read()
    except Exception as error:  # a file can have any value in any place, and the libraries raise any type for it
        logger.debug("%s: %s", type(error).__name__, error)
        return None


def time_of(path: Path) -> int:
    return max(0, min(LATEST_TIME, int(path.stat().st_mtime)))


def read_facts(name: str, path: Path, chat_template: str | None, tool_parser: str | None) -> FileFacts:
    """The facts of a directory."""
    kind, created = kind_of(name, path), attempt(lambda: time_of(path / CONFIG)) or 0
    config = attempt(lambda: model_config(path))
    if not config:
        return FileFacts(kind, created=created)
    tensors = attempt(lambda: [tensor for each in weight_paths(path) for tensor in read_tensors(each)]) or []
    names = [tensor.name for tensor in tensors]
    source = attempt(lambda: known_source(config))
    embeds, width = attempt(lambda: stated_embeddings(path, config)) or (None, None)
    # Qwen3-Embedding and others are published without a head, and with names that lack "model.".
    is_bare = kind is Kind.EMBEDDING and not any(each.startswith(("model.", "lm_head.")) for each in names)
    facts = FileFacts(
        kind,
        source,
        str(config.get("model_type", "")),
        attempt(lambda: stated_length(config)) or DEFAULT_CONTEXT_LENGTH,
        sees=attempt(lambda: sees(config, names)) or False,
        generates=source is not None and not is_encoder(config) and not is_bare,
        embeds=embeds,
        width=width,
        judges_pairs=attempt(lambda: judges_pairs(config)) or False,
        num_parameters=attempt(lambda: count_parameters(config, tensors)),
        quantization=attempt(lambda: stated_quantization(config, tensors)) or "",
        sampling=attempt(lambda: read_generation_config(path).sampling) or {},
        created=created,
    )
    templates = {DEFAULT: chat_template} if chat_template is not None else attempt(lambda: templates_in(path)) or {}
    settings = attempt(lambda: read_object(path / SETTINGS, missing_is_empty=True)) or {}
    defaults = {} if templates else attempt(lambda: mlx_lm_defaults(config)) or {}
    is_code = bool(settings.get(CODE) or defaults.get(CODE))
    chat = attempt(lambda: chat_facts(templates, is_code, FileVocabulary(path), tool_parser)) or NO_CHAT
    return replace(facts, chat=chat)


def gguf_facts(name: str, path: Path, chat_template: str | None, tool_parser: str | None) -> FileFacts:
    """The facts of a GGUF file."""
    created = attempt(lambda: time_of(path)) or 0
    facts = FileFacts(kind_of(name, path), Source.GGUF, is_gguf=True, created=created)
    try:
        file = read_gguf(path, texts=False)
        config = config_of(file)
    except Exception as error:  # as in `attempt`
        logger.debug("%s: %s", path.name, error)
        return facts
    found = {tensor.type.name: 0 for tensor in file.tensors.values()}
    for tensor in file.tensors.values():
        found[tensor.type.name] += tensor.nbytes
    recommended = attempt(lambda: sampling_of(gguf_tokenizer.sampling(file.metadata))) or {}
    facts = replace(
        facts,
        family=str(config["model_type"]),
        context_length=attempt(lambda: stated_length(config)) or DEFAULT_CONTEXT_LENGTH,
        generates=True,
        num_parameters=sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        quantization=max(found, key=lambda kind: found[kind]),
        sampling=recommended,
    )
    own = list(gguf_tokenizer.templates(file.metadata).values()) if chat_template is None else [chat_template]
    templates = dict(zip((DEFAULT, FOR_TOOLS), own, strict=False))
    chat = attempt(lambda: chat_facts(templates, False, GgufVocabulary(file), tool_parser)) or NO_CHAT
    return replace(facts, chat=chat)


def stated_embeddings(path: Path, config: Mapping[str, Any]) -> tuple[EmbeddingSpec | None, int | None]:
    """How a model makes embeddings or judges pairs, and the width of its states. Raises UnsupportedModelError."""
    if is_encoder(config):
        width = read_config(config).width
        spec = pair_spec(path, config) if judges_pairs(config) else embedding_spec(path, stated_dense)
    elif (path / MODULES).is_file():
        check_causal(config)
        part = config if "hidden_size" in config else config["text_config"]
        spec, width = embedding_spec(path, stated_dense), int(part["hidden_size"])
        if spec.pooling is Pooling.MAX:
            return None, None
    else:
        return None, None
    check_dense(spec, width)
    return spec, width


def sees(config: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether the model takes images. names: of its tensors."""
    if not isinstance(config.get("vision_config"), Mapping) or (family := family_of(config)) is None:
        return False
    return any(family.name_of(name.removeprefix("model.")) is not None for name in names)


def count_parameters(config: Mapping[str, Any], tensors: Sequence[StoredTensor]) -> int | None:
    """Parameters of all tensors of safetensors files. None if they are quantized by another library than MLX."""
    stated = config.get("quantization") or {}
    if not tensors or (not stated and config.get("quantization_config") is not None):
        return None
    names, count = {tensor.name for tensor in tensors}, 0
    for tensor in tensors:
        layer, _, part = tensor.name.rpartition(".")
        size, is_packed = math.prod(tensor.shape), bool(stated) and f"{layer}.scales" in names
        if is_packed and part == "weight":
            own = stated.get(layer)
            size = size * WORD_BITS // (own if isinstance(own, Mapping) else stated)["bits"]
        count += 0 if is_packed and part in ("scales", "biases") else size
    return count


def stated_quantization(config: Mapping[str, Any], tensors: Sequence[StoredTensor]) -> str:
    """What `quantization` finds, or else the type that most numbers of the files have."""
    if (stated := quantization(config)) != UNKNOWN:
        return stated
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + math.prod(tensor.shape)
    most = max(sizes, key=lambda dtype: sizes[dtype], default="")
    return DTYPES.get(most, UNKNOWN)
