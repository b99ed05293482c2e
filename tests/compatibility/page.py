"""Makes the tables of docs/compatibility.md. For each endpoint that reads a body, the claims of this folder come first,
and then the rows of the server's own table."""

from __future__ import annotations

from mlxpaged.api.endpoints import ENDPOINTS
from mlxpaged.api.fields.table import Table
from tests.compatibility import chat, completions, embeddings, messages, ollama, others, rerank, responses
from tests.compatibility.claims import Claim, of_row

MARK = "<!-- The rest of this page is made of tests/compatibility/ and mlxpaged/api/fields/ -->\n"

TOKENIZE = "POST /tokenize"
CLAIMS: dict[str, tuple[Claim, ...]] = {
    "POST /v1/chat/completions": chat.TABLE,
    "POST /v1/completions": completions.TABLE,
    "POST /v1/responses": responses.TABLE,
    "POST /v1/responses/input_tokens": responses.INPUT_TOKENS,
    "POST /v1/messages": messages.TABLE,
    "POST /v1/messages/count_tokens": messages.COUNT,
    "POST /v1/embeddings": embeddings.TABLE,
    "POST /v1/rerank": rerank.RERANK,
    "POST /v1/score": rerank.SCORE,
    TOKENIZE: others.TOKENIZE,
    "POST /detokenize": others.DETOKENIZE,
    "POST /v1/files": others.FILES,
    "POST /v1/batches": others.BATCHES,
    "POST /api/chat": ollama.CHAT,
    "POST /api/generate": ollama.GENERATE,
    "POST /api/embed": ollama.EMBED,
    "POST /api/embeddings": ollama.EMBEDDINGS,
    "POST /api/show": ollama.SHOW,
    "POST /api/pull": ollama.PULL,
}


def tables() -> dict[str, tuple[Claim, ...]]:
    """Returns the claims of each endpoint that reads a body, in the order of the page."""
    bodies = {f"{each.method} {each.path}": each.body for each in ENDPOINTS if each.body is not None}
    found = {}
    for name in dict.fromkeys((*CLAIMS, *bodies)):
        rows = [of_row(row) for row in getattr(bodies[name], "table", Table()).rows]
        if name == TOKENIZE:
            rows = [others.without_prompt(row) for row in rows]
        found[name] = (*CLAIMS.get(name, ()), *rows)
    return found


def markdown() -> str:
    lines = []
    for name, claims in tables().items():
        lines += ["", f"## {name}", "", "| Field | Example | Outcome | Note |", "|---|---|---|---|"]
        lines += [claim.markdown for claim in claims]
    return "\n".join(lines) + "\n"
