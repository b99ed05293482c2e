"""Loads what sources.py finds as a ServedModel or EmbeddingModel."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.utils import get_total_parameters

from mlxpaged.attention.gpu import gpu_generation
from mlxpaged.cpu.float32 import UNCHANGED, Choice, Storage
from mlxpaged.cpu.optimize import optimize_for_cpu
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.adapters.adapters import Adapters, check_files
from mlxpaged.models.checks.half_type import HALF_TYPES, NAMES, recast_if_equal, target_of
from mlxpaged.models.checks.quantized_kv import choose_quantization
from mlxpaged.models.drafts.draft_assistant import Assistant
from mlxpaged.models.drafts.draft_head import Mtp, load_mtp
from mlxpaged.models.drafts.draft_model import DraftModel
from mlxpaged.models.encoders.embedding import (
    EmbeddingModel,
    check_causal,
    embedding_model,
    embedding_spec,
    load_decoder,
    weight_bytes,
)
from mlxpaged.models.encoders.encoder import Encoder
from mlxpaged.models.encoders.encoder_files import load_encoder
from mlxpaged.models.encoders.encoder_model import EncoderModel, encoder_model, pair_spec
from mlxpaged.models.encoders.reranker import Reranker, make_reranker
from mlxpaged.models.errors import (
    AdapterError,
    EncoderError,
    ModelNotFoundError,
    UnsupportedModelError,
    in_one_line,
)
from mlxpaged.models.features import Feature, Missing
from mlxpaged.models.files.architectures import Source, source_of
from mlxpaged.models.files.context_length import context_length
from mlxpaged.models.files.files import check_entries
from mlxpaged.models.files.generation_config import read_generation_config
from mlxpaged.models.files.json_files import model_config
from mlxpaged.models.files.kinds import Kind, is_encoder, judges_pairs, kind_of
from mlxpaged.models.files.weights import READ_BYTES, WeightReader, computed_dtype, recast
from mlxpaged.models.head import RowSelection
from mlxpaged.models.layers import KV, LayerSpec, kv_layers, mutual
from mlxpaged.models.replacements import Replaced, replace_parts
from mlxpaged.models.sharding import least, shard
from mlxpaged.models.sources.completeness import lack_of
from mlxpaged.models.sources.hub import download_draft_head
from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.sources.preflight import NOTHING, Reserved
from mlxpaged.models.sources.resolve import MODELS, resolve
from mlxpaged.models.sources.short_names import BUNDLED, DEMO_MODEL
from mlxpaged.models.text.tokenizer import Tokenizer
from mlxpaged.models.text.tokenizer_files import tokenizer_in
from mlxpaged.models.turns import Turns
from mlxpaged.models.vision.loading import let_see, load_vision
from mlxpaged.progress import Stage
from mlxpaged.vision import MOST_PIXELS
from mlxpaged.vision.tower import Vision

logger = logging.getLogger(__name__)

DEMO_PATH = MODELS / BUNDLED[DEMO_MODEL]
NO_RECAST = "several ranks compute in the checkpoint's type"
NO_HEADS_TO_READ = "each of several ranks has only a part of the heads that an assistant reads"


@dataclass(frozen=True)
class ServedModel:
    """A loaded model with all that the engine needs to know about it.

    path: its directory. model_type: of its config.json. source: of the type's code. rows: None if its output head
    cannot select rows. max_model_len: most tokens of a prompt and its answer, at most the context length.
    sampling: the sampling parameters that its generation_config.json recommends, by name. missing: why it has no
    reranker, vision or draft head, and not the KV cache dtype that was asked for. vision: None if it takes no images.
    kv_cache_dtype: as `EngineConfig` has it. mtp: its draft head, whose layer is the last of `layers`, or its
    assistant; None if none was asked for. draft_model: a smaller model that drafts, whose layers are the last ones.
    dtype: in what it is computed, as "bfloat16". stored: how its weights are in memory. checkpoint_bytes: of the
    weights as its files have them.
    """

    name: str
    path: Path
    model_type: str
    source: Source
    model: Module
    tokenizer: Tokenizer
    layers: list[LayerSpec]
    rows: RowSelection | None
    vocab_size: int
    context_length: int
    max_model_len: int
    weight_bytes: int
    num_parameters: int
    sampling: Mapping[str, float]
    reranker: Reranker | None = None
    missing: Missing = field(default_factory=Missing)
    adapters: Adapters = field(default_factory=Adapters)
    vision: Vision | None = None
    kv_cache_dtype: str = "auto"
    mtp: Mtp | Assistant | None = None
    draft_model: DraftModel | None = None
    dtype: str = ""
    stored: Choice = UNCHANGED
    checkpoint_bytes: int = 0

    def __post_init__(self) -> None:
        """A draft head needs the hidden states of each step, also of those by which memory is measured."""
        if self.rows is not None:
            self.rows.keep_hidden(self.mtp is not None)

    @property
    def num_drafting(self) -> int:
        """How many of the last layers only draft."""
        return int(isinstance(self.mtp, Mtp)) if self.draft_model is None else len(self.draft_model.layers)

    @property
    def kv_layers(self) -> list[KV]:
        """The specs of its KV pools, in order."""
        return kv_layers(self.layers)

    @property
    def kv_type(self) -> str:
        """The types that its keys and values are kept in."""
        return ",".join(sorted({spec.stored_type for spec in self.kv_layers}))


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded.

    served_name: None for its own. tool_parser: one of FORMATS; None for the one that the chat template or the
    vocabulary shows. max_model_len: None for the context length. reserved: memory that is needed beside the weights.
    is_reranker: true if the user says so, false if the name decides. adapters: to be loaded beside it. joins: whether
    operations of its modules are joined (models/joins/). most_pixels: of an image; a larger one is reduced. drafts:
    whether its draft head is loaded, if it has one. mtp_path: where it is if not in its own files. chat_template: a
    file that replaces the model's own. cpu_dtype: as `WeightReader` has it. dtype: as `target_of` has it.
    """

    served_name: str | None = None
    tool_parser: str | None = None
    max_model_len: int | None = None
    reserved: Reserved = NOTHING
    is_reranker: bool = False
    adapters: Sequence[AdapterPath] = ()
    joins: bool = True
    most_pixels: int = MOST_PIXELS
    kv_cache_dtype: str = "auto"
    drafts: bool = False
    mtp_path: str | None = None
    chat_template: Path | None = None
    cpu_dtype: str = "model"
    dtype: str = "model"


def load_model(
    name: str,
    options: LoadOptions = LoadOptions(),
    turns: Turns | None = None,
    group: mx.distributed.Group | None = None,
) -> ServedModel:
    """Load weights and tokenizer and check that paged attention reproduces the model.

    turns: of other models; they get the bytes of weights that are loaded, and of all. group: ranks that each load their
    share of it, all at the same time. Call it on the thread that will run the model. Raises ModelNotFoundError or
    UnsupportedModelError.
    """
    turns = turns or Turns()
    options = replace(options, reserved=options.reserved._replace(adapters=check_files(options.adapters)))
    files = turns.during(lambda: resolve(name, options.reserved, 1 if group is None else group.size()))
    own_config = turns.during(lambda: files.config)
    check_use(name, files, own_config, options, group)
    try:
        read = read_model(files, own_config, options, turns, group)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be loaded: {error}") from None
    except Exception as error:  # mlx, mlx-lm and transformers raise any type for a missing field or a damaged file
        # Qwen3-Embedding is published without a head, and with other names of weights than a text model's.
        only_embeds = kind_of(name, files.directory) is Kind.EMBEDDING
        kind = EncoderError if only_embeds else UnsupportedModelError
        raise kind(f"{name} cannot be loaded: {lack_of(files.directory)}{in_one_line(error)}") from error
    reranker, no_reranker = find_reranker(name, read.tokenizer, options.is_reranker)
    try:
        served = prepare_model(name, files, own_config, read, options, turns, group)
    except AdapterError:
        raise
    except UnsupportedModelError as error:
        models = f"{read.config.get('model_type', 'this')} models" + " of mlx-vlm" * (read.source is Source.MLX_VLM)
        raise UnsupportedModelError(
            f"{name} cannot be served: {models} are not supported yet, because {error}"
        ) from None
    return replace(served, reranker=reranker, missing=served.missing.but(Feature.RERANKING, no_reranker))


def check_use(
    name: str,
    files: ModelFiles,
    own_config: dict[str, Any],
    options: LoadOptions,
    group: mx.distributed.Group | None,
) -> None:
    """Raises UnsupportedModelError if its configuration shows that it is not for this use."""
    if group is not None and not kind_of(name, files.directory).generates:
        raise UnsupportedModelError(
            f"{name}: several ranks make no embeddings and rerank nothing; run this model on one machine"
        )
    if is_encoder(own_config):
        raise EncoderError(f"{name} is an encoder, which generates no text")
    limit = context_length(own_config)
    if options.max_model_len is not None and options.max_model_len > limit:
        raise UnsupportedModelError(
            f"{name} cannot be loaded: --max-model-len is {options.max_model_len}, but its context length is {limit}"
        )


@dataclass(frozen=True)
class ReadModel:
    """What the files of a model give. config: of the text model. num_parameters: of all ranks. mtp: as in ServedModel;
    no_mtp: why it has none. stored, dtype, checkpoint_bytes: as in ServedModel."""

    model: Module
    config: dict[str, Any]
    source: Source
    num_parameters: int
    mtp: Mtp | Assistant | None
    no_mtp: str
    stored: Choice
    dtype: str
    checkpoint_bytes: int
    tokenizer: Tokenizer
    sampling: Mapping[str, float]


def read_model(
    files: ModelFiles,
    own_config: dict[str, Any],
    options: LoadOptions,
    turns: Turns,
    group: mx.distributed.Group | None,
) -> ReadModel:
    """Raises any type of error."""
    path, num_ranks = files.directory, 1 if group is None else group.size()
    recommended = turns.during(lambda: read_generation_config(path))
    turns.during(lambda: files.check_sizes(own_config))
    source = turns.during(lambda: source_of(own_config))
    if files.is_gguf and group is not None:
        raise UnsupportedModelError("several ranks need a model in MLX's format, and this is a GGUF file")
    if source is Source.MLX_VLM and group is not None:
        raise UnsupportedModelError("several ranks need a model type of mlx-lm, and this is one of mlx-vlm")
    reader = WeightReader(options.cpu_dtype, sum(options.reserved), turns.report, READ_BYTES // num_ranks)
    of_gguf = None if files.gguf_sizes is None else (reader.choose(files.gguf_sizes), files.gguf_sizes)
    model, config = files.load(turns.report, Storage.MODEL if of_gguf is None else of_gguf[0].storage)
    num_parameters = int(get_total_parameters(model))
    if group is not None:
        shard(model, config, group, lambda: files.load(turns.report)[0])
    mtp, no_mtp = find_mtp(model, files, options.mtp_path, group) if options.drafts else (None, "")
    of_model = reader.read(model)
    stored, checkpoint = of_gguf or of_model
    dtype = computed_dtype(model)
    if mtp is not None:
        reader.read(mtp.head)
    target = target_of(options.dtype, dtype, gpu_generation())
    if target is not None:
        problem = NO_RECAST if group is not None else recast_if_equal(model, dtype, target, turns.report)
        if problem is None:
            if mtp is not None:
                recast(mtp.head, HALF_TYPES[dtype], target)
            dtype = NAMES[target]
        elif options.dtype != "auto":
            raise UnsupportedModelError(f"--dtype {options.dtype} cannot be used: {problem}")
        elif group is None:
            logger.info("the model is computed in %s and not in %s: %s", dtype, NAMES[target], problem)
            del model, mtp
            return read_model(files, own_config, replace(options, dtype="model"), turns, group)
    turns.begin(Stage.TOKENIZER)
    chosen = options.tool_parser, recommended.end_tokens, options.chat_template
    tokenizer = turns.during(lambda: tokenizer_in(path, *chosen))
    model.eval()
    of_files = stored, dtype, checkpoint.model, tokenizer, recommended.sampling
    return ReadModel(model, config, source, num_parameters, mtp, no_mtp, *of_files)


def prepare_model(
    name: str,
    files: ModelFiles,
    own_config: dict[str, Any],
    read: ReadModel,
    options: LoadOptions,
    turns: Turns,
    group: mx.distributed.Group | None,
) -> ServedModel:
    """Replace parts of the model, find its layers, and check what it computes. Raises AdapterError or
    UnsupportedModelError, with the reason alone."""
    model, longest = read.model, context_length(read.config)
    replaced = replace_parts(model, name, longest, options.adapters, turns, group, options.joins, read.stored.storage)
    vocabulary = read.tokenizer.reader.get_vocab
    seen = load_vision(files, own_config, vocabulary, turns.report, options.most_pixels, options.cpu_dtype)
    turns.take()
    everywhere = bool if group is None else partial(all_say, group)
    vision, no_vision = let_see(model, replaced.layers, *seen, turns, everywhere)
    layers = replaced.layers if vision is None else mutual(replaced.layers, vision.mutual)
    served_len = min(longest, options.max_model_len or longest)
    kv = choose_quantization(model, layers, options.kv_cache_dtype, replaced.reference, served_len, turns, group)
    mtp, drafting, no_mtp = usable_mtp(read, replaced, kv.layers, 1 if group is None else group.size())
    added = (0 if mtp is None else mtp.nbytes) + (0 if vision is None else vision.tower.nbytes)
    return ServedModel(
        name=options.served_name or name,
        path=files.directory,
        model_type=str(read.config.get("model_type", "")),
        source=read.source,
        model=model,
        tokenizer=read.tokenizer,
        layers=[*kv.layers, *drafting],
        rows=replaced.rows,
        vocab_size=replaced.vocab_size,
        context_length=longest,
        max_model_len=served_len,
        weight_bytes=weight_bytes(model) + replaced.adapters.nbytes + added,
        num_parameters=read.num_parameters,
        sampling=read.sampling,
        missing=Missing(
            {
                Feature.IMAGES: no_vision,
                Feature.KV_CACHE_DTYPE: kv.reason,
                Feature.DRAFT_HEAD: no_mtp,
            }
        ),
        adapters=replaced.adapters,
        vision=vision,
        kv_cache_dtype=kv.dtype,
        mtp=mtp,
        dtype=read.dtype,
        stored=read.stored,
        checkpoint_bytes=read.checkpoint_bytes,
    )


def usable_mtp(
    read: ReadModel, replaced: Replaced, layers: Sequence[LayerSpec], num_ranks: int
) -> tuple[Mtp | Assistant | None, Sequence[LayerSpec], str]:
    """The draft head or assistant with its layers, or None and the reason. layers: the model's."""
    if read.mtp is None:
        return None, (), read.no_mtp
    drafting = read.mtp.specs(list(layers), num_ranks)
    if drafting is None or replaced.rows is None:
        return None, (), "its layers or its output head are not known well enough"
    if replaced.rows.num_outputs != replaced.vocab_size:
        return None, (), "its output head is divided among the ranks"
    return read.mtp, drafting, ""


def find_mtp(
    model: Module, files: ModelFiles, mtp_path: str | None, group: mx.distributed.Group | None
) -> tuple[Mtp | Assistant | None, str]:
    """The draft head, not read yet, or None and the reason. Raises UnsupportedModelError if that of another place does
    not fit."""
    if group is not None and group.rank():
        return None, "rank 0 drafts"
    try:
        found = load_mtp(model, files if mtp_path is None else resolve_mtp(mtp_path))
        if group is not None and isinstance(found, Assistant):
            raise UnsupportedModelError(NO_HEADS_TO_READ)
        return found, ""
    except UnsupportedModelError as error:
        if mtp_path is not None:
            raise UnsupportedModelError(f"--mtp {mtp_path}: {error}") from None
        return None, str(error)


def resolve_mtp(name: str) -> ModelFiles:
    """Those of a local file or directory, or of a hub repository, which is downloaded. Raises UnsupportedModelError."""
    path = Path(name).expanduser()
    if not path.exists():
        if name.startswith((".", "/", "~")) or name.count("/") != 1:
            raise UnsupportedModelError("there is no such file or directory")
        try:
            path = download_draft_head(name)
        except ModelNotFoundError as error:
            raise UnsupportedModelError(str(error)) from None
    if path.is_dir():
        check_entries(path)
    return ModelFiles(path)


def all_say(group: mx.distributed.Group, yes: bool) -> bool:
    """Whether all ranks say yes."""
    return bool(least(int(yes), group))


def read_tokenizer(name: str, tool_parser: str | None = None, chat_template: Path | None = None) -> Tokenizer:
    """The tokenizer of a model that another process loads. Raises ModelNotFoundError or UnsupportedModelError."""
    path = resolve(name).directory
    try:
        return tokenizer_in(path, tool_parser, read_generation_config(path).end_tokens, chat_template)
    except Exception as error:  # as in `load_model`
        raise UnsupportedModelError(f"{name} cannot be loaded: {in_one_line(error)}") from error


def find_reranker(name: str, tokenizer: Tokenizer, is_reranker: bool) -> tuple[Reranker | None, str]:
    """Returns None and the reason if the model is no reranker. Raises UnsupportedModelError if it has to be one."""
    try:
        return make_reranker(name, tokenizer, is_reranker), ""
    except UnsupportedModelError as error:
        if is_reranker:
            raise UnsupportedModelError(f"{name} cannot be used as a reranker: {error}") from None
        return None, str(error)


def load_embedding_model(
    name: str,
    served_name: str | None,
    max_tokens: int,
    turns: Turns | None = None,
    reserved: Reserved = NOTHING,
    cpu_dtype: str = "model",
) -> EmbeddingModel | EncoderModel:
    """Load a model for embeddings only, or a cross-encoder. max_tokens: limit of an input, if the model's context is
    longer. cpu_dtype: as `WeightReader` has it.

    Call it on the thread that will run the model. Raises ModelNotFoundError or UnsupportedModelError.
    """
    turns = turns or Turns()
    files = turns.during(lambda: resolve(name, reserved))
    path, use = files.directory, "for embeddings"
    try:
        own_config = files.config
        if judges_pairs(own_config):
            use, spec = "as a reranker", pair_spec(path, own_config)
        else:
            spec = embedding_spec(path)  # before gigabytes are loaded
            if not is_encoder(own_config):
                check_causal(own_config)
        model: Module
        try:
            turns.during(lambda: files.check_sizes(own_config))
            if is_encoder(own_config):
                model, config = load_encoder(own_config, files.tensors()), own_config
            else:
                model, config = load_decoder(path)
            WeightReader(cpu_dtype, sum(reserved), turns.report).read(model)
            turns.begin(Stage.TOKENIZER)
            tokenizer = turns.during(lambda: tokenizer_in(path, None, ()))
        except UnsupportedModelError:
            raise
        except Exception as error:  # as in `load_model`
            raise UnsupportedModelError(f"it cannot be loaded: {lack_of(path)}{in_one_line(error)}") from error
        model.eval()
        optimize_for_cpu(model, has_head=False)
        if isinstance(model, Encoder):
            return encoder_model(served_name or name, model, tokenizer, spec, max_tokens)
        context, vocab_size = context_length(config), config.get("vocab_size")
        if not isinstance(vocab_size, int):
            raise UnsupportedModelError("its config.json has no vocab_size")
        return embedding_model(served_name or name, model, tokenizer, spec, vocab_size, context, max_tokens)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be used {use}: {error}") from error


def own_embedding_model(served: ServedModel, max_tokens: int) -> EmbeddingModel:
    """Use the model that generates text for embeddings too. Raises UnsupportedModelError, with the reason, if its
    directory does not state that it makes embeddings."""
    spec = embedding_spec(served.path)
    check_causal(model_config(served.path))
    sizes = (served.vocab_size, served.context_length, max_tokens)
    return embedding_model(served.name, served.model, served.tokenizer, spec, *sizes)
