"""What an engine has loaded, and the largest request that it can run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxpaged.core.scheduling.admission import PromptTooLongError, check_fits
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.encoders.encoder_model import EncoderModel
from mlxpaged.models.features import Feature, Missing
from mlxpaged.models.files.architectures import Source
from mlxpaged.models.files.kinds import Kind
from mlxpaged.models.layers import is_per_sequence
from mlxpaged.parts.drafting.drafting import Drafting
from mlxpaged.parts.invariant.tiled_runner import TiledRunner

if TYPE_CHECKING:
    from mlxpaged.core.engine.core import EngineCore
    from mlxpaged.models.text.tokenizer import Tokenizer
    from mlxpaged.parts.embeddings.embedding_core import EmbeddingCore


@dataclass(frozen=True)
class Link:
    """The link between the ranks: bytes of the hidden states of one token and of the largest step, and the seconds in
    which the ranks add them up. A model does so twice in each layer."""

    token_bytes: int
    token_seconds: float
    step_bytes: int
    step_seconds: float


@dataclass(frozen=True)
class Cluster:
    """ranks: with the names of their machines. backend: of MLX. link: None if there is one rank."""

    ranks: tuple[str, ...]
    backend: str
    link: Link | None


class EngineInfo:
    """Facts about an engine that do not change while it lives."""

    def __init__(self, core: EngineCore, config: EngineConfig) -> None:
        served = core.served
        self.model = served.name
        self.tokenizer = served.tokenizer
        self.vocab_size = served.vocab_size
        self.close_thoughts = config.close_thoughts
        self.thinking_limit = config.thinking_limit
        self.context_length = served.context_length
        self.longest = served.max_model_len  # most tokens of a prompt and its answer, in any pool
        self.sampling_defaults = config.sampling_defaults(served.sampling)
        self.num_layers = len(served.layers) - served.num_drafting
        self.num_layers_per_sequence = sum(is_per_sequence([spec]) for spec in served.layers)  # called for each alone
        self.model_type = served.model_type
        self.source = served.source  # of its type's code
        self.num_parameters = served.num_parameters
        self.weight_bytes = served.weight_bytes
        self.checkpoint_bytes = served.checkpoint_bytes  # of the weights as the files have them
        self.dtype = served.dtype  # in what it is computed, as "bfloat16"
        self.stored = served.stored  # how its weights are in memory
        self.states = core.states  # what is reserved for recurrent states
        self.scheduler_config = core.scheduler.config
        self.num_blocks = self.scheduler_config.num_blocks  # that the KV pools can grow to
        self.block_size = self.scheduler_config.block_size
        self.kv_cache_bytes = core.runner.bytes_of(self.num_blocks)
        self.kv_cache_dtype = served.kv_cache_dtype  # "auto" if it is not quantized
        self.start_kv_cache_bytes = core.runner.bytes_of(core.scheduler.pool.num_blocks)
        self.groups = self.scheduler_config.groups
        self.num_swap_slots = self.scheduler_config.num_swap_slots  # KV blocks that the swap space holds
        self.backend = core.runner.backend
        self.kernels_off = core.kernels_off  # why the Metal kernels are not used although they could run here
        # Rows of each forward pass if the engine is batch-invariant.
        self.invariant_rows = core.runner.tile_size if isinstance(core.runner, TiledRunner) else None
        self.created = int(time.time())  # Unix time
        self.grammars = core.grammars
        self.missing = core.missing
        self.embedding_model = None if core.embedder is None else core.embedder.model.facts
        self.reranker = served.reranker
        self.adapters = served.adapters.names
        drafting = core.part(Drafting)
        self.drafters = [] if drafting is None else drafting.names  # some of DRAFTERS
        # How prompts show images; None if it takes none.
        self.images = None if served.vision is None else served.vision.format
        self.cluster: Cluster | None = None  # None if the model runs on one machine

    def __getstate__(self) -> dict[str, object]:
        """The state without what belongs to a process. The one that gets it sets its own tokenizer and grammars."""
        own = {"tokenizer", "grammars", "reranker", "images"}
        others = {name: value for name, value in vars(self).items() if name not in own}
        return others | {"reranker": None, "images": None}

    def with_tokenizer(self, tokenizer: Tokenizer) -> EngineInfo:
        """The same facts, for prompts and answers of another chat template."""
        other = EngineInfo.__new__(EngineInfo)
        vars(other).update(vars(self) | {"tokenizer": tokenizer})
        return other

    @property
    def kind(self) -> Kind:
        if self.reranker is not None:
            return Kind.RERANKER
        return Kind.TEXT if self.images is None else Kind.VISION

    @property
    def max_tokens_in_pool(self) -> int:
        """Tokens of the longest sequence that the pool can hold."""
        chunk, limit = self.scheduler_config.max_num_batched_tokens, self.num_blocks * self.block_size
        return self.groups.most_tokens(self.num_blocks, chunk, max(self.longest, limit))

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its answer together. The last token of an answer needs no KV."""
        return min(self.longest, self.max_tokens_in_pool + 1)

    @property
    def limit(self) -> str:
        """The end of a message about a request that is too long for any pool."""
        if self.longest < self.context_length:
            return f"this server's limit is {self.longest} tokens (--max-model-len)"
        return f"this model's context length is {self.context_length} tokens"

    def max_new_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """The most tokens that a request may generate: `max_tokens`, or all that have room if that is less.

        Raises PromptTooLongError, with size and limit, if the prompt leaves no room.
        """
        if num_prompt_tokens + (max_tokens != 0) > self.longest:
            message = f"the prompt has {num_prompt_tokens} tokens; {self.limit}"
            raise PromptTooLongError(message, num_prompt_tokens, self.longest)
        check_fits(num_prompt_tokens, None, self.scheduler_config)
        room = self.max_model_len - num_prompt_tokens
        return room if max_tokens is None else min(max_tokens, room)


class EmbeddingInfo:
    """Facts about the engine of a model that generates no text: it makes embeddings, or judges pairs of texts."""

    def __init__(self, core: EmbeddingCore) -> None:
        facts = core.embedder.model.facts
        self.embedding_model = None if facts.is_reranker else facts
        self.cross_encoder = facts if facts.is_reranker else None
        self.model = facts.name
        self.tokenizer = facts.tokenizer
        self.context_length = facts.context_length
        self.max_model_len = facts.max_tokens  # of an input
        self.weight_bytes = facts.weight_bytes
        self.created = int(time.time())  # Unix time
        self.missing = Missing(
            {Feature.EMBEDDINGS: "it is a reranker"}
            if facts.is_reranker
            else {Feature.RERANKING: "it makes embeddings"}
        )
        self.kind = Kind.RERANKER if facts.is_reranker else Kind.EMBEDDING
        self.source = Source.OWN if isinstance(core.embedder.model, EncoderModel) else Source.MLX_LM
