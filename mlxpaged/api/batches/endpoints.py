"""The endpoints of files and batches, and the runner of batches."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette

from mlxpaged.api.batches import routes as batches
from mlxpaged.api.batches.records import BatchRecord, FileRecord
from mlxpaged.api.batches.runner import BatchRunner
from mlxpaged.api.batches.store import Store
from mlxpaged.api.endpoint import BYTES, FORM, Api, delete, get, post
from mlxpaged.api.page import PageQuery

ENDPOINTS = (
    post("/v1/files", batches.create_file, "Upload a file", batches.FileUpload, FileRecord, body_type=FORM),
    get("/v1/files", batches.list_files, "Files, the newest first", query=batches.FileList),
    get("/v1/files/{file_id}", batches.get_file, "One file", answer=FileRecord),
    delete("/v1/files/{file_id}", batches.delete_file, "Delete a file"),
    get("/v1/files/{file_id}/content", batches.get_content, "The content of a file", answer_type=BYTES),
    post("/v1/batches", batches.create_batch, "Run the requests of a file", batches.BatchCreate, BatchRecord),
    get("/v1/batches", batches.list_batches, "Batches, the newest first", query=PageQuery),
    get("/v1/batches/{batch_id}", batches.get_batch, "One batch", answer=BatchRecord),
    post("/v1/batches/{batch_id}/cancel", batches.cancel_batch, "Cancel a batch", answer=BatchRecord),
)


def start(app: Starlette) -> AbstractAsyncContextManager[None]:
    """Open the directory of files and batches, if there is one. Raises DirectoryInUseError or OSError."""
    directory = app.state.data_dir
    app.state.store = None if directory is None else Store(directory)
    return running(app)


@contextlib.asynccontextmanager
async def running(app: Starlette) -> AsyncIterator[None]:
    store, registry = app.state.store, app.state.server.registry
    runner = None if store is None or registry is None else BatchRunner(app, registry, store)
    app.state.batch_runner = runner
    yield
    if runner is not None:
        await runner.stop()
    if store is not None:
        store.close()


API = Api(ENDPOINTS, start=start)
