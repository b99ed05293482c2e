"""Batches: files of requests that run while the server has spare capacity, and survive a restart of the server."""

from mlxpaged.api.batches.runner import BatchRunner
from mlxpaged.api.batches.store import DataDirInUseError, Store
