"""Makes a page of a list in OpenAI's format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from mlxpaged.api.errors import bad_parameter


class PageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    after: str | None = None  # an id: the page begins after it
    limit: Annotated[int, Field(ge=1, le=100)] = 20


def page(items: Sequence[dict[str, Any]], after: str | None, limit: int) -> Response:
    """Returns at most `limit` items that follow the id `after`. Raises ApiError if no item has this id."""
    by_id = {item["id"]: item for item in items}
    return JSONResponse(page_of(list(by_id), by_id.__getitem__, after, limit))


def page_of(ids: Sequence[str], item: Callable[[str], dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """The same, as the response's body. item: returns the item of an id. Only those of the page are made."""
    if after is not None and after not in ids:
        raise bad_parameter("after", f"no item of this list has the id {after!r}")
    start = 0 if after is None else ids.index(after) + 1
    shown = ids[start : start + limit]
    return {
        "object": "list",
        "data": list(map(item, shown)),
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
        "has_more": start + limit < len(ids),
    }
