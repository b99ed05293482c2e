"""The endpoints of decisions. Each path has the format of errors of its clients."""

from __future__ import annotations

import contextlib
from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.applications import Starlette

from mlxpaged.api.decisions import routes
from mlxpaged.api.decisions.decide import KnownReadings
from mlxpaged.api.decisions.system_one import SystemOneRequest
from mlxpaged.api.endpoint import Api, reads
from mlxpaged.api.error_format import ErrorFormat
from mlxpaged.api.errors import ApiError
from mlxpaged.api.ollama.errors import OllamaErrorResponse, error_body
from mlxpaged.api.openapi import ErrorResponse
from mlxpaged.api.request_id import HEADER


class DecisionErrorResponse(ErrorResponse):
    """OpenAI's error, and what clients of mlx-vlm read."""

    detail: str


def both_errors(error: ApiError, request_id: str) -> dict[str, Any]:
    return error.body() | {"detail": error.message}


def start(app: Starlette) -> AbstractAsyncContextManager[None]:
    app.state.known_readings = KnownReadings()
    return contextlib.nullcontext()


DECISIONS = Api(
    (
        reads(
            "/v1/decisions",
            routes.decisions,
            "Answer typed questions about an input with probabilities",
            routes.DecisionRequest,
            cancellable=True,
        ),
    ),
    ErrorFormat("/decisions", id_header=HEADER, body=both_errors, model=DecisionErrorResponse),
    start,
)

SYSTEM_ONE = Api(
    (
        reads(
            "/v1/systemone",
            routes.systemone,
            "Answer typed questions, as System One does",
            SystemOneRequest,
            cancellable=True,
        ),
    ),
    ErrorFormat("/systemone", id_header=HEADER, body=error_body, model=OllamaErrorResponse),
)
