"""The engine thread and what runs on it: commands, steps, model runner, sampler, detokenizer, delivery of outputs."""

from typing import TYPE_CHECKING

from mlxpaged.lazy_names import lazy_names

if TYPE_CHECKING:
    from mlxpaged.engine.async_engine import AsyncEngine
    from mlxpaged.engine.builder import build_engine
    from mlxpaged.engine.config import EngineConfig
    from mlxpaged.engine.constraint import Constraint, ConstraintKind, StructuredOutput, Thinking, ToolCallForm
    from mlxpaged.engine.core import EngineCore
    from mlxpaged.engine.embedder import EmbeddingRequest, Vectors
    from mlxpaged.engine.errors import (
        ConstraintFailedError,
        DeadlineExceededError,
        DuplicateRequestError,
        EngineBusyError,
        EngineState,
        EngineUnavailableError,
        MinTokensError,
        OutOfMemoryError,
        QueueFullError,
        RequestCancelledError,
        RequestFailedError,
    )
    from mlxpaged.engine.grammar import GrammarError
    from mlxpaged.engine.info import EmbeddingInfo, EngineInfo
    from mlxpaged.engine.logprobs import PromptLogprobs, TokenLogprobs
    from mlxpaged.engine.progress import Progress, Stage
    from mlxpaged.engine.prompt_progress import PromptProgress
    from mlxpaged.engine.request import Request, RequestOutput
    from mlxpaged.engine.request_stream import RequestStream
    from mlxpaged.engine.sampling_params import SamplingParams
    from mlxpaged.engine.status import EngineSnapshot, EngineStats, EngineStatus, SequenceState
    from mlxpaged.engine.timeline import Timeline
    from mlxpaged.scheduler import Priority
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "AsyncEngine",
    "Constraint",
    "ConstraintFailedError",
    "ConstraintKind",
    "DeadlineExceededError",
    "DuplicateRequestError",
    "EmbeddingInfo",
    "EmbeddingRequest",
    "EngineBusyError",
    "EngineConfig",
    "EngineCore",
    "EngineInfo",
    "EngineSnapshot",
    "EngineState",
    "EngineStats",
    "EngineStatus",
    "EngineUnavailableError",
    "GrammarError",
    "MinTokensError",
    "OutOfMemoryError",
    "Priority",
    "Progress",
    "PromptLogprobs",
    "PromptProgress",
    "QueueFullError",
    "Request",
    "RequestCancelledError",
    "RequestFailedError",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "SequenceState",
    "Stage",
    "StructuredOutput",
    "Thinking",
    "Timeline",
    "TokenLogprobs",
    "ToolCallForm",
    "Vectors",
    "build_engine",
]
