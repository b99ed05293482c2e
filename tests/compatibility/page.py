"""Makes the tables of docs/compatibility.md. For each endpoint that reads a body, the claims of this folder come first,
and then the rows of the server's own table."""

from __future__ import annotations

from collections.abc import Mapping

from mlxpaged.api.endpoints import ENDPOINTS
from mlxpaged.api.fields.table import Table
from tests.compatibility import chat, completions, decisions, embeddings, messages, ollama, others, rerank, responses
from tests.compatibility.claims import ALIAS, HONOURED, IGNORED, LABEL, MODEL, REFUSED, Claim, of_row

MARK = "<!-- The rest of this page is made of tests/compatibility/ and mlxpaged/api/fields/ -->\n"

TOKENIZE = "POST /tokenize"
CLAIMS: dict[str, tuple[Claim, ...]] = {
    "POST /v1/chat/completions": chat.TABLE,
    "POST /apply-template": chat.TABLE,
    "POST /v1/completions": completions.TABLE,
    "POST /v1/responses": responses.TABLE,
    "POST /v1/responses/input_tokens": responses.INPUT_TOKENS,
    "POST /v1/messages": messages.TABLE,
    "POST /v1/messages/count_tokens": messages.COUNT,
    "POST /v1/embeddings": embeddings.TABLE,
    "POST /v1/rerank": rerank.RERANK,
    "POST /v1/score": rerank.SCORE,
    "POST /v1/decisions": decisions.DECISIONS,
    "POST /v1/systemone": decisions.SYSTEM_ONE,
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


OUTCOMES = (HONOURED, MODEL, ALIAS, LABEL, IGNORED, REFUSED)
FAMILIES = (
    ("POST /v1/chat/completions", "POST /apply-template", "POST /v1/completions"),
    ("POST /v1/responses", "POST /v1/responses/input_tokens"),
    ("POST /v1/messages", "POST /v1/messages/count_tokens"),
    ("POST /v1/embeddings", "POST /v1/rerank", "POST /v1/score"),
    ("POST /v1/decisions", "POST /v1/systemone"),
    (TOKENIZE, "POST /detokenize"),
    ("POST /v1/files", "POST /v1/batches"),
    ("POST /api/chat", "POST /api/generate"),
    ("POST /api/embed", "POST /api/embeddings", "POST /api/show", "POST /api/pull"),
)
"""Endpoints that share a section, because most of their fields are the same."""


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
    claims, lines = tables(), []
    families = [*FAMILIES, *([name] for name in claims if not any(name in family for family in FAMILIES))]
    for family in families:
        lines += ["", f"## {', '.join(family)}", "", *section({name: claims[name] for name in family})]
    return "\n".join(lines) + "\n"


def section(claims: Mapping[str, tuple[Claim, ...]]) -> list[str]:
    """The lines of endpoints that have most fields in common: a list for each outcome of each set of endpoints."""
    endpoints: dict[tuple[str, str, str], dict[str, None]] = {}
    for endpoint, found in claims.items():
        for each in found:
            is_one_of_several = sum(other.field == each.field for other in found) > 1
            endpoints.setdefault((each.shown(is_one_of_several), each.outcome, each.remark), {})[endpoint] = None
    lists: dict[tuple[str, ...], dict[str, dict[str, list[str]]]] = {tuple(claims): {}}
    for (field, outcome, remark), names in endpoints.items():
        lists.setdefault(tuple(names), {}).setdefault(outcome, {}).setdefault(remark, []).append(field)
    lines = []
    for names, outcomes in lists.items():
        if len(lists) > 1 and outcomes:
            lines += [f"### {' and '.join(map(short, names))}", ""]
        for outcome, fields in sorted(outcomes.items(), key=lambda item: OUTCOMES.index(item[0])):
            lines += [f"**{outcome}**", ""]
            lines += [
                f"- {', '.join(of)}{': ' * bool(remark)}{remark}"
                for remark, of in sorted(fields.items(), key=lambda item: item[1])
            ]
            lines.append("")
    return lines[:-1]


def short(endpoint: str) -> str:
    """The last words of its path, as "chat/completions"."""
    return endpoint.removeprefix("POST ").removeprefix("/v1/").removeprefix("/api/").removeprefix("/")
