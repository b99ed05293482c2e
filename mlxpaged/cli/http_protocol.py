"""HTTP on one connection: uvicorn's with h11, whose own answers take the API's format too."""

from __future__ import annotations

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxpaged.api.errors import ApiError, render
from mlxpaged.api.request_id import HEADER, new_id


class HttpProtocol(H11Protocol):
    """h11 by name, because its limit on the size of a head counts whatever else is installed."""

    def send_400_response(self, msg: str) -> None:
        """To what is no HTTP request, or one with a head of more than 64 KiB: no route will see it."""
        response = render(ApiError(400, msg, code="invalid_http"), "")
        headers = [*response.raw_headers, (b"connection", b"close"), (HEADER.lower().encode(), new_id("req").encode())]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
