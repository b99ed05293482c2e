"""What the lists of models say of a model: by its engine if it is loaded, and before that by its files, with the same
result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlxpaged.engine.info import EmbeddingInfo, EngineInfo
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.file_facts import FileFacts
from mlxpaged.models.files.architectures import Source
from mlxpaged.models.files.kinds import QWEN_RERANKER, Kind


@dataclass(frozen=True)
class Facts:
    """kind, source: as the lists show them. context_length: of the model. max_model_len: most tokens of a prompt and
    its answer, or of an input for embeddings. generates, infills, chats, thinks, sees, embeds, reranks: what it can do.
    template: of its chats. parser, shown_by: how it calls tools, and what tells it of them; None if it does not.
    sampling: the defaults of requests; None if it generates no text. dimensions: of its embeddings; None if it makes
    none."""

    kind: Kind
    source: Source | None
    context_length: int
    max_model_len: int
    generates: bool = False
    infills: bool = False
    chats: bool = False
    thinks: bool = False
    sees: bool = False
    embeds: bool = False
    reranks: bool = False
    template: str = ""
    parser: str | None = None
    shown_by: str | None = None
    sampling: Mapping[str, float] | None = None
    dimensions: int | None = None


def engine_facts(info: EngineInfo | EmbeddingInfo) -> Facts:
    """The facts of a loaded model."""
    embedding = info.embedding_model
    dimensions = None if embedding is None else embedding.dimensions
    limits = info.context_length, info.max_model_len
    if isinstance(info, EmbeddingInfo):
        reranks = info.cross_encoder is not None
        return Facts(info.kind, info.source, *limits, embeds=not reranks, reranks=reranks, dimensions=dimensions)
    tokenizer = info.tokenizer
    chats = tokenizer.has_chat_template
    told = "system_message" if tokenizer.takes_system else "user_message"
    return Facts(
        info.kind,
        info.source,
        *limits,
        generates=True,
        infills=tokenizer.infill is not None,
        chats=chats,
        thinks=chats and tokenizer.tags.thinks,
        sees=chats and info.images is not None,
        embeds=embedding is not None,
        reranks=info.reranker is not None,
        template=tokenizer.template_source if chats else "",
        parser=tokenizer.tags.tools.name,
        shown_by="chat_template" if tokenizer.shows_tools else told if chats else None,
        sampling=info.sampling_defaults,
        dimensions=dimensions,
    )


def expected_facts(files: FileFacts, config: EngineConfig) -> Facts | None:
    """The facts that the model will have once it is loaded. config: of its engine. None if its files do not tell, for
    example because it cannot be loaded."""
    context, spec = files.context_length, files.embeds
    if context is None or files.source is None:
        return None
    inputs = context if spec is None else min(config.embedding_max_model_len, context, spec.max_tokens or context)
    dimensions = None if spec is None or files.width is None else spec.dimensions(files.width)
    if config.only_embeds or not files.generates:
        if spec is None:
            return None
        if files.judges_pairs:
            return Facts(Kind.RERANKER, files.source, context, inputs, reranks=True)
        return Facts(Kind.EMBEDDING, files.source, context, inputs, embeds=True, dimensions=dimensions)
    chat, sees = files.chat, files.sees and config.max_image_pixels > 0
    reranks = chat.chats and (config.reranker or QWEN_RERANKER in config.model.lower())
    return Facts(
        Kind.RERANKER if reranks else Kind.VISION if sees else Kind.TEXT,
        files.source,
        context,
        min(context, config.max_model_len or context),
        generates=True,
        infills=chat.infills,
        chats=chat.chats,
        thinks=chat.chats and chat.thinks,
        sees=chat.chats and sees,
        embeds=spec is not None,
        reranks=reranks,
        template=chat.template if chat.chats else "",
        parser=chat.parser,
        shown_by=chat.shown_by,
        sampling=config.sampling_defaults(files.sampling),
        dimensions=dimensions,
    )
