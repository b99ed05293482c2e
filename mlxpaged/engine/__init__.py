"""The MLX thread and what runs on it: command queue, step loop, model runner, sampler, detokenizer, delivery."""

from mlxpaged.engine.async_engine import (
    AsyncEngine,
    EngineInfo,
    EngineState,
    EngineUnavailableError,
    QueueFullError,
    RequestFailedError,
    RequestStream,
)
from mlxpaged.engine.config import EngineConfig
from mlxpaged.engine.core import EngineCore, EngineStats
from mlxpaged.engine.request import Request, RequestOutput, TokenLogprobs
from mlxpaged.engine.sampling_params import SamplingParams

__all__ = [
    "AsyncEngine",
    "EngineConfig",
    "EngineCore",
    "EngineInfo",
    "EngineState",
    "EngineStats",
    "EngineUnavailableError",
    "QueueFullError",
    "Request",
    "RequestFailedError",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "TokenLogprobs",
]
