"""One server, a request to it, and the reply."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]

COUNT = "Count from 3 to 12"
"""A question that even a tiny model answers with several words."""

USER: list[Fields] = [{"role": "user", "content": COUNT}]
ABSENT = object()
"""As the value of a field: the request does not have it."""

NO_SUCH_ENDPOINT = {404, 405, 501}

DEFINES = {
    "openai": "OpenAI's API reference and openai-python",
    "responses": "OpenAI's API reference and openai-python",
    "anthropic": "Anthropic's API reference and anthropic-sdk-python",
    "ollama": "Ollama's docs/api.md and ollama-python",
}


class Wrong(Exception):
    """A reply is not what the API defines. The message says what was seen."""


class NotOffered(Exception):
    """The server does not have the endpoint."""


class NotReady(Exception):
    """The server answers valid requests with 503, so its model is not loaded yet."""


@dataclass(frozen=True)
class Endpoint:
    """base: fields of a valid request, which a case changes; None: a GET."""

    api: str
    path: str
    base: Fields | None


ENDPOINTS = {
    "chat": Endpoint("openai", "/v1/chat/completions", {"messages": USER, "temperature": 0, "max_tokens": 24}),
    "completions": Endpoint("openai", "/v1/completions", {"prompt": COUNT, "temperature": 0, "max_tokens": 12}),
    "embeddings": Endpoint("openai", "/v1/embeddings", {"input": "blue river"}),
    "models": Endpoint("openai", "/v1/models", None),
    "responses": Endpoint("responses", "/v1/responses", {"input": COUNT, "temperature": 0, "max_output_tokens": 24}),
    "messages": Endpoint("anthropic", "/v1/messages", {"messages": USER, "temperature": 0, "max_tokens": 24}),
    "count_tokens": Endpoint("anthropic", "/v1/messages/count_tokens", {"messages": USER}),
    "generate": Endpoint(
        "ollama", "/api/generate", {"prompt": COUNT, "stream": False, "options": {"temperature": 0, "num_predict": 24}}
    ),
    "ollama-chat": Endpoint(
        "ollama", "/api/chat", {"messages": USER, "stream": False, "options": {"temperature": 0, "num_predict": 24}}
    ),
    "tags": Endpoint("ollama", "/api/tags", None),
    "show": Endpoint("ollama", "/api/show", {}),
}


@dataclass(frozen=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def json(self) -> Any:
        """Raises Wrong."""
        try:
            return json.loads(self.text)
        except ValueError:
            raise Wrong(f"status {self.status}, no JSON: {self.text[:200]!r}") from None

    @property
    def ok(self) -> Any:
        """The JSON of an answer. Raises Wrong."""
        if self.status != 200:
            raise Wrong(f"status {self.status}: {self.text[:200]!r}")
        return self.json

    @property
    def events(self) -> list[tuple[str, str]]:
        """(type, data) of the events of a stream, by the grammar of the HTML standard. Raises Wrong."""
        kind = self.headers.get_content_type()
        if self.status != 200 or kind != "text/event-stream":
            raise Wrong(f"status {self.status}, {kind}: {self.text[:200]!r}")
        *blocks, rest = self.text.replace("\r\n", "\n").split("\n\n")
        if rest:
            raise Wrong(f"no empty line after the last event: {rest[:200]!r}")
        found = []
        for block in blocks:
            fields: dict[str, str] = {}
            for line in block.split("\n"):
                name, colon, value = line.partition(":")
                if line and (not colon or name not in ("", "data", "event", "id", "retry")):
                    raise Wrong(f"a line that is no field of an event: {line[:200]!r}")
                value = value.removeprefix(" ")
                fields[name] = f"{fields[name]}\n{value}" if name in fields else value
            if "data" in fields:
                found.append((fields.get("event", "message"), fields["data"]))
        return found

    @property
    def lines(self) -> list[Any]:
        """The objects of a stream of lines. Raises Wrong."""
        kind = self.headers.get_content_type()
        if self.status != 200 or kind != "application/x-ndjson":
            raise Wrong(f"status {self.status}, {kind}: {self.text[:200]!r}")
        return [json.loads(line) for line in self.text.splitlines()]


@dataclass
class Target:
    """context: most tokens of a prompt. seconds: how long an answer may take."""

    url: str
    model: str
    context: int
    seconds: float = 300.0
    key: str = "none"

    def ask(self, endpoint: str, **fields: Any) -> Reply:
        """The base request of an endpoint, with the fields changed."""
        base = ENDPOINTS[endpoint].base
        if base is None:
            return self.send(ENDPOINTS[endpoint].path, None)
        body = {"model": self.model} | base | fields
        return self.send(
            ENDPOINTS[endpoint].path,
            json.dumps({name: value for name, value in body.items() if value is not ABSENT}).encode(),
        )

    def send(self, path: str, body: bytes | None, method: str | None = None) -> Reply:
        """Raises Wrong if no reply comes."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}", "x-api-key": self.key}
        if path.startswith("/v1/messages"):
            headers["anthropic-version"] = "2023-06-01"
        request = urllib.request.Request(self.url + path, body, headers, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            try:
                response = opener.open(request, timeout=self.seconds)
            except urllib.error.HTTPError as error:
                response = error
            with response:
                return Reply(response.status, response.headers, response.read().decode(errors="replace"))
        except TimeoutError:
            raise Wrong(f"no whole answer within {self.seconds:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise Wrong(f"no answer: {type(error).__name__}: {error}") from None

    def find(self) -> None:
        """Fill in the model and the context by the list of models, if they are not known. Raises Wrong."""
        if self.model and self.context:
            return
        reply = self.send("/v1/models", None)
        listed = reply.ok["data"] if reply.status == 200 else []
        if not self.model:
            if not listed:
                raise Wrong("the server lists no model: --model is needed")
            self.model = listed[0]["id"]
        about: Fields = next((each for each in listed if each["id"] == self.model), {})
        self.context = self.context or about.get("max_model_len") or (about.get("meta") or {}).get("n_ctx") or 8192

    def require(self, endpoint: str) -> None:
        """Raises NotOffered."""
        if not self.offers(endpoint):
            raise NotOffered

    def offers(self, endpoint: str) -> bool:
        """Whether the base request finds something. A model that makes no embeddings does not offer them. Raises
        NotReady."""
        reply = self.ask(endpoint)
        status = reply.status
        if status == 503:
            raise NotReady(f"not ready: {reply.text[:200]}")
        return status < 400 if endpoint == "embeddings" else status not in NO_SUCH_ENDPOINT
