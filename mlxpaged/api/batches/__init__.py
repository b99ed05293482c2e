"""Batches: files of requests that are answered while nobody else is waiting, and survive the server."""

from mlxpaged.api.batches.lane import BatchLane
from mlxpaged.api.batches.store import DataDirInUseError, Store

__all__ = ["BatchLane", "DataDirInUseError", "Store"]
