"""HTTP only: requests, text, errors, events. Never tensors."""

from mlxpaged.api.app import create_app
from mlxpaged.api.batches import DataDirInUseError

__all__ = ["DataDirInUseError", "create_app"]
