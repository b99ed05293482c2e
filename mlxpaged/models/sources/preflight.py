"""Refuses a model by its small files and the sizes of the others, before its weights are downloaded or read.

What only the loaded model can tell is checked after loading, by `probe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants

from mlxpaged.models.encoders.encoder_model import check_encoder
from mlxpaged.models.errors import AssistantError, InsufficientMemoryError, UnsupportedModelError
from mlxpaged.models.files.architectures import GGUF_BYTES, source_of
from mlxpaged.models.files.files import check_files
from mlxpaged.models.files.json_files import CONFIG, model_config, read_object
from mlxpaged.models.files.kinds import is_encoder
from mlxpaged.models.sources.completeness import TOKENIZER_FILES, WEIGHTS
from mlxpaged.models.sources.gguf.choice import memory_of

GGUF = ".gguf"
"""The suffix of llama.cpp's files, which are loaded if there are no WEIGHTS."""
PICKLES = "pytorch_model*.bin"

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Types of models that draft with the keys and values of another one."""

OTHER_ENCODERS = {
    "albert",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "eurobert",
}
"""Types of models whose tokens attend in both directions, and which are not computed here."""


class Reserved(NamedTuple):
    """Bytes that are needed beside the weights: of the KV cache, if its size is configured, of a step, and of
    adapters."""

    kv_cache: int = 0
    step: int = 0
    adapters: int = 0


NOTHING = Reserved()

FileSizes = Mapping[str, int | None]
"""Bytes by the name of a file, which is relative to the model's directory; None if the size is not known."""


def local_file_sizes(directory: Path) -> FileSizes:
    return {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}


def hub_file_sizes(repository: str) -> FileSizes | None:
    """None if the hub does not list the files. The download that follows reports why, or uses the local cache."""
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    try:
        siblings = HfApi().model_info(repository, files_metadata=True, timeout=timeout).siblings
    except Exception:  # its own errors, and those of its HTTP library, which depends on its version
        return None
    return {file.rfilename: file.size for file in siblings or []} or None


def weight_files(sizes: FileSizes) -> FileSizes:
    found = {name: size for name, size in sizes.items() if fnmatch(name, WEIGHTS) and "/" not in name}
    return found or {name: size for name, size in sizes.items() if name.lower().endswith(GGUF)}


def weight_paths(directory: Path) -> list[Path]:
    """The weights of a model in MLX's format, or the links to those of a GGUF file."""
    return sorted(directory.glob(WEIGHTS)) or sorted(directory.glob(f"model*{GGUF}"))


def is_gguf(sizes: FileSizes) -> bool:
    """Whether the only weights are GGUF files."""
    return any(name.lower().endswith(GGUF) for name in weight_files(sizes))


def check_directory(directory: Path, sizes: FileSizes, free_bytes: int, reserved: Reserved = NOTHING) -> None:
    """`check_model` with the JSON files of `directory`. The weights do not need to be there."""
    check_files(directory)
    config = model_config(directory) if (directory / CONFIG).is_file() else None
    tokenizer_config = read_object(directory / "tokenizer_config.json", missing_is_empty=True)
    check_model(config, tokenizer_config, sizes, free_bytes, reserved)
    if config is not None and is_encoder(config):
        check_encoder(directory, config)


def check_model(
    config: Mapping[str, Any] | None,
    tokenizer_config: Mapping[str, Any],
    sizes: FileSizes,
    free_bytes: int,
    reserved: Reserved = NOTHING,
) -> None:
    """Raises UnsupportedModelError, with the reason, if a model with these files cannot be loaded.

    config: None if there is no config.json; a GGUF file that is not downloaded yet has none. free_bytes: memory for the
    weights and what is `reserved`. If the size of a file of weights is not known, the memory is not checked.
    """
    weights, gguf = weight_files(sizes), is_gguf(sizes)
    if config is None and not gguf:
        raise UnsupportedModelError("it has no config.json, which describes a model")
    if not weights and any(fnmatch(name, PICKLES) for name in sizes):
        raise UnsupportedModelError(
            f"its weights are only in files named {PICKLES}, which can run code when they are read; take a repository "
            f"or a revision with {WEIGHTS}"
        )
    if not weights:
        raise UnsupportedModelError(f"it has no weights, which are files named {WEIGHTS}")
    if config is not None and (not gguf or GGUF_BYTES in config):
        check_architecture(config)
        check_tokenizer(tokenizer_config, sizes)
    known = [size for size in weights.values() if size is not None]
    taken = int((config or {}).get(GGUF_BYTES, memory_of(weights))) if gguf else sum(known)
    needed = taken + sum(reserved)
    if len(known) == len(weights) and needed > free_bytes:
        parts = [f"its weights take {taken / 1e9:.1f} GB"]
        parts += [f"--kv-cache-memory {reserved.kv_cache / 1e9:.1f} GB"] * bool(reserved.kv_cache)
        parts += [f"a step {reserved.step / 1e9:.1f} GB"] * bool(reserved.step)
        parts += [f"its adapters {reserved.adapters / 1e9:.1f} GB"] * bool(reserved.adapters)
        raise InsufficientMemoryError(
            f"{' and '.join(parts)}, but only {free_bytes / 1e9:.1f} GB of memory are free; use a smaller model, or a "
            "variant with fewer bits per weight",
            needed - free_bytes,
        )


def check_architecture(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError if no package has a module for the config's model_type."""
    if config.get("model_file") is not None:
        raise UnsupportedModelError(
            "its config.json asks for Python code of the repository (model_file), which is not run"
        )
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedModelError("its config.json has no model_type")
    if model_type in ASSISTANTS:
        raise AssistantError("it is an assistant, which drafts for a Gemma 4 model: name it with --mtp of that model")
    if model_type in OTHER_ENCODERS:
        raise UnsupportedModelError(
            f"it is an encoder of a kind that is not supported (model_type {model_type!r}); use BERT, XLM-RoBERTa, "
            "ModernBERT or another of docs/models.md"
        )
    source_of(config)


def check_tokenizer(tokenizer_config: Mapping[str, Any], sizes: FileSizes) -> None:
    """Raises UnsupportedModelError if there is no tokenizer, or if it is only Python code."""
    if any(fnmatch(name, pattern) for name in sizes for pattern in TOKENIZER_FILES):
        return
    if tokenizer_config.get("auto_map"):
        raise UnsupportedModelError(
            "its tokenizer is only Python code of the repository (auto_map in tokenizer_config.json), which is not run"
        )
    raise UnsupportedModelError("it has no tokenizer, which is a tokenizer.json or another file with a vocabulary")
