"""HTTP only: requests, text, errors, events. Never tensors."""

from mlxpaged.api.app import create_app

__all__ = ["create_app"]
