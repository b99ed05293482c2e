"""Errors in Ollama's format: {"error": message}."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from mlxpaged.api.error_format import ErrorFormat
from mlxpaged.api.errors import ApiError
from mlxpaged.api.request_id import HEADER


class OllamaErrorResponse(BaseModel):
    error: str


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    return {"error": error.message}


ERRORS = ErrorFormat("/api", id_header=HEADER, body=error_body, model=OllamaErrorResponse)
