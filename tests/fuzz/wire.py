"""Raw HTTP requests, most of them malformed. A request depends on the seed and its number alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum, auto

import h11

from mlxpaged.cli.http_protocol import MAX_HEAD_BYTES

MAX_STEPS = 3
HOST = (b"Host", b"127.0.0.1")
JSON = (b"Content-Type", b"application/json")
BODY = b'{"prompt": "x", "max_tokens": 1, "temperature": 0}'
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n--b--\r\n'
)


class End(Enum):
    """What the client does after it has sent all."""

    READ = auto()
    HALF_CLOSE = auto()
    CLOSE = auto()
    RESET = auto()


@dataclass(frozen=True)
class Wire:
    """What is sent on a connection.

    cuts: where `data` is cut into pieces. methods: of the requests whose heads are complete; that of an invalid one is
    empty. is_due: whether the first request is complete or invalid, so that an answer has to come. steps: how many
    mutations were made.
    """

    data: bytes
    cuts: tuple[int, ...]
    end: End
    methods: tuple[bytes, ...]
    is_due: bool
    steps: int

    @property
    def pieces(self) -> list[bytes]:
        ends = [*self.cuts, len(self.data)]
        return [self.data[a:b] for a, b in zip([0, *self.cuts], ends, strict=True) if b > a]


@dataclass
class Parts:
    """A request that is not written yet. body: with its framing, if that is chunked."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    version: bytes = b"HTTP/1.1"
    separator: bytes = b": "
    line_end: bytes = b"\r\n"

    def written(self) -> bytes:
        lines = [b" ".join((self.method, self.target, self.version))]
        lines += [name + self.separator + value for name, value in self.headers]
        return self.line_end.join((*lines, b"", self.body))


def with_length(body: bytes, *headers: tuple[bytes, bytes]) -> tuple[list[tuple[bytes, bytes]], bytes]:
    return [HOST, *headers, (b"Content-Length", b"%d" % len(body))], body


def chunked(body: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in (body[:7], body[7:])) + b"0\r\n\r\n"


def base(source: random.Random, key: str) -> Parts:
    """A valid request."""
    parts = without_key(source)
    if source.random() < 0.9:
        parts.headers.append((b"Authorization", b"Bearer " + key.encode()))
    return parts


def without_key(source: random.Random) -> Parts:
    match source.randrange(10):
        case 0:
            return Parts(b"GET", b"/health", [HOST])
        case 1:
            return Parts(b"GET", b"/v1/models", [HOST, (b"Accept", b"*/*")])
        case 2:
            return Parts(b"POST", b"/v1/completions", *with_length(BODY, JSON))
        case 3:
            return Parts(b"POST", b"/tokenize", *with_length(b'{"prompt": "x"}', JSON))
        case 4:
            head = [HOST, JSON, (b"Transfer-Encoding", b"chunked")]
            return Parts(b"POST", b"/tokenize", head, chunked(b'{"prompt": "a b c"}'))
        case 5:
            return Parts(b"HEAD", b"/", [HOST])
        case 6:
            head = [HOST, (b"Origin", b"http://localhost:1"), (b"Access-Control-Request-Method", b"POST")]
            return Parts(b"OPTIONS", b"/v1/completions", head)
        case 7:
            kind = (b"Content-Type", b"multipart/form-data; boundary=b")
            return Parts(b"POST", b"/v1/files", *with_length(FORM, kind))
        case 8:
            stream = BODY[:-1] + b', "stream": true}'
            return Parts(b"POST", b"/v1/completions", *with_length(stream, JSON, (b"Expect", b"100-continue")))
        case _:
            return Parts(b"GET", b"/v1/files?limit=1", [HOST, (b"Connection", b"keep-alive")])


METHODS = (
    *(b"TRACE", b"CONNECT", b"PUT", b"PATCH", b"DELETE", b"get", b"", b"G ET", b"PRI", b"M" * 5000, b"\xff", b"GET\0"),
    *(b"OPTIONS", b"HEAD", b"BREW", b"GET\t", b"\x16\x03\x01"),
)
TARGETS = (
    *(
        b"http://127.0.0.1/health",
        b"http://evil.example/v1/models",
        b"127.0.0.1:443",
        b"*",
        b"",
        b"//",
        b"/../..",
        b"?",
    ),
    *(b"/%", b"/%zz", b"/%00", b"/%ff%fe", b"/\xc3\xa9", b"/\xff", b"/a b", b"/\0", b"#", b"/" + b"a" * 60_000, b"/v1"),
    *(b"/v1/models/" + b"%2e%2e%2f" * 50, b"https:", b"/health?" + b"a=b&" * 5000, b"\\", b"/docs#x", b"/v1/status"),
    *(b"http://[::1", b"http://user:pass@127.0.0.1/health", b"/" + b"/" * 5000, b"/v1/requests/x", b"/metrics"),
)
VERSIONS = (b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2", b"HTTP/1.2", b"HTTP/1.1 ", b"", b"HTTP/11", b"http/1.1", b"RTSP/1.0")
HEADERS = (
    *((b"Content-Length", value) for value in (b"0", b"-1", b"+5", b"5, 5", b"5, 6", b"1" * 40, b"0x5", b"", b"5 5")),
    *((b"Content-Length", value) for value in (b"99999999999", b"1", b"18446744073709551616", b"\xb2", b"1e3")),
    *((b"Transfer-Encoding", value) for value in (b"chunked", b"gzip, chunked", b"chunked, chunked", b"identity")),
    *((b"Transfer-Encoding", value) for value in (b"xchunked", b"chunked\0", b" chunked", b"", b"chunked;q=1")),
    *(
        (b"Host", value)
        for value in (b"evil.example", b"", b"a b", b"[::1]", b"127.0.0.1:99999", b"\xff", b"localhost")
    ),
    *((b"Expect", value) for value in (b"100-continue", b"200-ok", b"100-continue, 100-continue")),
    *((b"Upgrade", value) for value in (b"websocket", b"h2c", b"TLS/1.0", b"")),
    *((b"Connection", value) for value in (b"close", b"upgrade", b"keep-alive, Upgrade", b"Host", b"\0", b"close, x")),
    *((b"Sec-WebSocket-Key", b"dGhlIHNhbXBsZSBub25jZQ=="), (b"Sec-WebSocket-Version", b"13")),
    *((b"HTTP2-Settings", b"AAMAAABkAAQAAP__"), (b"Trailer", b"Host"), (b"TE", b"trailers"), (b"Via", b"x")),
    *(
        (b"X-Fold", b"a\r\n b"),
        (b"X-Tab", b"a\r\n\tContent-Length: 3"),
        (b"X", b"a\nb: c"),
        (b"X", b"a\rb"),
        (b"", b"x"),
    ),
    *(
        (b"X Y", b"a"),
        (b" X", b"a"),
        (b"X\0", b"a"),
        (b"X\xff", b"a"),
        (b"X", b"\0"),
        (b"X", b"\xff\xfe"),
        (b"(", b")"),
    ),
    *((b"X-Large", b"a" * 70_000), (b"X" * 9000, b"a"), (b"X", b"\x7f"), (b"Authorization", b"Bearer \xff")),
    *((b"Content-Type", value) for value in (b"multipart/form-data", b"\xff", b"application/json; charset=\xff", b"")),
    *((b"Origin", value) for value in (b"http://evil.example", b"null", b"\xff", b"http://localhost:3000")),
    *((b"X-Request-Id", value) for value in (b"\xff", b"a" * 500, b"same", b"a/b")),
    *((b"Range", b"bytes=0-"), (b"If-Range", b"\xff"), (b"Accept-Encoding", b"gzip;q=\xff"), (b"Cookie", b"=" * 500)),
)
CHUNKS = (
    *(
        b"5\r\nhello\r\n0\r\n\r\n",
        b"5;a=b\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhel",
        b"-1\r\n\r\n",
        b"ffffffffffffffff1\r\nx",
    ),
    *(
        b"5\nhello\n0\n\n",
        b"0\r\nX: y\r\n\r\n",
        b"0\r\nContent-Length: 5\r\n\r\n",
        b"\r\n",
        b"x\r\n",
        b"0" * 9000 + b"\r\n",
    ),
    *(b"5\r\nhelloXX0\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n", b" 5 \r\nhello\r\n0\r\n\r\n", b"5;" + b"a" * 70_000),
    *(
        b"0\r\n" + b"X: y\r\n" * 300 + b"\r\n",
        b"0\r\n\r",
        b"1\r\n{\r\n" * 400 + b"0\r\n\r\n",
        b"5_0\r\nhello\r\n0\r\n\r\n",
    ),
)


def change(parts: Parts, source: random.Random) -> None:
    match source.randrange(12):
        case 0:
            parts.method = source.choice(METHODS)
        case 1:
            parts.target = source.choice(TARGETS)
        case 2:
            parts.version = source.choice(VERSIONS)
        case 3 | 4 | 5:
            parts.headers.insert(source.randrange(len(parts.headers) + 1), source.choice(HEADERS))
        case 6:
            parts.headers = [each for each in parts.headers if source.random() < 0.6]
        case 7:
            parts.headers += [(b"X-%d" % i, b"a" * 20) for i in range(source.choice((5, 99, 101, 2500)))]
        case 8:
            parts.headers = [each for each in parts.headers if each[0] != b"Content-Length"]
            parts.headers += [(b"Transfer-Encoding", b"chunked")]
            parts.body = source.choice(CHUNKS)
        case 9:
            parts.line_end = source.choice((b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n "))
        case 10:
            parts.separator = source.choice((b":", b" : ", b"", b"=", b":\t", b":\r\n "))
        case _:
            parts.body = source.choice((b"", parts.body[:-1], parts.body * 2, b"{", b"\xff" * 300, b"a" * 200_000))


def change_bytes(data: bytes, source: random.Random, key: str) -> bytes:
    at = source.randrange(len(data) + 1)
    match source.randrange(7):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([source.randrange(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + source.choice((b"\0", b"\r\n", b"\n", b"\r", b" ", b"\xff", b"\t", b":")) + data[at:]
        case 3:  # pipelined
            return data + base(source, key).written() + base(source, key).written()
        case 4:
            return source.choice((b"\r\n", b"\r\n\r\n", b" ", b"\n\n\n", b"\0")) + data
        case 5:
            return data + source.choice((b"\r\n", b"x", b"\0" * 50, source.randbytes(100)))
        case _:
            return source.randbytes(source.choice((1, 20, 2000)))


def case(seed: int, number: int, most_steps: int = MAX_STEPS, key: str = "") -> Wire:
    """most_steps: with fewer mutations, the rest of the case is the same. key: of most requests."""
    source = random.Random(f"{seed} wire {number}")
    parts = base(source, key)
    chosen = source.randint(0, MAX_STEPS)
    in_bytes = source.random() < 0.4
    end = source.choices(list(End), weights=(20, 2, 1, 1))[0]
    num_cuts = source.choice((0, 0, 0, 1, 2, 8))
    steps = min(chosen, most_steps)
    for _ in range(steps - (in_bytes and steps > 0)):
        change(parts, source)
    data = parts.written()
    if in_bytes and steps:
        data = change_bytes(data, source, key)
    cuts = tuple(sorted(source.randrange(len(data) + 1) for _ in range(num_cuts)))
    methods, is_due = expected(data)
    return Wire(data, cuts, end, methods, is_due, steps)


def expected(data: bytes) -> tuple[tuple[bytes, ...], bool]:
    """Wire.methods and Wire.is_due."""
    connection = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
    connection.receive_data(data.lstrip(b"\r\n"))
    methods: list[bytes] = []
    ended = 0
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                methods.append(event.method)
            elif isinstance(event, h11.EndOfMessage):
                ended += 1
                connection.send(h11.Response(status_code=404, headers=[(b"content-length", b"0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE:
                    break
                connection.start_next_cycle()
            elif event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                break
    except h11.RemoteProtocolError:
        return (*methods, b"") if len(methods) == ended else tuple(methods), True
    return tuple(methods), ended > 0
