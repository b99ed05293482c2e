"""Handles the endpoints of /v1/files and /v1/batches."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from mlxpaged.api import ignored_fields
from mlxpaged.api.access.caller import may_use, owner_of
from mlxpaged.api.batches.records import AnyRecord, BatchRecord, FileRecord
from mlxpaged.api.batches.requests import now
from mlxpaged.api.batches.runner import BatchRunner
from mlxpaged.api.batches.store import ERRORS, OUTPUT, Store, result_id
from mlxpaged.api.body import pieces, read_json, read_query, validate
from mlxpaged.api.endpoint import BYTES
from mlxpaged.api.errors import ApiError, bad_parameter, not_stored
from mlxpaged.api.fields import others
from mlxpaged.api.page import PageQuery, page
from mlxpaged.api.request_id import new_id
from mlxpaged.api.schema import Body, Labels
from mlxpaged.api.server import server_of

MAX_FILE_BYTES = 200 * 1024 * 1024
FORM_CHARSETS = ("utf-8", "us-ascii", "iso-8859-1")
"""Encodings of the names in a form. Python has others that raise any error, or make text that cannot be saved."""
WINDOW_UNITS = {"m": 60, "h": 3600, "d": 86400}

Result = TypeVar("Result")


class FileUpload(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    file: Annotated[UploadFile, WithJsonSchema({"type": "string", "format": "binary"})]
    purpose: Literal["batch"]


class BatchCreate(Body):
    table = others.BATCHES

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/decisions"]
    completion_window: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}[mhd]$")]  # minutes, hours or days, as "24h"
    metadata: Labels | None = None


class FileList(PageQuery):
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


def store_of(request: Request) -> Store:
    store: Store | None = request.app.state.store
    if store is None:
        raise ApiError(400, "files and batches are off: start the server with --data-dir", code="no_data_dir")
    return store


def runner_of(request: Request) -> BatchRunner:
    """Raises ApiError on a server without a model."""
    server_of(request).started().require_ready()
    runner: BatchRunner = request.app.state.batch_runner
    return runner


async def written(writing: Awaitable[Result]) -> Result:
    """Raises ApiError 507 if the disk refuses it."""
    try:
        return await writing
    except OSError as error:
        raise not_stored(error) from None


async def create_file(request: Request) -> Response:
    store = store_of(request)
    form = await read_form(request)
    try:
        upload = validate(dict(form), FileUpload)
        record = FileRecord(
            owner=owner_of(request),
            id=new_id("file"),
            bytes=upload.file.size or 0,
            created_at=now(),
            filename=upload.file.filename or "upload.jsonl",
            purpose=upload.purpose,
        )
        add = partial(store.add_file, record, upload.file.file)
        await written(server_of(request).change_file(request, record.bytes, add))
    finally:
        await form.close()
    return JSONResponse(record.shown())


async def read_form(request: Request) -> FormData:
    """Raises ApiError if the body is not a form of one file and its purpose, or is larger than MAX_FILE_BYTES."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data":
        raise ApiError(400, "the body must be multipart/form-data", code="invalid_form")
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in FORM_CHARSETS:
        message = f"the charset of the form must be {' or '.join(FORM_CHARSETS)}, got {charset!r}"
        raise ApiError(400, message, code="invalid_form")
    try:
        parser = MultiPartParser(request.headers, pieces(request, MAX_FILE_BYTES), max_files=1)
        form = await written(parser.parse())  # a large file is written to the system's directory of temporary files
        close_cut(parser, form)
    except MultiPartException as error:
        raise ApiError(400, f"the body is not a form with one file: {error.message}", code="invalid_form") from None
    unknown = next((name for name in form if name not in FileUpload.model_fields), None)
    if unknown is not None:
        await form.close()
        raise bad_parameter(unknown.split("[")[0], "this parameter is not supported", "unsupported_parameter")
    return form


def close_cut(parser: MultiPartParser, form: FormData) -> None:
    """Close the files that a form lacks because its body ended before theirs did: Starlette (1.10) leaves them open."""
    kept = {id(value.file) for _, value in form.multi_items() if isinstance(value, UploadFile)}
    for file in parser._files_to_close_on_error:
        if id(file) not in kept:
            file.close()


async def list_files(request: Request) -> Response:
    query = read_query(request, FileList)
    records = [each for each in list(store_of(request).files.values()) if query.purpose in (None, each.purpose)]
    return listed(request, records if query.order == "asc" else records[::-1], query)


async def get_file(request: Request) -> Response:
    return JSONResponse(find(store_of(request).files, request, "file").shown())


async def get_content(request: Request) -> Response:
    store = store_of(request)
    record = find(store.files, request, "file")
    return FileContent(store, record)


class FileContent(FileResponse):
    """The file may be deleted while it is sent, or before it is opened."""

    def __init__(self, store: Store, record: FileRecord) -> None:
        super().__init__(store.content(record.id), media_type=BYTES, filename=record.filename)
        self._store, self._file_id = store, record.id
        store.begin_reading(record.id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unless_refused(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in (400, 416):  # as a text
                headers = {name: value for name, value in Headers(raw=message["headers"]).items() if "range" in name}
                text = "Range: must be in bytes and begin within the file"
                raise ApiError(message["status"], text, param="Range", code="invalid_range", headers=headers)
            await send(message)

        try:
            await super().__call__(scope, receive, send_unless_refused)
        finally:
            self._store.end_reading(self._file_id)


async def delete_file(request: Request) -> Response:
    store = store_of(request)
    record = find(store.files, request, "file")
    if any(batch.unfinished and record.id in files_of(batch) for batch in list(store.batches.values())):
        message = f"file {record.id} belongs to an unfinished batch and cannot be deleted"
        raise ApiError(409, message, param="file_id", code="file_in_use")
    del store.files[record.id]  # nothing finds it from now on
    try:
        await written(server_of(request).change_file(request, 0, partial(store.delete_file, record.id)))
    except BaseException:
        store.files[record.id] = record  # it may still be on the disk
        raise
    return JSONResponse({"id": record.id, "object": "file", "deleted": True})


async def create_batch(request: Request) -> Response:
    body = await read_json(request, BatchCreate)
    store, runner = store_of(request), runner_of(request)
    file = store.files.get(body.input_file_id)
    if file is None or file.purpose != "batch" or not may_use(request, file.owner):
        raise bad_parameter("input_file_id", f"there is no file {body.input_file_id!r} with the purpose 'batch'")
    if file.status == "error":
        raise bad_parameter("input_file_id", f"{file.id!r}: {file.status_details}", "file_damaged")
    created_at = now()
    batch = BatchRecord(
        owner=owner_of(request),
        id=new_id("batch"),
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=created_at,
        expires_at=created_at + int(body.completion_window[:-1]) * WINDOW_UNITS[body.completion_window[-1]],
        metadata=body.metadata,
    )
    await written(runner.add(batch))
    return JSONResponse(batch.shown(), headers=ignored_fields.header(request))


async def list_batches(request: Request) -> Response:
    query = read_query(request, PageQuery)
    return listed(request, list(store_of(request).batches.values())[::-1], query)


async def get_batch(request: Request) -> Response:
    return JSONResponse(find(store_of(request).batches, request, "batch").shown())


async def cancel_batch(request: Request) -> Response:
    batch = find(store_of(request).batches, request, "batch")
    if not batch.unfinished:
        message = f"batch {batch.id} is {batch.status} and cannot be cancelled"
        raise ApiError(409, message, param="batch_id", code="batch_finished")
    await written(runner_of(request).cancel(batch))
    return JSONResponse(batch.shown())


def files_of(batch: BatchRecord) -> set[str]:
    return {batch.input_file_id, result_id(batch.id, OUTPUT), result_id(batch.id, ERRORS)}


def find(records: Mapping[str, AnyRecord], request: Request, kind: str) -> AnyRecord:
    """Returns the record that the path names. Raises ApiError 404."""
    record_id = request.path_params[f"{kind}_id"]
    record = records.get(record_id)
    if record is None or not may_use(request, record.owner):
        raise ApiError(404, f"there is no {kind} {record_id!r}", param=f"{kind}_id", code=f"{kind}_not_found")
    return record


def listed(request: Request, records: Sequence[FileRecord] | Sequence[BatchRecord], query: PageQuery) -> Response:
    theirs = [record.shown() for record in records if may_use(request, record.owner)]
    return page(theirs, query.after, query.limit)
