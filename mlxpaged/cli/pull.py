"""`mlxpaged pull MODEL` downloads a model from the hub, after it has said whether and how it fits this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from mlxpaged.cli.banner import megabytes
from mlxpaged.cli.flags import model_name
from mlxpaged.cli.parser import heavy_imports
from mlxpaged.cli.smaller_model import smaller
from mlxpaged.models.errors import HubError, InsufficientMemoryError, ModelNotFoundError, UnsupportedModelError
from mlxpaged.models.sources.gguf.choice import split_name
from mlxpaged.models.sources.short_names import (
    BUNDLED,
    full_name,
    near_names,
    short_name,
    taken,
)

if TYPE_CHECKING:
    from mlxpaged.models.sources.preflight import FileSizes

SEARCH_SECONDS = 10
MOST_FOUND = 8
"""Repositories that are named if there is no model of the name."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "pull",
        usage="%(prog)s MODEL",
        description="Download a model from the Hugging Face hub. First its small files show whether it can be served "
        "here and which context fits beside its weights. An interrupted download is resumed.",
    )
    text = "hub repository, its address, or a short name such as qwen3:4b; OWNER/NAME:Q4_K_M for one of its GGUF files"
    parser.add_argument("name", type=model_name, metavar="MODEL", help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0, or 1 if the model cannot be downloaded or could not be served."""
    name = full_name(args.name)
    if (said := taken(args.name)) is not None:
        print(said, flush=True)
    try:
        if is_here(name):
            print(f"{args.name} is on this machine: mlxpaged serve {quote(args.name)}")
            return 0
    except ModelNotFoundError as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    with heavy_imports():
        from mlxpaged.models.files.architectures import Source
        from mlxpaged.models.sources import hub
        from mlxpaged.models.sources.preflight import is_gguf, local_file_sizes, weight_files
    try:
        if split_name(name)[0].count("/") != 1:
            raise ModelNotFoundError(f"there is no model named {args.name!r}")
        found = hub.download_small_files(name)
        if found is not None:
            directory, sizes = found
            if is_gguf(sizes):  # what describes the model is in the file
                files = weight_files(sizes)
                size = megabytes(sum(size or 0 for size in files.values()))
                print(f"{name}: {Source.GGUF.value}, {', '.join(files)}, {size}", flush=True)
            else:
                print("\n".join(description(name, directory, sizes)), flush=True)
        with ended_by_signal():
            path = hub.download_weights(name, () if found is None else tuple(weight_files(sizes)))
        if found is not None and is_gguf(sizes):
            print("\n".join(description(name, path, local_file_sizes(path))), flush=True)
    except ModelNotFoundError as error:
        meant = "" if isinstance(error, HubError) else suggestions(args.name)
        print(f"mlxpaged: {error}{meant}", file=sys.stderr)
        return 1
    except InsufficientMemoryError as error:
        print(f"mlxpaged: {error}{smaller()}", file=sys.stderr)
        return 1
    except UnsupportedModelError as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    if found is None:
        print(f"the hub does not list the files of {name} now; what is on this machine is whole", flush=True)
    where = "it is in" if found is None else "downloaded to"
    print(f"{where} {path}\nserve it: mlxpaged serve {short_name(name) or name}")
    return 0


def is_here(name: str) -> bool:
    """Whether a name is that of a bundled model, a directory, a file, or a model of another app. Raises
    ModelNotFoundError if that app does not have it."""
    from mlxpaged.models.sources.source import source_path

    try:
        return name in BUNDLED or source_path(name) is not None or Path(name).expanduser().exists()
    except (OSError, RuntimeError):  # the name is too long, or there is no such user
        return False


def description(name: str, directory: Path, sizes: FileSizes) -> Iterator[str]:
    """What the model is, and what fits beside its weights."""
    from mlxpaged.engine_config import KV_CACHE_DTYPES
    from mlxpaged.models.checks.quantized_kv import cannot_quantize
    from mlxpaged.models.device_memory import default_device_memory
    from mlxpaged.models.files.architectures import GGUF_BYTES, source_of
    from mlxpaged.models.files.context_length import context_length
    from mlxpaged.models.files.json_files import model_config
    from mlxpaged.models.files.kinds import is_encoder, kind_of
    from mlxpaged.models.fit import fit, layers_of
    from mlxpaged.models.layers import quantized
    from mlxpaged.models.sources.downloads import quantization
    from mlxpaged.models.sources.preflight import weight_files
    from mlxpaged.parts.memory.fitting import least_step

    config = model_config(directory)
    weights = config.get(GGUF_BYTES) or sum(size or 0 for size in weight_files(sizes).values())
    longest = context_length(config)
    what = f"{kind_of(name, directory).value}, {config['model_type']} ({source_of(config).value})"
    yield f"{name}: {what}, {quantization(config)}, {megabytes(weights)}, context length {longest}"
    free = max(0, default_device_memory() - weights - least_step())
    if is_encoder(config):
        yield f"memory    {megabytes(free)} are free beside its weights"
        return
    try:
        specs = layers_of(directory)
    except UnsupportedModelError as error:
        yield f"memory    {megabytes(free)} are free beside its weights; {error}"
        return
    tokens = min(longest, fit(specs, free).tokens)
    fits = "its whole context fits" if tokens == longest else f"a context of {tokens} tokens fits"
    yield f"memory    {megabytes(free)} are free beside its weights: {fits}"
    for dtype in KV_CACHE_DTYPES[1:]:
        candidate = quantized(specs, dtype)
        more = min(longest, fit(candidate, free).tokens)
        if tokens < more and not cannot_quantize(specs, candidate, longest):
            yield f"          a context of {more} tokens, with --kv-cache-dtype {dtype}"
    if tokens < longest:
        yield f"          to limit it: --max-model-len {max(1, tokens)}"


def suggestions(name: str) -> str:
    """The end of the message about a name that is no model: names that the user may have meant."""
    from huggingface_hub import constants, get_session

    near = near_names(name.rpartition("/")[2])
    lines = [f"short names: {', '.join(near)}"] if near else []
    search: dict[str, str | int] = {
        "search": name.rpartition("/")[2].replace(":", " "),
        "author": "mlx-community",
        "limit": MOST_FOUND,
    }
    try:  # not HfApi.list_models, which tries for 46 s if the machine is offline
        answer = get_session().get(f"{constants.ENDPOINT}/api/models", params=search, timeout=SEARCH_SECONDS)
        answer.raise_for_status()
        if found := [model["id"] for model in answer.json()]:
            lines.append(f"on the hub: {', '.join(found)}")
    except Exception as error:  # its own errors, and those of its HTTP library, which depends on its version
        lines.append(f"the hub was not searched: {type(error).__name__}; is this machine online?")
    return "".join(f"\n  {line}" for line in lines)


@contextlib.contextmanager
def ended_by_signal() -> Iterator[None]:
    """A SIGINT ends the process at once. Otherwise the hub's library would first finish the files in flight."""

    def end(*_: Any) -> None:
        print("\nmlxpaged: interrupted; `mlxpaged pull` resumes the download", file=sys.stderr, flush=True)
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
